"""Machines stay for `calm.idle_s` after their work, whatever ended it, and no longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_ray.cloud.autoscaler.observation import Observed
from geo_ray.cloud.autoscaler.policy import BUDGET, DONE, HOLDS, STRANGER, AutoscalePolicy
from geo_ray.cloud.autoscaler.state import decode_memory, encode_memory, set_with_clock
from geo_ray.cloud.autoscaler.target import ClusterTarget
from tests.support.autoscale_support import (
    CONFIG,
    KNOWN,
    SMALL,
    SPOT_A,
    SPOT_B,
    Scene,
    drains,
    ends,
    launches,
    region,
    target,
    waiting,
)

IDLE_LOOKS = int(CONFIG.calm.idle_s / 10)
OTHER = region(name="other", at="r-2", zones=("r-2a",), rows_per_s=10.0)
UNPLANNED = target(regions=(region(rows_per_s=0.0),))


def at_work(wanted: ClusterTarget | None = None) -> Scene:
    """Return three busy machines of a plan."""
    found = Scene(wanted or target(), KNOWN, left_s=1e6, busy=True)
    found.looks(3)
    assert len(found.machines) == 3
    return found


def follow(found: Scene, wanted: ClusterTarget) -> None:
    found.target = wanted
    for pool in wanted.pools():
        found.usd.setdefault(pool, 1.0)


# ------------------------------------------------------------------ a run ends


def test_a_run_that_begins_soon_after_another_keeps_its_machines() -> None:
    found = at_work()
    before = set(found.machines)
    found.left_s, found.busy = 0.0, False
    assert not any(decided.actions for decided in found.looks(IDLE_LOOKS))
    found.left_s = 1e6
    assert not any(decided.actions for decided in found.looks(2))
    found.busy = True
    found.look()
    found.left_s, found.busy = 0.0, False
    decided = found.looks(IDLE_LOOKS)
    assert not any(each.actions for each in decided), "the time begins again with each run"
    assert {each.required.reason for each in decided} == {HOLDS}
    assert set(found.machines) == before


def test_machines_leave_when_no_other_run_has_begun() -> None:
    found = at_work()
    found.left_s, found.busy = 0.0, False
    found.looks(IDLE_LOOKS)
    assert {drain.reason for drain in drains(found.look())} == {DONE}
    found.look()
    assert not found.machines


def test_machines_stay_while_another_run_computes() -> None:
    found = at_work()
    found.left_s = 0.0  # the run of the cluster's name has ended; another one began before
    assert not any(decided.actions for decided in found.looks(2 * IDLE_LOOKS))
    found.busy = False
    found.looks(IDLE_LOOKS)
    assert {drain.reason for drain in drains(found.look())} == {DONE}


def test_another_run_that_waits_gets_the_planned_machines_again() -> None:
    found = at_work()
    found.left_s, found.busy = 0.0, False
    found.looks(IDLE_LOOKS + 2)
    assert not found.machines
    found.pending = (waiting(at="elsewhere"),)
    assert not any(launches(decided) for decided in found.looks(2))
    found.pending = (waiting(),)
    found.looks(3)
    assert len(found.machines) == 3
    found.pending, found.busy = (), True
    assert not any(decided.actions for decided in found.looks(2 * IDLE_LOOKS))
    found.pending, found.busy = (waiting(),), False
    found.is_released = True
    assert {drain.reason for drain in drains(found.look())} == {DONE}


@pytest.mark.parametrize("why", ["budget", "released"])
def test_machines_do_not_stay_beyond_the_budget_or_the_cluster(why: str) -> None:
    found = at_work()
    found.left_s, found.busy = 0.0, False
    found.looks(2)
    if why == "budget":
        follow(found, target(budget_usd=1e-6))
    else:
        found.is_released = True
    assert {drain.reason for drain in drains(found.look())} == {DONE if why != "budget" else BUDGET}
    found.look()
    assert not found.machines


def test_nothing_is_rented_after_a_run_and_what_was_asked_for_is_not_asked_for_again() -> None:
    found = at_work()
    found.deaf = {SPOT_A, SPOT_B}
    found.machines.popitem()
    found.looks(8)
    (pending_launch,) = found.memory.pending_launches.values()
    found.machines.popitem()
    found.left_s, found.busy = 0.0, False
    assert not any(launches(decided) for decided in found.looks(IDLE_LOOKS + 2))
    assert pending_launch.request.request_id not in found.memory.pending_launches
    assert not found.machines


def test_the_idle_time_after_a_run_survives_restarts_and_clock_changes() -> None:
    found = at_work()
    found.left_s, found.busy = 0.0, False
    found.looks(IDLE_LOOKS - 2)
    found.memory = decode_memory(encode_memory(set_with_clock(found.memory, 3600.0)))
    found.memory.token += 1
    found.now_s += 3600.0
    for name, machine in found.machines.items():
        ends_s = (machine.ends_unix_s or 0.0) + 3600.0
        found.machines[name] = replace(machine, ends_unix_s=ends_s)
    assert not any(decided.actions for decided in found.looks(2))
    assert len(drains(found.look())) == 3


def test_a_moment_of_unknown_demand_does_not_restart_the_timeout() -> None:
    found = at_work()
    found.left_s, found.busy = 0.0, False
    found.looks(IDLE_LOOKS - 1)
    found.now_s += 10.0
    nodes = tuple(found.machines.values())
    unknown = Observed(found.now_s, nodes, is_need_known=False)
    found.memory = AutoscalePolicy(KNOWN, "c").decide(found.target, found.memory, unknown).memory
    assert len(drains(found.look())) == 3
    found.look()
    assert not found.machines


def test_time_with_unknown_demand_is_not_idle_time() -> None:
    found = at_work()
    follow(found, UNPLANNED)
    found.busy = False
    found.looks(2)
    for _ in range(2 * IDLE_LOOKS):
        found.now_s += 10.0
        nodes = tuple(found.machines.values())
        unknown = Observed(found.now_s, nodes, is_need_known=False)
        decided = AutoscalePolicy(KNOWN, "c").decide(found.target, found.memory, unknown)
        found.memory = decided.memory
    assert not any(drains(each) or ends(each) for each in found.looks(IDLE_LOOKS - 2))
    found.looks(3)
    assert not found.machines


# ------------------------------------------------------------------ a target changes


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_region_that_a_target_has_again_soon_keeps_its_machines(is_planned: bool) -> None:
    found, first = at_work(), target()
    before = set(found.machines)
    without = target(regions=(OTHER if is_planned else replace(OTHER, rows_per_s=0.0),))
    for _ in range(3):
        follow(found, without)
        found.busy = False
        looks = [*found.looks(IDLE_LOOKS - 1)]
        follow(found, first)
        found.busy = set(before)
        looks += found.looks(3)
        gone = {each.machine_id for decided in looks for each in (*drains(decided), *ends(decided))}
        assert not gone & before
        again = [each.region for decided in looks for each in launches(decided)]
        assert "r" not in again
    assert before <= set(found.machines)


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_region_that_a_target_does_not_have_again_is_left(is_planned: bool) -> None:
    found = at_work()
    before = set(found.machines)
    follow(found, target(regions=(OTHER if is_planned else replace(OTHER, rows_per_s=0.0),)))
    found.busy = is_planned  # a plan needs them no more, whatever they do
    reasons = {
        each.reason
        for decided in found.looks(IDLE_LOOKS + 1 + int(KNOWN.drain_s / 10))
        for each in ends(decided)
        if each.machine_id in before
    }
    assert reasons == {STRANGER}
    assert not before & set(found.machines)


def test_a_request_for_a_region_that_a_target_has_again_soon_is_not_made_twice() -> None:
    found = Scene(target(), KNOWN, deaf={SPOT_A, SPOT_B})
    (launch,) = launches(found.look())
    follow(found, target(regions=(OTHER,)))
    found.looks(3)
    found.deaf = set()
    follow(found, target())
    sent = [each.request for decided in found.looks(4) for each in launches(decided)]
    assert [each for each in sent if each.labels == launch.request.labels] == [launch.request]
    assert sum(machine.pool.region == "r-1" for machine in found.machines.values()) == 3


def test_a_released_cluster_ends_busy_machines_of_regions_that_its_target_does_not_have() -> None:
    found = at_work()
    follow(found, target(regions=(replace(OTHER, rows_per_s=0.0),)))
    found.look()
    found.is_released = True
    assert {drain.reason for drain in drains(found.look())} == {DONE}
    found.looks(5)
    assert not found.machines


def test_idle_time_before_a_plan_is_no_idle_time_after_it() -> None:
    """A queue plans a region while a job runs there, and nothing between two jobs."""
    found = at_work()
    before = set(found.machines)
    for _ in range(3):
        follow(found, UNPLANNED)
        found.busy = False
        looks = found.looks(IDLE_LOOKS - 1)
        follow(found, target())
        found.busy = True
        looks += found.looks(3 * IDLE_LOOKS)
        assert not any(decided.actions for decided in looks)
    assert set(found.machines) == before


@pytest.mark.parametrize("between", ["unplanned", "unreachable", "done"])
def test_a_surplus_before_something_else_is_no_surplus_after_it(between: str) -> None:
    found = at_work()
    smaller = target(regions=(region(rows_per_s=10.0, kinds=(SMALL,)),))
    follow(found, smaller)
    assert not any(decided.actions for decided in found.looks(IDLE_LOOKS - 1))
    if between == "unplanned":
        follow(found, UNPLANNED)
    elif between == "unreachable":
        found.unreachable = {"r-1"}
    else:
        found.left_s, found.busy = 0.0, False
    found.looks(3)
    follow(found, smaller)
    found.unreachable, found.left_s, found.busy = set(), 1e6, True
    assert not any(decided.actions for decided in found.looks(IDLE_LOOKS - 1))
    assert any(drains(decided) for decided in found.looks(3))
