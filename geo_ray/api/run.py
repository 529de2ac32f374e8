"""`Run`: the summary, events, curves and model of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from geo_ray.api.config import FilePath
from geo_ray.api.display import Table
from geo_ray.api.status import directory_of, not_begun
from geo_ray.base.errors import ConfigChangedError, ConfigError, RunDirectoryError
from geo_ray.base.notebooks import html_view
from geo_ray.base.text import bytes_text, duration_text, metrics_text, nearest_word, number_text
from geo_ray.cloud.autoscaler.journal import JournalMachines
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.runs.checkpoints import store_of
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.evaluation import load_best
from geo_ray.runs.model_export import ExportFormat, export_model, format_of
from geo_ray.runs.model_file import about_model, load_trained, module_with
from geo_ray.runs.remote import fetch_models
from geo_ray.runs.report import write_run_report
from geo_ray.storage.checkpoint import Checkpoint, CheckpointStore
from geo_ray.storage.manifest import shard_part_name
from geo_ray.telemetry.charts import bytes_at
from geo_ray.telemetry.columns import RunRecord
from geo_ray.telemetry.event_log import EVENTS_FILE, has_begun, read_events
from geo_ray.telemetry.events import EVENT_FIELDS, Event
from geo_ray.telemetry.report import REPORT_FILE, load_record
from geo_ray.telemetry.summary import REGION_HEADINGS, Summary, Summing, load_summary
from geo_ray.telemetry.totals import LinkTotals
from geo_ray.training.checkpoint_parts import wire_tensors
from geo_ray.training.model_buffers import stored_buffers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class Run:
    """A run that has ended, or the current state of an active one.

    Attributes:
        directory: paths of the run.
        experiment: configuration of the run.
        summary: results of the run.
        finished: whether the run has finished.
    """

    directory: RunDirectory
    experiment: Experiment
    summary: Summary
    finished: bool = field(default=True)

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.directory.path

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.path.name

    @property
    def model_path(self) -> Path:
        """Path of the trained model, which exists after the run has finished."""
        return self.directory.model

    @property
    def best_path(self) -> Path:
        """Path of the best evaluated model; requires `train.keep_best`."""
        return self.directory.best_model

    @property
    def report_path(self) -> Path:
        """Path of the HTML report; written if missing."""
        path = self.path / REPORT_FILE
        return path if path.exists() else self.report()

    @cached_property
    def record(self) -> RunRecord:
        """All events of the run in columns, as in the report; read once."""
        return load_record(self.path)

    def report(self, out: FilePath | None = None) -> Path:
        """Write the HTML report again and return its path.

        Args:
            out: output file; default: ``report.html`` in the run's directory.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        target = None if out is None else Path(out)
        return write_run_report(self.path, target, JournalMachines())

    def events(self, kind: str | None = None) -> tuple[Event, ...]:
        """Yield the events of the run in order, optionally of one kind.

        Raises:
            RunDirectoryError: the event log cannot be read.
            ConfigError: there is no such kind of event.
        """
        found = read_events(self.path / EVENTS_FILE)
        if kind not in (None, *EVENT_FIELDS) and all(event.kind != kind for event in found):
            near = nearest_word(str(kind), EVENT_FIELDS)
            raise ConfigError(
                f"no events of kind {kind!r}" + (f"; did you mean {near!r}?" if near else ""),
                fix=f"Use one of {', '.join(EVENT_FIELDS)}.",
            )
        return tuple(event for event in found if kind in (None, event.kind))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of metrics for `metrics`."""
        return metric_names(self.events("eval"))

    def metrics(self, name: str) -> Table:
        """Return one metric over the steps of the run.

        Args:
            name: ``loss``, ``samples``, ``compute_s`` or ``wait_s`` of steps; ``eval.NAME`` of
                evaluations, where ``eval.`` may be omitted if no field of steps has the name.

        Returns:
            Columns step, time_s, region, value, wan_bytes.

        Raises:
            ConfigError: there is no such metric.
        """
        return metric_table(self.events(), name)

    def table(self) -> Table:
        """Return a row per region."""
        return regions_table(self.record)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the complete checkpoints, oldest first; in an object store, checked by file size.

        Raises:
            CheckpointCorruptError: a file of a checkpoint is damaged.
            StoreError: its object store does not answer or refuses.
        """
        store = self._store()
        return tuple(_opened(store, id) for id in store.ids())

    def model(self, checkpoint: int | None = None, *, best: bool = False) -> nn.Module:
        """Return the task's module with trained parameters, on the CPU.

        Args:
            checkpoint: id of a checkpoint; default: the final model.
            best: use the best evaluated model, saved by `train.keep_best`.

        Raises:
            ConfigError: both a checkpoint and the best model are requested, or the task's file is
                in the run itself.
            RunDirectoryError: the run has no final model yet, or no best model.
            CheckpointMissingError: there is no such checkpoint.
            TaskError: the task cannot be loaded.
        """
        return self._trained(checkpoint, best=best)[1]

    def _trained(self, checkpoint: int | None, *, best: bool) -> tuple[Task, nn.Module]:
        self._check_best(checkpoint, best=best)
        try:
            rundir.has_moved(self.directory, self.experiment)
        except ConfigChangedError as error:
            _log.warning("%s", error.message)
        rundir.check_files(self.directory, self.experiment)
        task = load_task(self.experiment.task, self.directory.base_dir)
        seed = self.experiment.seed
        if checkpoint is None:
            fetch_models(self.directory.address, self.path)
            return task, load_trained(task, seed, self.best_path if best else self.model_path)
        saved = _opened(self._store(), checkpoint)
        region = next(
            r for r in self.experiment.regions if r.name == self.experiment.averager_region
        )
        parts = [
            saved.read(shard_part_name(region.name, index))[0] for index in range(region.ps_shards)
        ]
        buffers_B = stored_buffers(wire_tensors(parts[0]))
        return task, module_with(task, seed, [part["params"] for part in parts], buffers_B)

    def export(
        self,
        out: FilePath,
        checkpoint: int | None = None,
        *,
        best: bool = False,
        format: ExportFormat | None = None,
    ) -> Path:
        """Export the trained model for PyTorch, transformers or peft.

        Args:
            out: output file; or directory, for ``hf``, ``adapter`` and ``dcp``.
            checkpoint: id of a checkpoint; default: the final model.
            best: use the best evaluated model, saved by `train.keep_best`.
            format: default: by the suffix, ``.safetensors`` or ``.pt``. ``pt``: a state dictionary
                for ``torch.load(path, weights_only=True)``. ``hf``: a directory for
                ``from_pretrained`` of transformers. ``adapter``: a directory for
                ``PeftModel.from_pretrained``. ``dcp``: a directory for
                ``torch.distributed.checkpoint.load``.

        Raises:
            ConfigError: the output does not fit the format, or the directory exists.
            TaskOutputError: the model cannot be written in this format.
            RunDirectoryError: the output cannot be written; or as for `model`.
        """
        self._check_best(checkpoint, best=best)
        path = Path(out)
        format_of(path, format)
        step, metrics = self.summary.steps, self.summary.eval
        if best and (best_file := load_best(self.best_path)) is not None:
            step, metrics = best_file.step, best_file.metrics
        if checkpoint is not None:
            step, metrics = _opened(self._store(), checkpoint).manifest.step, {}
        about = about_model(self.experiment, step, metrics)
        task, module = self._trained(checkpoint, best=best)
        export_model(task, module, path, about, format)
        return path

    def _check_best(self, checkpoint: int | None, *, best: bool) -> None:
        if best:
            fetch_models(self.directory.address, self.path)
        if best and checkpoint is not None:
            raise ConfigError(
                "the best model and a checkpoint are mutually exclusive", fix="Give only one."
            )
        if best and not self.best_path.exists():
            raise RunDirectoryError(
                f"{self.best_path} does not exist: the run has saved no best model",
                fix="Omit `best`: a run whose regions join keeps no best model."
                if self.experiment.is_served
                else "Train with `--set train.keep_best.metric=NAME --set "
                "train.keep_best.mode=max` (or min), until its first evaluation.",
            )

    def _store(self) -> CheckpointStore:
        return store_of(self.directory, self.experiment.checkpoint)

    def __repr__(self) -> str:
        summary = self.summary
        facts = [f"{summary.steps:,} steps in {duration_text(summary.seconds)}"]
        if summary.eval:
            facts.append(metrics_text(summary.eval))
        facts.append(f"{bytes_text(sum(summary.wan_bytes.values()))} between regions")
        if not self.finished:
            facts.append("not finished")
        return f"<Run {self.name}: {summary.strategy}, {', '.join(facts)}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                row["region"],
                f"{row['steps']:,}",
                f"{row['samples']:,}",
                number_text(row["loss"]),
                duration_text(row["compute_s"]),
                duration_text(row["wait_s"]),
                bytes_text(row["wan_bytes_sent"]),
                bytes_text(row["wan_bytes_received"]),
            )
            for row in self.table().to_pylist()
        ]
        return html_view(repr(self)[1:-1], REGION_HEADINGS, rows)


