"""Does the task's evaluation work, with the metrics that a run goes by? Tried before it starts."""

from __future__ import annotations

import traceback
from typing import Final

import torch

from geo_ray.config.experiment import Experiment
from geo_ray.data.manifest import Manifest
from geo_ray.data.reader import RegionReader
from geo_ray.errors import GeoRayError, TaskOutputError
from geo_ray.job.best import no_such_metric
from geo_ray.job.data import open_readers
from geo_ray.tasks.base import Task
from geo_ray.tasks.guard import checked_evaluate, checked_model

_ROWS: Final = 4


def check_evaluation(experiment: Experiment, task: Task, manifest: Manifest) -> None:
    """Evaluate a few rows in this process, if it wrote them itself.

    Rows of a manifest are read in their region, by its workers: see `try_evaluation`.

    Raises:
        GeoRayError: as for `try_evaluation`.
    """
    if experiment.data.generate is not None:
        _, heldout = open_readers(experiment, manifest, experiment.averager_region)
        try_evaluation(experiment, task, heldout)


def try_evaluation(experiment: Experiment, task: Task, heldout: RegionReader) -> None:
    """Evaluate the untrained model on a few rows.

    An error in an evaluation would show at the first one, perhaps after hours.

    Raises:
        ConfigError: the run goes by a metric that the task does not give; names the key.
        TaskOutputError: the evaluation raises, or gives what is no evaluation.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module = checked_model(task, experiment.seed).eval()
            batch = task.collate(heldout.read(0, _ROWS), torch.device("cpu"))
            there = task.metrics(checked_evaluate(task, module, batch))
    except GeoRayError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskOutputError(
            f"the task's evaluation raised {type(error).__name__}: {error} "
            f"({frame.filename}:{frame.lineno}); tried on {_ROWS} rows before the start",
            fix="Mend the named line, or what the task gives to it.",
        ) from error
    train = experiment.train
    for key, asked in (("target", train.target), ("keep_best", train.keep_best)):
        if asked is not None and asked.metric not in there:
            raise no_such_metric(f"train.{key}.metric", asked.metric, dict(there))
