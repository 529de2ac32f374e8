"""Regions without a planned speed: demand launches machines, busy ones stay, idle ones leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_ray.cloud.autoscaler.demand import WAITS
from geo_ray.cloud.autoscaler.node_group import TOO_MANY
from geo_ray.cloud.autoscaler.observation import (
    LIFE,
    NOTICE,
    LabelWanted,
    PendingBundle,
    PendingGroup,
)
from geo_ray.cloud.autoscaler.policy import BUDGET, DONE, STRANGER
from geo_ray.cloud.autoscaler.target import REGION_LABEL, TYPE_LABEL, MachineKind
from geo_ray.cloud.provider import Market
from tests.support.autoscale_support import (
    BIG,
    BIG_SPOT_A,
    CONFIG,
    KNOWN,
    ON_DEMAND_A,
    SMALL,
    SPOT_A,
    SPOT_B,
    Scene,
    drains,
    ends,
    launches,
    region,
    scene,
    target,
    waiting,
    with_one_busy,
)


def types(scene: Scene) -> list[str]:
    return sorted(pool.type for pool in scene.pools())


# ------------------------------------------------------------------ what waits


def test_what_waits_and_what_runs_has_machines_and_idle_ones_end() -> None:
    found = scene(waiting(2, CPU=4.0))
    decided = found.look()
    assert {launch.reason for launch in launches(decided)} == {WAITS}
    assert launches(decided)[0].alternatives[0].chosen == 2
    assert types(found) == ["small", "small"]
    assert not any(found.look().actions for _ in range(5)), "they are on their way"
    found.pending, found.busy = (), True
    assert not any(found.look().actions for _ in range(60))
    found.pending = (waiting(CPU=4.0),)
    found.look()
    assert len(found.machines) == 3
    found.pending, found.busy = (), False
    assert not any(found.look().actions for _ in range(12))
    assert {(e.reason, e.only_idle) for e in ends(found.look())} == {(TOO_MANY, True)}
    assert not found.machines


def test_a_planned_region_is_not_rented_for_twice_while_its_groups_wait() -> None:
    found = Scene(config=KNOWN, pending=(waiting(9, CPU=4.0),))
    found.looks(5)
    assert len(found.machines) == 3


def test_without_the_resources_of_a_type_what_waits_is_not_followed() -> None:
    found = scene(waiting(2, CPU=4.0), config=CONFIG)
    assert not any(decided.actions or decided.notes for decided in found.looks(5))


def test_a_bundle_that_only_a_large_machine_takes_rents_one_although_small_ones_are_idle() -> None:
    found = scene(waiting(CPU=4.0))
    found.look()
    assert types(found) == ["small"]
    found.pending = (waiting(CPU=12.0),)
    (launch,) = launches(found.look())
    assert (launch.request.pool, launch.request.count) == (BIG_SPOT_A, 1)


def test_just_placed_demand_that_is_still_listed_launches_nothing() -> None:
    """Ray reports demand up to a second later than load."""
    found = scene(waiting(2, CPU=4.0))
    found.look()
    found.busy = True
    assert not found.look().actions
    assert launches(found.look()), "by now it is something else that waits"


def test_bundles_that_pack_badly_have_as_many_machines_as_they_need() -> None:
    """Bundles of three quarters of a machine: their sum is three machines, but four are needed."""
    found = scene(waiting(4, CPU=3.0), region={"kinds": (SMALL,)})
    found.looks(3)
    assert len(found.machines) == 4


def test_of_a_group_that_is_not_placed_in_part_no_part_is_rented() -> None:
    few = {"kinds": (replace(SMALL, cap=2),)}
    found = scene(waiting(5, "PACK", CPU=4.0), region=few)
    for decided in found.looks(50):
        assert not decided.actions
        (note,) = decided.notes
        assert "needs more machines than the 4" in note
    assert scene(waiting(4, "PACK", CPU=4.0), region=few).look().actions


def test_an_infeasible_bundle_launches_nothing_and_is_reported() -> None:
    found = scene(waiting(3, CPU=20.0), waiting(CPU=1.0))
    for decided in found.looks(50):
        (note,) = decided.notes
        assert "a bundle of 20 CPU waits in r" in note
        assert "the largest of which is big with 16 CPU" in note
    assert types(found) == ["small"], "the other one has its machine"
    found.pending = ()
    assert found.look().notes == ()


def test_a_group_on_one_machine_is_as_large_as_its_sum() -> None:
    found = scene(waiting(3, "STRICT_PACK", CPU=4.0))
    found.look()
    assert types(found) == ["big"]
    found.pending = (waiting(5, "STRICT_PACK", CPU=4.0),)
    (note,) = found.look().notes
    assert "a bundle of 20 CPU" in note


def test_a_bundle_for_a_type_has_that_type() -> None:
    labels = (LabelWanted(REGION_LABEL, ("r",)), LabelWanted(TYPE_LABEL, ("big",)))
    found = scene(PendingGroup((PendingBundle({"CPU": 1.0}, labels),)))
    found.look()
    assert types(found) == ["big"]


def test_another_type_takes_what_the_cheapest_is_sold_out_of() -> None:
    found = scene(waiting(2, CPU=4.0), sold_out={SPOT_A, SPOT_B, ON_DEMAND_A})
    found.looks(8)
    assert types(found)[0] == "big"
    assert all(pool.type == "big" or pool.zone == "r-1b" for pool in found.pools())


def test_what_ray_finds_on_a_machine_counts_and_not_what_was_said() -> None:
    """4 CPUs are configured, 3 exist: a bundle of 4 would launch machines forever."""
    found = scene(waiting(CPU=4.0), region={"kinds": (SMALL,)}, resources={"small": {"CPU": 3.0}})
    rented = 0
    for _ in range(200):
        decided = found.look()
        rented += sum(launch.request.count for launch in launches(decided))
    assert rented == 1
    assert not found.machines
    assert any("has 4 CPU of small, and Ray finds 3 CPU there" in note for note in decided.notes)
    assert any("the largest of which is small with 3 CPU" in note for note in decided.notes)


def test_one_machine_is_on_demand_where_the_floor_says_so_and_the_server_has_its_own() -> None:
    found = scene(waiting(3, CPU=4.0), region={"floor": 1, "kinds": (SMALL,)})
    found.looks(2)
    assert [pool.market for pool in found.pools()].count(Market.ON_DEMAND) == 1
    server = MachineKind("cpu", 1.0, 2)
    found = scene(waiting(1, CPU=4.0), region={"floor": 1, "server": server, "kinds": (SMALL,)})
    found.looks(2)
    markets = {(pool.type, pool.market) for pool in found.pools()}
    assert markets == {("cpu", Market.ON_DEMAND), ("small", Market.SPOT)}
    found.pending, found.busy = (), {n for n, m in found.machines.items() if m.pool.type == "cpu"}
    found.looks(60)
    assert types(found) == ["cpu"], "what runs on the server's machine keeps it"
    found.busy = False
    found.looks(14)
    assert not found.machines


# ------------------------------------------------------------------ what runs is left alone


def test_the_idle_one_leaves_and_the_busy_one_stays_whatever_they_cost() -> None:
    found, busy, idle = with_one_busy()
    found.machines[busy] = replace(found.machines[busy], pool=ON_DEMAND_A)  # three times as dear
    taken = {e.machine_id for decided in found.looks(200) for e in ends(decided)}
    assert taken == {idle}
    assert set(found.machines) == {busy}


def test_a_busy_machine_is_not_exchanged_for_a_cheaper_one() -> None:
    found, busy, _ = with_one_busy()
    found.looks(80)
    found.usd[SPOT_B] = 0.01
    assert not any(decided.actions for decided in found.looks(200))
    assert set(found.machines) == {busy}


def test_a_busy_machine_of_a_type_or_region_that_the_target_has_no_more_stays_until_idle() -> None:
    for change in (
        {"regions": (region(rows_per_s=0.0, kinds=(BIG,)),)},
        {"regions": (region(name="other", rows_per_s=0.0),)},
        {"regions": (region(name="other", rows_per_s=30.0),)},
        {"regions": ()},
    ):
        found, busy, idle = with_one_busy()
        found.target = target(**change)
        for each in found.target.pools():
            found.usd.setdefault(each, 0.6)
        found.looks(60)
        assert busy in found.machines, change
        assert idle not in found.machines, change
        found.busy = False
        taken = {e.machine_id: e.reason for decided in found.looks(14) for e in ends(decided)}
        assert taken[busy] in (TOO_MANY, STRANGER), change
        assert busy not in found.machines, change


def test_a_machine_of_a_plan_stays_at_work_when_the_target_names_no_speed_any_more() -> None:
    found = Scene(busy=True)
    found.look()
    planned = set(found.machines)
    assert len(planned) == 3
    found.target = target(regions=(region(rows_per_s=0.0),))
    assert not any(decided.actions for decided in found.looks(100))
    found.busy = set(sorted(planned)[:1])
    found.looks(14)
    assert set(found.machines) == found.busy


def test_a_machine_on_which_something_began_in_the_last_moment_stays_and_is_free_again() -> None:
    found, busy, idle = with_one_busy()
    found.begun = {idle}
    asked = [e for decided in found.looks(14) for e in ends(decided)]
    assert asked and {(e.machine_id, e.only_idle) for e in asked} == {(idle, True)}
    assert idle in found.machines, "Ray says that something runs there"
    found.busy = {busy, idle}
    assert not any(decided.actions for decided in found.looks(100))
    assert found.memory.instances[idle].termination is None
    found.begun, found.busy = set(), {busy}
    assert not any(ends(decided) for decided in found.looks(12)), "its time begins anew"
    assert [e.machine_id for e in ends(found.look())] == [idle]
    record = found.memory.pool(SPOT_A)
    assert record.preemptions == 0


def test_a_machine_is_idle_for_itself() -> None:
    """A machine that became idle just now does not leave with one that was idle for long."""
    found, busy, idle = with_one_busy()
    found.looks(8)
    found.busy = False
    taken: dict[str, float] = {}
    for _ in range(30):
        for end in ends(found.look()):
            taken.setdefault(end.machine_id, found.now_s)
    assert taken[busy] - taken[idle] >= 80.0


# ------------------------------------------------------------------ what goes all the same


def test_a_busy_machine_near_the_end_of_its_life_is_replaced_first_and_then_drained() -> None:
    found, busy, _ = with_one_busy()
    found.looks(14)
    ends_s = found.machines[busy].ends_unix_s
    assert ends_s is not None and set(found.machines) == {busy}
    found.now_s = ends_s - CONFIG.lead_s
    decided = found.look()
    assert [launch.request.count for launch in launches(decided)] == [1]
    assert not drains(decided)
    (new,) = set(found.machines) - {busy}
    found.unready = {new}
    assert not found.look().actions, "the other one does not compute yet"
    found.unready = set()
    decided = found.look()
    assert [(d.machine_id, d.reason) for d in drains(decided)] == [(busy, LIFE)]
    assert not ends(decided)
    assert not found.look().actions, "it has its time, and the new one is not idle for nothing"
    found.pending, found.busy = (waiting(CPU=4.0),), False
    assert [e.machine_id for e in ends(found.look())] == [busy]
    found.looks(30)
    assert set(found.machines) == {new}


def test_one_that_cannot_be_replaced_has_its_time_to_leave_all_the_same() -> None:
    found, busy, _ = with_one_busy()
    found.looks(14)
    found.usd = dict.fromkeys(found.usd)  # nothing is for sale
    ends_s = found.machines[busy].ends_unix_s or 0.0
    found.now_s = ends_s - CONFIG.lead_s
    assert not found.look().actions
    found.now_s = ends_s - CONFIG.drain_s - 2 * CONFIG.every_s - 10.0
    decided = found.look()
    assert [(d.machine_id, d.reason) for d in drains(decided)] == [(busy, LIFE)]


def test_a_busy_machine_with_a_notice_is_drained_and_replaced_at_once() -> None:
    found, busy, _ = with_one_busy()
    found.looks(14)
    found.machines[busy] = replace(found.machines[busy], ends_unix_s=found.now_s + 120)
    decided = found.look()
    assert [(d.machine_id, d.reason) for d in drains(decided)] == [(busy, NOTICE)]
    assert [launch.request.count for launch in launches(decided)] == [1]
    assert not any(launches(decided) for decided in found.looks(2)), "once"
    assert len(found.machines) == 2


def test_a_busy_machine_that_its_own_agent_drains_is_replaced_at_once() -> None:
    found, busy, _ = with_one_busy()
    found.looks(14)
    found.leaves[busy] = found.now_s + 100
    decided = found.look()
    assert [d.machine_id for d in drains(decided)] == [busy]
    assert [launch.request.count for launch in launches(decided)] == [1]
    assert not any(launches(each) or drains(each) for each in found.looks(2)), "once"


def test_a_machine_that_is_let_go_when_idle_and_works_again_is_not_drained() -> None:
    found, busy, idle = with_one_busy()
    found.begun = {idle}
    found.looks(13)
    assert found.memory.instances[idle].termination is not None
    found.busy = {busy, idle}
    assert not any(drains(each) or ends(each) for each in found.looks(20))
    assert found.memory.instances[idle].termination is None


def test_a_group_that_waits_for_an_unreachable_region_launches_nothing() -> None:
    group = PendingGroup(
        tuple(
            PendingBundle({"CPU": 4.0}, (LabelWanted(REGION_LABEL, (name,)),))
            for name in ("r", "far")
        ),
        "SPREAD",
    )
    near = region(rows_per_s=0.0, kinds=(SMALL,))
    far = region(name="far", at="r-2", zones=("r-2a",), rows_per_s=0.0, kinds=(SMALL,))
    found = Scene(target(regions=(near, far)), KNOWN, pending=(group, waiting(CPU=4.0)))
    found.unreachable = {"r-2"}
    rented = [launch.request for decided in found.looks(3) for launch in launches(decided)]
    assert [(each.pool.region, each.count) for each in rented] == [("r-1", 1)], "what waits alone"
    found.unreachable = set()
    rented = [launch.request for launch in launches(found.look())]
    assert sorted(each.pool.region for each in rented) == ["r-1", "r-2"]


def test_what_does_not_wait_any_more_is_not_sent_again_and_called_off_after_a_while() -> None:
    found = scene(waiting(CPU=4.0), deaf={SPOT_A, SPOT_B})
    (launch,) = launches(found.look())
    found.pending = ()
    assert not any(each.actions for each in found.looks(10))
    assert launch.request.request_id in found.memory.pending_launches, "it may wait again"
    found.looks(10)
    assert not found.memory.pending_launches


@pytest.mark.parametrize("over", ["done", "budget"])
def test_the_end_of_the_job_and_of_the_budget_are_about_busy_ones_too(over: str) -> None:
    found, busy, _ = with_one_busy()
    if over == "done":
        found.is_released = True
    else:
        found.target = replace(found.target, budget_usd=1e-6)
    decided = found.look()
    assert {d.reason for d in drains(decided)} == {DONE if over == "done" else BUDGET}
    assert busy in {d.machine_id for d in drains(decided)}
    found.looks(4)
    assert not found.machines


@pytest.mark.parametrize("period_s", [40, 120, 400, 2000])
def test_a_demand_that_goes_to_and_fro_ends_each_machine_at_most_once_in_an_idle_time(
    period_s: int,
) -> None:
    found = scene(region={"kinds": (SMALL,)})
    ended: set[str] = set()
    rented = 0
    for number in range(720):
        low = (number * 20 // period_s) % 2
        found.pending = () if low else (waiting(3, CPU=4.0),)
        decided = found.look(20.0)
        ended |= {end.machine_id for end in ends(decided)}
        rented += sum(launch.request.count for launch in launches(decided))
    periods = 720 * 20 / max(2 * period_s, CONFIG.calm.idle_s)
    assert len(ended) <= 3 * periods + 3
    assert rented <= 3 * periods + 3
    if period_s <= CONFIG.calm.idle_s - 40:
        assert not ended