def open_run(path: FilePath | Run, *, base_dir: FilePath | None = None) -> Run:
    """Open the directory of a finished, interrupted or active run.

    Does not import user code that the configuration names: a custom strategy or codec may have
    been changed or removed since. `Run.model` and `Run.export` do import the task.

    Args:
        path: directory or address of the run.
        base_dir: first base of relative paths in its configuration; the fallbacks are the
            directory from which it was started and the working directory.

    Raises:
        RunDirectoryError: there is no run, or it has no events yet.
    """
    near = None if base_dir is None else Path(base_dir)
    directory, experiment = rundir.reopen(directory_of(path), read_only=True, near=near)
    summary = load_summary(directory.path)
    if summary is not None:
        return Run(directory, experiment, summary)
    if not has_begun(directory.path):
        raise not_begun(directory)
    return Run(
        directory,
        experiment,
        _so_far(experiment, read_events(directory.path / EVENTS_FILE)),
        finished=False,
    )


def _opened(store: CheckpointStore, id: int) -> Checkpoint:
    """Return a checkpoint; a remote one is verified while it is read, not in advance."""
    return store.peek(id) if store.is_remote else store.open(id)


def _so_far(experiment: Experiment, events: Iterable[Event]) -> Summary:
    summing = Summing(experiment.train.target)
    for event in events:
        summing.feed(event)
    return summing.summary()


