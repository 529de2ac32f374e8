"""Upper bound on the utility of any schedule, and an offline (oracle) schedule.

The bound is the relaxed offline problem, solved by column generation: sites are aggregated,
fractions of slots and jobs are allowed, egress is free. `OraclePolicy` knows all jobs in advance
and applies list scheduling at the dual prices of the bound; it shows how much of the distance to
the bound an online policy could still gain. Source: duality and list scheduling; our combination.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.scheduler.cluster import Allocation, Floats, SharedCluster
from geo_ray.scheduler.job import ClusterJob, LinkUsed
from geo_ray.scheduler.policy import SlotDecision, SlotScheduler, SlotView
from geo_ray.scheduler.pricing import (
    BestSchedule,
    SearchRule,
    SlotOffers,
    best_schedule,
    placement_patterns,
)
from geo_ray.scheduler.schedule import Admission

_BATCHES: Final = 512
_WORK_EPS: Final = 1e-12


@dataclass(frozen=True, eq=False)
class SlotWork:
    """Work of each number of workers in a whole slot, without dominated numbers.

    Attributes:
        part_W: fraction of the job's work, ascending.
        units_WR: required units of each resource.
    """

    part_W: Floats
    units_WR: Floats


@dataclass(frozen=True, slots=True)
class WorkPiece:
    """A step from one number of workers to a larger one in a slot.

    Attributes:
        cost: cost of a unit of work.
        part: fraction of the job's work.
        less: index of the smaller number in `SlotWork`; -1: no worker.
        more: index of the larger number.
    """

    cost: float
    part: float
    less: int
    more: int


def slot_work(cluster: SharedCluster, job: ClusterJob) -> SlotWork:
    """Return the work that a job can do in a slot."""
    demands = job.demands
    workers_W = np.arange(1, min(demands.most_workers, job.speed.batch.most_rows) + 1)
    servers_W = -(-workers_W // demands.workers_per_server)
    units_WR = workers_W[:, None] * demands.worker_R + servers_W[:, None] * demands.server_R
    most_SR = cluster.capacity_TSR.max(axis=0)
    within_WSR = units_WR[:, None, :] <= most_SR[job.may_work_S(cluster)] + 1e-9
    fits_W = within_WSR.all(axis=2).any(axis=1) & (len(job.data) <= 1)
    inside = LinkUsed(float(cluster.inside_mbps_S.max()), is_inside=True)
    per_s_W = np.maximum(
        np.where(fits_W, _fastest_W(job, workers_W, servers_W, inside), 0.0),
        _fastest_W(job, workers_W, servers_W, _best_link(cluster, job)),
    )
    part_W = per_s_W * cluster.slot_s / job.rows
    retained = _not_beaten(part_W, units_WR)
    return SlotWork(part_W[retained], units_WR[retained])


def _best_link(cluster: SharedCluster, job: ClusterJob) -> LinkUsed:
    """Return a link that is at least as good as every link that the job could use."""
    net = cluster.net
    both_GG, rtt_GG = np.minimum(net.mbps_GG, net.mbps_GG.T), net.rtt_s_GG
    if not job.data:
        return LinkUsed(float(both_GG.max()), False, float(rtt_GG.min()))
    # Every region with data has workers, and one region has the parameter servers.
    sources = list(job.data)
    return LinkUsed(
        float(both_GG[sources].min(axis=0).max()), False, float(rtt_GG[sources].max(axis=0).min())
    )


def _fastest_W(
    job: ClusterJob, workers_W: NDArray[np.int64], servers_W: NDArray[np.int64], link: LinkUsed
) -> Floats:
    """Return rows per second for each number of workers, at the best batch."""
    limits, speed = job.speed.batch, job.speed
    sizes = np.unique(np.geomspace(limits.rows, limits.most_rows, _BATCHES).round())
    best_W = np.zeros(len(workers_W))
    for least, above in pairwise([*map(int, sizes), limits.most_rows + 1]):
        # For all batches from `least` to below `above`: progress of the largest, time of the
        # smallest.
        progress = (above - 1) * limits.efficiency(above - 1)
        step_times_W = speed.step_time_s(workers_W, servers_W, least, link)
        if job.data:
            # Workers without data do not count; their servers do.
            step_times_W = np.array([
                speed.step_time_s(workers_W[: n + 1], servers, least, link).min()
                for n, servers in enumerate(servers_W)
            ])  # fmt: skip
        best_W = np.maximum(best_W, np.where(workers_W < above, progress / step_times_W, 0.0))
    return best_W


def _not_beaten(part_W: Floats, units_WR: Floats) -> NDArray[np.int64]:
    """Return the undominated entries: no other does as much with less. Ascending by work."""
    retained: list[int] = []
    for place in np.lexsort((units_WR.sum(axis=1), -part_W)):
        if part_W[place] > _WORK_EPS and not any(
            (units_WR[other] <= units_WR[place]).all() for other in retained
        ):
            retained.append(int(place))
    return np.array(retained[::-1], dtype=np.int64)


def cheapest_pieces(work: SlotWork, cost_W: Floats) -> list[WorkPiece]:
    """Return a slot's work as pieces, cheapest first: the lower convex hull of cost over work.

    Args:
        work: work by number of workers.
        cost_W: cost of each for a whole slot.
    """
    hull = [(0.0, 0.0, -1)]
    for place, (part, cost) in enumerate(zip(work.part_W.tolist(), cost_W.tolist(), strict=True)):
        while len(hull) > 1 and cost <= hull[-1][1]:
            hull.pop()
        if part <= hull[-1][0] + _WORK_EPS:
            continue
        while len(hull) > 1:
            (part_1, cost_1, _), (part_2, cost_2, _) = hull[-2:]
            if (cost_2 - cost_1) * (part - part_1) < (cost - cost_1) * (part_2 - part_1):
                break
            hull.pop()
        hull.append((part, cost, place))
    return [
        WorkPiece((more[1] - less[1]) / (more[0] - less[0]), more[0] - less[0], less[2], more[2])
        for less, more in pairwise(hull)
    ]


_COLUMN_EPS = 1e-7


@dataclass(frozen=True, eq=False)
class _Column:
    job: int
    value: float
    used_TR: Floats


@dataclass(frozen=True, eq=False)
class UtilityBound:
    """Upper bound on utility minus money of any schedule.

    Attributes:
        utility: the bound.
        price_TR: dual price of a unit of each resource by slot, for all sites together, without
            money.
    """

    utility: float
    price_TR: Floats


def utility_bound(
    cluster: SharedCluster,
    jobs: Sequence[ClusterJob],
    *,
    value_per_usd: float = 0.0,
    rounds: int = 60,
) -> UtilityBound:
    """Return an upper bound on utility minus money of any schedule, with its dual prices.

    Args:
        cluster: the cluster.
        jobs: all jobs.
        value_per_usd: utility per dollar; 0: money does not count.
        rounds: rounds of column generation; fewer give a looser bound.
    """
    total_TR = cluster.capacity_TSR.sum(axis=1)
    cheapest_TR = value_per_usd * cluster.slot_s / 3600.0 * cluster.usd_per_h_TSR.min(axis=1)
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
        if found.utility <= value * (1 + 1e-6) + _COLUMN_EPS:
            break
    return found


def _best(
    number: int, job: ClusterJob, work: SlotWork, price_TR: Floats, money_TR: Floats
) -> tuple[float, _Column | None]:
    """Return the maximum utility minus price of a job, and its schedule."""
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
    for piece, t, fraction in taken:
        less_R = work.units_WR[piece.less] if piece.less >= 0 else 0.0
        used_TR[first + t] += fraction * (work.units_WR[piece.more] - less_R)
    return best, _Column(number, job.utility.of(end) - float((money_TR * used_TR).sum()), used_TR)


def _master(columns: Sequence[_Column], jobs: int, total_TR: Floats) -> tuple[float, Floats]:
    """Solve the master problem; return its value and the prices of resources."""
    from scipy.optimize import linprog  # slow import
    from scipy.sparse import coo_matrix, vstack

    if not columns:
        return 0.0, np.zeros_like(total_TR)
    used = coo_matrix(np.stack([column.used_TR.ravel() for column in columns], axis=1))
    once = coo_matrix(
        (np.ones(len(columns)), ([c.job for c in columns], range(len(columns)))),
        shape=(jobs, len(columns)),
    )
    limits = np.concatenate([total_TR.ravel(), np.ones(jobs)])
    value = -np.array([column.value for column in columns])
    done = linprog(value, A_ub=vstack([used, once]).tocsr(), b_ub=limits, method="highs")
    duals = -np.asarray(done.ineqlin.marginals)
    return -float(done.fun), duals[: total_TR.size].reshape(total_TR.shape)


_TIMES: Final = (0.0, 0.3, 0.6, 1.0, 1.5)
_PRICE_EPS: Final = (
    1e-6  # relative to a price: breaks ties between free schedules in favor of the smallest
)

Plans = Mapping[str, Mapping[int, Allocation]]


@dataclass(frozen=True, eq=False)
class OraclePolicy:
    """Offline schedule with knowledge of all jobs and future spot capacity.

    Idea: the best schedule lies between an online policy and the upper bound; a feasible offline
    schedule shows how much of the distance is due to the policy. Rule: jobs are ordered by
    their gain at the bound's prices, or by that gain per fraction of the cluster. Each gets its
    best feasible schedule at a multiple of those prices; rejected jobs are retried at price
    zero. The best of all orders and multiples counts. When: as a benchmark only; no queue can
    know the future. Source: list scheduling by dual prices; our combination.

    Attributes:
        jobs: all jobs.
        bound: bound of these jobs, whose prices are used.
        value_per_usd: utility per dollar.
        change_s: zero, as all changes are planned.
    """

    jobs: Sequence[ClusterJob]
    bound: UtilityBound
    value_per_usd: float = 0.0
    change_s: float = 0.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        tried = [
            _planned(cluster, self, times, per_fraction, seed)
            for times, per_fraction in itertools.product(_TIMES, (False, True))
        ]
        return _Planned(max(tried, key=itemgetter(0))[1])


class _Planned:
    def __init__(self, plans: Plans) -> None:
        self._plans = plans

    def decide(self, view: SlotView) -> SlotDecision:
        given = {
            name: plan[view.slot]
            for name in view.active
            if view.slot in (plan := self._plans.get(name, {}))
        }
        admissions = [
            Admission(job.id, view.slot, job.id in self._plans, None) for job in view.arrived
        ]
        return SlotDecision(given, admissions)


def _planned(
    cluster: SharedCluster, policy: OraclePolicy, times: float, per_fraction: bool, seed: int
) -> tuple[float, Plans]:
    """Return plans and their value at the prices of their search."""
    rng = np.random.default_rng(seed)
    kappa = policy.value_per_usd
    money_TSR = _PRICE_EPS + kappa * cluster.slot_s / 3600.0 * cluster.usd_per_h_TSR
    scarce_TSR = times * policy.bound.price_TR[:, None, :]
    promised_TSR = np.zeros(cluster.capacity_TSR.shape)
    rule = SearchRule(value_per_usd=kappa)

    def best(job: ClusterJob, price_TSR: Floats) -> BestSchedule | None:
        first = job.arrival_slot
        if first >= cluster.slots:
            return None
        free_TSR = np.maximum(0.0, cluster.capacity_TSR[first:] - promised_TSR[first:])
        offers = SlotOffers(first, price_TSR[first:], free_TSR)
        patterns = placement_patterns(cluster, job, rule.max_patterns)
        found = best_schedule(cluster, job, job.rows, offers, patterns, rule, rng)
        return found if found is not None and found.surplus > 0 else None

    total_R = cluster.capacity_TSR.sum(axis=(0, 1))
    ranks: list[tuple[float, int]] = []
    for number, job in enumerate(policy.jobs):
        found = best(job, money_TSR + scarce_TSR)
        if found is not None:
            used_R = sum(
                _used_SR(cluster, job, had).sum(axis=0) for had in found.allocations.values()
            )
            fraction = float(np.divide(used_R, total_R, where=total_R > 0, out=0 * total_R).max())
            ranks.append((-found.surplus / (fraction if per_fraction else 1.0), number))
    order = [policy.jobs[number] for _, number in sorted(ranks)]
    plans: dict[str, Mapping[int, Allocation]] = {}
    value = 0.0
    for price_TSR in (money_TSR + scarce_TSR, money_TSR):
        for job in [job for job in order if job.id not in plans]:
            found = best(job, price_TSR)
            if found is None:
                continue
            plans[job.id] = found.allocations
            value += job.utility.of(found.last - job.arrival_slot)
            for slot, had in found.allocations.items():
                used_SR = _used_SR(cluster, job, had)
                promised_TSR[slot] += used_SR
                value -= float(((money_TSR[slot] - _PRICE_EPS) * used_SR).sum())
                value -= kappa * job.egress_usd_per_s(cluster, had) * cluster.slot_s
    return value, plans


def _used_SR(cluster: SharedCluster, job: ClusterJob, had: Allocation) -> Floats:
    used_SR = np.zeros(cluster.capacity_TSR.shape[1:])
    for site, count in had.workers:
        used_SR[site] += count * job.demands.worker_R
    for site, count in had.servers:
        used_SR[site] += count * job.demands.server_R
    return used_SR
