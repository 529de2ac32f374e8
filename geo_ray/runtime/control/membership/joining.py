"""Brings the actors of one region up beside a run that goes on, on threads of their own.

Starting processes takes seconds to minutes: nobody is held up by it. Workers that are left of a
region whose server has died go on with the next one: they have loaded everything already. Only when
all is there does the averager hear of the newcomer, and only the copy of a region's state is waited
for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from geo_ray.runtime.actors.parts import Handed
from geo_ray.runtime.cluster.demand import RegionDemand
from geo_ray.runtime.cluster.placement import PlacedRegion
from geo_ray.runtime.control.actor_group import ActorGroup
from geo_ray.runtime.control.calls import Handle, collect
from geo_ray.transport.wire.sockets import Address

T = TypeVar("T")
_PLACE_S: Final = 120.0
_START_S: Final = 300.0
_LINK_S: Final = 30.0
_COPY_S: Final = 86400.0  # it is given up when nothing comes any more, not when it is slow
_IDLE_S: Final = 5.0  # for a worker of a server that has died to notice it


@dataclass(slots=True)
class Joining:
    """A region on its way in.

    Attributes:
        region: its name.
        epoch: of its processes, later than that of any before in this run.
        actors: those of the run.
        origin_unix_s: when the run's clock was 0.
        asked_s: when it was asked for.
        is_asked: whether the averager was told.
        is_told: whether it was told that its processes run.
    """

    region: str
    epoch: int
    actors: ActorGroup
    origin_unix_s: float
    asked_s: float = field(default_factory=time.monotonic)
    is_asked: bool = False
    is_told: bool = False
    _up: Future[ActorGroup] = field(init=False)
    _begun: Future[int] | None = None
    _own: dict[str, PlacedRegion] = field(default_factory=dict)
    _linked: dict[str, Handle] = field(default_factory=dict)  # bridges, by region

    def bring_up(self, placed: PlacedRegion | None, demand: RegionDemand) -> None:
        """Begin to place and start its processes.

        Args:
            placed: its place, if it was here before.
            demand: what it asks for.
        """
        self._up = self._submit(partial(self._bring_up, placed, demand))

    @property
    def is_up(self) -> bool:
        """Whether its processes are there, and linked to the averager's region.

        Raises:
            GeoRayError: they will not be.
        """
        if not self._up.done():
            return False
        self._up.result()
        return True

    @property
    def has_come_up(self) -> bool:
        """Whether they are, and nothing went wrong."""
        up = self._up
        return up.done() and not up.cancelled() and up.exception() is None

    @property
    def group(self) -> ActorGroup:
        """Its actors, once they are up."""
        return self._up.result()

    def link(self, peer: str, bridge: Handle, address: Address) -> None:
        """See that its bridge, which is up, dials another one; nothing is waited for.

        Others may have come, or been replaced, since it was brought up.
        """
        if self._linked.get(peer) is not bridge:
            self._linked[peer] = bridge
            bridge.expect.remote(self.region)
            self.bridge.connect.remote(peer, address)

    def linked(self, peer: str, bridge: Handle) -> None:
        """Another one dials it."""
        self._linked[peer] = bridge

    @property
    def bridge(self) -> Handle:
        """Its bridge, once it is up."""
        return self.group.bridges[self.region]

    def begin_as(self, handed: Handed) -> None:
        """Begin, on a thread, to let it go on from a copy of another region."""
        self._begun = self._submit(partial(self._begin_as, handed))

    @property
    def begun(self) -> int | None:
        """Bytes of the copy once it trains; None before.

        Raises:
            GeoRayError: it will not.
        """
        if self._begun is None or not self._begun.done():
            return None
        return self._begun.result()

    def give_up(self) -> None:
        """End its processes, whatever they do."""
        self._up.add_done_callback(self._end)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        return self.actors.threads.submit(f"join-{self.region}", work)

    def _bring_up(self, placed: PlacedRegion | None, demand: RegionDemand) -> ActorGroup:
        actors = self.actors
        where = actors.maker.place([demand], _PLACE_S) if placed is None else {self.region: placed}
        own = where if placed is None else {}  # is given back if nothing comes of it
        spec = replace(actors.spec, resume=None, epoch=self.epoch, home=actors.home)
        group = ActorGroup(spec, where, actors.keys, actors.maker, actors.driver, actors.desk)
        for worker in actors.take_idle(self.region, _IDLE_S):
            group.workers[self.region, worker.rank] = worker
        try:
            group.create([spec.region(self.region)])
            group.await_ready(_START_S)
            group.open(self.origin_unix_s, _START_S)
            calls = {}
            for name, (bridge, reached) in self.peers().items():
                self._linked[name] = bridge
                calls["expect", name] = bridge.expect.remote(self.region)
                calls["connect", name] = group.bridges[self.region].connect.remote(name, reached)
            collect(calls, _START_S)
            # Whoever is let in without a link is waited for by all others.
            home = actors.home.region
            collect({0: group.bridges[self.region].await_link.remote(home, _LINK_S)}, _START_S)
        except BaseException:
            group.close()
            actors.maker.remove(own)
            raise
        self._own = own
        return group

    @property
    def meets_all(self) -> bool:
        """Whether everybody is linked to a newcomer, since the averager may move."""
        return self.actors.spec.experiment.averager.standby is not None

    def peers(self) -> dict[str, tuple[Handle, Address]]:
        """Which of those that are there are linked to a newcomer, and where they are reached."""
        actors = self.actors
        bridges = dict(actors.bridges)  # others change it meanwhile
        names = sorted(bridges) if self.meets_all else [actors.home.region]
        return {n: (bridges[n], actors.bridge_addresses[n][0]) for n in names if n in bridges}

    def _begin_as(self, handed: Handed) -> int:
        group, giver, bridges = self.group, handed.giver, self.actors.bridges
        bridge = group.bridges[self.region]
        files = [part.file for part in handed.parts]
        lenders = dict(zip(files, _servers(self.actors, giver), strict=True))
        calls = {"lend": bridges[giver].lend.remote(lenders)}
        is_stranger = giver not in self.peers()
        if is_stranger:
            calls["expect"] = bridges[giver].expect.remote(self.region)
            reached, _ = self.actors.bridge_addresses[giver]
            calls["connect"] = bridge.connect.remote(giver, reached)
            calls["link"] = bridge.await_link.remote(giver, _LINK_S)
        collect(calls, _START_S)
        servers = _servers(group, self.region)
        collect({i: s.begin_as.remote(handed, bridge) for i, s in enumerate(servers)}, _COPY_S)
        if is_stranger:
            ends = {giver: bridge, self.region: bridges[giver]}
            collect({peer: end.forget.remote(peer) for peer, end in ends.items()}, _START_S)
        group.start(self.origin_unix_s, _START_S)
        return sum(part.bytes for part in handed.parts)

    def _end(self, up: Future[ActorGroup]) -> None:
        if up.cancelled() or up.exception() is not None:
            return  # who brings it up cleans up
        up.result().close()
        self.actors.maker.remove(self._own)


def end_lending(actors: ActorGroup, giver: str) -> None:
    """The copy of a region's state is not needed any more; the region may be gone."""
    for server in _servers(actors, giver):
        server.end_lending.remote()


def _servers(actors: ActorGroup, region: str) -> list[Handle]:
    """What holds a region's state, in the order of its shards."""
    if region not in actors.primaries:
        return []
    return [actors.primaries[region], *actors.shard_servers[region]]
