"""All actors of a run: starts them on their reserved places, wires them, takes them down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray

from geo_ray.clock import Clock, SystemClock
from geo_ray.config.region import RegionConfig
from geo_ray.errors import GeoRayError, RegionLostError
from geo_ray.job.start.evaluation import check_metric_names
from geo_ray.runtime.actors.bridge_actor import BridgeActor
from geo_ray.runtime.actors.introduction import Introduction
from geo_ray.runtime.actors.server_actors import PrimaryActor, ShardServerActor
from geo_ray.runtime.actors.spec import RunSpec
from geo_ray.runtime.actors.worker_actor import WorkerActor
from geo_ray.runtime.cluster.head_watch import head_answers
from geo_ray.runtime.cluster.placement import PlacedRegion
from geo_ray.runtime.control.group_worker import GroupWorker
from geo_ray.runtime.control.membership.member_policy import MemberPolicy
from geo_ray.runtime.control.run_keys import RunKeys
from geo_ray.runtime.desk.part_desk import PartDesk
from geo_ray.runtime.paths import build
from geo_ray.training.averager.home import AveragerHome
from geo_ray.transport.wire.sockets import Address

Handle = Any  # a Ray actor handle; Ray gives it no useful type
Ref = Any
Tell = Callable[[str, int, int, Sequence[str]], None]
"""``tell(phase, done, total, names of those that are awaited)``, again and again in a wait."""
Heard = Callable[[int, int, Sequence[str]], None]
"""A `Tell` of one phase."""
Wait = Callable[[Sequence[Ref], float], Iterable[Ref]]
"""``wait(calls, seconds)``: those that are done after so many seconds, or as soon as all are."""
_TELL_EVERY_S = 0.5


def tell_nobody(phase: str, done: int, total: int, names: Sequence[str]) -> None:
    """A `Tell` that shows nothing."""


@dataclass(slots=True)
class ActorGroup:
    """The actors of a run by region.

    Attributes:
        spec: what they were given.
        placed: their reserved places.
        bridges: by region; empty if there is one region only.
        primaries: by region.
        shard_servers: by region, in order.
        workers: by region and rank.
        shard_addresses: where workers connect, by region, the primary shard's first.
        bridge_addresses: where other regions, and the own one, reach each bridge.
        home: where the averager lives at present, as far as is known.
        standby: who says that it may take over from there; None if nobody does.
        former_homes: where the averager lived before it moved, and moved again.
        keys: of the run.
        desk: takes parts of checkpoints in.
    """

    spec: RunSpec
    placed: dict[str, PlacedRegion]
    keys: RunKeys = field(repr=False)
    desk: PartDesk | None = None
    bridges: dict[str, Handle] = field(default_factory=dict)
    primaries: dict[str, Handle] = field(default_factory=dict)
    shard_servers: dict[str, list[Handle]] = field(default_factory=dict)
    workers: dict[tuple[str, int], GroupWorker] = field(default_factory=dict)
    shard_addresses: dict[str, list[Address]] = field(default_factory=dict)
    bridge_addresses: dict[str, tuple[Address, Address]] = field(default_factory=dict)
    home: AveragerHome = field(init=False)
    standby: str | None = field(init=False)
    former_homes: set[str] = field(default_factory=set)
    _known: dict[tuple[str, str], Introduction] = field(default_factory=dict)
    _newest_epoch: int = field(init=False)
    _idle: dict[str, list[GroupWorker]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._newest_epoch = self.spec.epoch
        self.home = AveragerHome(self.spec.experiment.averager_region)
        self.standby = self.spec.experiment.first_standby

    def servers(self) -> dict[tuple[str, str], Handle]:
        """Every actor that is not replaced when it dies, by (role, region)."""
        found: dict[tuple[str, str], Handle] = {("ps", r): h for r, h in self.primaries.items()}
        for region, shard_servers in self.shard_servers.items():
            found |= {(f"ps {i}", region): handle for i, handle in enumerate(shard_servers, 1)}
        return found | {("bridge", r): h for r, h in self.bridges.items()}

    def create(self, regions: Sequence[RegionConfig]) -> None:
        """Begin to start all actors of some regions at once; nothing is waited for."""
        experiment = self.spec.experiment
        for region in regions:
            place = self.placed[region.name]
            cpus = region.cpus_per_server
            if len(experiment.regions) > 1:
                self.bridges[region.name] = self.create_bridge(region.name)
            self.primaries[region.name] = _actor(
                PrimaryActor, place, "ps", 0, cpus, 4, self.spec, region.name
            )
            self.shard_servers[region.name] = [
                _actor(ShardServerActor, place, "ps", i, cpus, 2, self.spec, region.name, i)
                for i in range(1, region.ps_shards)
            ]
            for rank in range(region.workers):
                if (region.name, rank) not in self.workers:
                    self._create_worker(region.name, rank, epoch=1)

    def create_bridge(self, region: str, epoch: int | None = None) -> Handle:
        """Begin to start the bridge of a region.

        Args:
            region: which.
            epoch: of one that is to take the place of a bridge that died; None for the first one.
        """
        cpus, spec = self.spec.region(region).cpus_per_server, self.spec
        if epoch is not None:
            spec = replace(spec, resume=None, epoch=epoch)
        make = partial(_actor, BridgeActor, self.placed[region], "bridge", 0, cpus, 12)
        return make(spec, region, epoch is not None)

    def next_epoch(self) -> int:
        """Of processes that are started now: later than all before in this run."""
        self._newest_epoch += 1
        return self._newest_epoch

    def await_ready(self, timeout_s: float, tell: Tell = tell_nobody) -> None:
        """Wait until every actor is built.

        Args:
            timeout_s: longest wait.
            tell: hears who is awaited.

        Raises:
            RegionLostError: if one died or took too long.
            ConfigError: the run goes by a metric that no region has.
            GeoRayError: what an actor found wrong (task, data, checkpoint).
        """
        workers = {f"{r}/{rank}": worker.handle for (r, rank), worker in self.workers.items()}
        calls = {name: actor.ready.remote() for name, actor in workers.items()}
        servers = {f"{r}/{role}": handle for (role, r), handle in self.servers().items()}
        self.admit(servers, timeout_s)
        calls |= {name: actor.ready.remote() for name, actor in servers.items()}
        told = collect(calls, timeout_s, partial(tell, "starting processes")).values()
        found = [names for names in told if names is not None]  # by who tried an evaluation
        if found:
            check_metric_names(self.spec.experiment, set().union(*found))

    def admit(self, servers: Mapping[str, Handle], timeout_s: float) -> None:
        """Let servers and bridges that do not see the run's directory send parts to the driver."""
        if self.desk is not None:
            self.desk.admit(servers, partial(collect, timeout_s=timeout_s))

    def wire(self, origin_unix_s: float, timeout_s: float, tell: Tell = tell_nobody) -> None:
        """Connect bridges with each other and each region's parts; then let workers begin.

        Args:
            origin_unix_s: time of day at which the run's clock is 0.
            timeout_s: longest wait for each of the rounds of calls.
            tell: hears who is awaited.

        Raises:
            RegionLostError: if an actor died while starting.
            GeoRayError: what an actor found wrong (task, data, checkpoint, ports).
        """
        self.open(origin_unix_s, timeout_s, tell)
        connects = {
            f"{a} to {b}": self.bridges[a].connect.remote(b, self.bridge_addresses[b][0])
            for a, b in self.dials()
        }
        # A resumed averager may have an answer for a region whose bridge has not got through yet.
        connects |= {f"{b} to {a}": self.bridges[b].expect.remote(a) for a, b in self.dials()}
        collect(connects, timeout_s, partial(tell, "connecting regions"))
        self.start(origin_unix_s, timeout_s, tell)

    def open(self, origin_unix_s: float, timeout_s: float, tell: Tell = tell_nobody) -> None:
        """Let bridges, and shards beside the primary ones, listen; see `wire`."""
        servers = self.servers()
        self._known = collect({k: h.introduce.remote() for k, h in servers.items()}, timeout_s)
        given = {r: self.keys.for_bridge(r, self._known["bridge", r]) for r in self.bridges}
        self.bridge_addresses = collect(
            {r: b.open.remote(origin_unix_s, given[r]) for r, b in self.bridges.items()},
            timeout_s,
            partial(tell, "opening bridges"),
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

    def start(self, origin_unix_s: float, timeout_s: float, tell: Tell = tell_nobody) -> None:
        """Let primary shards connect to the rest of their regions, and workers begin."""
        starts = {}
        for region, primary in self.primaries.items():
            lan = self.bridge_addresses[region][1] if self.bridges else None
            lan_key = self.keys.for_server(region, self._known["ps", region])
            others = self.shard_addresses[region]
            starts[region] = primary.start.remote(origin_unix_s, lan, others, lan_key)
        for region, address in collect(
            starts, timeout_s, partial(tell, "starting parameter servers")
        ).items():
            self.shard_addresses[region].insert(0, address)
        for worker in self.workers.values():
            self._begin(worker)

    def replace_worker(self, worker: GroupWorker) -> GroupWorker:
        """Start a new incarnation of a lost worker in its place."""
        kill(worker.handle)
        fresh = self._create_worker(worker.region, worker.rank, worker.epoch + 1)
        self._begin(fresh)
        return fresh

    def tell_lost(self, worker: GroupWorker) -> None:
        """Let its server know, whose connection to it may be the last to notice."""
        if self.spec.experiment.train.elastic is not None:
            self.primaries[worker.region].lose_worker.remote(worker.rank, worker.epoch)

    def send_away(self, worker: GroupWorker) -> None:
        """Let it come home with what it has computed."""
        self.primaries[worker.region].dismiss_worker.remote(worker.rank)

    def dismiss_workers(self) -> None:
        """All are home: end them, with the memory that each shares with its shards."""
        for worker in self.workers.values():
            kill(worker.handle)

    def renew_certificate(self, region: str, request_pem: bytes) -> None:
        """Answer a bridge whose certificate ends soon; nothing is waited for.

        Raises:
            CertificateError: the request makes no sense.
        """
        signed, bridge = self.keys.sign(region, request_pem), self.bridges.get(region)
        if signed is not None and bridge is not None:
            bridge.use_certificate.remote(signed)

    def follow(self, home: AveragerHome) -> bool:
        """The averager says that it lives at ``home``; whether that is news."""
        is_news = home.epoch > self.home.epoch and home.region in self.bridges
        if is_news:
            self._move(home)
        return is_news

    def note_standby(self, region: str, home: AveragerHome, *, stands_by: bool) -> None:
        """A region says whether it may take over from ``home``."""
        is_news = stands_by or region == self.standby
        if is_news and home == self.home and region in self.bridges:
            self.standby = region if stands_by else None

    def can_lose(self, region: str) -> bool:
        """Whether the run can go on without ``region``; the averager's own: if one stands by."""
        if region == self.home.region:
            return self.standby in self.bridges
        experiment = self.spec.experiment
        may_change = experiment.members.min is not None or MemberPolicy(experiment).brings_back
        return may_change or region in self.former_homes

    def lose(self, region: str, *, keep_workers: bool = False) -> None:
        """Go on without a region; what is left of it is ended, but workers that are kept."""
        ranks = [key for key in self.workers if key[0] == region]
        workers = [self.workers.pop(key) for key in ranks]
        self.end_idle(region)
        if keep_workers:
            self._idle[region] = workers
        gone = [] if keep_workers else [worker.handle for worker in workers]
        gone += [
            self.primaries.pop(region),
            self.bridges.pop(region, None),  # none while it is being replaced
            *self.shard_servers.pop(region, []),
        ]
        for handle in gone:
            kill(handle)
        if region == self.standby:
            self.standby = None
        elif region == self.home.region:
            self.expect_takeover()

    def expect_takeover(self) -> None:
        """The averager's bridge is gone: its standby, if there is one, hosts it now."""
        if self.standby is not None:
            self._move(AveragerHome(self.standby, self.home.epoch))  # it tells its own epoch soon

    def _move(self, home: AveragerHome) -> None:
        if home.region != self.home.region:
            self.former_homes |= {self.home.region}
        self.former_homes -= {home.region}
        self.home, self.standby = home, None

    def take_idle(self, region: str, wait_s: float) -> list[GroupWorker]:
        """Workers of a lost region whose processes live, and which have nothing to do any more."""
        found = []
        for worker in self._idle.pop(region, []):
            try:
                if worker.ref is not None and not ray.wait([worker.ref], timeout=wait_s)[0]:
                    raise ray.exceptions.GetTimeoutError
                ray.get(worker.handle.process_id.remote(), timeout=wait_s)
                found.append(GroupWorker(region, worker.rank, worker.epoch, worker.handle))
            except ray.exceptions.RayError:  # it is dead, or busy with what nobody waits for
                kill(worker.handle)
        return found

    def end_idle(self, region: str) -> None:
        """Nobody needs the workers any more that were kept of a lost region."""
        for worker in self._idle.pop(region, []):
            kill(worker.handle)

    def adopt(self, newcomers: ActorGroup) -> None:
        """What were the actors of regions on their way in are this run's."""
        self.placed |= newcomers.placed
        self.bridges |= newcomers.bridges
        self.primaries |= newcomers.primaries
        self.shard_servers |= newcomers.shard_servers
        self.workers |= newcomers.workers
        self.shard_addresses |= newcomers.shard_addresses
        self.bridge_addresses |= newcomers.bridge_addresses

    def close(self, timeout_s: float = 5.0) -> None:
        """Let actors close their sockets, then end them; never raises."""
        servers = list(self.servers().values())
        for region in list(self._idle):
            self.end_idle(region)
        try:
            ray.wait(
                [s.close.remote() for s in servers], num_returns=len(servers), timeout=timeout_s
            )
        except Exception:  # a dead cluster must not stop us from cleaning up the rest
            return
        if head_answers():  # one that does not would be waited for
            for handle in [*servers, *(w.handle for w in self.workers.values())]:
                kill(handle)

    def dials(self) -> list[tuple[str, str]]:
        """Which bridge dials which: all that of the averager, and each other where it is needed."""
        experiment = self.spec.experiment
        home, names = experiment.averager_region, sorted(self.primaries)
        if experiment.averager.standby is not None:  # it may come to live anywhere
            return [(a, b) for a in names for b in names if b < a]
        dials = [(region, home) for region in names if region != home]
        return dials + build.dials(experiment)

    def _create_worker(self, region: str, rank: int, epoch: int) -> GroupWorker:
        config = self.spec.region(region)
        handle = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=config.cpus_per_worker,
                num_gpus=config.gpus_per_worker,
                scheduling_strategy=self.placed[region].strategy("worker", rank),
                max_concurrency=2,
                max_restarts=0,
            )
            .remote(self.spec, region, rank, epoch)
        )
        worker = GroupWorker(region, rank, epoch, handle)
        self.workers[region, rank] = worker
        return worker

    def _begin(self, worker: GroupWorker) -> None:
        # The primary shard seals the key for it: nothing is waited for here.
        key = self.primaries[worker.region].seal_key.remote(worker.handle.introduce.remote())
        worker.ref = worker.handle.run.remote(self.shard_addresses[worker.region], key)
        worker.node = worker.handle.node_id.remote()


