"""All actors of a run: starts them on their reserved places, wires them, and ends them.

This includes termination notices: Ray drains a node that the cloud will reclaim but does not notify
actors, so Ray is polled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import ray

from geo_ray.experiment.regions import RegionConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.calls import (
    Handle,
    ProgressCallback,
    RayThreads,
    collect,
    kill,
    no_progress,
)
from geo_ray.ray_cluster.connect import head_answers
from geo_ray.ray_cluster.demand import Role
from geo_ray.ray_cluster.keys import BridgeKeys, Introduction
from geo_ray.ray_cluster.placement import PlacedRegion, server_nodes
from geo_ray.runs.start_checks import check_metric_names
from geo_ray.runtime.checkpoint_upload import CheckpointUploadServer
from geo_ray.runtime.exchange import build
from geo_ray.runtime.launcher import (
    GoneRegions,
    Handoff,
    HandoffRecord,
    OwnProcesses,
    ProcessKind,
    ProcessLauncher,
    ProcessSpec,
    RunEndpoints,
)
from geo_ray.runtime.regions import MemberPolicy
from geo_ray.runtime.spec import RunSpec
from geo_ray.training.membership import AveragerLeader
from geo_ray.transport.security.process_keys import SignedCertificate
from geo_ray.transport.wire.sockets import Address

Key = TypeVar("Key")
log = logging.getLogger(__name__)

EVERY_S = 2.0
_GONE_S: Final = 1.0  # for threads that wait for a head that does not answer


@dataclass(frozen=True, slots=True)
class _DrainReport:
    """Draining nodes, and when servers of regions will be gone with them."""

    nodes: Collection[str] = ()
    regions: Mapping[str, float] = field(default_factory=dict)


class DrainedNodes(Protocol):
    """Reports which nodes of a cluster are draining, and which regions use them."""

    def draining(self) -> Mapping[str, int]:
        """Return when nodes will be gone, in unix ms (0: unknown), by their ids."""
        ...

    def of_servers(self) -> Mapping[str, Collection[str]]:
        """Return the ids of the nodes of each region's servers and bridge."""
        ...


@dataclass(slots=True)
class DrainNotices:
    """Termination notices of machines, as far as Ray knows.

    A cloud gives notice before it reclaims a spot instance; the machine's agent then tells Ray to
    drain the node. Ray schedules nothing there, and does not notify actors, so it is polled.

    Attributes:
        nodes: reports draining nodes, and the nodes of regions.
        threads: starts the polling thread.
    """

    nodes: DrainedNodes
    threads: RayThreads = field(default_factory=RayThreads)
    _report: _DrainReport = _DrainReport()
    _asked_s: float | None = None
    _asking: Future[None] | None = None

    def concern(self, nodes: Mapping[Key, str], now_s: float) -> list[Key]:
        """Return those of ``nodes`` that are draining, as last reported by Ray.

        Ray is polled every few seconds without waiting: its control service may be gone.

        Args:
            nodes: node ids, by the key of the process there.
            now_s: the current time.
        """
        due = self._asked_s is None or now_s - self._asked_s >= EVERY_S
        if due and (self._asking is None or self._asking.done()):
            self._asked_s = now_s
            self._asking = self.threads.submit("drain-notices", self._ask)
        return [key for key, node in nodes.items() if node in self._report.nodes]

    @property
    def regions(self) -> Mapping[str, float]:
        """When servers or bridges of regions will be gone, in unix s, as last reported by Ray."""
        return self._report.regions

    def _ask(self) -> None:
        try:
            until_ms = self.nodes.draining()
            where = self.nodes.of_servers() if until_ms else {}
        except Exception as error:  # errors of any class: notices are optional
            log.warning("no notice of drains: %s", error)
            return
        until_s = {node: at_ms / 1e3 if at_ms else math.inf for node, at_ms in until_ms.items()}
        regions = {
            region: min(until_s[node] for node in nodes if node in until_s)
            for region, nodes in where.items()
            if any(node in until_s for node in nodes)
        }
        self._report = _DrainReport(frozenset(until_ms), regions)


