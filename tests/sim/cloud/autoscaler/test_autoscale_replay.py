"""Small backtests: cost of the autoscaler and of the baselines, and correct accounting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.autoscale.autoscale import scenario
from geo_ray.cloud.autoscaler.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.cloud.backtest.markets import DayKind, generated_day
from geo_ray.cloud.backtest.replay import ALTERNATIVES, FAILOVER, ON_DEMAND, OURS, SPOT, replay
from geo_ray.cloud.backtest.simulated_cloud import SimJob, forever
from geo_ray.cloud.provider import Market, Pool
from geo_ray.experiment.autoscale import AutoscaleConfig, RetryConfig
from geo_ray.prices.price_book import bundled_book

BOOK = bundled_book()
CONFIG = AutoscaleConfig(every_s=60.0, retry=RetryConfig(resend_s=60.0))
SHORT = SimJob(3 * 3600.0)
ROUGH = DayKind(hours=24, jumps_per_day=12.0, least_sold_out_per_day=6, most_sold_out_per_day=30)


@pytest.mark.parametrize("seed", [1, 5])
def test_it_is_in_time_cheaper_than_all_others_that_are_and_leaves_nothing(seed: int) -> None:
    target, markets, _ = scenario(BOOK, seed)
    target = replace(target, deadline_unix_s=1.3 * SHORT.work_s)
    found = {
        strategy: replay(strategy, target, markets, SHORT, CONFIG) for strategy in ALTERNATIVES
    }
    ours = found[OURS]
    others = [
        found[strategy] for strategy in (ON_DEMAND, SPOT, FAILOVER) if found[strategy].in_time
    ]
    assert ours.in_time
    assert ours.usd <= min(each.usd for each in others)
    assert ours.usd <= 0.6 * found[ON_DEMAND].usd
    assert not ours.left_over
    assert ours.ledger_usd == pytest.approx(ours.usd, rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_a_deadline_that_only_machines_on_demand_keep_is_kept_on_a_rough_day(seed: int) -> None:
    target, markets, _ = scenario(BOOK, seed, ROUGH)
    start_s = CONFIG.start_s + 3 * CONFIG.every_s
    target = replace(target, deadline_unix_s=1.05 * SHORT.work_s + start_s)
    on_demand = replay(ON_DEMAND, target, markets, SHORT, CONFIG)
    assert on_demand.in_time
    ours = replay(OURS, target, markets, SHORT, CONFIG)
    assert ours.in_time
    assert not ours.left_over


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_a_budget_is_exceeded_by_at_most_one_iteration_of_all_machines(share: float) -> None:
    target, markets, _ = scenario(BOOK, 2)
    whole = replay(OURS, target, markets, SHORT, CONFIG)
    bound = share * whole.usd
    found = replay(
        OURS, replace(target, budget_usd=bound), markets, SHORT, CONFIG, longest_s=14_400
    )
    look_usd = whole.usd / whole.hours * CONFIG.every_s / 3600
    assert not found.is_done
    assert 0.9 * bound <= found.usd <= bound + look_usd
    assert not found.left_over


def test_a_made_up_day_is_within_what_is_documented_and_comes_again_with_its_seed() -> None:
    zones = {"us-east-1": ("us-east-1a", "us-east-1b")}
    day = generated_day(BOOK, "aws", zones, ("g5.xlarge",), 3)
    assert day == generated_day(BOOK, "aws", zones, ("g5.xlarge",), 3)
    assert day != generated_day(BOOK, "aws", zones, ("g5.xlarge",), 4)
    for pool, market in day.items():
        prices = [usd for _, usd in market.prices]
        if pool.market is Market.SPOT:
            assert 0.6 * 0.425 <= min(prices) <= max(prices) <= 1.006
            assert min(availability for _, availability in market.availabilities) < 3
        else:
            assert prices == [1.006]


def _two_regions(speeds: tuple[float, float], **changes: object) -> ClusterTarget:
    """Regions for which 2 x a is cheapest per row, and a + b cheapest per hour."""
    kinds = (MachineKind("a", 100.0, 10), MachineKind("b", 60.0, 10))
    regions = tuple(
        RegionTarget(f"r{i}", f"at{i}", speed, kinds, floor=0) for i, speed in enumerate(speeds)
    )
    return replace(ClusterTarget(regions, 6 * 3600.0), **changes)  # type: ignore[arg-type]


def _bills(target: ClusterTarget) -> dict[str, float]:
    usd = {"a": (1.0, 0.4), "b": (0.7, 0.3)}
    markets = {
        Pool(region.at, None, kind, market): forever(price)
        for region in target.regions
        for kind, prices in usd.items()
        for market, price in zip((Market.ON_DEMAND, Market.SPOT), prices, strict=True)
    }
    config = CONFIG.model_copy(update={"floor": "none"})
    return {
        strategy: replay(strategy, target, markets, SimJob(4 * 3600.0), config).usd
        for strategy in (OURS, SPOT)
    }


def test_speed_beyond_what_is_needed_counts_as_far_as_it_shortens_the_job() -> None:
    bills = _bills(_two_regions((160.0, 160.0)))
    assert bills[OURS] == pytest.approx(bills[SPOT], rel=1e-3)
    # Where only one of the regions could be faster, or rows are little of the time, it buys none.
    for target in (
        _two_regions((160.0, 200.0)),
        _two_regions((160.0, 160.0), compute_fraction=0.2),
    ):
        least = sum(0.7 if region.rows_per_s == 160.0 else 0.8 for region in target.regions)
        hours = 4 + (CONFIG.start_s + 5 + 2 * CONFIG.every_s) / 3600
        assert _bills(target)[OURS] <= least * hours
