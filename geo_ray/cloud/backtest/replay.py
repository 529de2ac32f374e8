"""Replays one job on the markets of one day, with the autoscaler and with baselines.

*On demand*: the cheapest type and zone at the start, never changed.
- *Spot*: the same on the spot market; a preempted machine is requested again in its own pool.
- *Zone failover*: all machines of a region in the cheapest pool; after a preemption the region
  moves to the next cheapest one and resumes from its newest checkpoint.

Source: SkyPilot's managed jobs (EAGER_NEXT_REGION); the choice by price per row favours it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from geo_ray.base.clock import VirtualClock
from geo_ray.cloud.autoscaler.journal import Journal
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.reconcile import Reconciler
from geo_ray.cloud.autoscaler.state import AutoscalerState
from geo_ray.cloud.autoscaler.target import (
    REGION_LABEL,
    ROLE_LABEL,
    ClusterTarget,
    MachineKind,
    MachineRole,
    RegionTarget,
)
from geo_ray.cloud.backtest.markets import MarketTrace
from geo_ray.cloud.backtest.simulated_cloud import (
    SimCloudBehavior,
    SimJob,
    SimMachine,
    SimulatedCloud,
    SimWorld,
)
from geo_ray.cloud.provider import LaunchRequest, Market, Pool
from geo_ray.experiment.autoscale import AutoscaleConfig
from geo_ray.runs.lease import Unfenced
from geo_ray.storage.conditional_store import StoredValue

CLUSTER = "replay"
CHECKPOINT_S = 600.0

Rule = Callable[[float], None]


@dataclass(slots=True)
class FixedFleet:
    """Machines of one market, chosen once at the start.

    Attributes:
        world: the job and its cloud.
        market: market of the workers.
        floor: whether servers are on demand.
    """

    world: SimWorld
    market: Market
    floor: bool = True
    _pools: dict[tuple[str, str], Pool] = field(default_factory=dict)
    _count: int = 0

    def look(self, now_unix_s: float) -> None:
        """Launch missing machines."""
        for region in self.world.target.regions:
            for role, kind, market in _roles(region, self.market, self.floor):
                place = (region.name, role)
                if place not in self._pools:
                    kinds = region.kinds if role == "worker" else (kind,)
                    self._pools[place] = self._start(region, kinds, market, role, now_unix_s)
                pool = self._pools[place]
                missing = _needed(region, role, pool) - len(_there(self.world, region, role))
                if missing > 0:
                    self._count += 1
                    _launch(self.world, region, role, pool, missing, self._count)

    def _start(
        self,
        region: RegionTarget,
        kinds: Sequence[MachineKind],
        market: Market,
        role: MachineRole,
        now_s: float,
    ) -> Pool:
        """Return the cheapest pool with enough capacity at the start."""
        ranked = _ranked(self.world, region, kinds, (market,), now_s)
        for pool in ranked:
            if self.world.cloud.markets[pool].available_at(now_s) >= _needed(region, role, pool):
                return pool
        return ranked[0]


@dataclass(slots=True)
class ZoneFailover:
    """Baseline with the rule of SkyPilot; see the module.

    Attributes:
        world: the job and its cloud.
        floor: whether servers are on demand.
    """

    world: SimWorld
    floor: bool = True
    _pools: dict[tuple[str, str], Pool] = field(default_factory=dict)
    _saved_s: float = 0.0
    _saved_unix_s: float = 0.0
    _count: int = 0

    def look(self, now_unix_s: float) -> None:
        """Replace the machines of a region after a preemption."""
        if now_unix_s - self._saved_unix_s >= CHECKPOINT_S:
            self._saved_unix_s, self._saved_s = now_unix_s, self.world.done_s
        for region in self.world.target.regions:
            for role, kind, market in _roles(region, Market.SPOT, self.floor):
                kinds = region.kinds if role == "worker" else (kind,)
                both = (Market.ON_DEMAND,) if market is Market.ON_DEMAND else tuple(Market)
                self._keep(region, role, kinds, both, now_unix_s)

    def _keep(
        self,
        region: RegionTarget,
        role: MachineRole,
        kinds: Sequence[MachineKind],
        markets: Sequence[Market],
        now_s: float,
    ) -> None:
        there, place = _there(self.world, region, role), (region.name, role)
        before = self._pools.get(place)
        if before is not None and len(there) >= _needed(region, role, before):
            return
        if before is not None:
            self.world.cloud.terminate([each.machine.id for each in there])
            if there or self._saved_s < self.world.done_s:
                self.world.roll_back_s(max(0.0, self.world.done_s - self._saved_s))
        for pool in _ranked(self.world, region, kinds, markets, now_s):
            if pool == before:
                continue
            needed = _needed(region, role, pool)
            self._count += 1
            _launch(self.world, region, role, pool, needed, self._count)
            there = _there(self.world, region, role)
            if len(there) >= needed:
                self._pools[place] = pool
                return
            self.world.cloud.terminate([each.machine.id for each in there])


def _roles(
    region: RegionTarget, market: Market, floor: bool
) -> list[tuple[MachineRole, MachineKind, Market]]:
    found: list[tuple[MachineRole, MachineKind, Market]] = []
    if region.server is not None:
        found.append(("server", region.server, Market.ON_DEMAND if floor else market))
    return [*found, ("worker", region.kinds[0], market)]


def _needed(region: RegionTarget, role: MachineRole, pool: Pool) -> int:
    if role == "server":
        return 1
    speeds = {kind.type: kind.rows_per_s for kind in region.kinds}
    return ceil(region.rows_per_s / speeds[pool.type] - 1e-3)


def _ranked(
    world: SimWorld,
    region: RegionTarget,
    kinds: Sequence[MachineKind],
    markets: Sequence[Market],
    now_s: float,
) -> list[Pool]:
    """Return pools ordered by the hourly price of all machines of the region."""
    role: MachineRole = "worker" if kinds is region.kinds else "server"
    pools = [pool for kind, pool in region.pools(kinds) if pool.market in markets]
    cost = {
        pool: world.cloud.markets[pool].usd_at(now_s) * _needed(region, role, pool)
        for pool in pools
    }
    return sorted(pools, key=cost.__getitem__)


def _there(world: SimWorld, region: RegionTarget, role: MachineRole) -> list[SimMachine]:
    return [
        each
        for each in world.cloud.alive()
        if each.machine.labels.get(REGION_LABEL) == region.name
        and each.machine.labels.get(ROLE_LABEL) == role
    ]


def _launch(
    world: SimWorld, region: RegionTarget, role: MachineRole, pool: Pool, count: int, number: int
) -> None:
    name = f"{region.name}-{role}-{number}"
    world.cloud.launch(LaunchRequest(name, CLUSTER, pool, count, region.labels(pool, role)))


OURS: Final = "autoscaler"
ON_DEMAND: Final = "on demand"
SPOT: Final = "spot"
FAILOVER: Final = "zone failover"
ALTERNATIVES: Final = (OURS, ON_DEMAND, SPOT, FAILOVER)


class MemoryStore:
    """A `ConditionalStore` in memory, for simulations."""

    def __init__(self) -> None:
        self._value: StoredValue | None = None

    def read(self, key: str) -> StoredValue | None:
        """See `ConditionalStore.read`."""
        return self._value

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        """See `ConditionalStore.write`."""
        if (None if self._value is None else self._value.tag) != expected:
            return None
        tag = str(1 + int(expected or 0))
        self._value = StoredValue(data, tag)
        return tag

    def remove(self, key: str) -> None:
        """See `ConditionalStore.remove`."""
        self._value = None

    @contextmanager
    def unchanged(self, key: str, tag: str) -> Iterator[bool]:
        """See `ConditionalStore.unchanged`."""
        yield self._value is not None and self._value.tag == tag


@dataclass(frozen=True, slots=True)
class Replayed:
    """Outcome of a job.

    Attributes:
        usd: cost.
        hours: duration.
        is_done: whether it completed within the replayed time.
        in_time: whether it completed before its deadline.
        taken: preempted machines.
        launches: launched machines.
        left_over: machines still running after the end.
        ledger_usd: cost in the autoscaler's ledger; None: a baseline ran.
    """

    usd: float
    hours: float
    is_done: bool
    in_time: bool
    taken: int
    launches: int
    left_over: int
    ledger_usd: float | None = None


def replay(
    strategy: str,
    target: ClusterTarget,
    markets: Mapping[Pool, MarketTrace],
    job: SimJob,
    config: AutoscaleConfig,
    start_unix_s: float = 0.0,
    longest_s: float = 172_800.0,
) -> Replayed:
    """Run a job until it ends.

    Args:
        strategy: one of `ALTERNATIVES`.
        target: need of the job.
        markets: markets of the day.
        job: the job.
        config: configuration of the autoscaler; baselines use the same interval.
        start_unix_s: start time.
        longest_s: time limit.
    """
    clock = VirtualClock(start_unix_s)
    behavior = SimCloudBehavior(start_s=max(0.0, config.start_s - job.join_s))
    cloud = SimulatedCloud(markets, clock.now_s, behavior)
    world = SimWorld(target, job, cloud, clock)
    memory: list[AutoscalerState] = []
    rule = _rule(strategy, world, config, memory)
    ends_s = start_unix_s + longest_s
    while world.finished_unix_s is None and clock.now_s() < ends_s:
        rule(clock.now_s())
        world.advance_to_s(clock.now_s() + config.every_s)
    finished_s = world.finished_unix_s
    if strategy == OURS:
        for _ in range(20):
            rule(clock.now_s())
            if not cloud.alive():
                break
            world.advance_to_s(clock.now_s() + config.every_s)
    else:
        cloud.terminate(list(cloud.machines))
    took_s = (ends_s if finished_s is None else finished_s) - start_unix_s
    deadline_s = target.deadline_unix_s
    return Replayed(
        cloud.bill_usd(),
        took_s / 3600.0,
        finished_s is not None,
        finished_s is not None and (deadline_s is None or finished_s <= deadline_s),
        sum(each.taken for each in cloud.machines.values()),
        len(cloud.machines),
        len(cloud.alive()),
        memory[-1].ledger.paid_usd if memory else None,
    )


def _rule(
    strategy: str, world: SimWorld, config: AutoscaleConfig, memory: list[AutoscalerState]
) -> Rule:
    floor = config.floor != "none"
    if strategy == ON_DEMAND:
        return FixedFleet(world, Market.ON_DEMAND, floor).look
    if strategy == SPOT:
        return FixedFleet(world, Market.SPOT, floor).look
    if strategy == FAILOVER:
        return ZoneFailover(world, floor).look
    journal = Journal(MemoryStore(), 1)
    policy = AutoscalePolicy(config, CLUSTER)
    loop = Reconciler(
        policy, world.target, world.cloud, world, world, journal, CLUSTER, fence=Unfenced()
    )

    def look(now_unix_s: float) -> None:
        memory[:] = [loop.tick(now_unix_s).decided.memory]

    return look
