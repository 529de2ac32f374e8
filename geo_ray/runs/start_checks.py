"""Checks before a run starts.

They cover the task's evaluation with the configured metrics, and likely mistakes in the
configuration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from itertools import count
from typing import Final

import torch
from torch import nn

from geo_ray.base.errors import ConfigError, TaskOutputError, TaskStateError
from geo_ray.base.random_state import generators_restored
from geo_ray.data.columns import Columns
from geo_ray.data.manifest import Manifest
from geo_ray.data.reader import RegionReader
from geo_ray.data.tasks.base import Stats, Task
from geo_ray.data.tasks.checked_calls import (
    checked_collate,
    checked_evaluate,
    checked_metrics,
    checked_model,
)
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.data import data_region, open_readers
from geo_ray.runs.evaluation import no_such_metric

_ENOUGH: Final = 4
"""Batches after which an exception is an error: some metrics are undefined for few rows."""


def check_evaluation(experiment: Experiment, task: Task, manifest: Manifest) -> None:
    """Evaluate a few rows in this process, if it generated them.

    Rows of a manifest are read only by workers in their region, which call `metrics_there`.

    Raises:
        GeoRayError: as for `metrics_there` and `check_metric_names`.
    """
    check_steps(experiment, task)
    if experiment.data.generate is None:
        return
    found: set[str] = set()
    for region in experiment.region_names:
        _, heldout = open_readers(experiment, manifest, region)
        found |= metrics_there(experiment, task, heldout)
        if found >= set(_wanted(experiment).values()):
            return
    check_metric_names(experiment, found)


def check_steps(experiment: Experiment, task: Task) -> None:
    """Compare `optimizer.kind` with the hooks of the task.

    Raises:
        TaskStateError: they do not fit.
    """
    name, train = type(task).__name__, experiment.train
    hooks = [hook for hook in ("train_step", "optimizer") if hasattr(task, hook)]
    if experiment.optimizer.kind != "task":
        if hooks:
            raise TaskStateError(
                f"{name} has the method {hooks[0]}, but optimizer.kind is "
                f"{experiment.optimizer.kind}",
                fix="Set `optimizer: {kind: task}`, or remove the method.",
            )
        return
    if not hooks:
        raise TaskStateError(
            f"optimizer.kind is task, but {name} has neither optimizer(params) nor "
            "train_step(model, batch)",
            fix="Add one of these methods, or choose another kind.",
        )
    if "train_step" not in hooks:
        return
    given = {"accumulate": train.accumulate > 1}
    given |= {key: getattr(train, key) is not None for key in ("clip_norm", "clip_mean_norm")}
    for key, is_given in given.items():
        if is_given:
            raise TaskStateError(
                f"train.{key} has no effect on {name}.train_step",
                fix="Do it in train_step, and omit the key.",
            )


def metrics_there(experiment: Experiment, task: Task, heldout: RegionReader) -> set[str]:
    """Evaluate the untrained model on a few rows of a region.

    Otherwise an error would appear only at the first evaluation, perhaps after hours.

    Returns:
        Names of the metrics of these rows: all that the run uses, or all that exist.

    Raises:
        TaskOutputError: the evaluation raises an exception, or returns an invalid result.
    """
    wanted, found = set(_wanted(experiment).values()), set[str]()
    for metrics in _metrics(experiment, task, heldout):
        found |= metrics.keys()
        if found >= wanted:
            break
    return found


def check_metric_names(experiment: Experiment, found: Collection[str]) -> None:
    """Reject metrics that no region has.

    Args:
        experiment: the run.
        found: metrics found by the regions; a region with one label may lack some metrics.

    Raises:
        ConfigError: names the key and the existing metrics.
    """
    for key, metric in _wanted(experiment).items():
        if metric in found:
            continue
        if key == "train.keep_best.metric" and experiment.train.keep_best is None:
            names = " or ".join(sorted(found))
            raise ConfigError(
                f"train.patience: the task's evaluation has no '{metric}', which patience "
                "watches by default",
                fix=f"Set train.keep_best or train.target with the metric {names}.",
            )
        raise no_such_metric(key, metric, found)


def _wanted(experiment: Experiment) -> dict[str, str]:
    """Return the metrics that the run uses, by key."""
    train = experiment.train
    watched = train.keep_best if train.patience is None else train.watched
    return {
        f"train.{key}.metric": asked.metric
        for key, asked in (("target", train.target), ("keep_best", watched))
        if asked is not None
    }


def _metrics(
    experiment: Experiment, task: Task, heldout: RegionReader
) -> Iterator[Mapping[str, float]]:
    """Yield the metrics of the untrained model over a row, a batch, two, and so on up to all rows.

    Some metrics are undefined for few rows: an AUC needs both labels.
    """
    totals: Stats = {}
    wrong: TaskOutputError | None = None
    with torch.no_grad(), generators_restored():
        module = checked_model(task, experiment.seed).eval()
        batches = heldout.scan(experiment.train.eval_batch_size)
        stats = _stats(task, module, heldout.read(0, 1))
        for number in count():
            try:
                found = checked_metrics(task, stats)
            except TaskOutputError as error:
                wrong = error
                if number >= _ENOUGH:
                    raise
            else:
                wrong = None
                yield found
            columns = next(batches, None)
            if columns is None:
                break
            for name, value in _stats(task, module, columns).items():
                totals[name] = totals[name] + value if name in totals else value
            stats = totals
    if wrong is not None:
        raise wrong


def _stats(task: Task, module: nn.Module, columns: Columns) -> Stats:
    return checked_evaluate(task, module, checked_collate(task, columns, torch.device("cpu")))


_log = logging.getLogger(__name__)

WORKERS_PER_CORE: Final = 4
"""Number of workers per core of a local cluster above which a note is logged."""


def warn_at_start(experiment: Experiment, manifest: Manifest, *, simulated: bool) -> None:
    """Log every note about a run that is about to start.

    Args:
        experiment: the run.
        manifest: its data.
        simulated: whether it computes in this process.
    """
    cores = len(os.sched_getaffinity(0))
    for note in start_notes(experiment, manifest, None if simulated else cores):
        _log.warning("%s", note)


def start_notes(experiment: Experiment, manifest: Manifest, cores: int | None) -> list[str]:
    """Return the notes; see the module's docstring.

    Args:
        experiment: the run.
        manifest: its data.
        cores: cores of this machine; None if workers have no separate processes.
    """
    return [
        *_few_rows(experiment, manifest),
        *_late(experiment),
        *(_unused_certificates(experiment) if cores is not None else ()),
        *(_not_simulated(experiment) if cores is None else _many_workers(experiment, cores)),
    ]


def _not_simulated(experiment: Experiment) -> list[str]:
    """Return notes about features that the simulator lacks."""
    notes = []
    if experiment.averager.standby is not None:
        notes.append(
            "averager.standby is not simulated: a real run sends its standby a copy of every "
            "update, and may wait for it"
        )
    if experiment.transfers is not None and experiment.transfers.aggregate:
        notes.append("transfers.aggregate is not simulated: every update goes by itself")
    return notes


def _few_rows(experiment: Experiment, manifest: Manifest) -> list[str]:
    """Return a note if a batch has more rows than its region."""
    notes = []
    for region in experiment.regions:
        rows = manifest.rows(data_region(region, manifest), "train")
        largest = max(region.batch_sizes or (experiment.data.batch_size,))
        if largest > rows:
            key = "batch_sizes of the region" if region.batch_sizes else "data.batch_size"
            notes.append(
                f"region '{region.name}' has {rows} training rows, fewer than the {largest} of one "
                f"batch ({key}): every batch has some of them more than once"
            )
    return notes


def _late(experiment: Experiment) -> list[str]:
    """Return notes about periods longer than the run."""
    train, exchange = experiment.train, experiment.strategy.traits.exchange
    notes = []
    if train.eval_every > train.steps and "eval_every" in train.model_fields_set:
        notes.append(
            f"train.eval_every: {train.eval_every} is beyond train.steps = {train.steps}: nothing "
            "is evaluated before the end"
        )
    interval = exchange.interval
    if len(experiment.regions) > 1 and interval is not None and interval > train.steps:
        notes.append(
            f"strategy.interval: {interval} is beyond train.steps = {train.steps}: regions train "
            "alone until the end"
        )
    return notes


def _unused_certificates(experiment: Experiment) -> list[str]:
    """Return a note about unused certificates on loopback links."""
    transport = experiment.transport
    if transport.certs is None or transport.tls == "required" or len(experiment.regions) < 2:
        return []
    if transport.tls == "off":
        return ["transport.certs is not used: transport.tls is off"]
    if experiment.cluster.kind != "local" or transport.advertise_host is not None:
        return []
    return [
        "transport.certs is not used: all links are loopback addresses of this machine, which "
        "transport.tls: auto leaves without TLS; required uses it there, too"
    ]


def _many_workers(experiment: Experiment, cores: int) -> list[str]:
    workers = sum(region.workers for region in experiment.regions)
    if experiment.cluster.kind != "local" or workers <= WORKERS_PER_CORE * cores:
        return []
    return [
        f"regions: {workers} worker processes on {cores} cores of this machine: "
        "they will be slow, and memory may run out; `geo-ray simulate` needs one process"
    ]
