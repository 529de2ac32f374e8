"""Replaces a region's bridge that has died, while the region's server and workers go on.

Idea: a bridge holds nothing of training that its region's server, or the averager's standby, does
not have. So its successor takes over place and identity, with a later epoch, and the server says
its open request again: the averager knows by the number whether it has had it, and what it said.
Nothing is lost, and no other region notices more than a late update.

Rule: where the averager lived in that bridge, its standby takes over first, and the region goes on
as one that is like all others. A bridge is not replaced where it holds more: `is_replaceable`. Then
the region is lost.

Source: ours.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from geo_ray.config.experiment import Experiment
from geo_ray.errors import GeoRayError, RegionLostError
from geo_ray.runtime.cluster.ray_threads import check_not_closing
from geo_ray.runtime.control.actor_group import ActorGroup
from geo_ray.runtime.control.calls import Handle, collect, kill
from geo_ray.runtime.control.restarts import Restarts
from geo_ray.training.averager.home import AveragerHome
from geo_ray.training.membership.config import why_fixed
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)

_START_S: Final = 180.0
_MOVE_S: Final = 30.0
_LOOK_S: Final = 0.1
AWAY_S: Final = 10.0
"""How long a region's server dials its bridge in vain before that is taken for dead."""


def is_replaceable(
    experiment: Experiment, region: str, home: AveragerHome, standby: str | None
) -> bool:
    """Whether a bridge of ``region`` holds nothing that its successor would lack.

    Not with an overlay, transfers or `dgt`: sums, turns and books of blocks are in bridges. Not if
    it hosts the averager, unless that has a standby which has had every update that counts. With
    the standby's its copy of the averager is gone: the averager chooses another one, or it again.

    Args:
        experiment: the run.
        region: the bridge's.
        home: where the averager lives, or lived in that bridge.
        standby: who may take over from there.
    """
    keeps = why_fixed(
        experiment.overlay.kind, experiment.codec, has_transfers=experiment.transfers is not None
    )
    if keeps is not None:
        return False
    if region == home.region:
        return standby is not None and not experiment.averager.max_divergence
    return True


_Fresh = tuple[Handle, tuple[Address, Address]]
"""A bridge that is up, and where other regions, and its own, reach it."""


