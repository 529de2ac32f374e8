"""Prices, rounding, spread slots and best schedules, against independent implementations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from geo_ray.scheduler.cluster import Allocation, SharedCluster
from geo_ray.scheduler.job import ClusterJob
from geo_ray.scheduler.policies.pd_ors import BasePrice, PriceTable
from geo_ray.scheduler.pricing import (
    RoundingRule,
    SearchRule,
    SlotOffers,
    SpreadQuestion,
    SpreadSolver,
    best_schedule,
    cover_factor,
    packing_factor,
    placement_patterns,
    rounded,
)
from tests.support.scheduling_support import cluster_of, job_of


def test_prices_are_those_of_the_documented_rule() -> None:
    """Implemented from docs/reference/scheduling-policies.md, without library code."""
    cluster = cluster_of(np.full((6, 3, 2), 8.0), (0, 0, 0))
    jobs = [job_of("a", value=30.0), job_of("b", value=5.0, urgency=1.0, worker=(2.0, 1.0))]
    price_table = PriceTable(cluster, span=6.0)
    top = [0.0, 0.0]
    for job in jobs:
        price_table.learn(job)
        workers, servers = 4, 2
        step_s = 8 / workers * 0.1 + 2 * 8.0 / servers / 10_000.0
        took_slots = 1000 / 8 * step_s / 100.0
        slots = math.ceil(took_slots - 1e-9)
        utility = job.utility
        value = utility.value / (1 + math.exp(utility.urgency * (slots - 1 - utility.target_slots)))
        used = [
            (workers * job.demands.worker_R[r] + servers * job.demands.server_R[r]) * took_slots
            for r in (0, 1)
        ]
        top = [max(top[r], value / used[r]) for r in (0, 1)]
    price_table.promised_TSR[2, 1, 0] = 6.0
    price = price_table.prices(slice(2, 3), cluster.capacity_TSR[2:3])[0]
    low = [t * math.exp(-6.0) for t in top]  # the span decides here
    for r in (0, 1):
        assert price[0, r] == pytest.approx(low[r])
    assert price[1, 0] == pytest.approx(low[0] * (top[0] / low[0]) ** (6 / 8))


def test_rounding_factors_are_the_solutions_of_the_chernoff_bounds() -> None:
    for rows, width in ((401, 5.0), (401, 15.0), (401, 100.0)):
        g = packing_factor(rows, width)
        # exp(-(1/G - 1)^2 G W / 3) = d / 3r: the chance that a row of mean G W exceeds W
        assert math.exp(-((1 / g - 1) ** 2) * g * width / 3) == pytest.approx(0.5 / (3 * rows))
        assert 0 < g < 1
    for width in (3.0, 10.0, 100.0):
        g = cover_factor(2, width)
        # exp(-(1 - 1/G)^2 G W / 2) = d / 3m
        assert math.exp(-((1 - 1 / g) ** 2) * g * width / 2) == pytest.approx(0.5 / 6)
        assert g > 1


def test_rounding_keeps_the_mean_and_whole_numbers() -> None:
    rng = np.random.default_rng(0)
    values = np.array([0.25, 2.0, 3.5])
    many = np.stack([rounded(values, 1.0, rng) for _ in range(4000)])
    assert set(many[:, 1]) == {2}
    assert many.mean(axis=0) == pytest.approx(values, abs=0.05)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("gap", [-1.0, 0.1])
def test_a_spread_slot_is_near_the_cheapest_of_all(seed: int, gap: float) -> None:
    rng = np.random.default_rng(seed)
    free = rng.integers(0, 6, (3, 2)).astype(float)
    cost_w, cost_s = rng.uniform(1, 5, 3), rng.uniform(1, 5, 3)
    worker, server = np.array([1.0, 1.0]), np.array([0.0, 2.0])
    workers, servers = int(rng.integers(1, 6)), int(rng.integers(1, 3))
    best = math.inf
    for w in itertools.product(range(6), repeat=3):
        for s in itertools.product(range(3), repeat=3):
            if sum(w) == workers and sum(s) == servers:
                used = np.outer(w, worker) + np.outer(s, server)
                if (used <= free).all():
                    best = min(best, float(w @ cost_w + s @ cost_s))
    every = np.arange(3)
    question = SpreadQuestion(free, cost_w, cost_s, worker, server, {None: every}, every)
    solver = SpreadSolver(question, RoundingRule(tries=30, gap=gap), rng)
    found = solver.cheapest({None: workers}, servers)
    assert solver.least({None: workers}, servers) <= best + 1e-9
    if found is None:
        return  # plans that leave room are not looked for beyond the tries
    assert best - 1e-9 <= found.cost <= 1.6 * best
    assert sum(found.workers.values()) == workers
    assert sum(found.servers.values()) == servers


def every_schedule(cluster: SharedCluster, job: ClusterJob, price: np.ndarray) -> float:
    """The largest surplus of all schedules that use one site in each slot."""
    slots = cluster.slots
    options = []
    for slot in range(slots):
        here = [(0.0, 0.0)]
        for site, workers in itertools.product(range(len(cluster.sites)), (1, 2, 3, 4)):
            servers = math.ceil(workers / job.demands.workers_per_server)
            need = job.demands.units_R(workers, servers)
            if (need <= cluster.capacity_TSR[slot, site]).all():
                had = Allocation(((site, workers),), ((site, servers),), 8)
                rows = job.rows_per_s(cluster, had) * cluster.slot_s
                here.append((float(price[slot, site] @ need), rows))
        options.append(here)
    best = -math.inf
    for chosen in itertools.product(*options):
        if sum(rows for _, rows in chosen) >= job.rows * (1 - 1e-9):
            last = max(slot for slot, (_, rows) in enumerate(chosen) if rows)
            best = max(best, job.utility.of(last) - sum(cost for cost, _ in chosen))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_dynamic_programme_is_the_best_of_all_schedules(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = cluster_of(rng.integers(1, 7, (3, 2, 2)).astype(float), (0, 0))
    job = job_of(rows=float(rng.integers(2000, 9000)), value=50.0, urgency=1.0, target=1.0)
    price = rng.uniform(0, 2, cluster.capacity_TSR.shape)
    best = every_schedule(cluster, job, price)
    offers = SlotOffers(0, price, cluster.capacity_TSR)
    rule = SearchRule(quanta=240)  # fine enough to have each number of workers' work as a sum
    found = best_schedule(cluster, job, job.rows, offers, [], rule, rng)
    if found is None:
        assert best == -math.inf
        return
    assert found.surplus <= best + 1e-6
    assert found.surplus >= best - 0.15 * abs(best) - 1.0
    rows = sum(job.rows_per_s(cluster, had) for had in found.allocations.values())
    assert rows * cluster.slot_s >= job.rows * (1 - 1e-6)


def test_ways_keep_workers_where_the_data_are() -> None:
    cluster = cluster_of(np.full((2, 4, 2), 8.0), (0, 0, 1, 2))
    patterns = placement_patterns(cluster, job_of(data={0: 0.5, 1: 0.5}), 10)
    assert patterns
    assert all(set(pattern.workers) <= {0, 1, 2} for pattern in patterns)
    assert all({0, 1, 2} == set(pattern.workers) for pattern in patterns)
    assert {pattern.server_region for pattern in patterns} == {0, 1, 2}


def test_the_base_price_is_the_value_of_the_last_job_that_fits() -> None:
    cluster = cluster_of(np.full((4, 1, 2), 3.0), (0,))
    base_price = BasePrice(cluster)
    # One worker with one parameter server does 1000 rows of 0.1 s in a slot, but for the exchange.
    rows = 8 / (0.8 + 2 * 8 / 10_000) * cluster.slot_s
    prices = []
    for number, value in enumerate((9.0, 2.0, 5.0, 7.0)):
        base_price.learn(job_of(f"j{number}", rows=rows, most=1, per_server=1, value=2 * value))
        prices.append(base_price.price_R[1])
    # Three cores, two for each: one job and a half have room.
    assert prices == pytest.approx([0.0, 2.0 / 2, 5.0 / 2, 7.0 / 2])
    assert base_price.price_R[0] == 0.0
    # Two slots later nine cores have been there: four jobs and half of the least.
    base_price.learn(job_of("late", arrival=2, rows=rows, most=1, per_server=1, value=2.0))
    assert base_price.price_R[1] == pytest.approx(1.0 / 2)


def test_a_job_that_was_taken_on_before_adds_nothing_to_the_load() -> None:
    """At the start of a policy generation, all running jobs arrive at once."""
    cluster = cluster_of(np.full((4, 1, 2), 3.0), (0,))
    plain, price_table = PriceTable(cluster), PriceTable(cluster, load_fraction=0.5)
    for number in range(5):
        job = job_of(f"j{number}", rows=800.0, most=1, per_server=1)
        for each in (plain, price_table):
            each.learn(job, is_new=False)
    assert np.array_equal(price_table.bounds[1], plain.bounds[1])
    price_table.learn(job_of("new", rows=9000.0, most=1, per_server=1))
    assert (price_table.bounds[1] > plain.bounds[1]).any()


def test_nothing_is_bid_where_there_was_no_room_at_all() -> None:
    base_price = BasePrice(cluster_of(np.zeros((4, 1, 2)), (0,)))
    base_price.learn(job_of(rows=800.0, most=1, per_server=1))
    assert base_price.price_R.tolist() == [0.0] * 4


def test_a_large_use_of_a_slot_costs_the_rising_price() -> None:
    """Compared with a sum over small parts, each at the price after the previous ones."""
    cluster = cluster_of(np.full((6, 2, 2), 8.0), (0, 0))
    price_table = PriceTable(cluster)
    price_table.learn(job_of("a", value=30.0))
    price_table.promised_TSR[3, 1, 0] = 2.0
    used_SR, parts = np.zeros_like(price_table.promised_TSR[3]), 2000
    used_SR[:, :2] = [[0.0, 1.0], [5.0, 8.0]]
    start_SR, summed = price_table.promised_TSR[3].copy(), 0.0
    at = slice(3, 4)
    before_SR = price_table.prices(at, cluster.capacity_TSR[at])[0]
    for part in range(parts):
        price_table.promised_TSR[3] = start_SR + used_SR * (part + 0.5) / parts
        summed += float(
            (used_SR / parts * price_table.prices(at, cluster.capacity_TSR[at])[0]).sum()
        )
    price_table.promised_TSR[3] = start_SR
    extra = summed - float((used_SR * before_SR).sum())
    assert price_table.surcharge(3, used_SR) == pytest.approx(extra, rel=1e-5)
    assert extra > 0 and price_table.surcharge(3, np.zeros_like(used_SR)) == 0.0
