"""Watches the processes of a run: replaces lost workers and bridges, and reports hung processes.

`RunPolicy` and `Hangs` decide. A bridge holds nothing that its region's server or the averager's
standby does not have, so a new one takes over its place and identity with a later attempt, and the
server repeats its open request. If a bridge holds more (`is_replaceable`), the region is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import ray

from geo_ray.base.errors import GeoRayError, RegionLostError
from geo_ray.base.restarts import Restarts
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.calls import Handle, check_not_closing, collect, failure_of, kill
from geo_ray.runtime.actor_group import ActorGroup, DrainNotices, GroupWorker
from geo_ray.runtime.members import Members
from geo_ray.runtime.policies import NAMED_S, Hangs, RunPolicy
from geo_ray.runtime.reporting import RunServices
from geo_ray.training.config import why_fixed
from geo_ray.training.membership import AveragerLeader
from geo_ray.transport.wire.sockets import Address

Place = tuple[str, int]
"""Region and rank."""


@dataclass(slots=True)
class _Replacement:
    """A requested replacement that does not work yet.

    Attributes:
        worker: the replacement.
        asked_s: when it was requested.
        has_started: whether its process runs.
    """

    worker: GroupWorker
    asked_s: float = field(default_factory=time.monotonic)
    has_started: bool = False


@dataclass(slots=True)
class WorkerWatch:
    """Watches the workers of a run: detects ends, replaces workers, and lets them leave on notice.

    `RunPolicy` decides on losses. How a region continues meanwhile is up to its server.

    Attributes:
        actors: actors of the run.
        policy: decides.
        loop: the run loop.
        notices: machines that will be reclaimed.
        members: tells whether a whole region leaves on such a notice.
    """

    actors: ActorGroup
    policy: RunPolicy
    loop: RunServices
    notices: DrainNotices
    members: Members
    _status: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # of servers, by region
    _sent_away: dict[Place, GroupWorker] = field(default_factory=dict)
    _replacements: dict[Place, _Replacement] = field(default_factory=dict)

    def note(self, region: str, status: Mapping[str, Any]) -> None:
        """Record the report of a region's server."""
        self._status[region] = status

    def resume(self, requested: Collection[Place]) -> None:
        """Restore replacements that an earlier run actor requested and that do not work yet."""
        for place in requested:
            worker = self.actors.workers.get(place)
            if worker is not None:
                self._replacements[place] = _Replacement(worker)

    def replace_hung(self, worker: GroupWorker, cause: str) -> None:
        """End a hung worker, which counts as lost.

        Raises:
            WorkerLostError: workers are lost more often than allowed.
        """
        kill(worker.handle)
        self._lost(worker, cause, None)

    @property
    def are_out(self) -> bool:
        """Whether any worker has not ended yet."""
        return any(
            worker.steps is None and not self._is_too_late(worker)
            for worker in self.actors.workers.values()
        )

    def collect(self, timeout_s: float) -> None:
        """Process ended workers, and start due replacements.

        Args:
            timeout_s: longest wait for a worker to end.

        Raises:
            WorkerLostError: workers die more often than allowed.
            GeoRayError: a worker reported an error of the task or the data.
        """
        busy = {w.ref: w for w in self.actors.workers.values() if w.is_out}
        if not busy:
            time.sleep(timeout_s)
        ready = ray.wait(list(busy), num_returns=1, timeout=timeout_s)[0] if busy else []
        for ref in ready:
            worker = busy[ref]
            try:
                steps = int(ray.get(ref))
            except ray.exceptions.RayError as error:
                self.loop.process_news()  # preceding events; perhaps the whole region is lost
                failure = failure_of(error)
                self._lost(worker, failure.cause, None if failure.is_lost else failure.as_error())
            else:
                self._leader(worker, steps)
        now_s = time.monotonic()
        for place in self.policy.replacements(now_s):
            gone = self.actors.workers.get(place)
            if gone is not None and gone.ref is None:  # not if its region has come back with it
                self._replace(gone)
        self._heed(now_s)
        self._report_replacements(now_s)

    def _report_replacements(self, now_s: float) -> None:
        """Report replacements whose process runs, and those that work."""
        for place, coming in list(self._replacements.items()):
            region, rank = place
            worker = coming.worker
            if self.actors.workers.get(place) is not worker or worker.ref is None:
                del self._replacements[place]
                continue
            about = {"region": region, "worker": rank, "attempt": worker.attempt}
            took_s = now_s - coming.asked_s
            joined = self._status.get(region, {}).get("here", {}).get(rank) == worker.attempt
            works = joined or worker.steps is not None
            if not coming.has_started and (works or worker.has_begun):
                coming.has_started = True
                self.loop.emit("worker_started", **about, took_s=took_s)
            if works:
                del self._replacements[place]
                self.loop.emit("worker_replaced", **about, took_s=took_s)

    def _is_too_late(self, worker: GroupWorker) -> bool:
        """Return whether the region finished before the worker began; it is then not awaited."""
        status = self._status.get(worker.region, {})
        phase = status.get("phase")
        if (worker.attempt == 1 and worker.is_out) or phase not in {"done", "halted"}:
            return False
        judged = phase == "halted" or bool(status.get("judged"))
        return judged and worker.rank not in status.get("here", ())

    def _lost(self, worker: GroupWorker, cause: str, error: GeoRayError | None) -> None:
        place = (worker.region, worker.rank)
        self._forget_sent(worker)
        decision = self.policy.worker_lost(
            place,
            cause,
            error,
            is_present=self.actors.workers.get(place) is worker,
            goes_on=self._continues_without(worker),
            now_s=time.monotonic(),
        )
        if decision == "ignore":
            return
        if error is not None and decision is error:
            raise error
        self.loop.emit("worker_lost", region=worker.region, worker=worker.rank, cause=cause)
        if isinstance(decision, GeoRayError):
            raise decision
        worker.ref = None
        self.actors.notify_lost(worker)
        if decision == "replace":
            self._replace(worker)

    def _continues_without(self, worker: GroupWorker) -> bool:
        """Return whether enough other workers of its region are present."""
        region = self.actors.spec.region(worker.region)
        elastic, ranks = self.actors.spec.experiment.elastic(region), region.workers
        if elastic is None:
            return False
        others = [
            other
            for other in self.actors.workers.values()
            if other.region == worker.region and other is not worker and other.is_out
        ]
        return len(others) >= elastic.least(ranks)

    def _leader(self, worker: GroupWorker, steps: int) -> None:
        place = (worker.region, worker.rank)
        was_sent = self._forget_sent(worker)
        if not was_sent or self.actors.workers.get(place) is not worker:
            worker.steps = steps
            return
        worker.ref = None
        if self.policy.worker_left(place, time.monotonic()) == "replace":
            self._replace(worker)

    def _forget_sent(self, worker: GroupWorker) -> bool:
        """Return whether this worker was asked to leave, and forget it; its place may be reused."""
        place = (worker.region, worker.rank)
        if self._sent_away.get(place) is not worker:
            return False
        del self._sent_away[place]
        return True

    def _replace(self, worker: GroupWorker) -> None:
        fresh = self.actors.replace_worker(worker)
        place = worker.region, worker.rank
        self._replacements[place] = _Replacement(fresh)
        self.loop.emit("worker_requested", region=place[0], worker=place[1], attempt=fresh.attempt)

    def _heed(self, now_s: float) -> None:
        """Let workers leave whose machine will be reclaimed; nothing is lost."""
        nodes = {
            place: node
            for place, worker in self.actors.workers.items()
            if self._sent_away.get(place) is not worker and (node := worker.node_id()) is not None
        }
        for place in self.notices.concern(nodes, now_s):
            region, rank = place
            if self.members.leaves_on_notice(region):  # they end at its last barrier
                continue
            self._sent_away[place] = self.actors.workers[place]
            cause = f"its node {nodes[place][:8]} is being drained"
            self.loop.emit("worker_left", region=region, worker=rank, cause=cause)
            self.actors.send_away(self.actors.workers[place])


