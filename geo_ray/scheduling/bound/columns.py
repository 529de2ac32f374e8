"""What no policy can exceed: the relaxed offline problem, by column generation.

Sites are taken together, parts of slots and of jobs are allowed, egress is free; what a job can do
in a slot is that of `slot_work`. A *column* is a schedule of one job; the master programme mixes
columns under the capacities of each slot and resource. For any prices ``p`` of these,

    sum_{t,r} p C + sum_i max(0, max over schedules of (utility - money - price))

is an upper bound, since each job's best schedule is found exactly: work goes where a unit of it is
cheapest first. The master gives prices, the jobs give new columns and a bound; the least bound
counts, and when no job has a better column it is the optimum of the relaxation.

Source: duality; the two sides are tested against each other and against enumeration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from geo_ray.scheduling.bound.slot_work import SlotWork, WorkPiece, cheapest_pieces, slot_work
from geo_ray.scheduling.model.cluster import Floats, SharedCluster
from geo_ray.scheduling.model.job import ClusterJob

_EPS = 1e-7


@dataclass(frozen=True, eq=False)
class _Column:
    job: int
    worth: float
    used_TR: Floats


@dataclass(frozen=True, eq=False)
class UtilityBound:
    """What no schedule's utility, less money, exceeds.

    Attributes:
        utility: that.
        price_TR: what a unit of each resource is worth in each slot, all sites together; money is
            not in it.
    """

    utility: float
    price_TR: Floats


def utility_bound(
    cluster: SharedCluster,
    jobs: Sequence[ClusterJob],
    *,
    worth_per_usd: float = 0.0,
    rounds: int = 60,
) -> UtilityBound:
    """Return a number that no schedule's utility, less money, exceeds, and its prices.

    Args:
        cluster: the cluster.
        jobs: all that will come.
        worth_per_usd: what a dollar counts; 0: utility alone.
        rounds: of column generation; fewer give a looser bound.
    """
    total_TR = cluster.capacity_TSR.sum(axis=1)
    cheapest_TR = worth_per_usd * cluster.slot_s / 3600.0 * cluster.usd_per_h_TSR.min(axis=1)
    works = [slot_work(cluster, job) for job in jobs]
    columns: list[_Column] = []
    price_TR = np.zeros_like(total_TR)
    found = UtilityBound(math.inf, price_TR)
    for _ in range(rounds):
        bound, fresh = float((price_TR * total_TR).sum()), []
        for number, (job, work) in enumerate(zip(jobs, works, strict=True)):
            gain, column = _best(number, job, work, price_TR, cheapest_TR)
            bound += max(0.0, gain)
            if column is not None:
                fresh.append(column)
        if bound < found.utility:
            found = UtilityBound(bound, price_TR)
        columns += fresh
        value, price_TR = _master(columns, len(jobs), total_TR)
        if found.utility <= value * (1 + 1e-6) + _EPS:
            break
    return found


def _best(
    number: int, job: ClusterJob, work: SlotWork, price_TR: Floats, money_TR: Floats
) -> tuple[float, _Column | None]:
    """Return the largest utility less price of a job, and its schedule."""
    first, slots = job.arrival_slot, len(price_TR)
    if first >= slots or not len(work.part_W):
        return 0.0, None
    cost_TW = (price_TR[first:] + money_TR[first:]) @ work.units_WR.T
    pieces: list[tuple[WorkPiece, int]] = []
    for t, cost_W in enumerate(cost_TW):
        if t and np.array_equal(cost_W, cost_TW[t - 1]):
            same = [piece for piece, slot in pieces if slot == t - 1]
        else:
            same = cheapest_pieces(work, cost_W)
        pieces += [(piece, t) for piece in same]
    pieces.sort(key=lambda each: each[0].cost)
    per_slot = float(work.part_W.max())
    best, found = 0.0, None
    for end in range(slots - first):
        if per_slot * (end + 1) < 1 - 1e-12:
            continue
        left, cost, taken = 1.0, 0.0, []
        for piece, t in pieces:
            if t > end:
                continue
            part = min(left, piece.part)
            taken.append((piece, t, part / piece.part))
            cost += part * piece.cost
            left -= part
            if left <= 0:
                break
        gain = job.utility.of(end) - cost
        if gain > best:
            best, found = gain, (taken, end)
    if found is None:
        return 0.0, None
    used_TR = np.zeros_like(price_TR)
    taken, end = found
    for piece, t, share in taken:
        less_R = work.units_WR[piece.less] if piece.less >= 0 else 0.0
        used_TR[first + t] += share * (work.units_WR[piece.more] - less_R)
    return best, _Column(number, job.utility.of(end) - float((money_TR * used_TR).sum()), used_TR)


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
