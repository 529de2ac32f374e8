"""A run as a value: its summary, its events, its curves, its model."""

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
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.runs.checkpoints import store_of
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.evaluation import load_best
from geo_ray.runs.model_file import about_model, export_model, load_trained, module_with
from geo_ray.runs.remote import fetch_models
from geo_ray.runs.report import write_run_report
from geo_ray.storage.checkpoint import Checkpoint, CheckpointStore
from geo_ray.storage.manifest import shard_part_name
from geo_ray.telemetry.charts import bytes_at
from geo_ray.telemetry.columns import RunRecord
from geo_ray.telemetry.event_log import EVENTS_FILE, has_begun, read_events
from geo_ray.telemetry.events import EVENT_FIELDS, Event
from geo_ray.telemetry.report import REPORT_FILE, load_record
from geo_ray.telemetry.summary import Summary, Summing, load_summary
from geo_ray.telemetry.totals import LinkTotals
from geo_ray.training.checkpoint_parts import wire_tensors
from geo_ray.training.model_buffers import stored_buffers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class Run:
    """A run that has ended, or what there is of one so far.

    Attributes:
        directory: its paths.
        experiment: its configuration.
        summary: what it came to.
        finished: whether it came to its end.
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
        """The name of its directory."""
        return self.path.name

    @property
    def model_path(self) -> Path:
        """The trained model; there is none before the run has finished."""
        return self.directory.model

    @property
    def best_path(self) -> Path:
        """The best evaluated model; there is none without `train.keep_best`."""
        return self.directory.best_model

    @property
    def report_path(self) -> Path:
        """The HTML page about it; written now if it is not there yet."""
        path = self.path / REPORT_FILE
        return path if path.exists() else self.report()

    @cached_property
    def record(self) -> RunRecord:
        """All of its events folded, as the report draws them; read once."""
        return load_record(self.path)

    def report(self, out: FilePath | None = None) -> Path:
        """Write the HTML page anew and give its path.

        Args:
            out: the file; default: ``report.html`` in its directory.

        Raises:
            RunDirectoryError: it cannot be written.
        """
        target = None if out is None else Path(out)
        return write_run_report(self.path, target, JournalMachines())

    def events(self, kind: str | None = None) -> tuple[Event, ...]:
        """Its events in order; those of one kind, if that is named.

        Raises:
            RunDirectoryError: the event log cannot be read.
            ConfigError: there are no events of such a kind in any run.
        """
        found = read_events(self.path / EVENTS_FILE)
        if kind not in (None, *EVENT_FIELDS) and all(event.kind != kind for event in found):
            near = nearest_word(str(kind), EVENT_FIELDS)
            raise ConfigError(
                f"there are no events of kind {kind!r}"
                + (f"; did you mean {near!r}?" if near else ""),
                fix=f"Name one of {', '.join(EVENT_FIELDS)}.",
            )
        return tuple(event for event in found if kind in (None, event.kind))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What `metrics` takes."""
        return metric_names(self.events("eval"))

    def metrics(self, name: str) -> Table:
        """One number over the steps of the run.

        Args:
            name: ``loss``, ``samples``, ``compute_s`` or ``wait_s`` of steps; ``eval.NAME`` of
                evaluations, where ``eval.`` may be left out if no field of steps has the name.

        Returns:
            Columns step, time_s, region, value, wan_bytes.

        Raises:
            ConfigError: there is no such number.
        """
        return metric_table(self.events(), name)

    def table(self) -> Table:
        """A row per region."""
        return regions_table(self.record)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Those that are whole, oldest first; in an object store, by the sizes of their files.

        Raises:
            CheckpointCorruptError: a file of one is damaged.
            StoreError: its object store does not answer or refuses.
        """
        store = self._store()
        return tuple(_opened(store, id) for id in store.ids())

    def model(self, checkpoint: int | None = None, *, best: bool = False) -> nn.Module:
        """The task's module with trained parameters, on the CPU.

        Args:
            checkpoint: the id of the one to take them from; default: the final model.
            best: those that evaluated best, which `train.keep_best` has kept.

        Raises:
            ConfigError: a checkpoint and the best model are asked for at once, or the task's file
                lies in the run itself.
            RunDirectoryError: the run has no final model yet, or keeps no best one.
            CheckpointMissingError: there is no such checkpoint.
            TaskError: the task cannot be loaded.
        """
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
            return load_trained(task, seed, self.best_path if best else self.model_path)
        saved = _opened(self._store(), checkpoint)
        region = next(
            r for r in self.experiment.regions if r.name == self.experiment.averager_region
        )
        parts = [
            saved.read(shard_part_name(region.name, index))[0] for index in range(region.ps_shards)
        ]
        buffers_B = stored_buffers(wire_tensors(parts[0]))
        return module_with(task, seed, [part["params"] for part in parts], buffers_B)

    def export(self, out: FilePath, checkpoint: int | None = None, *, best: bool = False) -> Path:
        """Write the trained parameters for plain PyTorch.

        Args:
            out: ``.safetensors``, or ``.pt`` for a state dictionary that
                ``torch.load(path, weights_only=True)`` reads.
            checkpoint: the id of the one to take them from; default: the final model.
            best: those that evaluated best, which `train.keep_best` has kept.

        Raises:
            ConfigError: the file has another ending.
            RunDirectoryError: it cannot be written; or as for `model`.
        """
        self._check_best(checkpoint, best=best)
        path = Path(out)
        step, metrics = self.summary.steps, self.summary.eval
        if best and (best_file := load_best(self.best_path)) is not None:
            step, metrics = best_file.step, best_file.metrics
        if checkpoint is not None:
            step, metrics = _opened(self._store(), checkpoint).manifest.step, {}
        about = about_model(self.experiment, step, metrics)
        export_model(self.model(checkpoint, best=best), path, about)
        return path

    def _check_best(self, checkpoint: int | None, *, best: bool) -> None:
        if best:
            fetch_models(self.directory.address, self.path)
        if best and checkpoint is not None:
            raise ConfigError(
                "the best model and a checkpoint are two things", fix="Ask for one of them."
            )
        if best and not self.best_path.exists():
            raise RunDirectoryError(
                f"{self.best_path} does not exist: the run has kept no best model",
                fix="Train with `--set train.keep_best.metric=NAME --set train.keep_best.mode=max`"
                " (or min), and let it come to its first evaluation.",
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
        headings = (
            "region",
            "steps",
            "samples",
            "loss",
            "compute",
            "waiting",
            "WAN sent",
            "received",
        )
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
        return html_view(repr(self)[1:-1], headings, rows)


def open_run(path: FilePath | Run, *, base_dir: FilePath | None = None) -> Run:
    """Open the directory of a run: finished, cut off, or still going.

    Imports nothing that the run's configuration names: a file with a strategy or codec of the
    user's may have been changed or removed since. `Run.model` and `Run.export` do import the task.

    Args:
        path: its directory, or its address.
        base_dir: where to look first for files that its configuration names by a relative path;
            then come the place from which it was started and the working directory.

    Raises:
        RunDirectoryError: there is no run, or nothing has happened in it yet.
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
    """A checkpoint; what lies far is verified where it is read, and not all of it before."""
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
    """The names that `metric_table` takes for this run."""
    evals = {name for event in events if event.kind == "eval" for name in event["metrics"]}
    return (*OF_STEPS, *(f"{EVAL}{name}" for name in sorted(evals)))


