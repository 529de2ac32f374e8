"""A simulated cloud with a job on its machines, driven by a clock that is passed in.

Spot prices, capacity and preemptions come from a `MarketTrace` and do not depend on requests. Lists
may be late and calls may fail. The job is as fast as its slowest region. A machine that joins or
leaves pauses all regions for a moment; a machine that was not drained loses its work since the last
exchange.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeVar

from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import ProviderUnreachableError, RegionsUnreachableError
from geo_ray.cloud.autoscaler.observation import ObservedNode, PendingGroup
from geo_ray.cloud.autoscaler.target import REGION_LABEL, ROLE_LABEL, ClusterTarget, RegionTarget
from geo_ray.cloud.backtest.markets import MarketTrace
from geo_ray.cloud.provider import (
    Availability,
    LaunchFailure,
    LaunchFailureKind,
    LaunchRequest,
    Machine,
    MachineState,
    Market,
    Pool,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SimCloudBehavior:
    """Behavior of the simulated cloud.

    Attributes:
        start_s: seconds from a launch to a running machine.
        notice_s: seconds of notice before a preemption.
        unlisted_s: maximum seconds for which a new machine is missing from lists.
        outage: fraction of calls that are executed without a reply.
        refusal: fraction of calls that fail without being executed.
        quota: maximum machines by region; no entry: no limit.
    """

    start_s: float = 60.0
    notice_s: float = 120.0
    unlisted_s: float = 0.0
    outage: float = 0.0
    refusal: float = 0.0
    quota: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class SimMachine:
    """A machine of the simulated cloud.

    Attributes:
        machine: the machine as listed, except for its state.
        cluster: name of its cluster.
        listed_unix_s: when it first appears in lists.
        ended_unix_s: when it ended; None: it runs.
        taken: whether it was preempted.
    """

    machine: Machine
    cluster: str
    listed_unix_s: float
    ended_unix_s: float | None = None
    taken: bool = False


@dataclass(slots=True)
class SimulatedCloud:
    """A simulated `MachineProvider`.

    Attributes:
        markets: by pool.
        now: returns the current time.
        behavior: behavior.
        seed: seed of the random generator.
        machines: all machines ever launched, by id.
        unreachable: regions that do not answer.
    """

    markets: Mapping[Pool, MarketTrace]
    now: Callable[[], float]
    behavior: SimCloudBehavior = field(default_factory=SimCloudBehavior)
    seed: int = 0
    machines: dict[str, SimMachine] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)
    _requests: dict[str, tuple[LaunchFailure, ...]] = field(default_factory=dict)
    _failures: list[tuple[str, LaunchFailure]] = field(default_factory=list)
    _rng: random.Random | None = None
    _advanced_unix_s: float = -math.inf

    @property
    def name(self) -> str:
        """See `MachineProvider.name`."""
        return "simulated"

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """See `MachineProvider.list_machines`."""
        self._trouble("list")
        self.advance()
        now_s = self.now()
        found = [
            self._seen(each, now_s)
            for each in self.machines.values()
            if each.cluster == cluster and each.listed_unix_s <= now_s
        ]
        return self._reachable([(each.pool.region, each) for each in found])

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """See `MachineProvider.launch`."""
        self._trouble("launch")
        self._heard({request.pool.region})
        self.advance()
        if request.request_id not in self._requests:
            self._requests[request.request_id] = self._make(request)
        if self._chance().random() < self.behavior.outage:
            raise ProviderUnreachableError("the reply to a launch was lost")
        return self._requests[request.request_id]

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """See `MachineProvider.terminate`."""
        self._trouble("terminate")
        self.advance()
        wanted = [self.machines[name] for name in machine_ids if name in self.machines]
        for each in wanted:
            if each.ended_unix_s is None and each.machine.pool.region not in self.unreachable:
                each.ended_unix_s = self.now()
        self._heard({each.machine.pool.region for each in wanted})
        if self._chance().random() < self.behavior.outage:
            raise ProviderUnreachableError("the reply to a termination was lost")

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """See `MachineProvider.poll_failures`."""
        return self._reachable(
            [(f.pool.region, f) for name, f in self._failures if name == cluster]
        )

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        """See `MachineProvider.availability`; the remaining capacity is not reported."""
        self._trouble("availability")
        found = []
        for pool in pools:
            market = self.markets.get(pool)
            availability = Availability(pool, None if market is None else market.usd_at(self.now()))
            found.append((pool.region, availability))
        return self._reachable(found)

    # ------------------------------------------------------------------ control of the simulation

    def advance(self) -> None:
        """Preempt machines until now: first with a notice, then for good."""
        now_s = self.now()
        if now_s <= self._advanced_unix_s:
            return
        self._advanced_unix_s = now_s
        there: dict[Pool, list[SimMachine]] = {}
        for each in self.machines.values():
            ends_s = each.machine.ends_unix_s
            if each.ended_unix_s is None and ends_s is not None and ends_s <= now_s:
                each.ended_unix_s, each.taken = ends_s, True
            if each.ended_unix_s is None and each.machine.pool.market is Market.SPOT:
                there.setdefault(each.machine.pool, []).append(each)
        for pool, machines in there.items():
            self._take_back(machines, self.markets[pool], now_s)

    def alive(self) -> list[SimMachine]:
        """Return the machines that are charged now."""
        self.advance()
        return [each for each in self.machines.values() if each.ended_unix_s is None]

    def bill_usd(self) -> float:
        """Return the cost of all machines until now."""
        total = 0.0
        for each in self.machines.values():
            end_s = self.now() if each.ended_unix_s is None else each.ended_unix_s
            market = self.markets[each.machine.pool]
            total += market.usd_between(each.machine.launched_unix_s, end_s)
        return total

    # ------------------------------------------------------------------ parts

    def _make(self, request: LaunchRequest) -> tuple[LaunchFailure, ...]:
        now_s, pool = self.now(), request.pool
        market = self.markets.get(pool)
        capacity = 0 if market is None else market.available_at(now_s) - len(self._in(pool))
        alive = [each for each in self.machines.values() if each.ended_unix_s is None]
        used = sum(each.machine.pool.region == pool.region for each in alive)
        quota = self.behavior.quota.get(pool.region)
        bound, failure_kind = capacity, LaunchFailureKind.SOLD_OUT
        if quota is not None and quota - used < capacity:
            bound, failure_kind = quota - used, LaunchFailureKind.QUOTA
        count = max(0, min(request.count, bound))
        for number in range(count):
            made = Machine(
                f"{request.request_id}.{number}",
                request.request_id,
                pool,
                MachineState.PENDING,
                now_s,
                None,
                dict(request.labels),
                request.ends_unix_s,
                request.cluster_id,
            )
            late_s = self._chance().random() * self.behavior.unlisted_s
            self.machines[made.id] = SimMachine(made, request.cluster, now_s + late_s)
        if count == request.count:
            return ()
        missing = request.count - count
        reason = f"the simulated cloud says {failure_kind.value}"
        failure = LaunchFailure(request.request_id, pool, missing, failure_kind, reason)
        self._failures.append((request.cluster, failure))
        return (failure,)

    def _in(self, pool: Pool) -> list[SimMachine]:
        return [
            each
            for each in self.machines.values()
            if each.ended_unix_s is None and each.machine.pool == pool
        ]

    def _take_back(self, there: list[SimMachine], market: MarketTrace, now_s: float) -> None:
        noticed = sum(self._is_noticed(each, now_s) for each in there)
        excess = len(there) - market.available_at(now_s) - noticed
        for each in sorted(there, key=attrgetter("machine.id")):
            if excess <= 0:
                return
            if not self._is_noticed(each, now_s):
                ends_s = now_s + self.behavior.notice_s
                each.machine = replace(each.machine, ends_unix_s=ends_s)
                excess -= 1

    def _is_noticed(self, each: SimMachine, now_s: float) -> bool:
        ends_s = each.machine.ends_unix_s
        return ends_s is not None and ends_s - now_s <= self.behavior.notice_s

    def _seen(self, each: SimMachine, now_s: float) -> Machine:
        if each.ended_unix_s is not None:
            return replace(each.machine, state=MachineState.ENDED)
        if now_s - each.machine.launched_unix_s < self.behavior.start_s:
            return each.machine
        number = int(each.machine.launched_unix_s) % 200
        address = f"10.0.{number}.{1 + len(each.machine.id) % 200}"
        return replace(each.machine, state=MachineState.RUNNING, address=address)

    def _reachable(self, found: Sequence[tuple[str, T]]) -> list[T]:
        """Return the answers, or raise an error that carries them if regions are unreachable."""
        answer = [each for region, each in found if region not in self.unreachable]
        if not self.unreachable:
            return answer
        error = RegionsUnreachableError(f"no answer of {', '.join(sorted(self.unreachable))}")
        error.found, error.unreachable = tuple(answer), dict.fromkeys(self.unreachable, "no answer")
        raise error

    def _heard(self, regions: Set[str]) -> None:
        if regions & self.unreachable:
            raise ProviderUnreachableError(f"no answer of {', '.join(sorted(regions))}")

    def _trouble(self, call: str) -> None:
        if self._chance().random() < self.behavior.refusal:
            raise ProviderUnreachableError(f"no answer to {call}")

    def _chance(self) -> random.Random:
        if self._rng is None:
            self._rng = random.Random(self.seed)
        return self._rng


def forever(usd_per_hour: float, availability: int = 1_000_000) -> MarketTrace:
    """Return a market with constant price and capacity."""
    return MarketTrace(((-math.inf, usd_per_hour),), ((-math.inf, availability),))


@dataclass(frozen=True, slots=True)
class SimJob:
    """Parameters of the job.

    Attributes:
        work_s: its duration with the target's machines.
        join_s: seconds from a running machine to a working node.
        change_s: seconds for which all regions pause when a machine joins or leaves.
        lost_s: seconds of work lost with a machine that was not drained.
        leave_s: seconds from a drain until the node is idle.
        most_speed: maximum speedup by more machines.
    """

    work_s: float
    join_s: float = 60.0
    change_s: float = 5.0
    lost_s: float = 60.0
    leave_s: float = 20.0
    most_speed: float = 2.0


@dataclass(slots=True)
class SimWorld:
    """A simulated job with its cloud; implements `ClusterNodes` and `WorkLeft`.

    Attributes:
        target: need of the job.
        job: parameters of the job.
        cloud: its machines.
        clock: the current time.
        done_s: completed work.
        finished_unix_s: completion time; None: not completed.
    """

    target: ClusterTarget
    job: SimJob
    cloud: SimulatedCloud
    clock: VirtualClock
    done_s: float = 0.0
    finished_unix_s: float | None = None
    _active: frozenset[str] = frozenset()
    _left_unix_s: dict[str, float] = field(default_factory=dict)
    _stalled_s: float = 0.0

    # ------------------------------------------------------------------ for the autoscaler

    def observe(self, machines: Sequence[Machine]) -> dict[str, ObservedNode]:
        """See `ClusterNodes.observe`."""
        now_s = self.clock.now_s()
        found = {}
        for machine in machines:
            each = self.cloud.machines[machine.id]
            if each.ended_unix_s is None and self._has_joined(each, now_s):
                left_s = self._left_unix_s.get(machine.id)
                busy = self.finished_unix_s is None and (left_s is None or now_s < left_s)
                found[machine.id] = ObservedNode(is_ready=True, is_busy=busy, leaves_unix_s=left_s)
        return found

    def drain(self, machine: Machine, reason: str, until_unix_s: float) -> None:
        """See `ClusterNodes.drain`."""
        gone_s = min(self.clock.now_s() + self.job.leave_s, until_unix_s)
        self._left_unix_s.setdefault(machine.id, gone_s)

    def end_idle(self, machine: Machine, reason: str) -> bool:
        """See `ClusterNodes.end_idle`."""
        node = self.observe([machine]).get(machine.id)
        return node is None or not node.is_busy

    def pending(self) -> tuple[PendingGroup, ...]:
        """See `ClusterNodes.pending`."""
        return ()

    @property
    def is_released(self) -> bool:
        """See `WorkLeft`. Machines are released when the job ends."""
        return self.finished_unix_s is not None

    def left_s(self) -> float | None:
        """See `WorkLeft.left_s`."""
        return self.job.work_s - self.done_s

    # ------------------------------------------------------------------ time passes

    def advance_to_s(self, when_s: float) -> None:
        """Advance the job to a time."""
        passed_s = when_s - self.clock.now_s()
        speed = 0.0 if self.finished_unix_s is not None else self._speed()
        stalled_s = min(passed_s, self._stalled_s)
        self._stalled_s -= stalled_s
        done_s = (passed_s - stalled_s) * speed
        left_s = self.job.work_s - self.done_s
        if self.finished_unix_s is None and speed and done_s >= left_s:
            self.finished_unix_s = self.clock.now_s() + stalled_s + left_s / speed
            done_s = left_s
        self.done_s += done_s
        self.clock.advance_to_s(when_s)

    def roll_back_s(self, work_s: float) -> None:
        """Lose some work."""
        self.done_s = max(0.0, self.done_s - work_s)

    def computing(self, region: str, role: str) -> list[SimMachine]:
        """Return the machines that work now."""
        now_s = self.clock.now_s()
        return [
            each
            for each in self.cloud.alive()
            if each.machine.labels.get(REGION_LABEL) == region
            and each.machine.labels.get(ROLE_LABEL) == role
            and self._has_joined(each, now_s)
            and now_s < self._left_unix_s.get(each.machine.id, float("inf"))
        ]

    def _speed(self) -> float:
        active: set[str] = set()
        fractions = [self._fraction(region, active) for region in self.target.regions]
        now = frozenset(active)
        if now != self._active:
            for machine_id in self._active - now:
                if machine_id not in self._left_unix_s:
                    self.roll_back_s(self.job.lost_s)
            self._stalled_s = self.job.change_s
            self._active = now
        return min(self.job.most_speed, *fractions)

    def _fraction(self, region: RegionTarget, active: set[str]) -> float:
        workers = self.computing(region.name, "worker")
        servers = self.computing(region.name, "server") if region.server else []
        active.update(each.machine.id for each in (*workers, *servers))
        if region.server and not servers:
            return 0.0
        speeds = {kind.type: kind.rows_per_s for kind in region.kinds}
        return sum(speeds[each.machine.pool.type] for each in workers) / region.rows_per_s

    def _has_joined(self, each: SimMachine, now_s: float) -> bool:
        start_s = self.cloud.behavior.start_s + self.job.join_s
        return now_s - each.machine.launched_unix_s >= start_s
