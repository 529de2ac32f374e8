"""Preempted machines are replaced immediately, from other pools if possible."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from geo_ray.cloud.autoscaler.observation import DRAINED, LIFE, NOTICE
from geo_ray.cloud.provider import Market
from tests.support.autoscale_support import (
    CONFIG,
    ON_DEMAND_A,
    SPOT_A,
    SPOT_B,
    Scene,
    drains,
    ends,
    launches,
    region,
    target,
)


@pytest.mark.parametrize("left_s", [90.0, math.inf], ids=["told when", "nobody said when"])
def test_a_node_that_its_own_agent_drains_is_replaced_at_once(left_s: float) -> None:
    """Real clouds notify only the machine: the autoscaler observes a drain."""
    scene = Scene(usd={SPOT_A: 0.2}, busy=True)
    scene.look()
    name = sorted(scene.machines)[0]
    scene.leaves[name] = gone_s = scene.now_s + left_s
    decided = scene.look()
    (drain,) = drains(decided)
    assert (drain.machine_id, drain.reason) == (name, NOTICE)
    assert drain.until_unix_s == min(gone_s, scene.now_s + CONFIG.drain_s)
    assert [launch.request.count for launch in launches(decided)] == [1]
    assert scene.memory.pool(SPOT_A).preemptions == 1
    assert not any(launches(each) or drains(each) for each in scene.looks(2))
    scene.busy = False
    assert [end.machine_id for end in ends(scene.look())] == [name]
    assert scene.memory.pool(SPOT_A).preemptions == pytest.approx(1, abs=0.01), "counted once"
    assert len(scene.machines) == 3


def test_a_drained_on_demand_node_is_replaced_without_counting_a_preemption() -> None:
    scene = Scene(busy=True, sold_out={SPOT_A, SPOT_B})
    scene.looks(3)
    assert {pool.market for pool in scene.pools()} == {Market.ON_DEMAND}
    name = sorted(scene.machines)[0]
    scene.leaves[name] = scene.now_s + 60
    decided = scene.look()
    assert [(each.machine_id, each.reason) for each in drains(decided)] == [(name, DRAINED)]
    assert sum(launch.request.count for launch in launches(decided)) == 1
    assert all(record.preemptions == 0 for record in scene.memory.pools.values())


def test_its_place_is_taken_from_another_pool_of_the_market() -> None:
    scene = Scene(usd={SPOT_A: 0.10, SPOT_B: 0.25}, busy=True)
    scene.look()
    assert set(scene.pools()) == {SPOT_A}
    name = sorted(scene.machines)[0]
    scene.machines[name] = replace(scene.machines[name], ends_unix_s=scene.now_s + 120)
    (launch,) = launches(scene.look())
    assert (launch.request.pool, launch.request.count) == (SPOT_B, 1)
    (left,) = [each for each in launch.alternatives if each.pool == SPOT_A]
    assert "preempted a machine recently" in left.note
    scene.looks(10)
    del scene.machines[sorted(scene.machines)[-1]]
    later = [each.request.pool for decided in scene.looks(12) for each in launches(decided)]
    assert later == [SPOT_A], "after a while it is asked again"


def test_where_there_is_no_other_pool_of_the_market_the_same_is_asked() -> None:
    scene = Scene(target(regions=(region(zones=("r-1a",)),)), busy=True)
    scene.look()
    name = sorted(scene.machines)[0]
    scene.machines[name] = replace(scene.machines[name], ends_unix_s=scene.now_s + 120)
    (launch,) = launches(scene.look())
    assert launch.request.pool == SPOT_A, "what is sold out is known at the next look"
    assert scene.usd[ON_DEMAND_A] == 1.0


def test_a_notice_counts_at_once_however_little_a_change_takes() -> None:
    config = CONFIG.model_copy(update={"start_s": 0.0, "drain_s": 5.0})
    scene = Scene(config=config, busy=True)
    scene.looks(2)
    name = sorted(scene.machines)[0]
    scene.machines[name] = replace(scene.machines[name], ends_unix_s=scene.now_s + 120)
    decided = scene.look()
    assert [(each.machine_id, each.reason) for each in drains(decided)] == [(name, NOTICE)]
    assert sum(launch.request.count for launch in launches(decided)) == 1


def test_an_end_that_was_set_hours_ahead_is_no_notice() -> None:
    scene = Scene(busy=True)
    scene.looks(2)
    name = sorted(scene.machines)[0]
    scene.machines[name] = replace(scene.machines[name], ends_unix_s=scene.now_s + 5 * 3600)
    assert not any(decided.actions for decided in scene.looks(20))
    assert LIFE not in {
        instance.termination and instance.termination.reason
        for instance in scene.memory.instances.values()
    }
