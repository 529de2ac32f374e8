"""Replaces a region's bridge that has died, while the region's server and workers go on.

Idea: outside of the averager's region a bridge holds nothing of training that its region's server
does not have. So its successor takes over address book and identity, with a later epoch, and the
server says its open request again: the averager knows by the number whether it has had it, and what
it said. Nothing is lost, and no other region notices more than a late update.

Not where bridges keep more: with an overlay, transfers or `dgt`; nor where the averager lives, or
stands by, or has moved from: the region is lost then.

Source: ours.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

from geo_ray.config.experiment import Experiment
from geo_ray.errors import GeoRayError
from geo_ray.runtime.control.actor_group import ActorGroup, collect, kill
from geo_ray.runtime.control.restarts import Restarts
from geo_ray.training.membership.config import why_fixed

log = logging.getLogger(__name__)

_START_S: Final = 180.0


def is_replaceable(experiment: Experiment, region: str, *, home_epoch: int) -> bool:
    """Whether a bridge of ``region`` holds nothing that its successor has not.

    Args:
        experiment: the run.
        region: the bridge's.
        home_epoch: how often the averager has moved, from 1.
    """
    averager = experiment.averager
    keeps = why_fixed(
        experiment.overlay.kind, experiment.codec, has_transfers=experiment.transfers is not None
    )
    hosts = (experiment.averager_region, averager.standby)
    return keeps is None and region not in hosts and home_epoch == 1


@dataclass(frozen=True, slots=True)
class _Replacing:
    """A bridge on its way."""

    cause: str
    since_s: float
    bridge: Future[Any]


@dataclass(slots=True)
class BridgeWatch:
    """See the module's docstring.

    Attributes:
        actors: of the run.
        restarts: how often there may be another one.
        origin_unix_s: when the run's clock was 0.
        emit: takes events of now: a kind, and its fields by name.
        tell: shows a line to the user.
        lose: goes on without a region, for a cause, or raises.
    """

    actors: ActorGroup
    restarts: Restarts
    origin_unix_s: float
    emit: Callable[..., None]
    tell: Callable[[str], None]
    lose: Callable[[str, str], None]
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "bridges"))
    _open: dict[str, _Replacing] = field(default_factory=dict)

    def replace(self, region: str, cause: str) -> bool:
        """Begin to replace the bridge of a region whose server lives; whether that can be done."""
        experiment, epoch = self.actors.spec.experiment, self.actors.home.epoch
        if not is_replaceable(experiment, region, home_epoch=epoch):
            return False
        if not self.restarts.take(time.monotonic()):
            log.warning("the bridge of region '%s' is not replaced: %s", region, self.restarts)
            return False
        kill(self.actors.bridges.pop(region))
        self.tell(f"the bridge of region '{region}' is lost: starting another one")
        fresh = self._pool.submit(self._bring_up, region, self.actors.next_epoch())
        self._open[region] = _Replacing(cause, time.monotonic(), fresh)
        return True

    def tick(self) -> None:
        """Let regions go on whose next bridge is there."""
        for region, found in list(self._open.items()):
            if not found.bridge.done():
                continue
            del self._open[region]
            if region not in self.actors.primaries:  # lost, or gone, meanwhile
                found.bridge.add_done_callback(_end)
                continue
            try:
                bridge, addresses = found.bridge.result()
            except GeoRayError as error:
                self.lose(region, f"the bridge of region '{region}' is lost: {error.message}")
                continue
            self.actors.bridges[region] = bridge
            self.actors.bridge_addresses[region] = addresses
            took_s = time.monotonic() - found.since_s
            self.emit("bridge_replaced", region=region, cause=found.cause, took_s=took_s)
            self.tell(f"the bridge of region '{region}' is replaced: {took_s:.1f} s")

    def close(self) -> None:
        """The run is over: what is on its way ends."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for found in self._open.values():
            found.bridge.add_done_callback(_end)

    def _bring_up(self, region: str, epoch: int) -> tuple[Any, Any]:
        actors = self.actors
        group = ActorGroup(
            replace(actors.spec, resume=None, epoch=epoch),
            {region: actors.placed[region]},
            actors.keys,
        )
        try:
            group.create_bridge(actors.spec.region(region))
            group.await_ready(_START_S)
            group.open(self.origin_unix_s, _START_S)
            bridge, addresses = group.bridges[region], group.bridge_addresses[region]
            dials = {
                home: bridge.connect.remote(home, actors.bridge_addresses[home][0])
                for who, home in actors.dials()
                if who == region
            }
            collect(dials, _START_S)
            collect({0: actors.primaries[region].use_bridge.remote(addresses[1])}, _START_S)
        except BaseException:
            group.close()
            raise
        return bridge, addresses


def _end(fresh: Future[Any]) -> None:
    if not fresh.cancelled() and fresh.exception() is None:
        kill(fresh.result()[0])
