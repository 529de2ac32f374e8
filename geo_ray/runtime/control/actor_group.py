"""All actors of a run: starts them on their reserved places, wires them, takes them down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from geo_ray.errors import GeoRayError, RegionLostError
from geo_ray.runtime.actors.actors import Address, BridgeActor
from geo_ray.runtime.actors.server_actors import PrimaryActor, ShardServerActor
from geo_ray.runtime.actors.spec import RunSpec
from geo_ray.runtime.actors.worker_actor import WorkerActor
from geo_ray.runtime.cluster.placement import PlacedRegion
from geo_ray.runtime.paths import build
from geo_ray.transport.security.certs import issue_for_run
from geo_ray.transport.security.tls import TlsBytes

Handle = Any  # a Ray actor handle; Ray gives it no useful type
Ref = Any


@dataclass(slots=True)
class GroupWorker:
    """One worker's place in the run.

    Attributes:
        region: its region.
        rank: its number there.
        epoch: its incarnation, from 1.
        handle: the actor.
        ref: the end of its work.
        steps: steps it computed, once it has come home.
    """

    region: str
    rank: int
    epoch: int
    handle: Handle
    ref: Ref = None
    steps: int | None = None


@dataclass(slots=True)
class ActorGroup:
    """The actors of a run by region.

    Attributes:
        spec: what they were given.
        placed: their reserved places.
        bridges: by region; empty if there is one region only.
        leads: by region.
        followers: by region, in order.
        workers: by region and rank.
        shard_addresses: where workers connect, by region, lead first.
        hub: the region that hosts the averager at present.
    """

    spec: RunSpec
    placed: Mapping[str, PlacedRegion]
    bridges: dict[str, Handle] = field(default_factory=dict)
    leads: dict[str, Handle] = field(default_factory=dict)
    followers: dict[str, list[Handle]] = field(default_factory=dict)
    workers: dict[tuple[str, int], GroupWorker] = field(default_factory=dict)
    shard_addresses: dict[str, list[Address]] = field(default_factory=dict)
    hub: str = field(init=False)

    def __post_init__(self) -> None:
        self.hub = self.spec.experiment.averager_region

    def servers(self) -> dict[tuple[str, str], Handle]:
        """Every actor that is not replaced when it dies, by (role, region)."""
        found: dict[tuple[str, str], Handle] = {("ps", r): h for r, h in self.leads.items()}
        for region, followers in self.followers.items():
            found |= {(f"ps {i}", region): handle for i, handle in enumerate(followers, 1)}
        return found | {("bridge", r): h for r, h in self.bridges.items()}

    def create(self) -> None:
        """Begin to start all actors at once; nothing is waited for."""
        experiment = self.spec.experiment
        for region in experiment.regions:
            place = self.placed[region.name]
            cpus = region.cpus_per_server
            if len(experiment.regions) > 1:
                self.bridges[region.name] = _actor(
                    BridgeActor, place, "bridge", 0, cpus, 8, self.spec, region.name
                )
            self.leads[region.name] = _actor(
                PrimaryActor, place, "ps", 0, cpus, 4, self.spec, region.name
            )
            self.followers[region.name] = [
                _actor(ShardServerActor, place, "ps", i, cpus, 2, self.spec, region.name, i)
                for i in range(1, region.ps_shards)
            ]
            for rank in range(region.workers):
                self._create_worker(region.name, rank, epoch=1)

    def await_ready(self, timeout_s: float) -> None:
        """Wait until every actor is built.

        Raises:
            RegionLostError: if one died or took too long.
            GeoRayError: what an actor found wrong (task, data, checkpoint).
        """
        everyone = [*self.servers().values(), *(w.handle for w in self.workers.values())]
        collect(dict(enumerate([actor.ready.remote() for actor in everyone])), timeout_s)

    def wire(self, origin_unix_s: float, timeout_s: float) -> None:
        """Connect bridges with each other and each region's parts; then let workers begin.

        Args:
            origin_unix_s: time of day at which the run's clock is 0.
            timeout_s: longest wait for each of the rounds of calls.

        Raises:
            RegionLostError: if an actor died while starting.
            GeoRayError: what an actor found wrong (task, data, checkpoint, ports).
        """
        experiment = self.spec.experiment
        certificates: dict[str, TlsBytes] = {}
        if experiment.transport.tls != "off" and experiment.transport.certs is None:
            # Each bridge gets its own key only; that of the CA is forgotten here.
            certificates = issue_for_run(self.spec.run_id, list(self.bridges))
        bridges = collect(
            {r: b.open.remote(origin_unix_s, certificates.get(r)) for r, b in self.bridges.items()},
            timeout_s,
        )
        connects = {
            (region, peer): self.bridges[region].connect.remote(peer, bridges[peer][0])
            for region, peer in self._dials()
        }
        collect(connects, timeout_s)
        slots = {(r, i): f for r, fs in self.followers.items() for i, f in enumerate(fs)}
        slices = collect({k: f.address.remote() for k, f in slots.items()}, timeout_s)
        starts = {}
        for region, lead in self.leads.items():
            lan = bridges[region][1] if bridges else None
            others = [slices[region, i] for i in range(len(self.followers[region]))]
            self.shard_addresses[region] = others
            starts[region] = lead.start.remote(origin_unix_s, lan, others)
        for region, address in collect(starts, timeout_s).items():
            self.shard_addresses[region].insert(0, address)
        for worker in self.workers.values():
            self._begin(worker)

    def replace_worker(self, worker: GroupWorker) -> GroupWorker:
        """Start a new incarnation of a lost worker in its place."""
        kill(worker.handle)
        fresh = self._create_worker(worker.region, worker.rank, worker.epoch + 1)
        self._begin(fresh)
        return fresh

    def can_lose(self, region: str) -> bool:
        """Whether the run can go on without ``region``: it hosted the averager, which moves."""
        experiment = self.spec.experiment
        standby = experiment.averager.standby
        return region == experiment.averager_region and standby in self.bridges

    def lose(self, region: str) -> None:
        """Go on without a region; what is left of it is ended."""
        ranks = [key for key in self.workers if key[0] == region]
        gone = [self.workers.pop(key).handle for key in ranks]
        gone += [self.leads.pop(region), self.bridges.pop(region), *self.followers.pop(region, [])]
        for handle in gone:
            kill(handle)
        standby = self.spec.experiment.averager.standby
        if region == self.hub and standby is not None:
            self.hub = standby

    def close(self, timeout_s: float = 5.0) -> None:
        """Let actors close their sockets, then end them; never raises."""
        servers = list(self.servers().values())
        try:
            ray.wait(
                [s.close.remote() for s in servers], num_returns=len(servers), timeout=timeout_s
            )
        except Exception:  # a dead cluster must not stop us from cleaning up the rest
            return
        for handle in [*servers, *(w.handle for w in self.workers.values())]:
            kill(handle)

    def _dials(self) -> list[tuple[str, str]]:
        """Which bridge dials which: all that of the averager, and each other where it is needed."""
        experiment = self.spec.experiment
        hub, names = experiment.averager_region, sorted(self.bridges)
        dials = [(region, hub) for region in names if region != hub]
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
        worker.ref = worker.handle.run.remote(self.shard_addresses[worker.region])


def collect(refs: dict[Any, Ref], timeout_s: float) -> dict[Any, Any]:
    """The values of several calls, by the same keys.

    Raises:
        GeoRayError: the one that an actor raised.
        RegionLostError: if an actor died or did not answer in time.
    """
    try:
        values = ray.get(list(refs.values()), timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise reason_of(error) from error
    except ray.exceptions.RayActorError as error:
        raise RegionLostError(f"an actor is lost: {error}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise RegionLostError(f"actors did not answer within {timeout_s:g} s") from error
    return dict(zip(refs, values, strict=True))


def reason_of(error: ray.exceptions.RayTaskError) -> GeoRayError:
    """The error of geo_ray's tree that an actor raised, or one that quotes another's."""
    cause = error.cause
    if isinstance(cause, GeoRayError):
        return cause
    return RegionLostError(f"an actor failed: {type(cause).__name__}: {cause}")


def kill(handle: Handle) -> None:
    """End an actor; it may be dead already."""
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
