"""A simulated cluster whose autoscaler dies: at any call, before it is done or after.

A next one starts with the journal and the next token of the lease. The one before may only have
stood still, and wake up in the middle of what it was doing: then the journal is not its own. Beside
that, answers of the journal get lost, orders to nodes fail, and the target changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import ClusterError, LeaseLostError, RunDirectoryError
from geo_ray.cloud.autoscaler.journal import Journal
from geo_ray.cloud.autoscaler.observation import UNWANTED, ObservedNode
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.reconcile import Reconciler, TickResult
from geo_ray.cloud.autoscaler.state import decode_memory
from geo_ray.cloud.autoscaler.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.cloud.backtest.markets import MarketTrace
from geo_ray.cloud.backtest.replay import MemoryStore
from geo_ray.cloud.backtest.simulated_cloud import (
    SimCloudBehavior,
    SimJob,
    SimulatedCloud,
    SimWorld,
    forever,
)
from geo_ray.cloud.provider import Availability, LaunchFailure, LaunchRequest, Machine, Market, Pool
from geo_ray.experiment.autoscale import AutoscaleConfig, CalmConfig, RetryConfig
from geo_ray.runs.lease import Unfenced
from geo_ray.storage.conditional_store import StoredValue

CLUSTER = "killed"
EVERY_S = 15.0


class Killed(BaseException):
    """The autoscaler's process has ended."""


@dataclass(slots=True)
class Reaper:
    """Ends the process at the next call but so many.

    Attributes:
        calls_left: before it strikes; None: it does not.
        kills: how often it has.
    """

    calls_left: int | None = None
    kills: int = 0

    @contextmanager
    def around(self) -> Iterator[None]:
        """A call to the world, before and after which the process may end."""
        self._strike()
        yield
        self._strike()

    def _strike(self) -> None:
        if self.calls_left is None:
            return
        if self.calls_left == 0:
            self.calls_left = None
            self.kills += 1
            raise Killed
        self.calls_left -= 1


@dataclass(slots=True)
class Trouble:
    """What fails at the next look.

    Attributes:
        journal: whether it is written, and the answer gets lost.
        drains: whether no order to drain comes to its node.
    """

    journal: bool = False
    drains: bool = False


@dataclass(slots=True)
class MortalStore:
    """A conditional store as a process sees it that may end."""

    inner: MemoryStore
    reaper: Reaper
    trouble: Trouble = field(default_factory=Trouble)

    def read(self, key: str) -> StoredValue | None:
        """See `ConditionalStore.read`."""
        with self.reaper.around():
            return self.inner.read(key)

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        """See `ConditionalStore.write`."""
        with self.reaper.around():
            tag = self.inner.write(key, data, expected)
        if self.trouble.journal:
            self.trouble.journal = False
            raise RunDirectoryError("the answer to a write got lost")
        return tag

    @contextmanager
    def unchanged(self, key: str, tag: str) -> Iterator[bool]:
        """See `ConditionalStore.unchanged`."""
        with self.inner.unchanged(key, tag) as held:
            yield held


@dataclass(slots=True)
class MortalProvider:
    """A cloud as a process sees it that may end; ``ending`` hears what it is about to end."""

    inner: SimulatedCloud
    reaper: Reaper
    ending: Callable[[Sequence[str]], None] = lambda _: None

    @property
    def name(self) -> str:
        """See `MachineProvider.name`."""
        return self.inner.name

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """See `MachineProvider.list_machines`."""
        with self.reaper.around():
            return self.inner.list_machines(cluster)

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """See `MachineProvider.launch`."""
        with self.reaper.around():
            return self.inner.launch(request)

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """See `MachineProvider.terminate`."""
        with self.reaper.around():
            self.ending(machine_ids)
            self.inner.terminate(machine_ids)

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """See `MachineProvider.poll_failures`."""
        with self.reaper.around():
            return self.inner.poll_failures(cluster)

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        """See `MachineProvider.availability`."""
        with self.reaper.around():
            return self.inner.availability(pools)


@dataclass(slots=True)
class TroubledNodes:
    """The nodes of a cluster, to which an order may not come."""

    inner: SimWorld
    trouble: Trouble

    def observe(self, machines: Sequence[Machine]) -> dict[str, ObservedNode]:
        """See `ClusterNodes.observe`."""
        return self.inner.observe(machines)

    def drain(self, machine: Machine, reason: str, until_unix_s: float) -> None:
        """See `ClusterNodes.drain`."""
        if self.trouble.drains:
            raise ClusterError(f"{machine.id} does not hear that it is to leave")
        self.inner.drain(machine, reason, until_unix_s)

    def pending(self) -> dict[str, int]:
        """See `ClusterNodes.pending`."""
        return self.inner.pending()


KIND = MachineKind("gpu", 10.0, 20)
TARGET = ClusterTarget(
    (
        RegionTarget("us", "us-1", 30.0, (KIND,), MachineKind("cpu", 1.0, 2), ("us-1a", "us-1b")),
        RegionTarget("eu", "eu-1", 20.0, (KIND,), None, ("eu-1a",)),
    )
)
CONFIG = AutoscaleConfig(
    every_s=EVERY_S,
    start_s=90.0,
    drain_s=60.0,
    calm=CalmConfig(dwell_s=300.0, idle_s=60.0),
    retry=RetryConfig(
        first_s=30.0, longest_s=240.0, resend_s=30.0, give_up_s=300.0, missing_s=200.0
    ),
)


