"""A market that is played to the local cloud: prices, stock and preemptions as the day has them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.autoscale.real_market import PlayedMarket
from geo_ray.base.clock import VirtualClock
from geo_ray.cloud.backtest.markets import MarketTrace
from geo_ray.cloud.backtest.simulated_cloud import SimCloudBehavior, SimulatedCloud
from geo_ray.cloud.local import LocalCatalog, LocalProvider
from geo_ray.cloud.provider import LaunchRequest, MachineState, Market, Pool
from tests.support.provider_support import Sleeper

POOL = Pool("r", "r-a", "t", Market.SPOT)
TRACE = MarketTrace(((0.0, 36.0), (5.0, 72.0)), ((0.0, 9), (1.0, 1)))
REQUEST = LaunchRequest("three", "c", POOL, 3, {})


def until(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_it_takes_as_many_as_the_simulated_cloud_would(tmp_path: Path) -> None:
    cloud = LocalProvider(tmp_path, Sleeper())
    catalog = LocalCatalog(owner_pid=os.getpid())
    with PlayedMarket({POOL: TRACE}, tmp_path, catalog, "c", 1.0) as market:
        cloud.launch(REQUEST)
        until(lambda: {m.state for m in cloud.list_machines("c")} == {MachineState.RUNNING})
        assert market.taken == set(), "the day has not begun"
        market.began_unix_s = time.time()
        ended: list[str] = []

        def two_have_ended() -> bool:
            listed = cloud.list_machines("c")
            ended[:] = [m.id for m in listed if m.state is MachineState.ENDED]
            return len(ended) >= 2

        until(two_have_ended)
        assert set(ended) == market.taken
        (availability,) = cloud.availability([POOL])
        assert availability.available == 0
        left = [m.id for m in cloud.list_machines("c") if m.state is not MachineState.ENDED]
        cloud.terminate(left)
        until(lambda: all(m.state is MachineState.ENDED for m in cloud.list_machines("c")))
    assert market.launches == 3

    clock = VirtualClock(0.0)
    simulated = SimulatedCloud({POOL: TRACE}, clock.now_s, SimCloudBehavior(0.0, 1.0))
    simulated.launch(REQUEST)
    for second in range(1, 5):
        clock.advance_to_s(float(second))
        simulated.advance()
    assert sum(each.taken for each in simulated.machines.values()) == len(market.taken)


def test_its_bill_is_the_sum_over_moments(tmp_path: Path) -> None:
    cloud = LocalProvider(tmp_path, Sleeper())
    plenty = MarketTrace(TRACE.prices, ((0.0, 9),))
    catalog = LocalCatalog(owner_pid=os.getpid())
    with PlayedMarket({POOL: plenty}, tmp_path, catalog, "c", 1.0) as market:
        cloud.launch(REQUEST)
        until(lambda: market.launches == 3)
        began_s = market.began_unix_s = time.time()
        cloud.terminate([machine.id for machine in cloud.list_machines("c")])
        assert market.bill_usd(began_s - 10.0, began_s - 10.0) == 0.0
        until(lambda: all(m.state is MachineState.ENDED for m in cloud.list_machines("c")))
        time.sleep(0.3)
    launched = {machine.id: machine.launched_unix_s for machine in cloud.list_machines("c")}
    bill = market.bill_usd(0.0, began_s + 60.0)
    # A second program: moments of a hundredth of a second, each at the price that holds then.
    expected = 0.0
    for machine, since_s in launched.items():
        moment = since_s
        while moment < market.ended_unix_s[machine]:
            day_s = max(0.0, moment - began_s)
            expected += 0.01 / 3600.0 * (36.0 if day_s < 5.0 else 72.0) * (day_s > 0)
            moment += 0.01
    assert bill == pytest.approx(expected, abs=3 * 0.02 * 72.0 / 3600.0)
    assert bill > 0.0
