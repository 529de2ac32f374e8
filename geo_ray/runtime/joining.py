"""Starts the actors of joining regions and admits them at barriers.

Each region starts on its own threads and blocks no other; workers left over from a lost server are
reused. The averager is notified of a region when all its processes are up. Regions that are up
while none is being admitted enter together, as copies of one donor. `geo_ray.runtime.regions`
decides which regions come back, and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from geo_ray.base.errors import GeoRayError, InvariantError, RegionLostError
from geo_ray.ray_cluster.calls import Handle, collect
from geo_ray.ray_cluster.demand import RegionDemand
from geo_ray.ray_cluster.placement import PlacedRegion
from geo_ray.runtime.actor_group import ActorGroup
from geo_ray.runtime.spec import demand_of
from geo_ray.training.checkpoint_parts import TransferredState
from geo_ray.training.membership import View
from geo_ray.transport.wire.sockets import Address

T = TypeVar("T")
_PLACE_S: Final = 120.0
_START_S: Final = 300.0
_LINK_S: Final = 30.0
_STATE_TRANSFER_S: Final = 86400.0  # a transfer fails when no data arrives, not when it is slow
_IDLE_S: Final = 5.0  # for a worker to notice that its server has died


@dataclass(slots=True)
class Joining:
    """A joining region.

    Attributes:
        region: its name.
        attempt: attempt of its processes, later than any before in this run.
        actors: actors of the run.
        origin_unix_s: wall-clock time at which the run's clock was 0.
        asked_s: when it was requested.
        is_asked: whether the averager was asked to admit it.
        is_notified: whether the averager was notified that its processes run.
    """

    region: str
    attempt: int
    actors: ActorGroup
    origin_unix_s: float
    asked_s: float = field(default_factory=time.monotonic)
    is_asked: bool = False
    is_notified: bool = False
    _up: Future[ActorGroup] = field(init=False)
    _begun: Future[int] | None = None
    _own: dict[str, PlacedRegion] = field(default_factory=dict)
    _linked: dict[str, Handle] = field(default_factory=dict)  # bridges, by region

    def bring_up(self, placed: PlacedRegion | None, demand: RegionDemand) -> None:
        """Start to place and start its processes.

        Args:
            placed: its place, if it took part before.
            demand: its resource demand.
        """
        self._up = self._submit(partial(self._bring_up, placed, demand))

    @property
    def is_up(self) -> bool:
        """Whether its processes are up and linked to the averager's region.

        Raises:
            GeoRayError: starting them failed.
        """
        if not self._up.done():
            return False
        self._up.result()
        return True

    @property
    def has_come_up(self) -> bool:
        """Whether they are up, without an error."""
        up = self._up
        return up.done() and not up.cancelled() and up.exception() is None

    @property
    def group(self) -> ActorGroup:
        """Its actors, once they are up."""
        return self._up.result()

    def link(self, peer: str, bridge: Handle, address: Address) -> None:
        """Make its running bridge dial another one, without waiting.

        Other bridges may have come or been replaced since it was started.
        """
        if self._linked.get(peer) is not bridge:
            self._linked[peer] = bridge
            bridge.expect.remote(self.region)
            self.bridge.connect.remote(peer, address)

    def linked(self, peer: str, bridge: Handle) -> None:
        """Record that another bridge dials it."""
        self._linked[peer] = bridge

    @property
    def bridge(self) -> Handle:
        """Its bridge, once it is up."""
        return self.group.bridges[self.region]

    def begin_as(self, transferred: TransferredState) -> None:
        """Start, on a thread, to let it continue from a copy of another region."""
        self._begun = self._submit(partial(self._begin_as, transferred))

    @property
    def begun(self) -> int | None:
        """Size of the copy in bytes once it trains; None before.

        Raises:
            GeoRayError: it failed to begin.
        """
        if self._begun is None or not self._begun.done():
            return None
        return self._begun.result()

    def give_up(self) -> None:
        """End its processes, whatever their state."""
        self._up.add_done_callback(self._end)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        return self.actors.threads.submit(f"join-{self.region}", work)

    def _bring_up(self, placed: PlacedRegion | None, demand: RegionDemand) -> ActorGroup:
        actors = self.actors
        where = (
            actors.launcher.place([demand], _PLACE_S) if placed is None else {self.region: placed}
        )
        own = where if placed is None else {}  # released if starting fails
        spec = replace(actors.spec, resume=None, attempt=self.attempt, leader=actors.leader)
        group = ActorGroup(
            spec, where, actors.keys, actors.launcher, actors.token, actors.upload_server
        )
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
            # All others would wait for a region that was admitted without a link.
            leader = actors.leader.region
            collect({0: group.bridges[self.region].await_link.remote(leader, _LINK_S)}, _START_S)
        except BaseException:
            group.close()
            actors.launcher.remove(own)
            raise
        self._own = own
        return group

    @property
    def meets_all(self) -> bool:
        """Whether all bridges are linked to it, since the averager may move to any of them."""
        return self.actors.spec.experiment.averager.standby is not None

    def peers(self) -> dict[str, tuple[Handle, Address]]:
        """Return the bridges to link to it, with their addresses."""
        actors = self.actors
        bridges = dict(actors.bridges)  # other threads change it
        names = sorted(bridges) if self.meets_all else [actors.leader.region]
        return {n: (bridges[n], actors.bridge_addresses[n][0]) for n in names if n in bridges}

    def _begin_as(self, transferred: TransferredState) -> int:
        group, donor, bridges = self.group, transferred.donor, self.actors.bridges
        bridge = group.bridges[self.region]
        files = [part.file for part in transferred.parts]
        lenders = dict(zip(files, _servers(self.actors, donor), strict=True))
        calls = {"serve": bridges[donor].serve.remote(lenders)}
        is_stranger = donor not in self.peers()
        if is_stranger:
            calls["expect"] = bridges[donor].expect.remote(self.region)
            reached, _ = self.actors.bridge_addresses[donor]
            calls["connect"] = bridge.connect.remote(donor, reached)
            calls["link"] = bridge.await_link.remote(donor, _LINK_S)
        collect(calls, _START_S)
        servers = _servers(group, self.region)
        collect(
            {i: s.begin_as.remote(transferred, bridge) for i, s in enumerate(servers)},
            _STATE_TRANSFER_S,
        )
        if is_stranger:
            ends = {donor: bridge, self.region: bridges[donor]}
            collect({peer: end.forget.remote(peer) for peer, end in ends.items()}, _START_S)
        group.start(self.origin_unix_s, _START_S)
        return sum(part.bytes for part in transferred.parts)

    def _end(self, up: Future[ActorGroup]) -> None:
        if up.cancelled() or up.exception() is not None:
            return  # the starting thread cleans up
        up.result().close()
        self.actors.launcher.remove(self._own)


def end_transfer(actors: ActorGroup, donor: str) -> None:
    """Release the copy of a region's state; the region may be gone."""
    for server in _servers(actors, donor):
        server.end_transfer.remote()