Ref = Any


@dataclass(slots=True)
class GroupWorker:
    """A worker of the run and its state.

    Attributes:
        region: its region.
        rank: its number there.
        attempt: its attempt, from 1.
        handle: the actor.
        ref: the result of its `run` call; None before the call, and after a death until it is
            replaced.
        steps: number of steps it computed, once it has ended.
        node: its node, or the call that returns it.
    """

    region: str
    rank: int
    attempt: int
    handle: Handle
    ref: Ref = None
    steps: int | None = None
    node: str | Ref | None = None

    @property
    def is_out(self) -> bool:
        """Whether the actor works, or will as soon as it is placed."""
        return self.steps is None and self.ref is not None

    @property
    def has_begun(self) -> bool:
        """Whether it is known to be placed and working."""
        return self.node_id() is not None

    def node_id(self) -> str | None:
        """The node that it runs on; None if not known yet, or if it does not work."""
        if not self.is_out or self.node is None:
            return None
        if isinstance(self.node, str):
            return self.node
        if not ray.wait([self.node], timeout=0)[0]:
            return None
        try:
            self.node = str(ray.get(self.node))
        except ray.exceptions.RayError:  # it is lost, which its `run` call reports
            self.node = None
        return self.node


class Keys(Protocol):
    """Interface of `RunKeys`, which may be in another process."""

    def for_bridge(self, region: str, introduction: Introduction) -> BridgeKeys:
        """Return the keys for the bridge of a region."""
        ...

    def for_server(self, region: str, introduction: Introduction) -> bytes:
        """The region's key, sealed for one of its processes."""
        ...

    def sign(self, region: str, request_pem: bytes) -> SignedCertificate | None:
        """Answer a region's request for a certificate."""
        ...


