"""Does the task's evaluation work, with the metrics that a run goes by? Tried before it starts."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from geo_ray.config.experiment import Experiment
from geo_ray.data.columns import Columns
from geo_ray.data.manifest import Manifest
from geo_ray.data.reader import RegionReader
from geo_ray.errors import GeoRayError, TaskOutputError
from geo_ray.job.best import no_such_metric
from geo_ray.job.data import open_readers
from geo_ray.tasks.base import Stats, Task
from geo_ray.tasks.guard import checked_evaluate, checked_model
from geo_ray.util.nearest import nearest

_ROWS: Final = 4


def check_evaluation(experiment: Experiment, task: Task, manifest: Manifest) -> None:
    """Evaluate a few rows in this process, if it wrote them itself.

    Rows of a manifest are read in their region, by its workers: see `try_evaluation`.

    Raises:
        GeoRayError: as for `try_evaluation`.
    """
    if experiment.data.generate is not None:
        _, heldout = open_readers(experiment, manifest, experiment.averager_region)
        try_evaluation(experiment, task, heldout, is_all=True)


def try_evaluation(
    experiment: Experiment, task: Task, heldout: RegionReader, *, is_all: bool = False
) -> None:
    """Evaluate the untrained model on a few rows; on more, if metrics of the run are not in there.

    An error in an evaluation would show at the first one, perhaps after hours. A metric may not be
    defined over few rows, or over those of one region: an AUC wants both labels.

    Args:
        experiment: the run.
        task: its task.
        heldout: rows of one region.
        is_all: whether other regions' rows are like these. If not, a metric is refused only if its
            name is nearly that of another one.

    Raises:
        ConfigError: the run goes by a metric that the task does not give; names the key.
        TaskOutputError: the evaluation raises, or gives what is no evaluation.
    """
    train = experiment.train
    wanted = {
        f"train.{key}.metric": asked.metric
        for key, asked in (("target", train.target), ("keep_best", train.keep_best))
        if asked is not None
    }
    there = _metrics(experiment, task, heldout, set(wanted.values()))
    for key, metric in wanted.items():
        if metric not in there and (is_all or nearest(metric, there) is not None):
            raise no_such_metric(key, metric, there)


def _metrics(
    experiment: Experiment, task: Task, heldout: RegionReader, wanted: set[str]
) -> dict[str, float]:
    """The metrics of the untrained model: over a few rows, or over more, until all are in there."""
    totals: Stats = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _blamed():
        module = checked_model(task, experiment.seed).eval()
        there = task.metrics(_stats(task, module, heldout.read(0, _ROWS)))
        for columns in heldout.scan(experiment.train.eval_batch_size):
            if there.keys() >= wanted:
                break
            for name, value in _stats(task, module, columns).items():
                totals[name] = totals[name] + value if name in totals else value
            there = task.metrics(totals)
    return there


def _stats(task: Task, module: nn.Module, columns: Columns) -> Stats:
    return checked_evaluate(task, module, task.collate(columns, torch.device("cpu")))


@contextmanager
def _blamed() -> Iterator[None]:
    try:
        yield
    except GeoRayError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskOutputError(
            f"the task's evaluation raised {type(error).__name__}: {error} "
            f"({frame.filename}:{frame.lineno}); tried before the start",
            fix="Mend the named line, or what the task gives to it.",
        ) from error