def _servers(actors: ActorGroup, region: str) -> list[Handle]:
    """Return the servers of a region, in the order of its shards."""
    if region not in actors.primaries:
        return []
    return [actors.primaries[region], *actors.shard_servers[region]]


_COPY_S: Final = 120.0
_ASK_S: Final = 5.0  # until a request is repeated
_ENDING_S: Final = 20.0  # that an ending run waits for joining regions


@dataclass(frozen=True, slots=True)
class _Copy:
    """The state that joining regions copy: donor, bridge, step, and when it was announced."""

    donor: str
    bridge: Handle
    step: int
    round: int
    at_s: float


@dataclass(frozen=True, slots=True)
class HasStarted:
    """The processes of a joining region run."""

    region: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Enter:
    """Ask for the admission of joining regions at the next barrier."""

    regions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HasJoined:
    """A region trains.

    Attributes:
        region: its name.
        attempt: attempt of its processes.
        group: its actors.
        step: step of the state that it starts from.
        event: further fields of its event.
    """

    region: str
    attempt: int
    group: ActorGroup
    step: int
    event: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HasFailed:
    """A region does not join; the run continues as before.

    Attributes:
        region: its name.
        cause: the reason.
        was_asked: whether the averager was asked to admit it.
    """

    region: str
    cause: str
    was_asked: bool