@dataclass(slots=True)
class ActorGroup:
    """The actors of a run by region.

    Attributes:
        spec: the run's specification.
        placed: their reserved places.
        bridges: by region; empty if there is one region only.
        primaries: by region.
        shard_servers: by region, in order.
        workers: by region and rank.
        shard_addresses: where workers connect, by region, the primary shard's first.
        bridge_addresses: addresses of each bridge, for other regions and for its own.
        leader: the averager's leader, as last known.
        standby: region that reports that it may take over; None: there is none.
        former_leaders: earlier regions of the averager.
        keys: keys of the run.
        launcher: creates and owns its processes.
        token: fencing token of the run actor's lease.
        upload_server: receives parts of checkpoints.
        threads: start every thread of this process that calls the actors.
    """

    spec: RunSpec
    placed: dict[str, PlacedRegion]
    keys: Keys = field(repr=False)
    launcher: ProcessLauncher = field(default_factory=OwnProcesses, repr=False)
    token: int = 0
    upload_server: CheckpointUploadServer | None = None
    threads: RayThreads = field(default_factory=RayThreads, repr=False)
    bridges: dict[str, Handle] = field(default_factory=dict)
    primaries: dict[str, Handle] = field(default_factory=dict)
    shard_servers: dict[str, list[Handle]] = field(default_factory=dict)
    workers: dict[tuple[str, int], GroupWorker] = field(default_factory=dict)
    shard_addresses: dict[str, list[Address]] = field(default_factory=dict)
    bridge_addresses: dict[str, tuple[Address, Address]] = field(default_factory=dict)
    leader: AveragerLeader = field(init=False)
    standby: str | None = field(init=False)
    former_leaders: set[str] = field(default_factory=set)
    _known: dict[tuple[str, str], Introduction] = field(default_factory=dict)
    _newest_attempt: int = field(init=False)
    _idle: dict[str, list[GroupWorker]] = field(default_factory=dict)
    _attempts: dict[tuple[str, int], int] = field(default_factory=dict)  # of earlier workers
    _noted: HandoffRecord | None = None

    def __post_init__(self) -> None:
        self._newest_attempt = self.spec.attempt
        self.leader = AveragerLeader(self.spec.experiment.averager_region)
        self.standby = self.spec.experiment.first_standby

    def servers(self) -> dict[tuple[str, str], Handle]:
        """Every actor that is not replaced after its death, by (role, region)."""
        found: dict[tuple[str, str], Handle] = {("ps", r): h for r, h in self.primaries.items()}
        for region, shard_servers in self.shard_servers.items():
            found |= {(f"ps {i}", region): handle for i, handle in enumerate(shard_servers, 1)}
        return found | {("bridge", r): h for r, h in self.bridges.items()}

    def create(self, regions: Sequence[RegionConfig]) -> None:
        """Start all actors of some regions at once, without waiting."""
        experiment = self.spec.experiment
        for region in regions:
            if len(experiment.regions) > 1:
                self.bridges[region.name] = self.create_bridge(region.name)
            arguments = self.spec, region.name
            indices = range(1, region.ps_shards)
            specs = [self._server("primary", "ps", 0, region, arguments)]
            specs += [self._server("shard", "ps", i, region, (*arguments, i)) for i in indices]
            self.primaries[region.name], *self.shard_servers[region.name] = self.launcher.make(
                specs
            )
            for rank in range(region.workers):
                if (region.name, rank) not in self.workers:
                    self._create_worker(region.name, rank, attempt=1)

    def create_bridge(self, region: str, attempt: int | None = None) -> Handle:
        """Start the bridge of a region without waiting.

        Args:
            region: the region.
            attempt: attempt of a bridge that replaces a dead one; None for the first one.
        """
        spec = self.spec
        if attempt is not None:
            spec = replace(spec, resume=None, attempt=attempt)
        arguments = spec, region, attempt is not None
        process = self._server("bridge", "bridge", 0, spec.region(region), arguments, spec.attempt)
        return self.launcher.make([process])[0]

    def next_attempt(self) -> int:
        """Return an attempt for processes that start now, later than all before in this run."""
        self._newest_attempt += 1
        return self._newest_attempt

    def await_ready(self, timeout_s: float, progress: ProgressCallback = no_progress) -> None:
        """Wait until every actor has loaded.

        Args:
            timeout_s: longest wait.
            progress: receives the names of those awaited.

        Raises:
            RegionLostError: an actor died or took too long.
            ConfigError: the run uses a metric that no region has.
            GeoRayError: an actor reported an error (task, data, checkpoint).
        """
        workers = {f"{r}/{rank}": worker.handle for (r, rank), worker in self.workers.items()}
        calls = {name: actor.ready.remote() for name, actor in workers.items()}
        servers = {f"{r}/{role}": handle for (role, r), handle in self.servers().items()}
        self.admit(servers, timeout_s, progress)
        calls |= {name: actor.ready.remote() for name, actor in servers.items()}
        tried = collect(calls, timeout_s, partial(progress, "starting processes")).values()
        found = [names for names in tried if names is not None]  # only from actors that tried a row
        if found:
            check_metric_names(self.spec.experiment, set().union(*found))

    def admit(
        self,
        servers: Mapping[str, Handle],
        timeout_s: float,
        progress: ProgressCallback = no_progress,
    ) -> None:
        """Let servers and bridges without a shared run directory upload parts to the run actor."""
        if self.upload_server is not None:
            phase_progress = partial(progress, "starting servers and bridges")
            self.upload_server.admit(
                servers, partial(collect, timeout_s=timeout_s, progress=phase_progress)
            )

    def wire(
        self, origin_unix_s: float, timeout_s: float, progress: ProgressCallback = no_progress
    ) -> None:
        """Connect bridges with each other and each region's parts; then let workers begin.

        Args:
            origin_unix_s: wall-clock time at which the run's clock is 0.
            timeout_s: longest wait for each round of calls.
            progress: receives the names of those awaited.

        Raises:
            RegionLostError: an actor died while starting.
            GeoRayError: an actor reported an error (task, data, checkpoint, ports).
        """
        self.open(origin_unix_s, timeout_s, progress)
        connects = {
            f"{a} to {b}": self.bridges[a].connect.remote(b, self.bridge_addresses[b][0])
            for a, b in self.dials()
        }
        # A resumed averager may have an answer for a region whose bridge is not connected yet.
        connects |= {f"{b} to {a}": self.bridges[b].expect.remote(a) for a, b in self.dials()}
        collect(connects, timeout_s, partial(progress, "connecting regions"))
        self.start(origin_unix_s, timeout_s, progress)

    def open(
        self, origin_unix_s: float, timeout_s: float, progress: ProgressCallback = no_progress
    ) -> None:
        """Let bridges and secondary shards listen; see `wire`."""
        servers = self.servers()
        self._known = collect({k: h.introduce.remote() for k, h in servers.items()}, timeout_s)
        given = {r: self.keys.for_bridge(r, self._known["bridge", r]) for r in self.bridges}
        self.bridge_addresses = collect(
            {r: b.open.remote(origin_unix_s, given[r]) for r, b in self.bridges.items()},
            timeout_s,
            partial(progress, "opening bridges"),
        )
        slices = collect(
            {
                (r, i): held.open.remote(self.keys.for_server(r, self._known[f"ps {i}", r]))
                for r, each in self.shard_servers.items()
                for i, held in enumerate(each, 1)
            },
            timeout_s,
        )
        for region, each in self.shard_servers.items():
            self.shard_addresses[region] = [slices[region, i] for i, _ in enumerate(each, 1)]

    def start(
        self, origin_unix_s: float, timeout_s: float, progress: ProgressCallback = no_progress
    ) -> None:
        """Let primary shards connect to the rest of their regions, and workers begin."""
        starts = {}
        for region, primary in self.primaries.items():
            lan = self.bridge_addresses[region][1] if self.bridges else None
            lan_key = self.keys.for_server(region, self._known["ps", region])
            others = self.shard_addresses[region]
            starts[region] = primary.start.remote(origin_unix_s, lan, others, lan_key)
        for region, address in collect(
            starts, timeout_s, partial(progress, "starting parameter servers")
        ).items():
            self.shard_addresses[region].insert(0, address)
        for worker in self.workers.values():
            self._begin(worker)

    def replace_worker(self, worker: GroupWorker) -> GroupWorker:
        """Start a new attempt of a lost worker in its place."""
        kill(worker.handle)
        newest = max(worker.attempt, self._attempts.get((worker.region, worker.rank), 0))
        fresh = self._create_worker(worker.region, worker.rank, newest + 1)
        self._begin(fresh)
        return fresh

    def notify_lost(self, worker: GroupWorker) -> None:
        """Notify a lost worker's server, whose connection may be slow to detect it."""
        if self.spec.experiment.elastic(self.spec.region(worker.region)) is not None:
            self.primaries[worker.region].lose_worker.remote(worker.rank, worker.attempt)

    def send_away(self, worker: GroupWorker) -> None:
        """Ask a worker to end after its current step."""
        self.primaries[worker.region].drain_worker.remote(worker.rank)

    def drain_workers(self) -> None:
        """End all workers, which are done, and free the memory shared with their shards."""
        for worker in self.workers.values():
            kill(worker.handle)

    def renew_certificate(self, region: str, request_pem: bytes) -> None:
        """Answer a bridge whose certificate expires soon, without waiting.

        Raises:
            CertificateError: the request is invalid.
        """
        signed, bridge = self.keys.sign(region, request_pem), self.bridges.get(region)
        if signed is not None and bridge is not None:
            bridge.use_certificate.remote(signed)

    def follow(self, leader: AveragerLeader) -> bool:
        """Record that the averager reports ``leader``; return whether that is new."""
        is_news = leader.term > self.leader.term and leader.region in self.bridges
        if is_news:
            self._move(leader)
        return is_news

    def note_standby(self, region: str, leader: AveragerLeader, *, is_standby: bool) -> None:
        """Record a region's report on whether it may take over from ``leader``."""
        is_news = is_standby or region == self.standby
        if is_news and leader == self.leader and region in self.bridges:
            self.standby = region if is_standby else None

    def can_lose(self, region: str) -> bool:
        """Return whether a run can continue without ``region``; the averager's needs a standby."""
        if region == self.leader.region:
            return self.standby in self.bridges
        experiment = self.spec.experiment
        may_change = experiment.members.min is not None or MemberPolicy(experiment).brings_back
        return may_change or region in self.former_leaders

    def lose(self, region: str, *, keep_workers: bool = False) -> None:
        """Continue without a region; end its processes, except workers to be reused."""
        ranks = [key for key in self.workers if key[0] == region]
        workers = [self.workers.pop(key) for key in ranks]
        self.end_idle(region)
        if keep_workers:
            self._idle[region] = workers
        gone = [] if keep_workers else [worker.handle for worker in workers]
        gone += [
            self.primaries.pop(region),
            self.bridges.pop(region, None),  # absent while it is being replaced
            *self.shard_servers.pop(region, []),
        ]
        for handle in gone:
            kill(handle)
        if region == self.standby:
            self.standby = None
        elif region == self.leader.region:
            self.expect_failover()

    def expect_failover(self) -> None:
        """Record that the averager's bridge is lost: its standby, if any, takes over."""
        if self.standby is not None:
            self._move(
                AveragerLeader(self.standby, self.leader.term)
            )  # it reports its own term soon

    def _move(self, leader: AveragerLeader) -> None:
        if leader.region != self.leader.region:
            self.former_leaders |= {self.leader.region}
        self.former_leaders -= {leader.region}
        self.leader, self.standby = leader, None

    def release(self, region: str) -> None:
        """Release a region's places so that it can get others; processes there end."""
        placed = self.placed.pop(region, None)
        if placed is not None:
            self.launcher.remove({region: placed})

    def take_idle(self, region: str, wait_s: float) -> list[GroupWorker]:
        """Return workers of a lost region whose processes run and are idle."""
        found = []
        for worker in self._idle.pop(region, []):
            try:
                if worker.ref is not None and not ray.wait([worker.ref], timeout=wait_s)[0]:
                    raise ray.exceptions.GetTimeoutError
                ray.get(worker.handle.process_id.remote(), timeout=wait_s)
                found.append(GroupWorker(region, worker.rank, worker.attempt, worker.handle))
            except ray.exceptions.RayError:  # it is dead, or busy with obsolete work
                kill(worker.handle)
        return found

    def end_idle(self, region: str) -> None:
        """End the workers of a lost region that were to be reused."""
        for worker in self._idle.pop(region, []):
            kill(worker.handle)

    def adopt(self, joining: ActorGroup) -> None:
        """Take over the actors of regions that have joined."""
        self.placed |= joining.placed
        self.bridges |= joining.bridges
        self.primaries |= joining.primaries
        self.shard_servers |= joining.shard_servers
        self.workers |= joining.workers
        self.shard_addresses |= joining.shard_addresses
        self.bridge_addresses |= joining.bridge_addresses

    def note(self, origin_unix_s: float, gone: GoneRegions, *, is_changing: bool) -> None:
        """Store the handoff record with the owner of the processes, if it changed.

        Args:
            origin_unix_s: wall-clock time at which the run's clock was 0.
            gone: regions that do not take part.
            is_changing: whether a region is joining or leaving.
        """
        shards = {region: tuple(each) for region, each in self.shard_addresses.items()}
        leaders = self.leader, self.standby, tuple(sorted(self.former_leaders))
        record = HandoffRecord(
            self.spec,
            origin_unix_s,
            self.servers(),
            {place: (worker.attempt, worker.handle) for place, worker in self.workers.items()},
            dict(self.placed),
            RunEndpoints(*leaders, shards, dict(self.bridge_addresses)),
            gone,
            is_changing,
            self.upload_server is not None and self.upload_server.is_open,
        )
        if record != self._noted:
            self._noted = record
            self.launcher.note(record)

    def restore(self, handoff: Handoff, record: HandoffRecord) -> None:
        """Restore the group of another run actor, which continues.

        Args:
            handoff: what the supervisor has stored.
            record: its record of the group.
        """
        for (role, region), handle in record.servers.items():
            if role == "bridge":
                self.bridges[region] = handle
            elif role == "ps":
                self.primaries[region] = handle
        for region in self.primaries:
            shards = range(1, self.spec.region(region).ps_shards)
            self.shard_servers[region] = [record.servers[f"ps {i}", region] for i in shards]
        for (region, rank), (attempt, handle) in record.workers.items():
            outcome = handle.outcome.remote(self.token)
            node = handle.node_id.remote()
            worker = GroupWorker(region, rank, attempt, handle, outcome, node=node)
            self.workers[region, rank] = worker
        self.shard_addresses = {name: list(each) for name, each in record.where.shards.items()}
        self.bridge_addresses = dict(record.where.bridges)
        self.leader, self.standby = record.where.leader, record.where.standby
        self.former_leaders = set(record.where.former_leaders)
        self._attempts, self._newest_attempt = dict(handoff.attempts), handoff.newest_attempt

    def end_calls(self) -> None:
        """End the threads that call Ray, except those that wait for a head that is gone."""
        if head_answers():
            self.threads.close()
        else:  # limit the wait, or Ray ends this process
            self.threads.close(_GONE_S)

    def close(self, timeout_s: float = 5.0) -> None:
        """Let actors close their sockets, then end them if this run owns them; never raises."""
        self.end_calls()
        if not self.launcher.is_ours():
            return
        servers = list(self.servers().values())
        for region in list(self._idle):
            self.end_idle(region)
        try:
            ray.wait(
                [s.close.remote() for s in servers], num_returns=len(servers), timeout=timeout_s
            )
        except Exception:  # the other actors must be cleaned up in any case
            return
        if head_answers():  # otherwise the calls would block
            for handle in [*servers, *(w.handle for w in self.workers.values())]:
                kill(handle)

    def dials(self) -> list[tuple[str, str]]:
        """Return which bridge dials which: all dial the averager's, and each other if needed."""
        experiment = self.spec.experiment
        leader, names = experiment.averager_region, sorted(self.primaries)
        if experiment.averager.standby is not None:  # the averager may move to any region
            return [(a, b) for a in names for b in names if b < a]
        dials = [(region, leader) for region in names if region != leader]
        return dials + build.dials(experiment)

    def _server(
        self,
        kind: ProcessKind,
        role: Role,
        index: int,
        region: RegionConfig,
        arguments: tuple[object, ...],
        attempt: int = 0,
    ) -> ProcessSpec:
        strategy = self.placed[region.name].strategy(role, index)
        cpus = region.cpus_per_server
        return ProcessSpec(kind, arguments, cpus, 0.0, strategy, None, attempt or self.spec.attempt)

    def _create_worker(self, region: str, rank: int, attempt: int) -> GroupWorker:
        config = self.spec.region(region)
        process = ProcessSpec(
            "worker",
            (self.spec, region, rank, attempt),
            config.cpus_per_worker,
            config.gpus_per_worker,
            self.placed[region].strategy("worker", rank),
            (region, rank),
            attempt,
        )
        handle = self.launcher.make([process])[0]
        worker = GroupWorker(region, rank, attempt, handle)
        self.workers[region, rank] = worker
        return worker

    def _begin(self, worker: GroupWorker) -> None:
        # The primary shard seals the key for it, so nothing is waited for here.
        key = self.primaries[worker.region].seal_key.remote(worker.handle.introduce.remote())
        worker.ref = worker.handle.run.remote(self.shard_addresses[worker.region], key)
        worker.node = worker.handle.node_id.remote()


@dataclass(frozen=True, slots=True)
class _RunNodes:
    """The `DrainedNodes` of a run."""

    actors: ActorGroup

    def draining(self) -> Mapping[str, int]:
        return ray_internals.draining_nodes()

    def of_servers(self) -> Mapping[str, Collection[str]]:
        placed = dict(self.actors.placed)  # other threads change it
        return {region: server_nodes(placed[region]) for region in placed}


def notices_of(actors: ActorGroup) -> DrainNotices:
    """Return the termination notices of the machines of a run's actors."""
    return DrainNotices(_RunNodes(actors), actors.threads)