_ASK_S: Final = 5.0
_HEARD_S: Final = 15.0  # validity of an answer
_TELL_AGAIN_S: Final = 60.0


@dataclass(slots=True)
class _Suspect:
    """A worker that is late.

    Attributes:
        worker: the worker.
        asked: the open call; None: none.
        asked_s: when it was called last.
        doing: its newest answer.
        answered_s: when that arrived.
    """

    worker: GroupWorker
    asked: Any = None
    asked_s: float = -_ASK_S
    doing: str | None = None
    answered_s: float = 0.0

    def ask(self, now_s: float) -> str | None:
        """Return its activity, if it has answered recently; does not wait."""
        if self.asked is not None and ray.wait([self.asked], timeout=0)[0]:
            asked, self.asked = self.asked, None
            try:
                self.doing, self.answered_s = str(ray.get(asked)), now_s
            except ray.exceptions.RayError:  # it is lost, which its `run` call reports
                self.doing = None
        if self.asked is None and now_s - self.asked_s >= _ASK_S:
            self.asked, self.asked_s = self.worker.handle.doing.remote(), now_s
        return self.doing if now_s - self.answered_s < _HEARD_S else None


@dataclass(slots=True)
class HangWatch:
    """Detects hung and stopped processes of a run, and reports them to the user.

    `Hangs` decides by the reports of servers on their workers. A late worker is asked for its
    activity; a stopped one does not answer.

    Attributes:
        actors: actors of the run.
        hangs: decides.
        loop: the run loop.
    """

    actors: ActorGroup
    hangs: Hangs
    loop: RunServices
    _suspects: dict[tuple[str, int], _Suspect] = field(default_factory=dict)
    _named: set[tuple[str, str]] = field(default_factory=set)  # region and process
    _reported_s: float = 0.0

    def look(
        self,
        statuses: Mapping[str, Mapping[str, Any]],
        unresponsive_s: Mapping[tuple[str, str], float],
    ) -> list[tuple[GroupWorker, str]]:
        """Check all processes.

        Args:
            statuses: current reports of parameter servers, by region.
            unresponsive_s: seconds for which servers and bridges have not answered, by (process,
                region).

        Returns:
            Workers to replace, with the cause.
        """
        now_s, hung = time.monotonic(), []
        late = {
            (region, process): f"the {process} of region '{region}' has not answered for {s:.0f} s"
            for (process, region), s in unresponsive_s.items()
            if s >= NAMED_S
        }
        seconds = {(region, process): s for (process, region), s in unresponsive_s.items()}
        for region, status in statuses.items():
            usual_s = status.get("usual_s")
            for rank, computing in status.get("computing", {}).items():
                place = region, rank
                worker = self.actors.workers.get(place)
                if worker is None or worker.attempt != computing.attempt or not worker.is_out:
                    continue
                is_late = self.hangs.judge(computing, usual_s, None) != "fine"
                if not is_late:
                    self._suspects.pop(place, None)
                    continue
                suspect = self._suspects.get(place)
                if suspect is None or suspect.worker is not worker:
                    suspect = self._suspects[place] = _Suspect(worker)
                doing = suspect.ask(now_s)
                cause = _cause(doing, computing.for_s, usual_s)
                if self.hangs.judge(computing, usual_s, doing) == "replaced":
                    del self._suspects[place]
                    hung.append((worker, cause))
                    continue
                late[region, f"worker {rank}"] = f"worker {region}/{rank}: {cause}"
                seconds[region, f"worker {rank}"] = computing.for_s
        # A region whose server is unresponsive reports nothing on its workers: named ones stay
        # named.
        gone = {key for key in self._named - late.keys() if key[0] not in statuses}
        self._name(late, seconds, gone, now_s)
        return hung

    def _name(
        self,
        late: Mapping[tuple[str, str], str],
        seconds: Mapping[tuple[str, str], float],
        unknown: set[tuple[str, str]],
        now_s: float,
    ) -> None:
        fresh = late.keys() - self._named
        for region, process in sorted(fresh):
            self.loop.emit(
                "process_unresponsive",
                region=region,
                process=process,
                unresponsive_s=seconds[region, process],
            )
        had_any, self._named = bool(self._named), {*late, *unknown}
        if late and (fresh or now_s - self._reported_s >= _TELL_AGAIN_S):
            self._reported_s = now_s
            self.loop.show("; ".join(late[key] for key in sorted(late)))
        elif had_any and not self._named:
            self.loop.show("")


