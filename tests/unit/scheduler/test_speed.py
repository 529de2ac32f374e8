"""Jobs here and in the planner are equally fast; the papers' rule is a special case."""

from __future__ import annotations

import numpy as np
import pytest

from geo_ray.planner.exchange import exchange
from geo_ray.planner.profile import StepModel
from geo_ray.planner.timing import Timing
from geo_ray.scheduler.cluster import Allocation
from geo_ray.scheduler.job import MACHINE, BatchLimits, JobSpeed, LinkUsed
from geo_ray.transport.links import LinkRecord, LinkTable
from tests.support.scheduling_support import cluster_of, job_of


@pytest.mark.parametrize(("inside", "mbps"), [(True, 10_000.0), (False, 500.0)])
def test_a_worker_takes_q_seconds_for_a_row_as_in_pd_ors(inside: bool, mbps: float) -> None:
    tau, gamma, size, batch = 0.02, 3, 80e6, 24
    job = job_of(row_s=tau, model_bytes=size, per_server=gamma, batch=batch, most=24)
    q = tau + gamma * 2 * (8 * size * 1e-6) / (mbps * batch)
    for servers in (1, 2, 5):
        workers = gamma * servers
        per_s = job.speed.rows_per_s(workers, servers, batch, LinkUsed(mbps, inside))
        assert float(per_s) == pytest.approx(workers / q)


@pytest.mark.parametrize("every", [1.0, 8.0])
@pytest.mark.parametrize("hides", [0.0, 4.0])
def test_the_pace_between_regions_is_the_planners(every: float, hides: float) -> None:
    """Step, exchange and timing are combined independently from the planner's parts."""
    timing = Timing(every, min(hides, every))
    steps = StepModel("", 0.4, 0.01, {MACHINE: 0.002}, {MACHINE: (1, 64)}, (1, 8), 0.0)
    params = 25e6
    speed = JobSpeed(steps, 4 * params, BatchLimits(256, 256), timing)
    links = LinkTable(
        links=tuple(
            LinkRecord(src=a, dst=b, goodput_mbps=200.0, rtt_s=0.1, samples=1, measured_at_unix_s=0)
            for a, b in (("eu", "us"), ("us", "eu"))
        )
    )
    prices = {("eu", "us"): 0.02, ("us", "eu"): 0.02}
    planned = exchange(params, ["eu", "us"], "us", None, links, prices)
    step_s = steps.step_s(MACHINE, 4, 64)
    paces = [a * planned.seconds + b * step_s for a, b in timing.lines(1e6)]
    step_time_s = speed.step_time_s(4, 1, 256, LinkUsed(200.0, is_inside=False, rtt_s=0.1))
    assert float(step_time_s) == pytest.approx(max(paces))


def test_the_region_with_fewest_workers_for_its_data_decides() -> None:
    cluster = cluster_of(np.full((2, 2, 2), 8.0), (0, 1))
    job = job_of(data={0: 0.75, 1: 0.25}, most=8)
    balanced = Allocation(((0, 3), (1, 1)), ((0, 2),), 8)
    wasteful = Allocation(((0, 3), (1, 3)), ((0, 3),), 8)
    assert job.rows_per_s(cluster, balanced) > 0
    same_servers = Allocation(((0, 3), (1, 3)), ((0, 2),), 8)
    assert job.rows_per_s(cluster, same_servers) == job.rows_per_s(cluster, balanced)
    assert job.rows_per_s(cluster, wasteful) >= job.rows_per_s(cluster, balanced)
    assert job.rows_per_s(cluster, Allocation(((0, 3),), ((0, 2),), 8)) == 0.0


def test_a_larger_batch_is_faster_and_less_efficient_per_row() -> None:
    limits = BatchLimits(32, 128, noise_rows=64.0)
    assert limits.efficiency(32) == 1.0
    assert limits.efficiency(128) == pytest.approx((64 + 32) / (64 + 128))


def test_egress_is_what_crosses_regions_per_exchange() -> None:
    cluster = cluster_of(np.full((2, 3, 2), 8.0), (0, 0, 1), usd_per_gb=0.5, mbps=800.0)
    job = job_of(model_bytes=2e9, timing=Timing(4.0), row_s=1.0)
    inside = Allocation(((0, 1), (1, 1)), ((0, 1),), 8)
    across = Allocation(((0, 1), (2, 1)), ((0, 1),), 8)
    assert job.egress_usd_per_s(cluster, inside) == 0.0
    exchange_s = 2 * 8 * 2000 / 800.0
    step_time_s = 8 / 2 * 1.0 + exchange_s / 4
    # One region lies apart: one update there and one back, 2 GB each, every 4 steps.
    assert job.egress_usd_per_s(cluster, across) == pytest.approx(2 * 2 * 0.5 / (4 * step_time_s))