def metric_table(events: Sequence[Event], name: str) -> Table:
    """One number of a run over its steps.

    Args:
        events: all of the run's, in order.
        name: a field of steps, such as ``loss``; ``eval.accuracy`` and the like for evaluations.
            ``eval.`` may be left out where no field of steps has the name.

    Returns:
        Columns step, time_s, region, value, wan_bytes: the last counts all bytes between regions
        until then, between two counts in proportion, as the report draws them; null in a run that
        counted none. The region is null in evaluations of all regions together. Steps that were
        done again after a resumption are there once.

    Raises:
        ConfigError: the run has no such number.
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
                own.pop()  # it was done again
            own.append((event["step"], event.t_s, event["region"], values[metric]))
    if not rows:
        names = ", ".join(metric_names(events))
        raise ConfigError(f"the run has no metric {name!r}", fix=f"There are {names}.")
    ordered = sorted((row for own in rows.values() for row in own), key=itemgetter(1))
    counts_N2 = np.array(counts, dtype=np.float64).reshape(-1, 2)
    times_s = np.array([row[1] for row in ordered], dtype=np.float64)
    by_then = bytes_at(counts_N2[:, 0], counts_N2[:, 1], times_s)
    known = [round(float(count)) for count in by_then] if counts else [None] * len(ordered)
    ordered = [(*row, count) for row, count in zip(ordered, known, strict=True)]
    return Table([dict(zip(_COLUMNS, row, strict=True)) for row in ordered], _COLUMNS)


def regions_table(record: RunRecord) -> Table:
    """A row per region: what it did, and what it sent and received."""
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