def _cause(doing: str | None, for_s: float, usual_s: float | None) -> str:
    usual = "" if usual_s is None else f" (usually {usual_s:.2g} s)"
    what = "it does not answer" if doing is None else f"it is {doing}"
    return f"its step takes {for_s:.0f} s{usual}, and {what}"


log = logging.getLogger(__name__)

_START_S: Final = 180.0
_MOVE_S: Final = 30.0
_LOOK_S: Final = 0.1
AWAY_S: Final = 10.0
"""How long a region's server dials its bridge in vain before the bridge counts as dead."""


def is_replaceable(
    experiment: Experiment, region: str, leader: AveragerLeader, standby: str | None
) -> bool:
    """Return whether a bridge of ``region`` holds no state that its successor would lack.

    False with an overlay, upload scheduling or `dgt`: bridges then hold sums, turns and block
    accounting. False if it hosts the averager, unless a standby has received every relevant update.
    If the standby's bridge is lost, its replica of the averager is lost with it; the averager then
    chooses another standby, or the same region again.

    Args:
        experiment: the run.
        region: the bridge's region.
        leader: the averager's region, now or in that bridge.
        standby: region that may take over.
    """
    keeps = why_fixed(
        experiment.overlay.kind, experiment.codec, has_transfers=experiment.transfers is not None
    )
    if keeps is not None:
        return False
    if region == leader.region:
        return standby is not None and not experiment.averager.max_divergence
    return True


