"""How a simulated run's updates travel where that is not straight to the averager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from geo_ray.config.experiment import Experiment
from geo_ray.sim.lossy import SimLossy
from geo_ray.sim.network import Network
from geo_ray.sim.overlay import SimOverlay
from geo_ray.sim.scheduler import Scheduler
from geo_ray.sim.turns import SimTurns
from geo_ray.strategies.base import Reply, Update


@dataclass(frozen=True, slots=True)
class PathHooks:
    """What paths do with the rest of the world.

    Attributes:
        ship: puts a region's update on its way; when it arrives.
        updated: the averager has an update.
        replied: a region has its answer.
        skipped: an update is given up, by region, epoch and number.
        version: of the averager.
        is_done: whether a region has ended its training.
    """

    ship: Callable[[str, Update], float]
    updated: Callable[[Update], None]
    replied: Callable[[Reply], None]
    skipped: Callable[[str, int, int], None]
    version: Callable[[], int]
    is_done: Callable[[str], bool]


def build_paths(
    experiment: Experiment,
    num_params: int,
    network: Network,
    scheduler: Scheduler,
    hooks: PathHooks,
) -> tuple[SimLossy | None, SimTurns | None, SimOverlay | None]:
    """Build those that a run has: updates in two parts, turns, an overlay."""
    hub, up = experiment.averager_region, experiment.codec.up
    differential = None if up is None else up.traits.differential
    lossy = turns = overlay = None
    if differential is not None:
        lossy = SimLossy(differential, num_params, network, scheduler, hub, hooks.is_done)
    if experiment.transfers is not None:
        turns = SimTurns(
            experiment.transfers,
            hub,
            scheduler,
            network,
            hooks.ship,
            hooks.version,
            hooks.updated,
            hooks.skipped,
        )
    if experiment.overlay.kind != "star" and len(experiment.regions) > 1:
        overlay = SimOverlay(
            experiment, num_params, network, scheduler, hooks.updated, hooks.replied
        )
    return lossy, turns, overlay
