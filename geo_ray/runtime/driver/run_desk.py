"""The desk of a run whose checkpoints are in its directory."""

from __future__ import annotations

from geo_ray.config.experiment import Experiment
from geo_ray.job.checkpoints import places_of
from geo_ray.job.rundir import RunDirectory
from geo_ray.runtime.desk.own_node import address_here, region_here
from geo_ray.runtime.desk.part_desk import PartDesk


def desk_of(run: RunDirectory, experiment: Experiment) -> PartDesk | None:
    """What takes parts in here, from machines that do not see the run's directory.

    Args:
        run: its directory.
        experiment: the run.

    Returns:
        The desk; None if its checkpoints go to stores.
    """
    if places_of(run, experiment.checkpoint).far:
        return None
    here = region_here()
    near = here if here in experiment.region_names else experiment.averager_region
    region = experiment.checkpoint.store_region or near
    return PartDesk(run.checkpoints, run.path, region, address_here)
