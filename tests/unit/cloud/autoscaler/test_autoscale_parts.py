"""Independent parts of the autoscaler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from geo_ray.base.errors import ConfigError, LeaseLostError, PriceBookError
from geo_ray.cloud.autoscaler.journal import JOURNAL_KEY, Journal
from geo_ray.cloud.autoscaler.pools import HALF_LIFE_S, learn, rate_per_h
from geo_ray.cloud.autoscaler.run_work import RecentSpeed
from geo_ray.cloud.autoscaler.state import AutoscalerState, PoolRecord
from geo_ray.cloud.autoscaler.target import MARKET_LABEL, REGION_LABEL, TYPE_LABEL
from geo_ray.cloud.backtest.markets import read_spot_history
from geo_ray.cloud.cluster.spec import target_of
from geo_ray.cloud.provider import Market, Pool
from geo_ray.experiment.autoscale import AutoscaleConfig
from geo_ray.planner.config import MachineConfig, PlanConfig, RegionOffer
from geo_ray.planner.plan import Machines, Plan, RegionPlan
from geo_ray.prices.price_book import bundled_book
from geo_ray.ray_cluster import labels
from geo_ray.storage.conditional_store import LocalConditionalStore

POOL = Pool("us-east-1", "us-east-1a", "g5.xlarge", Market.SPOT)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        AutoscaleConfig.model_validate_json('{"flor": "none"}')


def test_labels_are_those_that_placement_asks_for() -> None:
    assert REGION_LABEL == labels.REGION_LABEL
    assert TYPE_LABEL == labels.TYPE_LABEL
    assert MARKET_LABEL == "ray.io/market-type"


# ------------------------------------------------------------------ from a plan


def plan(server: str | None = "c5a.2xlarge") -> Plan:
    machines = (
        Machines(type="g5.xlarge", market="spot", count=2, rows=8, rows_per_s=120, usd_per_h=0.5),
        Machines(
            type="g5.xlarge", market="on_demand", count=1, rows=8, rows_per_s=120, usd_per_h=1.0
        ),
    )
    regions = (
        RegionPlan(region="us", machines=machines, step_s=0.1, server=server),
        RegionPlan(region="eu", machines=machines[:1], step_s=0.1),
    )
    return Plan(
        policy="optimal",
        regions=regions,
        averager="eu",
        interval=8,
        codec=None,
        steps=100,
        seconds={"start": 60.0, "compute": 100.0},
        usd={},
    )


def section(**changes: object) -> PlanConfig:
    rented = (
        MachineConfig(type="g5.xlarge", cap=4, markets=("on_demand", "spot")),
        MachineConfig(type="g6.2xlarge", cap=4, rows_per_s=90),
    )
    regions = {
        "us": RegionOffer(cloud="aws", at="us-east-1", machines=rented),
        "eu": RegionOffer(cloud="aws", at="eu-central-1", machines=rented),
    }
    return PlanConfig(regions=regions, deadline_h=2.0, budget_usd=9.0).model_copy(update=changes)


def test_a_target_is_the_plan_with_the_limits_of_its_section() -> None:
    config = AutoscaleConfig(zones={"us": ("us-east-1a", "us-east-1b")})
    found = target_of(plan(), section(), config, bundled_book(), 1000.0)
    us, eu = found.regions
    assert (us.at, us.rows_per_s, us.zones, us.floor) == (
        "us-east-1",
        360.0,
        ("us-east-1a", "us-east-1b"),
        1,
    )
    assert [kind.type for kind in us.kinds] == ["g5.xlarge"]
    assert us.kinds[0].list_usd_per_hour == pytest.approx(1.006)
    assert us.server is not None
    assert us.server.markets == (Market.ON_DEMAND,)
    assert (eu.rows_per_s, eu.zones, eu.server, eu.floor) == (240.0, (None,), None, 1)
    assert (found.deadline_unix_s, found.budget_usd) == (1000.0 + 7200.0, 9.0)
    assert len(found.pools()) == 2 * 2 + 2 + 2


def test_substitutes_and_floors_are_as_configured() -> None:
    config = AutoscaleConfig(substitutes=True, floor="averager")
    found = target_of(plan(), section(), config, bundled_book(), 0.0)
    us, eu = found.regions
    assert [kind.type for kind in us.kinds] == ["g5.xlarge", "g6.2xlarge"]
    assert (us.floor, eu.floor) == (0, 1)
    assert us.server is not None
    assert us.server.markets == (Market.ON_DEMAND, Market.SPOT)
    bare = target_of(plan(), section(), AutoscaleConfig(floor="none"), bundled_book(), 0.0)
    assert [region.floor for region in bare.regions] == [0, 0]


def test_a_plan_of_another_configuration_is_refused() -> None:
    other = section(regions={"us": section().regions["us"]})
    with pytest.raises(ConfigError, match="region 'eu'"):
        target_of(plan(), other, AutoscaleConfig(), bundled_book(), 0.0)
    offer = RegionOffer(cloud="aws", at="us-east-1", machines=section().regions["us"].machines[1:])
    other = section(regions={"us": offer, "eu": offer})
    with pytest.raises(ConfigError, match=r"g5\.xlarge"):
        target_of(plan(), other, AutoscaleConfig(), bundled_book(), 0.0)


def test_a_floor_that_no_machine_could_be_is_refused() -> None:
    spot = (MachineConfig(type="g5.xlarge", cap=4, markets=("spot",)),)
    eu = RegionOffer(cloud="aws", at="eu-central-1", machines=spot)
    other = section(regions={"us": section().regions["us"], "eu": eu})
    for floor in ("servers", "averager"):
        config = AutoscaleConfig(floor=floor)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"autoscale\.floor .* plan\.regions\.eu"):
            target_of(plan(), other, config, bundled_book(), 0.0)
    assert target_of(plan(), other, AutoscaleConfig(floor="none"), bundled_book(), 0.0)


# ------------------------------------------------------------------ what is learned


def test_the_preemption_rate_moves_from_the_prior_to_observations_and_decays() -> None:
    record = PoolRecord(POOL)
    assert rate_per_h(None, 0.05, 20.0) == rate_per_h(record, 0.05, 20.0) == 0.05
    learn(record, 1000.0, 20.0, 3)
    assert rate_per_h(record, 0.05, 20.0) == pytest.approx((1 + 3) / 40)
    learn(record, 1000.0 + HALF_LIFE_S, 0.0)
    assert rate_per_h(record, 0.05, 20.0) == pytest.approx((1 + 1.5) / 30)
    learn(record, 1000.0 + 50 * HALF_LIFE_S, 0.0)
    assert rate_per_h(record, 0.05, 20.0) == pytest.approx(0.05)


def test_the_fastest_of_the_recent_looks_counts_and_the_plan_before() -> None:
    speed = RecentSpeed(2.0)
    assert speed.left_s(10) == 20.0
    speed.see(0, 0.0)
    speed.see(100, 100.0)
    assert speed.left_s(10) == 10.0
    speed.see(110, 200.0)  # half of the machines are gone: this says nothing of all of them
    assert speed.left_s(10) == 10.0
    speed.see(50, 300.0)  # resumed from a checkpoint
    speed.see(250, 400.0)
    assert speed.left_s(10) == 5.0
    assert speed.left_s(-3) == 0.0


# ------------------------------------------------------------------ journal


def test_only_one_of_two_writes_the_journal(tmp_path: Path) -> None:
    store = LocalConditionalStore(tmp_path)
    first, second = Journal(store, 1), Journal(store, 2)
    memory = first.read()
    assert second.read().token == 2
    memory.launches = 7
    first.write(memory)
    with pytest.raises(LeaseLostError, match="another autoscaler"):
        second.write(AutoscalerState(token=2))
    third = Journal(store, 3)
    assert (third.read().launches, third.read().token) == (7, 3)
    third.write(third.read())
    with pytest.raises(LeaseLostError):
        first.write(memory)
    assert (tmp_path / JOURNAL_KEY).exists()


# ------------------------------------------------------------------ AWS's history


def test_a_history_of_aws_is_read_as_it_is_printed() -> None:
    def price(zone: str, when: str, usd: str, product: str = "Linux/UNIX") -> dict[str, str]:
        return {
            "AvailabilityZone": zone,
            "InstanceType": "g5.xlarge",
            "ProductDescription": product,
            "SpotPrice": usd,
            "Timestamp": when,
        }

    text = json.dumps(
        {
            "SpotPriceHistory": [
                price("us-east-1a", "2026-11-24T02:00:00+00:00", "0.450000"),
                price("us-east-1a", "2026-11-24T01:00:00+00:00", "0.430000"),
                price("us-east-1b", "2026-11-24T00:30:00+00:00", "0.440000"),
                price("us-east-1a", "2026-11-24T00:00:00+00:00", "9.0", "Windows"),
            ]
        }
    )
    found = read_spot_history(text)
    assert {pool.zone for pool in found} == {"us-east-1a", "us-east-1b"}
    market = found[POOL]
    one = market.prices[0][0]
    assert market.usd_at(one - 5) == market.usd_at(one + 5) == 0.43
    assert market.usd_at(one + 3600) == 0.45
    assert market.usd_between(one, one + 7200) == pytest.approx(0.43 + 0.45)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"SpotPriceHistory": [{"SpotPrice": "0"}]}'])
def test_what_is_no_history_is_refused(text: str) -> None:
    with pytest.raises(PriceBookError, match="not a spot price history"):
        read_spot_history(text)
