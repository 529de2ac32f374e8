"""Decisions of the autoscaler, one situation at a time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from geo_ray.cloud.autoscaler.node_group import CHEAPER, DEADLINE, TOO_MANY, NodeGroupPolicy
from geo_ray.cloud.autoscaler.observation import LIFE, NO_NODE_CAME, NOTICE
from geo_ray.cloud.autoscaler.policy import BUDGET, DONE, LATE
from geo_ray.cloud.autoscaler.pools import Losses
from geo_ray.cloud.autoscaler.target import MachineKind
from geo_ray.cloud.provider import LaunchFailure, LaunchFailureKind, Market
from tests.support.autoscale_support import (
    AGED,
    BIG,
    BIG_SPOT_A,
    CONFIG,
    ON_DEMAND_A,
    ON_DEMAND_B,
    SMALL,
    SPOT_A,
    SPOT_B,
    Scene,
    drains,
    ends,
    launches,
    region,
    target,
)


def looks_of(period_s: float) -> int:
    """Looks of 20 s each in more than three half periods, and in six of the longest waits."""
    return max(180, int(3.3 * period_s / 20))


# ------------------------------------------------------------------ what is rented


def test_it_rents_the_cheapest_that_the_plan_needs_and_says_what_else_there_was() -> None:
    scene = Scene(usd={SPOT_A: 0.31, SPOT_B: 0.30})
    decided = scene.look()
    (launch,) = launches(decided)
    assert (launch.request.pool, launch.request.count, launch.reason) == (SPOT_B, 3, "the plan")
    assert launch.request.labels["ray.io/availability-region"] == "r"
    assert launch.request.ends_unix_s == scene.now_s + 24 * 3600
    first, second, *others = launch.alternatives
    assert (first.pool, first.chosen, second.pool, second.chosen) == (SPOT_B, 3, SPOT_A, 0)
    assert {each.pool for each in others} == {ON_DEMAND_A, ON_DEMAND_B}
    scores = [each.usd_per_million_rows or 0.0 for each in launch.alternatives]
    assert scores == sorted(scores)
    # By hand: 0.30 USD an hour, and 0.01 preemptions of 1/60 h at what three such machines cost.
    assert scores[0] == pytest.approx((0.30 + 0.01 / 60 * 0.90) / 10 / 3600 * 1e6, rel=1e-3)
    assert not any(scene.look().actions for _ in range(100))


def test_a_larger_machine_is_taken_where_its_rows_are_cheaper() -> None:
    kinds = (BIG, SMALL)
    scene = Scene(target(regions=(region(kinds=kinds),)), usd={BIG_SPOT_A: 0.4})
    scene.look()
    assert [pool.type for pool in scene.pools()].count("big") >= 1
    assert sum(20.0 if pool.type == "big" else 10.0 for pool in scene.pools()) >= 30.0
    # Until the job is done, per speed: 2 big 0.8 / 1.33; 1 big and 1 small 0.7; 3 small 0.9
    assert sorted(pool.type for pool in scene.pools()) == ["big", "big"]


def test_the_servers_machine_and_one_worker_without_one_are_not_on_the_spot_market() -> None:
    server = MachineKind("cpu", 1.0, 2)
    scene = Scene(target(regions=(region(server=server, floor=1),)))
    scene.look()
    markets = {(pool.type, pool.market) for pool in scene.pools()}
    assert markets == {("cpu", Market.ON_DEMAND), ("small", Market.SPOT)}
    alone = Scene(target(regions=(region(floor=1),)))
    alone.look()
    assert [pool.market for pool in alone.pools()].count(Market.ON_DEMAND) == 1
    assert len(alone.machines) == 3


def test_what_has_no_price_is_not_rented_and_runs_on_at_its_last_price() -> None:
    scene = Scene()
    scene.look()
    scene.usd = dict.fromkeys(scene.usd)
    for _ in range(100):
        assert not scene.look().actions
    assert scene.memory.ledger.paid_usd == pytest.approx(3 * 0.3 * 1000 / 3600, rel=0.01)
    empty = Scene()
    empty.usd = dict.fromkeys(empty.usd)
    assert not empty.look().actions


def test_a_cap_is_of_a_type_and_market_in_all_zones() -> None:
    kind = replace(SMALL, cap=2)
    scene = Scene(target(regions=(region(kinds=(kind,), rows_per_s=30.0),)))
    scene.looks(3)
    markets = [pool.market for pool in scene.pools()]
    assert (markets.count(Market.SPOT), markets.count(Market.ON_DEMAND)) == (2, 1)


# ------------------------------------------------------------------ what does not come


def test_a_pool_that_is_sold_out_is_left_alone_and_for_longer_each_time() -> None:
    scene = Scene(usd={SPOT_A: 0.2}, sold_out={SPOT_A})
    asked = []
    for _ in range(400):
        for launch in launches(scene.look()):
            if launch.request.pool == SPOT_A:
                asked.append(scene.now_s)
        scene.machines.clear()  # all others are ended by somebody, again and again
        scene.memory.instances.clear()
    gaps = [later - before for before, later in itertools.pairwise(asked)]
    assert len(asked) <= 9
    assert gaps[0] >= 60
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 480


def test_others_take_the_place_of_what_is_sold_out_on_demand_if_need_be() -> None:
    scene = Scene(sold_out={SPOT_A, SPOT_B})
    scene.looks(4)
    assert set(scene.pools()) <= {ON_DEMAND_A, ON_DEMAND_B}
    assert len(scene.machines) == 3


def test_a_fleet_of_which_half_came_is_completed_from_elsewhere_and_nothing_is_paid_twice() -> None:
    scene = Scene(left={SPOT_A: 1, SPOT_B: 1})
    scene.looks(6)
    spot, on_demand = [SPOT_A, SPOT_B], {ON_DEMAND_A, ON_DEMAND_B}
    assert [pool for pool in scene.pools() if pool not in on_demand] == spot
    assert len(scene.machines) == 3
    for _ in range(60):
        scene.look()
        assert len(scene.machines) == 3
    assert not scene.memory.pending_launches, "nobody waits for what did not come"


def test_machines_whose_nodes_come_only_in_part_are_completed() -> None:
    scene = Scene()
    scene.look()
    late = sorted(scene.machines)[:2]
    scene.unready.update(late)
    scene.looks(40)
    assert not set(late) & set(scene.machines), "they were ended after their time"
    assert len(scene.machines) == 3


@pytest.mark.parametrize("ahead_s", [-900.0, 900.0])
def test_a_cloud_whose_clock_is_off_changes_neither_machines_nor_much_of_the_bill(
    ahead_s: float,
) -> None:
    scene = Scene(cloud_ahead_s=ahead_s)
    scene.look()
    first = set(scene.machines)
    scene.looks(90)
    assert set(scene.machines) == first
    (row,) = [row for _, _, row in scene.memory.ledger.by_region_and_reason()]
    # At most what the clocks differ by is booked besides, and nothing is taken off.
    true_h = 3 * 900 / 3600
    assert true_h - 0.01 <= row.machine_h <= true_h + 3 * 900 / 3600 + 0.01


def test_a_quota_is_of_all_zones_and_lasts() -> None:
    scene = Scene(deaf={SPOT_A, SPOT_B})
    (launch,) = launches(scene.look())
    request = launch.request
    scene.failures.append(
        LaunchFailure(
            request.request_id, request.pool, 3, LaunchFailureKind.QUOTA, "VcpuLimitExceeded"
        )
    )
    scene.looks(60)
    assert {pool.market for pool in scene.pools()} == {Market.ON_DEMAND}
    assert len(scene.machines) == 3


def test_what_was_throttled_is_sent_again_with_the_same_id() -> None:
    scene = Scene(deaf={SPOT_A, SPOT_B})
    (launch,) = launches(scene.look())
    request = launch.request
    scene.failures.append(
        LaunchFailure(request.request_id, request.pool, 3, LaunchFailureKind.THROTTLED, "slow down")
    )
    again = [launch.request for decided in scene.looks(6) for launch in launches(decided)]
    assert again
    assert set(map(repr, again)) == {repr(request)}


def test_a_launch_without_trace_is_given_up_and_what_comes_of_it_later_is_ended() -> None:
    scene = Scene(deaf={SPOT_A, SPOT_B})
    (launch,) = launches(scene.look())
    scene.looks(64)
    assert {pool.market for pool in scene.pools()} == {Market.ON_DEMAND}
    scene.deaf.clear()
    scene._do(launch)
    assert len(scene.machines) == 6
    decided = scene.look()
    assert len(ends(decided)) == 3
    assert {pool.market for pool in scene.pools()} == {Market.ON_DEMAND}


def test_machines_of_others_are_left_alone() -> None:
    scene = Scene()
    scene.look()
    head = replace(next(iter(scene.machines.values())), id="head", request_id="up-1")
    by_hand = replace(head, id="mine", request_id=None)
    scene.machines |= {"head": head, "mine": by_hand}
    scene.looks(50)
    assert {"head", "mine"} <= set(scene.machines)
    assert len(scene.machines) == 5


def test_a_machine_whose_node_never_comes_is_ended_and_replaced() -> None:
    scene = Scene()
    scene.look()
    lost = sorted(scene.machines)[0]
    scene.unready.add(lost)
    found = {end for decided in scene.looks(40) for end in ends(decided)}
    assert {(end.machine_id, end.reason) for end in found} == {(lost, NO_NODE_CAME)}
    assert len(scene.machines) == 3


def test_a_machine_that_a_list_lacks_once_is_not_replaced_but_one_that_stays_away_is() -> None:
    scene = Scene()
    scene.look()
    name, machine = scene.machines.popitem()
    scene.looks(3)
    scene.machines[name] = machine
    assert not any(launches(decided) for decided in scene.looks(20))
    del scene.machines[name]
    assert sum(len(launches(decided)) for decided in scene.looks(20)) == 1
    assert len(scene.machines) == 3


# ------------------------------------------------------------------ what leaves


def test_a_notice_drains_at_once_and_its_replacement_is_on_its_way() -> None:
    scene = Scene(busy=True)
    scene.look()
    name = sorted(scene.machines)[0]
    machine = replace(scene.machines[name], ends_unix_s=scene.now_s + 120)
    scene.machines[name] = machine
    decided = scene.look()
    assert [(d.machine_id, d.reason) for d in drains(decided)] == [(name, NOTICE)]
    assert sum(launch.request.count for launch in launches(decided)) == 1
    assert not ends(decided), "a busy node is not taken"
    record = scene.memory.pool(machine.pool)
    assert record.preemptions == 1
    assert scene.look().actions == ()
    scene.busy = False
    assert [end.machine_id for end in ends(scene.look())] == [name]


def test_a_busy_node_has_its_time_to_leave_and_no_more() -> None:
    scene = Scene(busy=True)
    scene.look()
    scene.is_released = True
    decided = scene.look()
    assert len(drains(decided)) == 3
    assert {d.reason for d in drains(decided)} == {DONE}
    assert not ends(decided)
    assert not ends(scene.look(20.0))
    assert len(ends(scene.look(10.0))) == 3


def test_a_machine_near_the_end_of_its_life_stays_until_another_computes() -> None:
    scene = Scene(busy=True)
    scene.look()
    old = set(scene.machines)
    scene.now_s += 24 * 3600 - 105
    decided = scene.look()
    assert not drains(decided)
    assert sum(launch.request.count for launch in launches(decided)) == 3
    new = set(scene.machines) - old
    scene.unready |= new
    assert not drains(scene.look())
    scene.unready.clear()
    decided = scene.look()
    assert {d.machine_id for d in drains(decided)} == old
    assert {d.reason for d in drains(decided)} == {LIFE}


def test_too_many_leave_only_after_a_while() -> None:
    scene = Scene()
    scene.look()
    scene.target = target(regions=(region(rows_per_s=10.0),))
    assert not any(drains(decided) for decided in scene.looks(11))
    found = [d for decided in scene.looks(4) for d in drains(decided)]
    assert [d.reason for d in found] == [TOO_MANY] * 2
    assert len(scene.machines) == 1


def test_regions_that_the_plan_has_no_more_are_left() -> None:
    scene = Scene()
    scene.look()
    scene.target = target(regions=(region(name="other"),))
    scene.looks(int(CONFIG.calm.idle_s / 10) + 3)
    labels = {m.labels["ray.io/availability-region"] for m in scene.machines.values()}
    assert labels == {"other"}


# ------------------------------------------------------------------ prices move


def test_cheaper_machines_come_first_and_those_they_replace_leave_when_they_compute() -> None:
    scene = Scene(usd={SPOT_A: 0.30, SPOT_B: 0.31}, busy=True)
    scene.looks(70)
    old = set(scene.machines)
    scene.usd[SPOT_B] = 0.20
    decided = scene.look()
    (launch,) = launches(decided)
    assert (launch.request.pool, launch.request.count, launch.reason) == (SPOT_B, 3, CHEAPER)
    assert not drains(decided)
    scene.unready |= set(scene.machines) - old
    assert not drains(scene.look())
    scene.unready.clear()
    decided = scene.look()
    assert {(d.machine_id, d.reason) for d in drains(decided)} == {(name, CHEAPER) for name in old}
    assert launches(decided) == []


def test_a_gain_below_the_least_moves_nothing() -> None:
    scene = Scene(usd={SPOT_A: 0.30, SPOT_B: 0.31})
    scene.looks(70)
    scene.usd[SPOT_B] = 0.29
    assert not any(decided.actions for decided in scene.looks(200))


def test_old_machines_count_at_the_price_of_their_age() -> None:
    """New machines of another zone cost a third less, but the running ones pay half by now."""
    regions = (region(kinds=(AGED,), zones=("r-1a", "r-1b")),)
    config = CONFIG.model_copy(update={"life_h": 10_000.0})
    scene = Scene(target(regions=regions), config)
    for pool in (ON_DEMAND_A, ON_DEMAND_B):
        scene.usd[pool] = None
    scene.usd[SPOT_B] = 0.5
    scene.look()
    assert set(scene.pools()) == {SPOT_A}
    scene.looks(30, 3600 * 4)
    assert len(scene.machines) == 3
    scene.usd[SPOT_B] = 0.2
    assert not any(decided.actions for decided in scene.looks(100))
    young = Scene(target(regions=regions), config)
    for pool in (ON_DEMAND_A, ON_DEMAND_B):
        young.usd[pool] = None
    young.usd[SPOT_B] = 0.5
    young.looks(70)
    young.usd[SPOT_B] = 0.2
    assert any(launches(decided) for decided in young.looks(100))


@pytest.mark.parametrize("period_s", [20, 60, 600, 3600])
def test_prices_that_go_to_and_fro_move_machines_at_most_once_in_a_dwell(period_s: int) -> None:
    scene = Scene(usd={SPOT_A: 0.2, SPOT_B: 0.4})
    scene.looks(10)
    moves = 0
    looks = looks_of(period_s)
    for number in range(looks):
        low = (number * 20 // period_s) % 2
        scene.usd[SPOT_A], scene.usd[SPOT_B] = (0.4, 0.2) if low else (0.2, 0.4)
        moves += len(launches(scene.look(20.0)))
    assert moves <= looks * 20 / CONFIG.calm.dwell_s + 1
    assert len(scene.machines) <= 6


@pytest.mark.parametrize("period_s", [40, 120, 400, 2000])
def test_a_load_that_goes_to_and_fro_ends_machines_at_most_once_in_an_idle_time(
    period_s: int,
) -> None:
    scene = Scene()
    scene.looks(10)
    ended = rented = 0
    looks = looks_of(period_s)
    for number in range(looks):
        low = (number * 20 // period_s) % 2
        scene.target = target(regions=(region(rows_per_s=10.0 if low else 30.0),))
        decided = scene.look(20.0)
        ended += len(drains(decided))
        rented += sum(launch.request.count for launch in launches(decided))
    periods = looks * 20 / max(2 * period_s, CONFIG.calm.idle_s)
    assert ended <= 2 * periods + 2
    assert rented <= 2 * periods + 2
    if period_s <= CONFIG.calm.idle_s - 40:
        assert ended == 0


# ------------------------------------------------------------------ hazard


def test_a_pool_that_takes_machines_back_is_left_for_one_that_does_not() -> None:
    scene = Scene(target(preemptions_per_h=0.05, lost_s=600.0), usd={SPOT_A: 0.300, SPOT_B: 0.305})
    scene.look()
    assert set(scene.pools()) == {SPOT_A}
    for _ in range(12):
        name = next((n for n in sorted(scene.machines) if scene.machines[n].pool == SPOT_A), None)
        if name is None:
            break
        scene.machines[name] = replace(scene.machines[name], ends_unix_s=scene.now_s + 100)
        scene.looks(6)
    assert set(scene.pools()) == {SPOT_B}


def test_losses_by_hand() -> None:
    losses = Losses(0.1, 20.0, 0.5, 8.0)
    assert losses.usd_per_hour(1.0, 0.1) == pytest.approx((1.0 + 0.05 * 8.0) / 0.95)


# ------------------------------------------------------------------ deadline and budget


def test_without_time_for_a_preemption_only_machines_on_demand_count() -> None:
    scene = Scene(busy=True, left_s=7200.0)
    scene.target = target(deadline_unix_s=scene.now_s + 10_000)
    scene.look()
    assert {pool.market for pool in scene.pools()} == {Market.SPOT}
    old = set(scene.machines)
    scene.target = target(deadline_unix_s=scene.now_s + 7250)
    decided = scene.look()
    assert decided.required.only_on_demand
    assert sum(launch.request.count for launch in launches(decided)) >= 3
    assert not drains(decided), "the spot machines compute until the others do"
    decided = scene.look()
    assert {d.machine_id for d in drains(decided)} == old
    assert {d.reason for d in drains(decided)} == {DEADLINE}


def test_a_late_job_has_more_machines_up_to_a_bound() -> None:
    scene = Scene(left_s=7200.0)
    scene.target = target(deadline_unix_s=scene.now_s + 6000)
    decided = scene.look()
    assert decided.required.reason == LATE
    assert 1.2 <= decided.required.speed <= 1.3
    assert len(scene.machines) == 4
    scene.target = target(deadline_unix_s=scene.now_s + 600)
    assert scene.look().required.speed == CONFIG.most_speed
    assert len(scene.machines) == 5


def test_it_stops_while_there_is_money_to_stop() -> None:
    scene = Scene(busy=True, left_s=1e6)
    scene.target = target(budget_usd=0.5)
    reasons, looks_to_save, spent_to_save = [], 0, 1.0
    for _ in range(300):
        decided = scene.look()
        reasons += [d.reason for d in drains(decided)]
        if decided.required.saves and not reasons:
            looks_to_save += 1
            spent_to_save = min(spent_to_save, scene.memory.ledger.paid_usd)
    assert set(reasons) == {BUDGET}
    # As long again as machines need to leave: that is when runs are to be saved.
    assert looks_to_save >= CONFIG.drain_s / CONFIG.every_s and 0.4 <= spent_to_save < 0.5
    assert not scene.machines
    assert 0.45 <= scene.memory.ledger.paid_usd <= 0.5
    assert not any(launches(decided) for decided in scene.looks(50))
    scene.target = target(budget_usd=1.0)
    raised = scene.look()
    assert launches(raised) and not raised.required.saves


def test_the_speed_is_chosen_once_in_a_while_when_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, chosen_s = Scene(), list[float]()
    whole = NodeGroupPolicy.cost

    def counted(keeper: NodeGroupPolicy, *arguments: Any) -> tuple[float, float]:
        chosen_s.append(keeper._now_s)
        return whole(keeper, *arguments)

    monkeypatch.setattr(NodeGroupPolicy, "cost", counted)
    scene.looks(400)
    times_s = sorted(set(chosen_s))
    rested = [b - a for a, b in itertools.pairwise(times_s) if a > CONFIG.start_s]
    assert len(rested) >= 2
    assert min(rested) >= CONFIG.calm.dwell_s