EVAL = "eval."
OF_STEPS = ("loss", "samples", "compute_s", "wait_s")
_COLUMNS = {"step": int, "time_s": float, "region": str, "value": float, "wan_bytes": int}


def metric_names(events: Iterable[Event]) -> tuple[str, ...]:
    """Return the metric names of this run for `metric_table`."""
    evals = {name for event in events if event.kind == "eval" for name in event["metrics"]}
    return (*OF_STEPS, *(f"{EVAL}{name}" for name in sorted(evals)))


def metric_table(events: Sequence[Event], name: str) -> Table:
    """Return one metric of a run over its steps.

    Args:
        events: all events of the run, in order.
        name: a field of steps, such as ``loss``; ``eval.accuracy`` and so on for evaluations.
            ``eval.`` may be omitted if no field of steps has the name.

    Returns:
        Columns step, time_s, region, value, wan_bytes: the last is the total of bytes between
        regions until then, interpolated between two counts, as in the report; null if the run
        counted none. The region is null in evaluations of all regions. A step that was repeated
        after a resume appears once.

    Raises:
        ConfigError: the run has no such metric.
    """
    metric = name.removeprefix(EVAL)
    of_steps = name in OF_STEPS
    wan, counts = LinkTotals(), list[tuple[float, float]]()
    rows: dict[str | None, list[tuple[Any, ...]]] = {}
    for event in events:
        if event.kind == "run_started":
            wan.restart()
        elif event.kind == "wan":
            wan.feed(event["src"], event["dst"], event["bytes_by_class"])
            counts.append((event.t_s, sum(wan.by_class().values())))
        elif event.kind == ("step" if of_steps else "eval"):
            values = event.fields if of_steps else event["metrics"]
            if metric not in values:
                continue
            own = rows.setdefault(event["region"], [])
            while own and own[-1][0] >= event["step"]:
                own.pop()  # the step was repeated
            own.append((event["step"], event.t_s, event["region"], values[metric]))
    if not rows:
        names = ", ".join(metric_names(events))
        raise ConfigError(f"the run has no metric {name!r}", fix=f"The metrics are {names}.")
    ordered = sorted((row for own in rows.values() for row in own), key=itemgetter(1))
    counts_N2 = np.array(counts, dtype=np.float64).reshape(-1, 2)
    times_s = np.array([row[1] for row in ordered], dtype=np.float64)
    by_then = bytes_at(counts_N2[:, 0], counts_N2[:, 1], times_s)
    known = [round(float(count)) for count in by_then] if counts else [None] * len(ordered)
    ordered = [(*row, count) for row, count in zip(ordered, known, strict=True)]
    return Table([dict(zip(_COLUMNS, row, strict=True)) for row in ordered], _COLUMNS)


def regions_table(record: RunRecord) -> Table:
    """Return a row per region: its work and its traffic."""
    totals = record.totals
    rows = [
        {
            "region": name,
            "steps": region.steps.step,
            "samples": region.steps.samples,
            "loss": region.steps.end_loss(),
            "compute_s": region.compute_s,
            "wait_s": region.wait_s,
            "wan_bytes_sent": totals.wan.bytes_sent(name),
            "wan_bytes_received": totals.wan.bytes_received(name),
        }
        for name, region in totals.regions.items()
    ]
    return Table(rows)
