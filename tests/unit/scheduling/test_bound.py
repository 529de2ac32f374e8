"""The upper bound against enumeration, against the whole programme, and against every policy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog

from geo_ray.scheduling.bound.columns import utility_bound
from geo_ray.scheduling.history.replay import replay_jobs
from geo_ray.scheduling.load.generate import LoadShape, made_up_cluster, made_up_jobs
from geo_ray.scheduling.model.allocation import Allocation
from geo_ray.scheduling.model.cluster import SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.policies.registry import POLICIES
from tests.scheduling_support import cluster_of, job_of


def best_of_all(cluster: SharedCluster, jobs: list[ClusterJob]) -> float:
    """The most utility of all schedules with whole workers on one site of cores and GPUs."""

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
            best = max(best, sum(worth for worth, _ in chosen))
    return best


@pytest.mark.parametrize("seed", range(5))
def test_no_schedule_exceeds_the_bound_by_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = cluster_of(np.full((3, 1, 2), 4.0), (0,))
    jobs = [
        job_of(
            f"j{number}",
            arrival=int(rng.integers(0, 2)),
            rows=float(rng.integers(1500, 6000)),
            worth=float(rng.uniform(1, 20)),
            urgency=float(rng.uniform(0, 3)),
            target=1.0,
            most=3,
        )
        for number in range(3)
    ]
    bound, best = utility_bound(cluster, jobs), best_of_all(cluster, jobs)
    assert bound >= best - 1e-6
    assert replay_jobs(cluster, jobs, POLICIES["pd_ors"]()).total_utility <= best + 1e-6


def whole_programme(cluster: SharedCluster, jobs: list[ClusterJob]) -> float:
    """The same relaxation as one programme, written anew: parts of jobs by the slot they end in.

    Unknowns: the part of each job that ends in each slot, and its work in each slot up to there.
    """
    slots, total = cluster.slots, cluster.capacity_TSR.sum(axis=1)
    worth: list[float] = []
    packing: dict[tuple[int, int], list[tuple[int, float]]] = {}
    once: list[list[int]] = []
    covers: list[tuple[int, list[int], float]] = []
    for job in jobs:
        step = [8 / w * 0.1 + 2 * 8 / math.ceil(w / 2) / 10_000 for w in (1, 2, 3, 4)]
        per_slot = [8 / one * cluster.slot_s for one in step]
        units = sum(
            (
                job.demands.worker_R * min(w / per_slot[w - 1] for w in (1, 2, 3, 4)),
                job.demands.server_R
                * min(math.ceil(w / 2) / per_slot[w - 1] for w in (1, 2, 3, 4)),
            )
        )
        own = []
        for end in range(job.arrival_slot, slots):
            y = len(worth)
            worth.append(job.utility.of(end - job.arrival_slot))
            own.append(y)
            z = list(range(y + 1, y + 2 + end - job.arrival_slot))
            worth += [0.0] * len(z)
            covers.append((y, z, max(per_slot) / job.rows))
            for place, slot in zip(z, range(job.arrival_slot, end + 1), strict=True):
                for r in range(len(units)):
                    packing.setdefault((slot, r), []).append((place, units[r] * job.rows))
        once.append(own)
    rows, right = [], []
    for (slot, r), terms in packing.items():
        row = np.zeros(len(worth))
        for place, value in terms:
            row[place] += value
        rows.append(row)
        right.append(total[slot, r])
    for own in once:
        row = np.zeros(len(worth))
        row[own] = 1.0
        rows.append(row)
        right.append(1.0)
    for y, z, most in covers:
        row = np.zeros(len(worth))
        row[y], row[z] = 1.0, -1.0
        rows.append(row)
        right.append(0.0)
        for place in z:
            row = np.zeros(len(worth))
            row[place], row[y] = 1.0, -most
            rows.append(row)
            right.append(0.0)
    done = linprog(-np.array(worth), A_ub=np.stack(rows), b_ub=right, method="highs")
    return -float(done.fun)


@pytest.mark.parametrize("seed", range(4))
def test_columns_end_at_the_optimum_of_the_whole_programme(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = cluster_of(np.full((5, 2, 2), 3.0), (0, 0))
    cluster.net.mbps_GG[:] = 10_000.0
    jobs = [
        job_of(
            f"j{number}",
            arrival=int(rng.integers(0, 3)),
            rows=float(rng.integers(2000, 9000)),
            worth=float(rng.uniform(1, 20)),
            urgency=float(rng.uniform(0, 2)),
            target=2.0,
        )
        for number in range(6)
    ]
    assert utility_bound(cluster, jobs) == pytest.approx(whole_programme(cluster, jobs), rel=1e-4)


@pytest.mark.parametrize("regions", [1, 3])
def test_no_policy_exceeds_the_bound(regions: int) -> None:
    shape = LoadShape(10, 8, regions=regions, spot_share=0.2)
    cluster, jobs = made_up_cluster(shape, 3), made_up_jobs(shape, 3)
    for usd in (0.0, 1.0):
        bound = utility_bound(cluster, jobs, worth_per_usd=usd)
        for name in POLICIES:
            done = replay_jobs(cluster, jobs, POLICIES[name]())
            assert done.total_utility - usd * done.usd <= bound + 1e-6, name
