"""What no policy can exceed: the relaxed offline problem, by column generation.

Sites are taken together, everything runs as fast as inside the best site, parts of workers and of
jobs are allowed, egress is free. A *column* is a schedule of one job; the master programme mixes
columns under the capacities of each slot and resource. For any prices ``p`` of these,

    sum_{t,r} p C + sum_i max(0, max over schedules of (utility - money - price))

is an upper bound, since each job's best schedule is found exactly: work goes to the cheapest slots
first. The master gives prices, the jobs give new columns and a bound; the least bound counts, and
when no job has a better column it is the optimum of the relaxation.

Source: duality; the two sides are tested against each other and against enumeration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from geo_ray.scheduling.model.cluster import Floats, SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.speed import LinkUsed

_EPS = 1e-7


@dataclass(frozen=True, eq=False)
class _Relaxed:
    """A job with sites taken together.

    Attributes:
        per_slot: work that a slot can do at most, as a share of the job.
        units_R: that the whole job takes of each resource, in slots.
    """

    job: ClusterJob
    per_slot: float
    units_R: Floats


@dataclass(frozen=True, eq=False)
class _Column:
    job: int
    worth: float
    used_TR: Floats


def utility_bound(
    cluster: SharedCluster,
    jobs: Sequence[ClusterJob],
    *,
    worth_per_usd: float = 0.0,
    rounds: int = 60,
) -> float:
    """Return a number that no schedule's utility, less money, exceeds.

    Args:
        cluster: the cluster.
        jobs: all that will come.
        worth_per_usd: what a dollar counts; 0: utility alone.
        rounds: of column generation; fewer give a looser bound.
    """
    total_TR = cluster.capacity_TSR.sum(axis=1)
    cheapest_TR = worth_per_usd * cluster.slot_s / 3600.0 * cluster.usd_per_h_TSR.min(axis=1)
    relaxed = [_relaxed(cluster, job) for job in jobs]
    columns: list[_Column] = []
    price_TR = np.zeros_like(total_TR)
    least = math.inf
    for _ in range(rounds):
        bound, fresh = float((price_TR * total_TR).sum()), []
        for number, each in enumerate(relaxed):
            gain, column = _best(number, each, price_TR, cheapest_TR)
            bound += max(0.0, gain)
            if column is not None:
                fresh.append(column)
        least = min(least, bound)
        columns += fresh
        value, price_TR = _master(columns, len(jobs), total_TR)
        if least <= value * (1 + 1e-6) + _EPS:
            break
    return least


def _relaxed(cluster: SharedCluster, job: ClusterJob) -> _Relaxed:
    """The most work a slot can do, and the least that a unit of work needs of each resource."""
    most = min(job.demands.most_workers, job.speed.batch.rows)
    workers_W = np.arange(1, most + 1)
    servers_W = -(-workers_W // job.demands.workers_per_server)
    link = LinkUsed(max(float(cluster.inside_mbps_S.max()), float(cluster.net.mbps_GG.max())), True)
    batch = job.speed.batch.rows
    per_slot_W = job.speed.rows_per_s(workers_W, servers_W, batch, link) * cluster.slot_s
    # Best rows per worker and per server over all sizes: no integer plan uses less.
    worker_slots = float((workers_W / per_slot_W).min())
    server_slots = float((servers_W / per_slot_W).min())
    units_R = job.demands.units_R(worker_slots, server_slots) * job.rows
    return _Relaxed(job, float(per_slot_W.max()) / job.rows, units_R)


def _best(
    number: int, each: _Relaxed, price_TR: Floats, money_TR: Floats
) -> tuple[float, _Column | None]:
    """Return the largest utility less price of a job, and its schedule."""
    job, first, slots = each.job, each.job.arrival_slot, len(price_TR)
    if first >= slots:
        return 0.0, None
    cost_T = (price_TR[first:] + money_TR[first:]) @ each.units_R
    money_T = money_TR[first:] @ each.units_R
    best, found = 0.0, None
    for end in range(slots - first):
        if each.per_slot * (end + 1) < 1 - 1e-12:
            continue
        order = np.argsort(cost_T[: end + 1], kind="stable")
        part = np.minimum(each.per_slot, np.maximum(0, 1 - each.per_slot * np.arange(len(order))))
        gain = job.utility.of(end) - float(cost_T[order] @ part)
        if gain > best:
            best, found = gain, (order, part, job.utility.of(end) - float(money_T[order] @ part))
    if found is None:
        return 0.0, None
    used_TR = np.zeros_like(price_TR)
    order, part, worth = found
    used_TR[first + order] = part[:, None] * each.units_R
    return best, _Column(number, worth, used_TR)


def _master(columns: Sequence[_Column], jobs: int, total_TR: Floats) -> tuple[float, Floats]:
    """Mix columns; return the value and the prices of resources."""
    from scipy.optimize import linprog  # slow to import
    from scipy.sparse import coo_matrix, vstack

    if not columns:
        return 0.0, np.zeros_like(total_TR)
    used = coo_matrix(np.stack([column.used_TR.ravel() for column in columns], axis=1))
    once = coo_matrix(
        (np.ones(len(columns)), ([c.job for c in columns], range(len(columns)))),
        shape=(jobs, len(columns)),
    )
    limits = np.concatenate([total_TR.ravel(), np.ones(jobs)])
    worth = -np.array([column.worth for column in columns])
    done = linprog(worth, A_ub=vstack([used, once]).tocsr(), b_ub=limits, method="highs")
    duals = -np.asarray(done.ineqlin.marginals)
    return -float(done.fun), duals[: total_TR.size].reshape(total_TR.shape)
