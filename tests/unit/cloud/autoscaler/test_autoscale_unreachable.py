"""An unreachable region stays unchanged and accounted for, while all others continue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import RunDirectoryError
from geo_ray.cloud.autoscaler.actions import Launch
from geo_ray.cloud.autoscaler.journal import Journal
from geo_ray.cloud.autoscaler.observation import Observed, ObservedNode, RegionOutage
from geo_ray.cloud.autoscaler.policy import BUDGET, UNKNOWN, AutoscalePolicy
from geo_ray.cloud.autoscaler.reconcile import Reconciler, TickResult
from geo_ray.cloud.autoscaler.state import AutoscalerState
from geo_ray.cloud.autoscaler.target import ClusterTarget
from geo_ray.cloud.backtest.replay import MemoryStore
from geo_ray.cloud.backtest.simulated_cloud import (
    SimCloudBehavior,
    SimJob,
    SimulatedCloud,
    SimWorld,
    forever,
)
from geo_ray.cloud.cluster.providers import RegionProviders
from geo_ray.cloud.provider import (
    Availability,
    LaunchRequest,
    Machine,
    MachineProvider,
    MachineState,
)
from geo_ray.runs.lease import Unfenced
from tests.support.autoscale_support import CONFIG, drains, ends, launches, region, target

EAST = region(name="east", at="r-1", zones=("r-1a",), rows_per_s=20.0)
WEST = region(name="west", at="r-2", zones=("r-2a",), rows_per_s=20.0)
BOTH = target(regions=(EAST, WEST))


class Two:
    """Two regions in different clouds, and their autoscaler."""

    def __init__(
        self, wanted: ClusterTarget = BOTH, provider: MachineProvider | None = None
    ) -> None:
        self.clock = VirtualClock(1_000_000.0)
        self.cloud = SimulatedCloud(
            {pool: forever(0.3) for pool in wanted.pools()},
            self.clock.now_s,
            SimCloudBehavior(10.0, 60.0),
        )
        self.world = SimWorld(wanted, SimJob(1e9, join_s=5.0), self.cloud, self.clock)
        self.loop = Reconciler(
            AutoscalePolicy(CONFIG, "c"),
            wanted,
            provider or self.cloud,
            self.world,
            self.world,
            Journal(MemoryStore(), 1),
            "c",
            Unfenced(),
        )

    def look(self) -> TickResult:
        result = self.loop.tick(self.clock.now_s())
        self.world.advance_to_s(self.clock.now_s() + 10.0)
        return result

    def looks(self, count: int) -> list[TickResult]:
        return [self.look() for _ in range(count)]

    def alive(self) -> dict[str, int]:
        found = {"r-1": 0, "r-2": 0}
        for each in self.cloud.alive():
            found[each.machine.pool.region] += 1
        return found


def where(result: TickResult) -> set[str]:
    """Return the regions with actions."""
    return {action.region for action in result.decided.actions}


def test_reachable_regions_launch_while_one_is_unreachable_from_the_start() -> None:
    two = Two()
    two.cloud.unreachable = {"r-1"}
    found = two.looks(60)
    assert two.alive() == {"r-1": 0, "r-2": 2}
    assert set().union(*map(where, found)) == {"west"}
    two.cloud.unreachable = set()
    two.looks(5)
    assert two.alive() == {"r-1": 2, "r-2": 2}


def test_the_status_reports_unreachable_regions_with_duration_and_reason() -> None:
    two = Two()
    two.looks(3)
    two.cloud.unreachable = {"r-1"}
    two.look()
    (told,) = two.looks(3)[-1].errors
    assert told.startswith("r-1 has not answered for 30 s")
    assert told.endswith("no answer")
    two.cloud.unreachable = set()
    assert not two.look().errors


def test_machines_of_an_unreachable_region_are_charged_and_not_lost() -> None:
    two = Two()
    two.looks(10)
    before = set(two.cloud.machines)
    two.cloud.unreachable = {"r-1"}
    found = two.looks(200)  # 2000 s: longer than any time that runs against a machine
    assert not any(result.decided.actions for result in found)
    assert two.loop.journal.read().ledger.paid_usd == pytest.approx(two.cloud.bill_usd(), rel=0.02)
    assert found[-1].decided.usd_per_hour == pytest.approx(4 * 0.3)
    two.cloud.unreachable = set()
    assert not any(result.decided.actions for result in two.looks(30))
    assert set(two.cloud.machines) == before
    assert all(record.preemptions == 0 for record in two.loop.journal.read().pools.values())


def test_reachable_regions_are_reconciled_during_an_outage() -> None:
    two = Two()
    two.looks(10)
    two.cloud.unreachable = {"r-1"}
    lost = next(each for each in two.cloud.alive() if each.machine.pool.region == "r-2")
    lost.ended_unix_s = two.clock.now_s()
    assert where(two.look()) == {"west"}
    two.looks(10)
    assert two.alive() == {"r-1": 2, "r-2": 2}
    two.loop.target = target(regions=(replace(EAST, rows_per_s=10.0), replace(WEST, rows_per_s=30)))
    assert set().union(*map(where, two.looks(60))) == {"west"}
    assert two.alive() == {"r-1": 2, "r-2": 3}
    two.cloud.unreachable = set()
    two.looks(40)
    assert two.alive() == {"r-1": 1, "r-2": 3}


def test_a_machine_that_ended_during_an_outage_is_replaced_after_it() -> None:
    two = Two()
    two.looks(10)
    two.cloud.unreachable = {"r-1"}
    lost = next(each for each in two.cloud.alive() if each.machine.pool.region == "r-1")
    lost.ended_unix_s = two.clock.now_s()
    two.looks(50)
    assert two.alive() == {"r-1": 1, "r-2": 2}
    two.cloud.unreachable = set()
    two.looks(2)
    assert two.alive() == {"r-1": 2, "r-2": 2}


def test_what_is_not_needed_any_more_ends_as_soon_as_its_region_answers() -> None:
    two = Two()
    two.looks(10)
    two.cloud.unreachable = {"r-1"}
    two.world.done_s = two.world.job.work_s
    two.looks(10)
    assert two.alive() == {"r-1": 2, "r-2": 0}
    two.cloud.unreachable = set()
    two.looks(10)
    assert two.alive() == {"r-1": 0, "r-2": 0}


def test_a_launch_into_an_unreachable_region_is_neither_resent_nor_abandoned() -> None:
    two = Two()
    send = two.cloud.launch

    def launch(request: LaunchRequest):  # type: ignore[no-untyped-def]
        if request.pool.region == "r-1":
            two.cloud.unreachable = {"r-1"}
        return send(request)

    two.loop.provider = Launching(two.cloud, launch)
    (first,) = [e for e in launches(two.look().decided) if e.region == "east"]
    assert not any("east" in where(result) for result in two.looks(100))
    two.loop.provider = two.cloud
    two.cloud.unreachable = set()
    (again,) = [each for each in two.look().decided.actions if isinstance(each, Launch)]
    assert again.request == first.request
    assert two.alive() == {"r-1": 2, "r-2": 2}


class Launching:
    """A cloud with a custom launch function."""

    def __init__(self, inner: SimulatedCloud, launch) -> None:  # type: ignore[no-untyped-def]
        self.name, self.launch = inner.name, launch
        self.list_machines, self.terminate = inner.list_machines, inner.terminate
        self.poll_failures, self.availability = inner.poll_failures, inner.availability


def test_a_budget_counts_machines_of_an_unreachable_region() -> None:
    two = Two(target(regions=(EAST, WEST), budget_usd=0.5))
    two.looks(10)
    two.cloud.unreachable = {"r-1"}
    found = two.looks(200)
    assert {drain.reason for result in found for drain in drains(result.decided)} == {BUDGET}
    assert two.alive() == {"r-1": 2, "r-2": 0}
    # Without those of the silent region it would have lasted twice as long.
    stopped = next(result for result in found if result.decided.required.reason == BUDGET)
    assert stopped.observed.now_unix_s - 1_000_000.0 <= 0.5 / (4 * 0.3) * 3600 + 10


class Mute(SimWorld):
    """A job that does not report its remaining work."""

    def left_s(self) -> float | None:
        raise RunDirectoryError("the run cannot be read")


def test_with_unknown_demand_only_the_budget_is_enforced() -> None:
    two = Two(target(regions=(EAST, WEST), budget_usd=1.0))
    two.looks(10)
    two.loop.work = Mute(two.loop.target, two.world.job, two.cloud, two.clock)
    lost = next(each for each in two.cloud.alive() if each.machine.pool.region == "r-2")
    lost.ended_unix_s = two.clock.now_s()
    found = two.looks(100)
    assert all(not result.decided.actions and result.errors for result in found)
    assert {result.decided.required.reason for result in found} == {UNKNOWN}
    paid_usd = two.loop.journal.read().ledger.paid_usd
    assert paid_usd == pytest.approx(two.cloud.bill_usd(), rel=0.02)
    found = two.looks(500)
    assert {drain.reason for result in found for drain in drains(result.decided)} == {BUDGET}
    assert any(r.decided.required.saves and r.decided.required.reason == UNKNOWN for r in found)
    assert two.alive() == {"r-1": 0, "r-2": 0}
    assert 0.95 <= two.cloud.bill_usd() <= 1.0


def test_each_of_several_errors_is_of_its_own_region() -> None:
    """Launches and terminations: a failure in one region does not affect the others."""
    two = Two()
    east, west = (SimulatedCloud({p: forever(0.3) for p in BOTH.pools() if p.region == at},
                                 two.clock.now_s) for at in ("r-1", "r-2"))  # fmt: skip

    class Broken(Launching):
        def __init__(self, inner: SimulatedCloud) -> None:
            super().__init__(inner, self.fail)
            self.terminate = self.fail

        def fail(self, _: object) -> None:
            raise ValueError("whatever a library of the cloud's may raise")

    two.loop.provider = RegionProviders({"r-1": Broken(east), "r-2": west})
    two.world.cloud = west
    result = two.look()
    assert any("whatever" in error for error in result.errors)
    assert len(west.alive()) == 2
    assert not east.alive()


def test_a_cloud_without_any_answer_is_unreachable_in_all_regions() -> None:
    two = Two()
    two.looks(10)
    two.cloud.behavior = replace(two.cloud.behavior, refusal=1.0)
    found = two.looks(50)
    assert not any(result.decided.actions for result in found)
    assert set(found[-1].observed.unreachable) == {"r-1", "r-2"}
    assert found[-1].decided.usd_per_hour == pytest.approx(4 * 0.3)
    two.cloud.behavior = replace(two.cloud.behavior, refusal=0.0)
    assert not any(result.decided.actions for result in two.looks(20))
    assert two.alive() == {"r-1": 2, "r-2": 2}


def test_prices_of_one_region_that_fail_leave_all_at_their_last_price() -> None:
    two = Two()
    two.looks(10)
    ask = two.cloud.availability

    def availability(pools):  # type: ignore[no-untyped-def]
        two.cloud.unreachable = {"r-1"}
        try:
            return ask(pools)
        finally:
            two.cloud.unreachable = set()

    provider = Launching(two.cloud, two.cloud.launch)
    provider.availability = availability
    two.loop.provider = provider
    found = two.looks(10)
    assert any("r-1 quotes no prices" in error for result in found for error in result.errors)
    assert not any(result.observed.unreachable for result in found)
    lost = next(each for each in two.cloud.alive() if each.machine.pool.region == "r-1")
    lost.ended_unix_s = two.clock.now_s()
    assert [each.request.pool.region for each in launches(two.look().decided)] == ["r-1"]


def test_an_outage_does_not_count_towards_the_join_timeout() -> None:
    """Policy only: the join timeout of a new machine continues only after the outage."""
    wanted, policy = target(regions=(EAST,)), AutoscalePolicy(CONFIG, "c")
    memory, now_s = AutoscalerState(), 1_000_000.0
    availabilities = {pool: Availability(pool, 0.3) for pool in wanted.pools()}
    decided = policy.decide(wanted, memory, Observed(now_s, (), availabilities=availabilities))
    (launch,) = launches(decided)
    request = launch.request
    machines = tuple(
        Machine(f"m{n}", request.request_id, request.pool, MachineState.RUNNING, now_s, None,
                request.labels, request.ends_unix_s)
        for n in range(request.count)
    )  # fmt: skip
    memory = policy.decide(wanted, decided.memory, Observed(now_s + 10, machines)).memory
    unreachable = {"r-1": RegionOutage(now_s + 20, "no answer")}
    for passed_s in range(20, 1000, 10):
        observed = Observed(now_s + passed_s, (), unreachable=unreachable)
        decided = policy.decide(wanted, memory, observed)
        memory = decided.memory
        assert not decided.actions
    ready = {machine.id: ObservedNode(is_ready=True) for machine in machines[1:]}
    for passed_s in range(1000, 1000 + int(CONFIG.retry.join_s) - 20, 10):
        decided = policy.decide(wanted, memory, Observed(now_s + passed_s, machines, ready))
        memory = decided.memory
        assert not ends(decided)
