"""Costs that the autoscaler accounts for: machines, the head, and machines that never worked."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from geo_ray.cloud.autoscaler.observation import HEAD, NO_NODE_CAME, UNWANTED
from geo_ray.cloud.autoscaler.policy import BUDGET
from geo_ray.cloud.autoscaler.target import ROLE_LABEL, HeadTarget
from geo_ray.cloud.provider import Machine, MachineState, Market, Pool
from tests.support.autoscale_support import (
    AGED,
    CONFIG,
    ON_DEMAND_A,
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
from tests.support.autoscale_support import scene as waiting_scene

# ------------------------------------------------------------------ the books


def test_the_ledger_has_what_was_quoted_and_what_it_came_to() -> None:
    scene = Scene()
    scene.looks(361)
    scene.usd[SPOT_A] = scene.usd[SPOT_B] = 0.6
    scene.looks(360)
    ((name, reason, row),) = scene.memory.ledger.by_region_and_reason()
    assert (name, reason) == ("r", "the plan")
    assert row.machine_h == pytest.approx(6.0, rel=0.01)
    assert row.quoted_usd == pytest.approx(3 * 2 * 0.3, rel=0.01)
    assert row.paid_usd == pytest.approx(3 * (0.3 + 0.6), rel=0.01)


# ------------------------------------------------------------------ the head


HEAD_POOL = Pool("r-1", None, "small", Market.ON_DEMAND)


def with_head(scene: Scene, name: str = "head", age_s: float = 0.0) -> None:
    """List a Ray head in a zone chosen by the cloud."""
    pool = replace(HEAD_POOL, zone="r-1c")
    began_s, labels = scene.now_s - age_s, {ROLE_LABEL: "head"}
    scene.machines[name] = Machine(
        name, f"head-{name}", pool, MachineState.RUNNING, began_s, "10.0.0.1", labels
    )


def test_the_head_is_paid_from_its_start_by_its_price_and_age() -> None:
    head = HeadTarget(HEAD_POOL, replace(AGED, list_usd_per_hour=9.0))
    scene = Scene(target(regions=(), head=head))
    scene.usd[HEAD_POOL] = 2.0
    with_head(scene, age_s=1800.0)
    decided = scene.look()
    assert decided.actions == ()
    assert decided.usd_per_hour == 2.0
    scene.looks(179)
    row = scene.memory.ledger.row("", HEAD)
    assert row.machine_h == pytest.approx(1.0, rel=0.01)
    assert row.paid_usd == pytest.approx(2.0, rel=0.01)
    scene.usd[HEAD_POOL] = None
    assert scene.look().usd_per_hour == 2.0, "the last price that was seen"
    scene.usd[HEAD_POOL] = 2.0
    scene.look(100 * 3600.0)
    assert scene.look().usd_per_hour == 1.0, "half of it from the 96th hour on"
    ((region_, reason, row),) = scene.memory.ledger.by_region_and_reason()
    assert (region_, reason) == ("", HEAD)
    assert row.paid_usd == pytest.approx(96 * 2.0 + 5 * 1.0, rel=0.01)


def test_a_head_of_others_is_not_paid() -> None:
    scene = Scene(target(regions=()))
    with_head(scene)
    assert {decided.usd_per_hour for decided in scene.looks(10)} == {0.0}
    assert scene.memory.ledger.paid_usd == 0.0


def test_a_replaced_head_is_charged_until_it_was_last_listed() -> None:
    scene = Scene(target(regions=(), head=HeadTarget(HEAD_POOL, SMALL)))
    scene.usd[HEAD_POOL] = 3600.0  # a dollar a second
    with_head(scene)
    scene.look()
    with_head(scene, "other")
    assert scene.look().usd_per_hour == 2 * 3600.0
    del scene.machines["head"]
    assert scene.looks(8)[-1].usd_per_hour == 3600.0
    assert scene.memory.ledger.paid_usd == pytest.approx(20.0 + 90.0)
    del scene.machines["other"]  # a list that lacks what this runs on
    assert scene.looks(20)[-1].usd_per_hour == 3600.0
    with_head(scene, "other", age_s=290.0)
    scene.look()
    assert scene.memory.ledger.paid_usd == pytest.approx(20.0 + 300.0), "and not twice"


def test_the_budget_has_the_head_in_it_as_has_the_money_to_stop() -> None:
    scene = Scene(busy=True, left_s=1e6)
    scene.target = target(budget_usd=1.0, head=HeadTarget(HEAD_POOL, SMALL))
    scene.usd[HEAD_POOL] = 3.6
    with_head(scene)
    reasons = []
    while set(scene.machines) != {"head"} or not reasons:
        decided = scene.look()
        reasons += [d.reason for d in drains(decided)]
    assert set(reasons) == {BUDGET}
    assert 0.95 <= scene.memory.ledger.paid_usd <= 1.0
    assert scene.memory.ledger.row("", HEAD).paid_usd == pytest.approx(0.8, rel=0.05)
    assert not any(launches(decided) for decided in scene.looks(50))
    assert set(scene.machines) == {"head"}, "who keeps the books is not ended"


def many(budget_usd: float, count: int = 100) -> Scene:
    """Return a plan with several machines at one dollar per hour each."""
    kind = replace(SMALL, cap=count)
    wanted = region(zones=("r-1a",), rows_per_s=10.0 * count, kinds=(kind,))
    scene = Scene(target(regions=(wanted,), budget_usd=budget_usd), busy=True, left_s=1e6)
    scene.usd = {SPOT_A: 1.0, ON_DEMAND_A: None}
    return scene


@pytest.mark.parametrize("first_usd", [10.0, 0.05])
def test_nothing_is_rented_for_which_the_budget_has_not_the_money_to_start_and_stop_it(
    first_usd: float,
) -> None:
    scene = many(first_usd)
    asked = [launch for decided in scene.looks(60) for launch in launches(decided)]
    paid_usd = scene.memory.ledger.paid_usd
    assert paid_usd <= first_usd and not scene.machines
    assert bool(asked) == (first_usd == 10.0), "a hundred machines cost 3 USD until they are gone"
    scene.target = replace(scene.target, budget_usd=first_usd + 0.05)
    decided = scene.look()
    assert not launches(decided)
    assert any("100 x small spot in r-1a" in note for note in decided.notes)
    assert scene.look().required.reason == BUDGET, "and who waits for its machines knows"
    scene.looks(20)
    assert scene.memory.ledger.paid_usd == paid_usd
    scene.target = replace(scene.target, budget_usd=first_usd + 10.0)
    assert launches(scene.look())


def test_losses_near_the_end_of_the_budget_are_not_replaced() -> None:
    scene = many(1.0, 10)
    while scene.memory.ledger.paid_usd < 0.75:
        scene.look()
    lost = sorted(scene.machines)[0]
    scene.machines[lost] = replace(scene.machines[lost], state=MachineState.ENDED)
    decided = scene.look()
    assert not decided.actions and any("1 x small spot" in note for note in decided.notes)
    del scene.machines[lost]
    assert scene.memory.required.stopped_at_usd is None
    scene.looks(60)
    assert not scene.machines
    assert 0.95 <= scene.memory.ledger.paid_usd <= 1.0


def test_what_waits_and_costs_too_much_keeps_nothing_smaller_from_being_rented() -> None:
    scene = waiting_scene(waiting(100, CPU=4.0), region={"kinds": (replace(SMALL, cap=100),)})
    scene.target = replace(scene.target, budget_usd=0.5)
    decided = scene.look()
    assert not launches(decided) and any("are not launched" in note for note in decided.notes)
    scene.pending = (waiting(CPU=4.0),)
    assert len(launches(scene.look())) == 1


# ------------------------------------------------------------------ what nobody waits for


def refused(**fields: Any) -> Scene:
    """Return three machines that appear after their request was withdrawn and cannot be ended."""
    scene = Scene(deaf={SPOT_A, SPOT_B}, **fields)
    (launch,) = launches(scene.look())
    scene.target = replace(scene.target, regions=(region(rows_per_s=0.0),))
    scene.looks(int(CONFIG.calm.idle_s / 10) + 2)
    assert not scene.memory.pending_launches
    scene.deaf.clear()
    scene._do(launch)
    scene.retained = set(scene.machines)
    return scene


def test_unneeded_machines_are_charged_until_they_end() -> None:
    scene = refused()
    for decided in scene.looks(360):
        assert {end.machine_id for end in ends(decided)} == scene.retained
        assert not launches(decided) and not drains(decided)
        assert decided.usd_per_hour == pytest.approx(0.9)
    ((name, reason, row),) = scene.memory.ledger.by_region_and_reason()
    assert (name, reason) == ("r", UNWANTED)
    assert row.paid_usd == pytest.approx(0.9, rel=0.01)
    scene.retained = set()
    scene.looks(2)
    assert not scene.machines and scene.look().usd_per_hour > 0
    scene.looks(10)
    assert not scene.memory.instances and scene.memory.ledger.paid_usd < 0.93


def test_the_budget_has_them_in_it() -> None:
    scene = refused(target=target(budget_usd=1.0))
    decided = scene.looks(400)[-1]
    assert decided.required.reason == BUDGET
    assert len(ends(decided)) == 3


def test_withdrawn_machines_are_not_used() -> None:
    """New demand does not wait for them either."""
    scene = refused()
    scene.look()
    scene.target = target()
    (launch,) = launches(scene.look())
    assert launch.request.count == 3
    scene.looks(3)
    assert len(scene.machines) == 6
    assert not any(launches(decided) for decided in scene.looks(20))
    scene.usd[SPOT_B] = 0.1  # nor do they keep the others from being exchanged
    assert any(launches(decided) for decided in scene.looks(60))


# ------------------------------------------------------------------ what never joins


def test_the_backoff_of_a_pool_without_joining_nodes_grows_and_is_reported() -> None:
    """One pool only: its machines start immediately, but their nodes never join."""
    scene = Scene(target(regions=(region(zones=("r-1a",), rows_per_s=20.0),)))
    scene.usd = {SPOT_A: 0.3, ON_DEMAND_A: None}
    asked: list[float] = []
    notes: list[tuple[int, tuple[str, ...]]] = []
    while len(asked) < 7:
        decided = scene.look()
        scene.unready |= set(scene.machines)
        asked += [scene.now_s for _ in launches(decided)]
        notes.append((scene.memory.pool(SPOT_A).unjoined, decided.notes))
    gaps = [later - before for before, later in itertools.pairwise(asked)]
    # Seen at the next look, the time to join, then a pause: 60 s, doubled each time up to 900 s.
    assert gaps == [10 + 300 + pause for pause in (60, 120, 240, 480, 900, 900)]
    assert all(bool(told) == (failed >= 3) for failed, told in notes)
    (note,) = notes[-1][1]
    assert "small spot in r-1a" in note and "6 consecutive launches" in note
    for word in ("image", "security group", "token"):
        assert word in note
    scene.unready.clear()
    assert scene.look().notes == (), "a node that comes ends the row"
    assert scene.memory.pool(SPOT_A).unjoined == 0


def test_another_pool_takes_the_place_of_one_whose_nodes_never_come() -> None:
    scene = Scene(usd={SPOT_A: 0.2, SPOT_B: 0.3})
    scene.look()
    scene.unready |= set(scene.machines)
    (launch,) = [launch for decided in scene.looks(31) for launch in launches(decided)]
    assert (launch.request.pool, launch.request.count) == (SPOT_B, 3)
    (other,) = [each for each in launch.alternatives if each.pool == SPOT_A]
    assert "its nodes did not join" in other.note
    assert scene.memory.pool(SPOT_A).unjoined == 1, "three machines of one launch fail once"


def test_what_never_joins_is_paid_for_its_own_reason() -> None:
    scene = Scene(usd={SPOT_A: 0.2, SPOT_B: 0.3})
    scene.look()
    lost = sorted(scene.machines)[0]
    scene.unready.add(lost)
    scene.looks(60)
    wasted = scene.memory.ledger.row("r", NO_NODE_CAME)
    assert wasted.machine_h == pytest.approx(300 / 3600, rel=0.05)
    assert wasted.paid_usd == wasted.quoted_usd == pytest.approx(0.2 * 300 / 3600, rel=0.05)
    rest = scene.memory.ledger.row("r", "the plan")
    assert rest.machine_h == pytest.approx((3 * 600 - 300) / 3600, rel=0.05)


def test_a_machine_that_ends_before_its_node_came_is_such_a_failure_too() -> None:
    scene = Scene(usd={SPOT_A: 0.2, SPOT_B: 0.3})
    scene.look()
    first = set(scene.machines)
    scene.unready |= first
    scene.look()
    scene.machines = {
        name: replace(machine, state=MachineState.ENDED) for name, machine in scene.machines.items()
    }
    (launch,) = launches(scene.look())
    assert launch.request.pool == SPOT_B
    assert scene.memory.pool(SPOT_A).unjoined == 1
    assert scene.memory.ledger.row("r", NO_NODE_CAME).paid_usd > 0


def test_a_machine_that_had_joined_is_no_such_failure() -> None:
    scene = Scene()
    scene.looks(2)
    scene.unready |= set(scene.machines)
    scene.looks(40)
    assert scene.memory.pool(SPOT_A).unjoined == 0
    assert NO_NODE_CAME not in {
        reason for _, reason, _ in scene.memory.ledger.by_region_and_reason()
    }