@dataclass(frozen=True, slots=True)
class _Replacing:
    """A bridge on its way, for a region's server, which follows the averager in ``host``."""

    cause: str
    primary: Handle
    host: str
    fresh: Future[_Fresh]
    since_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class BridgeWatch:
    """See the module's docstring.

    Attributes:
        actors: of the run.
        restarts: how often there may be another one.
        origin_unix_s: when the run's clock was 0.
        emit: takes events of now: a kind, and its fields by name.
        tell: shows the user what is going on; an empty text when it is over.
        lose: goes on without a region, for a cause, or raises.
    """

    actors: ActorGroup
    restarts: Restarts
    origin_unix_s: float
    emit: Callable[..., None]
    tell: Callable[[str], None]
    lose: Callable[[str, str], None]
    _open: dict[str, _Replacing] = field(default_factory=dict)
    _linked_s: dict[str, float] = field(default_factory=dict)  # since when others are there
    _refused: set[str] = field(default_factory=set)  # that are out of reach, and stay

    def replaced(
        self,
        silent: Mapping[tuple[str, str], str],
        answers: Mapping[tuple[str, str], Mapping[str, Any]],
    ) -> Iterator[str]:
        """Begin to replace the bridges that are lost alone, as far as that can be done.

        A bridge that lives, but that its region's server does not reach, is ended for it. One that
        cannot be replaced is waited for: the server dials it on and on.

        Args:
            silent: why servers and bridges are lost, by (role, region).
            answers: of the others.

        Yields:
            Their regions, which go on.
        """
        lost = {region for _, region in silent}
        for (role, region), answer in answers.items():
            if role == "ps" and region not in lost:
                self._judge(region, answer["status"].get("bridge_away_s"))
        for (role, region), cause in silent.items():
            others = any(name == region and other != "bridge" for other, name in silent)
            if role == "bridge" and not others and self._replace(region, cause):
                yield region

    def _judge(self, region: str, away_s: float | None) -> None:
        if away_s is None:
            self._refused.discard(region)
            return
        # An answer may be older than the bridge that is there now.
        is_old = time.monotonic() - away_s < self._linked_s.get(region, 0.0)
        if away_s < AWAY_S or is_old or region not in self.actors.bridges:
            return
        if region not in self._refused and not self._replace(
            region, f"its region's server has not reached it for {away_s:.0f} s"
        ):
            self._refused.add(region)
            log.warning("region '%s' does not reach its bridge, which nobody replaces", region)

    def tick(self) -> None:
        """Let regions go on whose next bridge is there."""
        for region, found in list(self._open.items()):
            if not found.fresh.done():
                continue
            del self._open[region]
            if self.actors.primaries.get(region) is not found.primary:  # lost meanwhile
                found.fresh.add_done_callback(_end)
                continue
            if found.host != self.actors.home.region:  # the averager has moved meanwhile
                found.fresh.add_done_callback(_end)
                if not self._replace(region, found.cause):
                    self.lose(region, f"the bridge of region '{region}' is lost: {found.cause}")
                continue
            try:
                bridge, addresses = found.fresh.result()
            except GeoRayError as error:
                self.lose(region, f"the bridge of region '{region}' is lost: {error.message}")
                continue
            self.actors.bridges[region] = bridge
            self.actors.bridge_addresses[region] = addresses
            self._linked_s[region] = time.monotonic()
            took_s = time.monotonic() - found.since_s
            self.tell("")  # no longer on its way; the event says the rest
            self.emit("bridge_replaced", region=region, cause=found.cause, took_s=took_s)

    def close(self) -> None:
        """The run is over: what is on its way ends."""
        for found in self._open.values():
            found.fresh.add_done_callback(_end)

    def _replace(self, region: str, cause: str) -> bool:
        actors = self.actors
        if not is_replaceable(actors.spec.experiment, region, actors.home, actors.standby):
            return False
        if not self.restarts.take(time.monotonic()):
            log.warning("the bridge of region '%s' is not replaced: %s", region, self.restarts)
            return False
        kill(actors.bridges.pop(region, None))
        log.warning("the bridge of region '%s' is lost: %s", region, cause)
        self.tell(f"the bridge of region '{region}' is lost: starting another one")
        self.emit("bridge_requested", region=region, cause=cause)
        if region == actors.home.region:
            actors.expect_takeover()
            actors.bridges[actors.home.region].report_dead.remote(region, True)
        elif region == actors.standby:
            actors.standby = None
            actors.bridges[actors.home.region].report_dead.remote(region, True)
        primary, host = actors.primaries[region], actors.home.region
        bring_up = partial(self._bring_up, region, primary, host, actors.next_epoch())
        fresh = actors.threads.submit(f"bridge-{region}", bring_up)
        self._open[region] = _Replacing(cause, primary, host, fresh)
        return True

    def _bring_up(self, region: str, primary: Handle, host: str, epoch: int) -> _Fresh:
        actors = self.actors
        bridge = actors.create_bridge(region, epoch)
        try:
            actors.admit({region: bridge}, _START_S)
            _await(bridge.ready.remote())
            keys = actors.keys.for_bridge(region, _await(bridge.introduce.remote()))
            home = self._home_in(host)
            addresses = _await(bridge.open.remote(self.origin_unix_s, keys, home))
            self._link(region, bridge, addresses[0], host)
            _await(primary.use_bridge.remote(addresses[1]))
        except BaseException:
            kill(bridge)
            raise
        return bridge, addresses

    def _link(self, region: str, bridge: Handle, address: Address, host: str) -> None:
        """Connect a bridge with those that its predecessor was connected with, and the averager's.

        Only the latter is waited for: others may be lost, too.
        """
        actors = self.actors
        for who, whom in {(region, host), *actors.dials()}:
            if who == region and whom in actors.bridges:
                bridge.connect.remote(whom, actors.bridge_addresses[whom][0])
            elif whom == region and who in actors.bridges:
                bridge.expect.remote(who)
                actors.bridges[who].connect.remote(region, address)
        _await(self._host(host).expect.remote(region))

    def _host(self, name: str) -> Handle:
        """The bridge of a region where the averager lives.

        Raises:
            RegionLostError: it is gone.
        """
        bridge = self.actors.bridges.get(name)
        if bridge is None:
            raise RegionLostError(f"the bridge of region '{name}' is lost")
        return bridge

    def _home_in(self, host: str) -> AveragerHome:
        """Where the averager lives, once its bridge knows that it does."""
        until_s = time.monotonic() + _MOVE_S
        while True:
            home: AveragerHome = _await(self._host(host).home.remote())
            if home.region == host:
                return home
            check_not_closing()
            if time.monotonic() > until_s:
                raise RegionLostError(f"the averager has not moved to region '{host}'")
            time.sleep(_LOOK_S)


def _await(call: Any) -> Any:
    return collect({0: call}, _START_S)[0]


def _end(fresh: Future[_Fresh]) -> None:
    if not fresh.cancelled() and fresh.exception() is None:
        kill(fresh.result()[0])