def collect(
    refs: Mapping[Any, Ref], timeout_s: float, heard: Heard | None = None
) -> dict[Any, Any]:
    """The values of several calls, by the same keys.

    Args:
        refs: the calls.
        timeout_s: longest wait.
        heard: hears how many are done, of how many, and the keys of the others.

    Raises:
        GeoRayError: the one that an actor raised.
        RegionLostError: if an actor died or did not answer in time.
    """
    late: list[str] = []
    try:
        if heard is not None:
            late = watch(refs, timeout_s, heard, _ended, SystemClock())
        values = ray.get(list(refs.values()), timeout=0 if late else timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise reason_of(error) from error
    except ray.exceptions.RayActorError as error:
        raise RegionLostError(f"an actor is lost: {error}") from error
    except ray.exceptions.GetTimeoutError as error:
        who = f": {', '.join(late)}" if late else ""
        raise RegionLostError(f"actors did not answer within {timeout_s:g} s{who}") from error
    return dict(zip(refs, values, strict=True))


def watch(
    refs: Mapping[Any, Ref], timeout_s: float, heard: Heard, wait: Wait, clock: Clock
) -> list[str]:
    """Wait for calls, telling every so often which are awaited.

    Args:
        refs: the calls by key.
        timeout_s: longest wait.
        heard: see `collect`.
        wait: how to wait for calls.
        clock: measures the wait.

    Returns:
        The keys of the calls that are not done.
    """
    deadline_s = clock.now_s() + timeout_s
    awaited = {ref: str(key) for key, ref in refs.items()}
    while True:
        left_s = deadline_s - clock.now_s()
        heard(len(refs) - len(awaited), len(refs), list(awaited.values()))
        if not awaited or left_s <= 0:
            return list(awaited.values())
        for ref in wait(list(awaited), min(_TELL_EVERY_S, left_s)):
            del awaited[ref]


def _ended(refs: Sequence[Ref], timeout_s: float) -> Sequence[Ref]:
    """Those that have ended in this time; an error that one ended with is raised."""
    done: Sequence[Ref]
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    ray.get(list(done))
    return done


def reason_of(error: ray.exceptions.RayTaskError) -> GeoRayError:
    """The error of geo_ray's tree that an actor raised, or one that quotes another's."""
    cause = error.cause
    if isinstance(cause, GeoRayError):
        return cause
    return RegionLostError(f"an actor failed: {type(cause).__name__}: {cause}")


def kill(handle: Handle) -> None:
    """End an actor; it may be dead already, and None is nobody."""
    if handle is None:
        return
    try:
        ray.kill(handle, no_restart=True)
    except Exception:  # dead actors, dead clusters: gone is what we want
        return


def _actor(
    kind: type, place: PlacedRegion, role: Any, rank: int, cpus: float, threads: int, *args: Any
) -> Handle:
    return (
        ray.remote(kind)
        .options(
            num_cpus=cpus,
            scheduling_strategy=place.strategy(role, rank),
            max_concurrency=threads,
            max_restarts=0,
        )
        .remote(*args)
    )