_Fresh = tuple[Handle, tuple[Address, Address]]
"""A bridge that is up, and its addresses for other regions and for its own."""


@dataclass(frozen=True, slots=True)
class _Replacing:
    """A starting bridge, for a region's server, which follows the averager in ``host``."""

    cause: str
    primary: Handle
    host: str
    fresh: Future[_Fresh]
    since_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class BridgeWatch:
    """Replaces a failed bridge of a region while the region's server and workers continue.

    Idea: a bridge holds no training state that its region's server, or the averager's standby, does
    not have. So its successor takes over its place and identity, with a later attempt, and the
    server repeats its open request. The averager recognizes it by its number and repeats its
    answer. Nothing is lost, and other regions only see a late update.

    Rule: if the averager was in that bridge, its standby takes over first, and the region continues
    as an ordinary one. A bridge that holds more (`is_replaceable`) is not replaced; the region is
    then lost.

    Source: ours.

    Attributes:
        actors: actors of the run.
        restarts: allowance of replacements.
        origin_unix_s: wall-clock time at which the run's clock was 0.
        loop: the run loop.
    """

    actors: ActorGroup
    restarts: Restarts
    origin_unix_s: float
    loop: RunServices
    _open: dict[str, _Replacing] = field(default_factory=dict)
    _linked_s: dict[str, float] = field(default_factory=dict)  # since when others are there
    _refused: set[str] = field(default_factory=set)  # unreachable, and not replaced

    def replaced(
        self,
        unresponsive: Mapping[tuple[str, str], str],
        answers: Mapping[tuple[str, str], Mapping[str, Any]],
    ) -> Iterator[str]:
        """Begin to replace bridges that were lost alone, if possible.

        A running bridge that its region's server cannot reach is ended first. One that cannot be
        replaced is waited for: the server keeps dialing it.

        Args:
            unresponsive: why servers and bridges are lost, by (role, region).
            answers: answers of the others.

        Yields:
            Their regions, which continue.
        """
        lost = {region for _, region in unresponsive}
        for (role, region), answer in answers.items():
            if role == "ps" and region not in lost:
                self._judge(region, answer["status"].get("bridge_away_s"))
        for (role, region), cause in unresponsive.items():
            others = any(name == region and other != "bridge" for other, name in unresponsive)
            if role == "bridge" and not others and self._replace(region, cause):
                yield region

    def _judge(self, region: str, away_s: float | None) -> None:
        if away_s is None:
            self._refused.discard(region)
            return
        # An answer may be older than the current bridge.
        is_old = time.monotonic() - away_s < self._linked_s.get(region, 0.0)
        if away_s < AWAY_S or is_old or region not in self.actors.bridges:
            return
        if region not in self._refused and not self._replace(
            region, f"its region's server has not reached it for {away_s:.0f} s"
        ):
            self._refused.add(region)
            log.warning("region '%s' cannot reach its bridge, which is not replaced", region)

    def tick(self) -> None:
        """Let regions continue whose next bridge is up."""
        for region, found in list(self._open.items()):
            if not found.fresh.done():
                continue
            del self._open[region]
            if self.actors.primaries.get(region) is not found.primary:  # lost meanwhile
                found.fresh.add_done_callback(_end)
                continue
            if found.host != self.actors.leader.region:  # the averager has moved meanwhile
                found.fresh.add_done_callback(_end)
                if not self._replace(region, found.cause):
                    self._lose(region, found.cause)
                continue
            try:
                bridge, addresses = found.fresh.result()
            except GeoRayError as error:
                self._lose(region, error.message)
                continue
            self.actors.bridges[region] = bridge
            self.actors.bridge_addresses[region] = addresses
            self._linked_s[region] = time.monotonic()
            took_s = time.monotonic() - found.since_s
            self.loop.show("")  # the event reports the rest
            self.loop.emit("bridge_replaced", region=region, cause=found.cause, took_s=took_s)

    def close(self) -> None:
        """End replacements in progress: the run is over."""
        for found in self._open.values():
            found.fresh.add_done_callback(_end)

    def _lose(self, region: str, cause: str) -> None:
        self.loop.lose_region(region, f"the bridge of region '{region}' is lost: {cause}")

    def _replace(self, region: str, cause: str) -> bool:
        actors = self.actors
        if not is_replaceable(actors.spec.experiment, region, actors.leader, actors.standby):
            return False
        if not self.restarts.take(time.monotonic()):
            log.warning("the bridge of region '%s' is not replaced: %s", region, self.restarts)
            return False
        kill(actors.bridges.pop(region, None))
        log.warning("the bridge of region '%s' is lost: %s", region, cause)
        self.loop.show(f"the bridge of region '{region}' is lost: starting another one")
        self.loop.emit("bridge_requested", region=region, cause=cause)
        if region == actors.leader.region:
            actors.expect_failover()
            actors.bridges[actors.leader.region].report_dead.remote(region, True)
        elif region == actors.standby:
            actors.standby = None
            actors.bridges[actors.leader.region].report_dead.remote(region, True)
        primary, host = actors.primaries[region], actors.leader.region
        bring_up = partial(self._bring_up, region, primary, host, actors.next_attempt())
        fresh = actors.threads.submit(f"bridge-{region}", bring_up)
        self._open[region] = _Replacing(cause, primary, host, fresh)
        return True

    def _bring_up(self, region: str, primary: Handle, host: str, attempt: int) -> _Fresh:
        actors = self.actors
        bridge = actors.create_bridge(region, attempt)
        try:
            actors.admit({region: bridge}, _START_S)
            _await(bridge.ready.remote())
            keys = actors.keys.for_bridge(region, _await(bridge.introduce.remote()))
            leader = self._leader_in(host)
            addresses = _await(bridge.open.remote(self.origin_unix_s, keys, leader))
            self._link(region, bridge, addresses[0], host)
            _await(primary.use_bridge.remote(addresses[1]))
        except BaseException:
            kill(bridge)
            raise
        return bridge, addresses

    def _link(self, region: str, bridge: Handle, address: Address, host: str) -> None:
        """Connect a bridge with the peers of its predecessor, and with the averager's bridge.

        Only the latter is waited for: other peers may be lost, too.
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
        """Return the bridge of the averager's region.

        Raises:
            RegionLostError: it is gone.
        """
        bridge = self.actors.bridges.get(name)
        if bridge is None:
            raise RegionLostError(f"the bridge of region '{name}' is lost")
        return bridge

    def _leader_in(self, host: str) -> AveragerLeader:
        """Return the averager's leader once its bridge has become it."""
        until_s = time.monotonic() + _MOVE_S
        while True:
            leader: AveragerLeader = _await(self._host(host).leader.remote())
            if leader.region == host:
                return leader
            check_not_closing()
            if time.monotonic() > until_s:
                raise RegionLostError(f"the averager has not moved to region '{host}'")
            time.sleep(_LOOK_S)


def _await(call: Any) -> Any:
    return collect({0: call}, _START_S)[0]


def _end(fresh: Future[_Fresh]) -> None:
    if not fresh.cancelled() and fresh.exception() is None:
        kill(fresh.result()[0])
