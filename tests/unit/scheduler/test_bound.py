"""The upper bound against enumeration, the complete program and every policy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog

from geo_ray.planner.timing import Timing
from geo_ray.scheduler.bound import OraclePolicy, slot_work, utility_bound
from geo_ray.scheduler.cluster import Allocation, SharedCluster, counts_of
from geo_ray.scheduler.job import ClusterJob, LinkUsed
from geo_ray.scheduler.policies.registry import POLICIES
from geo_ray.scheduler.replay import replay_jobs
from geo_ray.scheduler.schedule import check_schedule
from geo_ray.scheduler.workload import LoadShape, generated_cluster, generated_jobs
from tests.support.scheduling_support import cluster_of, job_of


def best_of_all(cluster: SharedCluster, jobs: list[ClusterJob]) -> float:
    """Return the best utility of all schedules with whole workers on one site of cores and GPUs."""

    def plans(job: ClusterJob) -> list[tuple[float, np.ndarray]]:
        found = [(0.0, np.zeros((cluster.slots, len(cluster.resources))))]
        for counts in itertools.product(range(4), repeat=cluster.slots - job.arrival_slot):
            rows, used = 0.0, np.zeros((cluster.slots, len(cluster.resources)))
            for slot, workers in enumerate(counts, job.arrival_slot):
                if workers:
                    servers = job.demands.servers(workers)
                    had = Allocation(((0, workers),), ((0, servers),), 8)
                    rows += job.rows_per_s(cluster, had) * cluster.slot_s
                    used[slot] = job.demands.units_R(workers, servers)
            if rows >= job.rows and (used <= cluster.capacity_TSR[:, 0]).all():
                last = max(slot for slot in range(cluster.slots) if used[slot].any())
                found.append((job.utility.of(last - job.arrival_slot), used))
        return found

    best = 0.0
    for chosen in itertools.product(*(plans(job) for job in jobs)):
        if (sum(used for _, used in chosen) <= cluster.capacity_TSR[:, 0] + 1e-9).all():
            best = max(best, sum(value for value, _ in chosen))
    return best


def three_jobs(seed: int) -> tuple[SharedCluster, list[ClusterJob]]:
    rng = np.random.default_rng(seed)
    return cluster_of(np.full((3, 1, 2), 4.0), (0,)), [
        job_of(
            f"j{number}",
            arrival=int(rng.integers(0, 2)),
            rows=float(rng.integers(1500, 6000)),
            value=float(rng.uniform(1, 20)),
            urgency=float(rng.uniform(0, 3)),
            target=1.0,
            most=3,
        )
        for number in range(3)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_no_schedule_exceeds_the_bound_by_enumeration(seed: int) -> None:
    cluster, jobs = three_jobs(seed)
    bound, best = utility_bound(cluster, jobs).utility, best_of_all(cluster, jobs)
    assert bound >= best - 1e-6
    assert replay_jobs(cluster, jobs, POLICIES["pd_ors"]()).total_utility <= best + 1e-6


def whole_programme(cluster: SharedCluster, jobs: list[ClusterJob]) -> float:
    """The same relaxation as one programme, written anew: parts of jobs by the slot they end in.

    Unknowns: the part of each job that ends in each slot, and for each slot up to there the share
    of it that the job has one, two, three or four workers. Three or more lie on two sites.
    """
    slots, total = cluster.slots, cluster.capacity_TSR.sum(axis=1)
    value: list[float] = []
    packing: dict[tuple[int, int], list[tuple[int, float]]] = {}
    once: list[list[int]] = []
    covers: list[tuple[int, list[list[int]], list[float]]] = []
    for job in jobs:
        parts, units = [], []
        for w in (1, 2, 3, 4):
            servers, mbps = math.ceil(w / 2), 10_000 if w <= 2 else 50
            step = 8 / w * 0.1 + 2 * 8 / servers / mbps
            parts.append(8 / step * cluster.slot_s / job.rows)
            units.append(w * job.demands.worker_R + servers * job.demands.server_R)
        own = []
        for end in range(job.arrival_slot, slots):
            y = len(value)
            value.append(job.utility.of(end - job.arrival_slot))
            own.append(y)
            fractions = []
            for slot in range(job.arrival_slot, end + 1):
                fractions.append(list(range(len(value), len(value) + 4)))
                value += [0.0] * 4
                for place, each in zip(fractions[-1], units, strict=True):
                    for r in range(len(each)):
                        packing.setdefault((slot, r), []).append((place, each[r]))
            covers.append((y, fractions, parts))
        once.append(own)
    rows, right = [], []

    def limit(terms: list[tuple[int, float]], most: float) -> None:
        row = np.zeros(len(value))
        for index, factor in terms:
            row[index] += factor
        rows.append(row)
        right.append(most)

    for (slot, r), terms in packing.items():
        limit(terms, total[slot, r])
    for own in once:
        limit([(y, 1.0) for y in own], 1.0)
    for y, fractions, parts in covers:
        done = [
            (place, -part) for slot in fractions for place, part in zip(slot, parts, strict=True)
        ]
        limit([(y, 1.0), *done], 0.0)
        for slot in fractions:
            limit([(y, -1.0), *((place, 1.0) for place in slot)], 0.0)
    found = linprog(-np.array(value), A_ub=np.stack(rows), b_ub=right, method="highs")
    return -float(found.fun)


@pytest.mark.parametrize("seed", range(4))
def test_columns_end_at_the_optimum_of_the_whole_programme(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = cluster_of(np.full((5, 2, 2), 3.0), (0, 0))
    cluster.net.mbps_GG[:] = 50.0
    jobs = [
        job_of(
            f"j{number}",
            arrival=int(rng.integers(0, 3)),
            rows=float(rng.integers(2000, 9000)),
            value=float(rng.uniform(1, 20)),
            urgency=float(rng.uniform(0, 2)),
            target=2.0,
        )
        for number in range(6)
    ]
    assert utility_bound(cluster, jobs).utility == pytest.approx(
        whole_programme(cluster, jobs), rel=1e-4
    )


@pytest.mark.parametrize("name", ["ones", "pollux"])
def test_no_policy_that_grows_batches_exceeds_the_bound(name: str) -> None:
    cluster = cluster_of(np.full((12, 2, 2), 8.0), (0, 0))
    jobs = [
        job_of(
            f"j{number}",
            arrival=number,
            rows=7_000.0,
            model_bytes=5e8,
            urgency=1.0,
            target=3.0,
            most_rows=64,
        )
        for number in range(4)
    ]
    done = replay_jobs(cluster, jobs, POLICIES[name]())
    assert max(use.allocation.batch for use in done.uses) > 8
    assert 0 < done.total_utility <= utility_bound(cluster, jobs).utility


def test_a_way_over_a_link_that_hides_its_exchanges_counts_where_it_is_faster() -> None:
    cluster = cluster_of(np.full((12, 2, 2), 8.0), (0, 0))
    job = job_of(model_bytes=1e9, timing=Timing(every=100.0, hides=100.0))
    one = LinkUsed(5000.0, is_inside=False)
    part = float(job.speed.rows_per_s(4, 2, 8, one)) * cluster.slot_s / job.rows
    assert slot_work(cluster, job).part_W[-1] == pytest.approx(part)


@pytest.mark.parametrize("data", [{}, {0: 1.0}, {0: 0.4, 1: 0.6}])
def test_nothing_that_fits_does_more_in_a_slot(data: dict[int, float]) -> None:
    rng = np.random.default_rng(7)
    cluster = cluster_of(np.full((2, 3, 2), 5.0), (0, 1, 1), mbps=200.0)
    job = job_of(data=data, model_bytes=1e7, most=8, per_server=3)
    work, tried = slot_work(cluster, job), 0
    for _ in range(3000):
        workers = rng.integers(0, 4, 3) * job.may_work_S(cluster)
        servers = rng.integers(0, 3, 3)
        if not 1 <= workers.sum() <= 8 or servers.sum() != job.demands.servers(workers.sum()):
            continue
        had = Allocation(
            counts_of(dict(enumerate(workers.tolist()))),
            counts_of(dict(enumerate(servers.tolist()))),
            8,
        )
        used_SR = workers[:, None] * job.demands.worker_R + servers[:, None] * job.demands.server_R
        if (used_SR > cluster.capacity_TSR[0]).any():
            continue
        tried += 1
        part = job.rows_per_s(cluster, had) * cluster.slot_s / job.rows
        within = (work.units_WR <= used_SR.sum(axis=0) + 1e-9).all(axis=1)
        assert part <= work.part_W[within].max(initial=0.0) + 1e-12
    assert tried > 200


@pytest.mark.parametrize("regions", [1, 3])
def test_no_policy_exceeds_the_bound(regions: int) -> None:
    shape = LoadShape(10, 8, regions=regions, spot_fraction=0.2)
    cluster, jobs = generated_cluster(shape, 3), generated_jobs(shape, 3)
    for usd in (0.0, 1.0):
        bound = utility_bound(cluster, jobs, value_per_usd=usd)
        policies = {name: make() for name, make in POLICIES.items()}
        policies["oracle"] = OraclePolicy(jobs, bound, value_per_usd=usd)
        for name, policy in policies.items():
            done = replay_jobs(cluster, jobs, policy)
            assert done.total_utility - usd * done.usd <= bound.utility + 1e-6, name


@pytest.mark.parametrize("seed", range(3))
def test_who_knows_all_jobs_ahead_is_near_the_best_of_all_schedules(seed: int) -> None:
    cluster, jobs = three_jobs(seed)
    best = best_of_all(cluster, jobs)
    ahead = replay_jobs(cluster, jobs, OraclePolicy(jobs, utility_bound(cluster, jobs)))
    check_schedule(ahead)
    assert 0.8 * best <= ahead.total_utility <= best + 1e-6


def test_the_oracle_reserves_capacity_for_later_jobs() -> None:
    cluster = cluster_of(np.full((2, 1, 2), 2.0), (0,))
    early = job_of("early", rows=1500.0, most=1, value=1.0, worker=(2.0, 1.0))
    late = job_of("late", arrival=1, rows=900.0, most=1, value=50.0, worker=(2.0, 1.0))
    jobs = [early, late]
    ahead = replay_jobs(cluster, jobs, OraclePolicy(jobs, utility_bound(cluster, jobs)))
    assert set(ahead.finished_s) == {"late"}
    assert set(replay_jobs(cluster, jobs, POLICIES["fifo"]()).finished_s) == {"early"}
