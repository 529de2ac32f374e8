"""One job under one day's markets, by each way to rent its machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from geo_ray.autoscale.config import AutoscaleConfig
from geo_ray.autoscale.journal import Journal
from geo_ray.autoscale.loop import Reconciler
from geo_ray.autoscale.memory import AutoscalerMemory
from geo_ray.autoscale.policy import AutoscalePolicy
from geo_ray.autoscale.replay.baselines import CLUSTER, FixedFleet, Rule, ZoneFailover
from geo_ray.autoscale.replay.market_trace import MarketTrace
from geo_ray.autoscale.replay.sim_cloud import SimTemper, SimulatedCloud
from geo_ray.autoscale.replay.world import SimJob, SimWorld
from geo_ray.autoscale.target import ClusterTarget
from geo_ray.clock import VirtualClock
from geo_ray.lease.store import StoredValue
from geo_ray.providers.base import Market, Pool

OURS: Final = "autoscaler"
ON_DEMAND: Final = "on demand"
SPOT: Final = "spot"
FAILOVER: Final = "zone failover"
WAYS: Final = (OURS, ON_DEMAND, SPOT, FAILOVER)


class MemoryStore:
    """A `ConditionalStore` that ends with the process: for simulations."""

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
    """How a job came out.

    Attributes:
        usd: its bill.
        hours: that it took.
        is_done: whether it came to its end within the time that was replayed.
        in_time: whether before its deadline.
        taken: machines that the cloud took back.
        launches: machines that were rented.
        left_over: machines that still ran when all was over.
        booked_usd: what the autoscaler's own ledger says; None: it was another way.
    """

    usd: float
    hours: float
    is_done: bool
    in_time: bool
    taken: int
    launches: int
    left_over: int
    booked_usd: float | None = None


def replay(
    way: str,
    target: ClusterTarget,
    markets: Mapping[Pool, MarketTrace],
    job: SimJob,
    config: AutoscaleConfig,
    start_unix_s: float = 0.0,
    longest_s: float = 172_800.0,
) -> Replayed:
    """Run a job to its end.

    Args:
        way: one of `WAYS`.
        target: what it wants.
        markets: of the day.
        job: the job.
        config: of the autoscaler; the others look as often as it does.
        start_unix_s: when it begins.
        longest_s: when it is given up.
    """
    clock = VirtualClock(start_unix_s)
    temper = SimTemper(start_s=max(0.0, config.start_s - job.join_s))
    cloud = SimulatedCloud(markets, clock.now_s, temper)
    world = SimWorld(target, job, cloud, clock)
    memory: list[AutoscalerMemory] = []
    rule = _rule(way, world, config, memory)
    ends_s = start_unix_s + longest_s
    while world.finished_unix_s is None and clock.now_s() < ends_s:
        rule(clock.now_s())
        world.advance_to_s(clock.now_s() + config.every_s)
    finished_s = world.finished_unix_s
    if way == OURS:
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
    way: str, world: SimWorld, config: AutoscaleConfig, memory: list[AutoscalerMemory]
) -> Rule:
    floor = config.floor != "none"
    if way == ON_DEMAND:
        return FixedFleet(world, Market.ON_DEMAND, floor).look
    if way == SPOT:
        return FixedFleet(world, Market.SPOT, floor).look
    if way == FAILOVER:
        return ZoneFailover(world, floor).look
    journal = Journal(MemoryStore(), 1)
    policy = AutoscalePolicy(config, CLUSTER)
    loop = Reconciler(
        policy, world.target, world.cloud, world, world, journal, CLUSTER, fence=lambda: None
    )

    def look(now_unix_s: float) -> None:
        memory[:] = [loop.tick(now_unix_s).decided.memory]

    return look