@dataclass(frozen=True, slots=True)
class HasStopped:
    """A region does not join because the run ends."""

    region: str


JoinNews = HasStarted | Enter | HasJoined | HasFailed | HasStopped
"""News of joining regions."""


@dataclass(slots=True)
class JoiningRegions:
    """Joining regions: started concurrently, and admitted at barriers.

    Starting processes takes seconds to minutes, so regions start independently. Regions that are up
    while none is being admitted enter together, as copies of one region; a region that is up later
    enters at the next barrier. The averager decides when that is (`geo_ray.training.membership`).

    Attributes:
        actors: actors of the run.
        origin_unix_s: wall-clock time at which the run's clock was 0.
    """

    actors: ActorGroup
    origin_unix_s: float
    _open: dict[str, Joining] = field(default_factory=dict)
    _copy: _Copy | None = None  # for those that enter now
    _donor: str = ""  # whose copies they are to begin as, once they are members
    _member_s: float = 0.0  # when they were last not members
    _asked_s: float = 0.0
    _ending_s: float | None = None  # since when the run is ending

    @property
    def are_entering(self) -> bool:
        """Whether some regions are up and enter at the next barrier."""
        return bool(self._entering)

    @property
    def _entering(self) -> list[Joining]:
        return [joining for joining in self._open.values() if joining.is_asked]

    def begin(self, region: str) -> None:
        """Start the processes of a region."""
        joining = Joining(region, self.actors.next_attempt(), self.actors, self.origin_unix_s)
        spec = self.actors.spec
        demand = demand_of(spec.experiment, spec.region(region))
        joining.bring_up(self.actors.placed.get(region), demand)
        self._open[region] = joining

    def note(self, view: View | None) -> None:
        """Record the averager's view, if it has reported one."""
        self._donor = "" if view is None else view.donor

    def advance(self, view: View, *, may_enter: bool, is_ending: bool) -> list[JoinNews]:
        """Carry out what is possible now.

        Args:
            view: the averager's view.
            may_enter: whether no other change of members is in progress.
            is_ending: whether the run was told to finish or halt.
        """
        news: list[JoinNews] = []
        ready, now_s = [], time.monotonic()
        self._ending_s = (self._ending_s or now_s) if is_ending else None
        is_late = self._ending_s is not None and now_s - self._ending_s > _ENDING_S
        for region, joining in list(self._open.items()):
            try:
                if self._ending_s is not None and region not in view.members:
                    self._forget(joining)
                    joining.give_up()
                    news.append(HasStopped(region))
                elif is_late and joining.begun is None:  # no checkpoint begins meanwhile
                    late = RegionLostError("the run ended before the region was up")
                    news.append(self.call_off(region, late))
                elif joining.is_up:
                    if not joining.is_notified:
                        joining.is_notified = True
                        news.append(HasStarted(region, now_s - joining.asked_s))
                    if not joining.is_asked:
                        ready.append(joining)
                    elif (joined := self._advance(joining, view)) is not None:
                        news.append(joined)
            except GeoRayError as error:
                news.append(self.call_off(region, error))
            except Exception as error:  # of this region alone: the run and the others continue
                wrong = InvariantError(f"{type(error).__name__}: {error}")
                news.append(self.call_off(region, wrong))
        entering = self._entering
        asked: list[Joining] = []
        if ready and may_enter and not entering:
            for joining in ready:
                joining.is_asked = True
            self._member_s = now_s  # they may be members before the next look
            asked = ready
        elif entering and self._copy is None and now_s - self._asked_s >= _ASK_S:
            # A request made while another change was pending was lost; repeating it is harmless.
            asked = [joining for joining in entering if joining.region not in view.members]
        else:
            return news
        self._asked_s = now_s
        return [*news, Enter(tuple(each.region for each in asked))] if asked else news

    def on_state_transferred(
        self, donor: str, event: Mapping[str, Any], rows: Mapping[str, Mapping[str, object]]
    ) -> None:
        """Let regions that enter begin as the copy of a region's state, which is written now.

        Args:
            donor: that region.
            event: what it reports.
            rows: the sample ledgers of joining regions that were there before.
        """
        entering = self._entering
        if not entering or donor not in self.actors.bridges:
            end_transfer(self.actors, donor)
            return
        bridge, now_s = self.actors.bridges[donor], time.monotonic()
        self._copy = _Copy(donor, bridge, int(event["step"]), int(event["round"]), now_s)
        for joining in entering:
            joining.begin_as(
                TransferredState(donor, tuple(event["parts"]), rows.get(joining.region))
            )

    def fail_all(self, error: GeoRayError) -> list[JoinNews]:
        """End the joins of regions that enter now: the copy of a region's state failed."""
        return [self.call_off(joining.region, error) for joining in self._entering]

    def on_lost(self, region: str) -> list[JoinNews]:
        """Record that the run continues without a region; its copy may be awaited."""
        if region != self._donor or self._copy is not None:
            return []
        return self.fail_all(
            RegionLostError(f"region '{region}' was lost before it had transferred its state")
        )

    def leader_moved(self) -> None:
        """Repeat requests to the averager in its new region, which may not know joining regions."""
        self._asked_s = -_ASK_S

    def call_off(self, region: str, error: GeoRayError) -> HasFailed:
        """Cancel the join of a region."""
        joining = self._open[region]
        joining.give_up()
        self._forget(joining)
        return HasFailed(region, error.message, joining.is_asked)

    def close(self) -> None:
        """End all joins: the run is over."""
        for joining in list(self._open.values()):
            joining.give_up()
            self._forget(joining)

    def link(self) -> None:
        """Let joining regions dial bridges that came, or were replaced, since they were started.

        They also dial each other if the averager may move to any of them; one of each two then
        dials.
        """
        up = {name: each for name, each in sorted(self._open.items()) if each.has_come_up}
        for name, joining in up.items():
            for peer, (bridge, address) in joining.peers().items():
                joining.link(peer, bridge, address)
            for other in [each for each in up if each < name and joining.meets_all]:
                address, _ = up[other].group.bridge_addresses[other]
                joining.link(other, up[other].bridge, address)
                up[other].linked(name, joining.bridge)

    def _advance(self, joining: Joining, view: View) -> HasJoined | None:
        """Follow a region whose admission was requested."""
        region, copy = joining.region, self._copy
        if copy is None:
            self._await_copy(region, view)
            return None
        size_bytes = joining.begun
        if size_bytes is None:
            if self.actors.bridges.get(copy.donor) is not copy.bridge:
                raise RegionLostError(
                    f"the bridge of region '{copy.donor}' was lost before its state was transferred"
                )
            return None
        took_s = time.monotonic() - copy.at_s
        event = {
            "view": view.generation,
            "round": copy.round,
            "bytes": size_bytes,
            "took_s": took_s,
        }
        self._forget(joining)
        return HasJoined(region, joining.attempt, joining.group, copy.step, event)

    def _await_copy(self, region: str, view: View) -> None:
        """Give up waiting for a donor that may be lost."""
        now_s = time.monotonic()
        if region not in view.members:
            self._member_s = now_s
        elif region in view.joining and view.donor not in view.members:
            # The averager moved before the loss was reported to it.
            raise RegionLostError(
                f"region '{view.donor}' was lost before its state was transferred"
            )
        elif now_s - self._member_s > _COPY_S:
            raise RegionLostError(f"no region's state was there {_COPY_S:g} s after the barrier")

    def _forget(self, joining: Joining) -> None:
        del self._open[joining.region]
        if self._copy is not None and not self._entering:
            end_transfer(self.actors, self._copy.donor)
            self._copy = None
