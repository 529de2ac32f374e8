"""Does the task have the metrics that a run goes by? Found out before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from geo_ray.config.experiment import Experiment
from geo_ray.data.columns import Columns
from geo_ray.data.manifest import Manifest
from geo_ray.job.best import no_such_metric
from geo_ray.job.data import open_readers
from geo_ray.tasks.base import Stats, Task
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
    if not wanted or experiment.data.generate is None:
        return
    there: Mapping[str, float] = {}
    try:
        for there in _metrics(experiment, task, manifest):
            if there.keys() >= set(wanted.values()):
                return
    except Exception:  # what is wrong with a task is told where it is used, with its line
        return
    for key, metric in wanted.items():
        if metric not in there:
            raise no_such_metric(key, metric, there)


def _metrics(
    experiment: Experiment, task: Task, manifest: Manifest
) -> Iterator[Mapping[str, float]]:
    """The metrics of the untrained model over a row, over a batch, two, and so on up to all rows.

    Over few rows some are not defined: an AUC wants both labels.
    """
    _, heldout = open_readers(experiment, manifest, experiment.averager_region)
    one_row = heldout.read(0, 1)
    totals: Stats = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        module = checked_model(task, experiment.seed).eval()
        yield task.metrics(_stats(task, module, one_row))
        for columns in heldout.scan(experiment.train.eval_batch_size):
            for name, value in _stats(task, module, columns).items():
                totals[name] = totals[name] + value if name in totals else value
            yield task.metrics(totals)


def _stats(task: Task, module: nn.Module, columns: Columns) -> Stats:
    return checked_evaluate(task, module, task.collate(columns, torch.device("cpu")))
