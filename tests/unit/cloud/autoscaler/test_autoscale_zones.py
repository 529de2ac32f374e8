"""Pools whose zone the cloud chooses: machines count to the requested pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_ray.cloud.autoscaler.state import pool_key
from geo_ray.cloud.provider import Market, Pool
from tests.support.autoscale_support import Scene, launches, region, target

ANY_SPOT = Pool("r-1", None, "small", Market.SPOT)
ANY_ON_DEMAND = Pool("r-1", None, "small", Market.ON_DEMAND)


def scene() -> Scene:
    return Scene(target(regions=(region(zones=(None,)),)), busy=True)


def test_a_machine_is_paid_at_the_present_price_of_the_pool_that_was_asked() -> None:
    alone = scene()
    alone.looks(361)
    alone.usd[ANY_SPOT] = 0.6
    decided = alone.looks(360)[-1]
    assert {machine.pool.zone for machine in alone.machines.values()} == {"r-1c"}
    ((_, _, row),) = alone.memory.ledger.by_region_and_reason()
    assert row.paid_usd == pytest.approx(3 * (0.3 + 0.6), rel=0.01)
    assert decided.usd_per_hour == pytest.approx(3 * 0.6)


def test_what_the_budget_leaves_is_counted_at_the_present_price() -> None:
    alone = scene()
    alone.target = replace(alone.target, budget_usd=3.0)
    alone.looks(10)
    alone.usd |= {ANY_SPOT: 3.0, ANY_ON_DEMAND: None}
    alone.looks(130)  # 3 USD are 1200 s of three machines
    assert not alone.machines
    assert 2.8 <= alone.memory.ledger.paid_usd <= 3.0


def test_preemptions_and_hours_are_learned_of_the_pool_that_is_asked() -> None:
    alone = scene()
    alone.looks(361)
    assert alone.memory.pools.keys() == {pool_key(ANY_SPOT), pool_key(ANY_ON_DEMAND)}
    learned = alone.memory.pool(ANY_SPOT)
    assert learned.hours == pytest.approx(3.0, rel=0.05)
    name = sorted(alone.machines)[0]
    alone.machines[name] = replace(alone.machines[name], ends_unix_s=alone.now_s + 60)
    (launch,) = launches(alone.look())
    assert alone.memory.pool(ANY_SPOT).preemptions == 1
    (offer,) = [each for each in launch.alternatives if each.pool == ANY_SPOT]
    assert offer.preemptions_per_h == pytest.approx((0.01 * 20 + 1) / (20 + 3), rel=0.01)


def test_a_pool_whose_nodes_never_come_is_left_alone_as_the_one_that_was_asked() -> None:
    alone = scene()
    alone.look()
    alone.unready |= set(alone.machines)
    late = [launch.request.pool for d in alone.looks(40) for launch in launches(d)]
    assert late[:1] == [ANY_ON_DEMAND], "the region's spot pool is left alone"
    assert alone.memory.pool(ANY_SPOT).until_unix_s > 0


def test_what_runs_keeps_its_price_when_zones_are_named_later() -> None:
    alone = scene()
    alone.looks(10)
    alone.target = target(regions=(region(zones=("r-1a",)),))
    alone.usd = {pool: usd for pool, usd in alone.usd.items() if pool.zone is not None}
    alone.memory.pool(ANY_SPOT).usd_per_hour = 0.9
    decided = alone.look()
    assert decided.usd_per_hour == pytest.approx(3 * 0.9), "the last price of its own pool"
    assert not launches(decided)
    assert len(alone.machines) == 3


def test_where_zones_are_named_each_has_its_own_books() -> None:
    apart = Scene()
    apart.looks(10)
    counted = {instance.machine.pool for instance in apart.memory.instances.values()}
    assert counted == {machine.pool for machine in apart.machines.values()}
    assert None not in {pool.zone for pool in counted}
