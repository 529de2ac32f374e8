"""Does the task's evaluation work, with the metrics that a run goes by? Tried before it starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import count
from typing import Final

import torch
from torch import nn

from geo_ray.config.experiment import Experiment
from geo_ray.data.columns import Columns
from geo_ray.data.manifest import Manifest
from geo_ray.data.reader import RegionReader
from geo_ray.errors import TaskOutputError
from geo_ray.job.best import no_such_metric
from geo_ray.job.data import open_readers
from geo_ray.tasks.base import Stats, Task
from geo_ray.tasks.guard import (
    checked_collate,
    checked_evaluate,
    checked_metrics,
    checked_model,
)
from geo_ray.util.generators import generators_restored

_ENOUGH: Final = 4
"""Batches after which metrics that raise are wrong: over few rows some are not defined."""


def check_evaluation(experiment: Experiment, task: Task, manifest: Manifest) -> None:
    """Evaluate a few rows in this process, if it wrote them itself.

    Rows of a manifest are read in their region, by its workers: they call `metrics_there`.

    Raises:
        GeoRayError: as for `metrics_there` and `check_metric_names`.
    """
    if experiment.data.generate is None:
        return
    found: set[str] = set()
    for region in experiment.region_names:
        _, heldout = open_readers(experiment, manifest, region)
        found |= metrics_there(experiment, task, heldout)
        if found >= set(_wanted(experiment).values()):
            return
    check_metric_names(experiment, found)


def metrics_there(experiment: Experiment, task: Task, heldout: RegionReader) -> set[str]:
    """Evaluate the untrained model on a few rows of a region.

    An error in an evaluation would show at the first one, perhaps after hours.

    Returns:
        Names of metrics that these rows have: all that the run goes by, or all that there are.

    Raises:
        TaskOutputError: the evaluation raises, or gives what is no evaluation.
    """
    wanted, found = set(_wanted(experiment).values()), set[str]()
    for metrics in _metrics(experiment, task, heldout):
        found |= metrics.keys()
        if found >= wanted:
            break
    return found


def check_metric_names(experiment: Experiment, found: Collection[str]) -> None:
    """Refuse metrics that no region has.

    Args:
        experiment: the run.
        found: by the regions; one with rows of one label may lack a metric that others have.

    Raises:
        ConfigError: names the key and the metrics that there are.
    """
    for key, metric in _wanted(experiment).items():
        if metric not in found:
            raise no_such_metric(key, metric, found)


def _wanted(experiment: Experiment) -> dict[str, str]:
    """The metrics that the run goes by, by key."""
    train = experiment.train
    return {
        f"train.{key}.metric": asked.metric
        for key, asked in (("target", train.target), ("keep_best", train.keep_best))
        if asked is not None
    }


def _metrics(
    experiment: Experiment, task: Task, heldout: RegionReader
) -> Iterator[Mapping[str, float]]:
    """The metrics of the untrained model over a row, over a batch, two, and so on up to all rows.

    Over few rows some are not defined: an AUC wants both labels.
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
