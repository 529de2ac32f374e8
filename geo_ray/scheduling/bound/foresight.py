"""A schedule that knows all jobs ahead: what a policy that sees only who has come could still win.

Idea: between an online policy and the upper bound lies the best schedule; one that really exists
says how much of the distance is the policy's. Rule: jobs in the order of their gain over the
bound's prices, or of that gain per share of the cluster, each get the best schedule there is room
for at a multiple of those prices; who got none is tried again at no price; of the orders and
multiples the best counts. What spot machines will be there is known, too. When: as a measure only;
no queue can do it. Source: list scheduling by dual prices; ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from geo_ray.scheduling.bound.columns import UtilityBound
from geo_ray.scheduling.model.allocation import Allocation
from geo_ray.scheduling.model.cluster import Floats, SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.schedule import Admission
from geo_ray.scheduling.policies.base import SlotDecision, SlotScheduler, SlotView
from geo_ray.scheduling.pricing.best_schedule import (
    BestSchedule,
    SearchRule,
    SlotOffers,
    best_schedule,
)
from geo_ray.scheduling.pricing.ways import spread_ways

_TIMES: Final = (0.0, 0.3, 0.6, 1.0, 1.5)
_EPS: Final = 1e-6  # of a price: of schedules that cost nothing the smallest is meant

Plans = Mapping[str, Mapping[int, Allocation]]


@dataclass(frozen=True, eq=False)
class ForesightPolicy:
    """See the module's docstring.

    Attributes:
        jobs: all that will come.
        bound: of these jobs; its prices are used.
        worth_per_usd: what a dollar counts.
        change_s: none, as everything is planned.
    """

    jobs: Sequence[ClusterJob]
    bound: UtilityBound
    worth_per_usd: float = 0.0
    change_s: float = 0.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        tried = [
            _planned(cluster, self, times, per_share, seed)
            for times, per_share in itertools.product(_TIMES, (False, True))
        ]
        return _Planned(max(tried, key=lambda each: each[0])[1])


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
    cluster: SharedCluster, policy: ForesightPolicy, times: float, per_share: bool, seed: int
) -> tuple[float, Plans]:
    """Return plans and what they are worth by the prices of their search."""
    rng = np.random.default_rng(seed)
    kappa = policy.worth_per_usd
    money_TSR = _EPS + kappa * cluster.slot_s / 3600.0 * cluster.usd_per_h_TSR
    scarce_TSR = times * policy.bound.price_TR[:, None, :]
    promised_TSR = np.zeros(cluster.capacity_TSR.shape)
    rule = SearchRule(worth_per_usd=kappa)

    def best(job: ClusterJob, price_TSR: Floats) -> BestSchedule | None:
        first = job.arrival_slot
        if first >= cluster.slots:
            return None
        free_TSR = np.maximum(0.0, cluster.capacity_TSR[first:] - promised_TSR[first:])
        offers = SlotOffers(first, price_TSR[first:], free_TSR)
        ways = spread_ways(cluster, job, rule.most_ways)
        found = best_schedule(cluster, job, job.rows, offers, ways, rule, rng)
        return found if found is not None and found.payoff > 0 else None

    total_R = cluster.capacity_TSR.sum(axis=(0, 1))
    ranks: list[tuple[float, int]] = []
    for number, job in enumerate(policy.jobs):
        found = best(job, money_TSR + scarce_TSR)
        if found is not None:
            used_R = sum(
                _used_SR(cluster, job, had).sum(axis=0) for had in found.allocations.values()
            )
            share = float(np.divide(used_R, total_R, where=total_R > 0, out=0 * total_R).max())
            ranks.append((-found.payoff / (share if per_share else 1.0), number))
    order = [policy.jobs[number] for _, number in sorted(ranks)]
    plans: dict[str, Mapping[int, Allocation]] = {}
    worth = 0.0
    for price_TSR in (money_TSR + scarce_TSR, money_TSR):
        for job in [job for job in order if job.id not in plans]:
            found = best(job, price_TSR)
            if found is None:
                continue
            plans[job.id] = found.allocations
            worth += job.utility.of(found.last - job.arrival_slot)
            for slot, had in found.allocations.items():
                used_SR = _used_SR(cluster, job, had)
                promised_TSR[slot] += used_SR
                worth -= float(((money_TSR[slot] - _EPS) * used_SR).sum())
                worth -= kappa * job.egress_usd_per_s(cluster, had) * cluster.slot_s
    return worth, plans


def _used_SR(cluster: SharedCluster, job: ClusterJob, had: Allocation) -> Floats:
    used_SR = np.zeros(cluster.capacity_TSR.shape[1:])
    for site, count in had.workers:
        used_SR[site] += count * job.demands.worker_R
    for site, count in had.servers:
        used_SR[site] += count * job.demands.server_R
    return used_SR
