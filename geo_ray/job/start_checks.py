"""What can be seen to be wrong with a run on the machine where it is started, before it begins."""

from __future__ import annotations

import logging

import torch

from geo_ray.config.experiment import Experiment
from geo_ray.data.manifest import Manifest
from geo_ray.errors import ConfigError
from geo_ray.job.data import data_region

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
