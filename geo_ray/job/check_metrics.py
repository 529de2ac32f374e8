"""Does the task have the metrics that a run goes by? Found out before anything is started."""

from __future__ import annotations

import torch

from geo_ray.config.experiment import Experiment
from geo_ray.data.manifest import Manifest
from geo_ray.job.best import no_such_metric
from geo_ray.job.data import open_readers
from geo_ray.tasks.base import Task
from geo_ray.tasks.guard import checked_evaluate, checked_model


def check_metric_names(experiment: Experiment, task: Task, manifest: Manifest) -> None:
    """Refuse names of metrics that the task does not give.

    Only where this process wrote the rows itself: those of a region are read in that region. There,
    the first evaluation finds it out.

    Raises:
        ConfigError: naming the key and the metrics that there are.
    """
    train = experiment.train
    wanted = {
        f"train.{key}.metric": asked.metric
        for key, asked in (("target", train.target), ("keep_best", train.keep_best))
        if asked is not None
    }
    there = _metrics(experiment, task, manifest) if wanted else None
    for key, metric in wanted.items():
        if there is not None and metric not in there:
            raise no_such_metric(key, metric, there)


def _metrics(experiment: Experiment, task: Task, manifest: Manifest) -> dict[str, float] | None:
    """The metrics of the untrained model over one row; None if they cannot be had here."""
    if experiment.data.generate is None:
        return None
    _, heldout = open_readers(experiment, manifest, experiment.averager_region)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module = checked_model(task, experiment.seed).eval()
            batch = task.collate(heldout.read(0, 1), torch.device("cpu"))
            return task.metrics(checked_evaluate(task, module, batch))
    except Exception:  # what is wrong with a task is told where it is used, with its line
        return None
