"""What can be seen to be wrong with a run on the machine where it is started, before it begins."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch

from geo_ray.config.experiment import Experiment
from geo_ray.data.manifest import Manifest
from geo_ray.data.stores.uri import is_s3
from geo_ray.errors import ConfigError
from geo_ray.job.data import data_region, open_readers
from geo_ray.tasks.base import Task
from geo_ray.tasks.guard import checked_evaluate, checked_model
from geo_ray.tasks.seeding import seeded
from geo_ray.util.nearest import nearest

_FEW_ROWS = 8
_log = logging.getLogger(__name__)


def check_device(experiment: Experiment) -> None:
    """Refuse a device that this machine does not have; for runs that compute on it.

    Raises:
        ConfigError: naming the key.
    """
    device = experiment.device
    if device == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(device.partition(":")[2] or 0)
    if number < count:
        return
    build = "" if torch.version.cuda is not None else ", and this PyTorch is built without CUDA"
    found = f"GPUs 0 to {count - 1}" if count else f"no GPU{build}"
    raise ConfigError(
        f"device: {device}, but PyTorch finds {found} on this machine",
        fix="Compute on the CPU: `--set device=cpu`; or start it on a machine with a GPU.",
    )


def check_metrics(experiment: Experiment, task: Task, manifest: Manifest) -> None:
    """Refuse a target that the task's evaluation never tells of.

    The task evaluates a few held-out rows with its first parameters. Where that cannot be done
    here, nothing is said: the first evaluation of the run tells.

    Raises:
        ConfigError: naming the key and what the task does tell.
    """
    target = experiment.train.target
    if target is None:
        return
    metrics = _metrics(experiment, task, manifest)
    if metrics is not None:
        check_metric("train.target.metric", target.metric, metrics)


def check_metric(key: str, name: str, metrics: Collection[str]) -> None:
    """Refuse a metric that is not among those of the task.

    Raises:
        ConfigError: naming the key.
    """
    if name in metrics:
        return
    near = nearest(name, metrics)
    hint = f"; did you mean '{near}'?" if near else ""
    raise ConfigError(
        f"{key}: the task's evaluation has no '{name}'{hint}",
        fix=f"Set {key} to {' or '.join(sorted(metrics))}.",
    )


def warn_of_few_rows(experiment: Experiment, manifest: Manifest) -> None:
    """Say so if a batch has more rows than its region has: some are in it twice."""
    for region in experiment.regions:
        rows = manifest.rows(data_region(region, manifest), "train")
        largest = max(region.batch_sizes or (experiment.data.batch_size,))
        if largest > rows:
            key = "batch_sizes of the region" if region.batch_sizes else "data.batch_size"
            _log.warning(
                "region '%s' has %d training rows, fewer than the %d of one batch (%s): every "
                "batch has some of them more than once",
                region.name,
                rows,
                largest,
                key,
            )


def _metrics(experiment: Experiment, task: Task, manifest: Manifest) -> Mapping[str, float] | None:
    """What the task tells of a few rows; None if there are none on this machine's disk."""
    names = sorted(experiment.region_names, key=lambda name: name != experiment.averager_region)
    regions = {region.name: data_region(region, manifest) for region in experiment.regions}
    for name in names:
        if is_s3(manifest.stores[regions[name]]):
            continue  # rows stay in their region
        try:
            _, heldout = open_readers(experiment, manifest, name)
            with seeded(experiment.seed), torch.no_grad():
                model = checked_model(task, experiment.seed).eval()
                batch = task.collate(heldout.read(0, _FEW_ROWS), torch.device("cpu"))
                return task.metrics(checked_evaluate(task, model, batch))
        except Exception as error:  # whoever does it in the run says what is wrong
            _log.debug("region '%s' cannot be evaluated here: %s", name, error)
    return None