def calm_markets() -> dict[Pool, MarketTrace]:
    """Markets where nothing changes."""
    return {
        pool: forever(1.0 if pool.market is Market.ON_DEMAND else 0.3) for pool in TARGET.pools()
    }


@dataclass(slots=True)
class MortalCluster:
    """The world, and the autoscaler that lives in it now.

    Attributes:
        cloud: the machines.
        clock: the time.
        world: the job.
        store: the journal's.
        reaper: ends the autoscaler.
        token: how manieth autoscaler this is.
        target: what should run.
        trouble: what fails.
        rude: machines that were ended in the middle of their work, without having been drained.
        wasted: machines that were ended since nobody waited for them.
        loop: it; None: it has ended, and the next one has not begun.
    """

    cloud: SimulatedCloud
    clock: VirtualClock
    world: SimWorld
    store: MemoryStore = field(default_factory=MemoryStore)
    reaper: Reaper = field(default_factory=Reaper)
    token: int = 0
    target: ClusterTarget = TARGET
    trouble: Trouble = field(default_factory=Trouble)
    rude: list[str] = field(default_factory=list)
    wasted: list[str] = field(default_factory=list)
    loop: Reconciler | None = None

    @classmethod
    def made(
        cls,
        behavior: SimCloudBehavior,
        seed: int = 0,
        markets: dict[Pool, MarketTrace] | None = None,
    ) -> MortalCluster:
        """Return one with a job that takes for ever."""
        clock = VirtualClock(1_000_000.0)
        cloud = SimulatedCloud(markets or calm_markets(), clock.now_s, behavior, seed)
        world = SimWorld(TARGET, SimJob(1e12, join_s=10.0), cloud, clock)
        return cls(cloud, clock, world)

    def next_autoscaler(self, reaper: Reaper | None = None) -> Reconciler:
        """Return another process: it knows the journal only."""
        self.token += 1
        reaper = reaper or self.reaper
        policy = AutoscalePolicy(CONFIG, CLUSTER)
        provider = MortalProvider(self.cloud, reaper, self._ending)
        journal = Journal(MortalStore(self.store, reaper, self.trouble), self.token)
        nodes = TroubledNodes(self.world, self.trouble)
        return Reconciler(
            policy, self.target, provider, nodes, self.world, journal, CLUSTER, Unfenced()
        )

    def follow(self, target: ClusterTarget) -> None:
        """Let something else run from now on."""
        self.target = target
        if self.loop is not None:
            self.loop.target = target

    def tick(self) -> TickResult | None:
        """Let the autoscaler look once; None: it broke off. Then time passes."""
        result = None
        try:
            if self.loop is None:
                self.loop = self.next_autoscaler()
            result = self.loop.tick(self.clock.now_s())
        except RunDirectoryError:
            pass  # it looks again
        except (Killed, LeaseLostError):
            self.loop = None
        self.world.advance_to_s(self.clock.now_s() + EVERY_S)
        return result

    def finish(self) -> None:
        """The job is done."""
        self.world.done_s = self.world.job.work_s

    def settle(self, ticks: int = 60) -> None:
        """Nothing dies, and every call is answered, for a while."""
        self.reaper.calls_left = None
        for _ in range(ticks):
            self.tick()

    def _ending(self, machine_ids: Sequence[str]) -> None:
        stored = self.store.read("")
        instances = {} if stored is None else decode_memory(stored.data).instances
        for each in (self.cloud.machines[name] for name in machine_ids):
            if each.ended_unix_s is not None:
                continue
            node = self.world.observe([each.machine]).get(each.machine.id)
            instance = instances.get(each.machine.id)
            if instance is None or instance.reason == UNWANTED:
                self.wasted.append(each.machine.id)
            elif node is not None and node.is_busy and node.leaves_unix_s is None:
                self.rude.append(each.machine.id)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return how many machines run, by region and role."""
        found: dict[tuple[str, str], int] = {}
        for each in self.cloud.alive():
            labels = each.machine.labels
            place = (labels["ray.io/availability-region"], labels["geo-ray/role"])
            found[place] = found.get(place, 0) + 1
        return found


WANTED = {("us", "server"): 1, ("us", "worker"): 3, ("eu", "worker"): 2}


def random_kills(
    seed: int, kills: int, tell: Callable[[str], None] = lambda _: None
) -> tuple[int, int, int]:
    """Kill an autoscaler again and again, in a cloud that answers late, twice or never.

    Returns:
        Machines that ran beyond what was wanted after all had settled; machines that ran when the
        job was over; and the most that ever ran at once beyond those wanted.
    """
    rng = random.Random(seed)
    behavior = SimCloudBehavior(30.0, 60.0, unlisted_s=90.0, outage=0.1, refusal=0.1)
    cluster = MortalCluster.made(behavior, seed)
    most = 0
    while cluster.reaper.kills < kills:
        cluster.reaper.calls_left = rng.randrange(16)
        for _ in range(rng.randrange(1, 6)):
            cluster.tick()
        if rng.random() < 0.2:  # somebody ends a machine by hand, or the cloud does
            alive = cluster.cloud.alive()
            if alive:
                rng.choice(alive).ended_unix_s = cluster.clock.now_s()
        beyond = sum(cluster.counts().values()) - sum(WANTED.values())
        most = max(most, beyond)
    cluster.settle(80)
    double = sum(max(0, n - WANTED.get(place, 0)) for place, n in cluster.counts().items())
    tell(f"seed {seed}: {cluster.reaper.kills} kills, {len(cluster.cloud.machines)} machines")
    cluster.finish()
    cluster.settle(40)
    return double, len(cluster.cloud.alive()), most
