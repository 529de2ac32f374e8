"""Online admission and placement by prices: PD-ORS, from machines to regions.

Idea: what is scarce has a price that grows exponentially with its use, so that room is left for
jobs that are worth more. Rule: when a job comes, find the schedule with the largest payoff, utility
less price; admit it if that is positive and promise what the schedule has, else turn it away. The
schedule may lie inside one site or be spread; its places change from slot to slot. Egress and
dollars are part of the price with ``worth_per_usd``. Where machines of the spot market were taken
back, the rest of a job is scheduled anew, and what was promised is not taken from others. When:
deadlines and worth differ, and jobs come unannounced. Source: PD-ORS (Yu, Liu, Wu, Ji, Bentley,
arXiv 2108.02917); only its abstract could be read, the algorithm is reconstructed; what was added
for regions, money and spot machines is ours.

OASiS is the same without locality: workers and parameter servers on sites of their own. Rule: the
first sites, a share of them by what all parameter servers need, have parameter servers only.
Source: OASiS, the online
scheduler that PD-ORS compares itself with, reconstructed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from geo_ray.scheduling.model.allocation import Allocation
from geo_ray.scheduling.model.cluster import SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.schedule import Admission
from geo_ray.scheduling.model.speed import LinkUsed
from geo_ray.scheduling.policies.base import JobProgress, SlotDecision, SlotScheduler, SlotView
from geo_ray.scheduling.policies.packing import SiteRoom
from geo_ray.scheduling.pricing.best_schedule import (
    BestSchedule,
    SearchRule,
    SlotOffers,
    best_schedule,
)
from geo_ray.scheduling.pricing.prices import PriceBoard
from geo_ray.scheduling.pricing.ways import SpreadWay, spread_ways

Locality = Literal["any", "apart"]


@dataclass(frozen=True, slots=True)
class PdOrsPolicy:
    """See the module's docstring.

    Attributes:
        search: how a schedule is looked for.
        window: slots that are looked at from a job's arrival on.
        tight: see `PriceBoard`.
        span: see `PriceBoard`.
        locality: ``apart``: no site has both workers and parameter servers, as in OASiS.
        server_share: of the sites, that have parameter servers if apart.
        fine: whether a job's work is cut into as many parts as it takes slots at its fastest, or a
            multiple of that; else long jobs, of which no part fits a slot, are turned away, and
            others are planned longer than they take. Not in the paper.
        change_s: none: moves between slots are planned and go through members, not a restart.
    """

    search: SearchRule = field(default_factory=SearchRule)
    window: int = 40
    tight: bool = True
    span: float = 6.0
    locality: Locality = "any"
    server_share: float = 0.3
    change_s: float = 0.0
    fine: bool = False

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        return _PdOrs(self, cluster, seed)


def oasis(**changes: float) -> PdOrsPolicy:
    """Return OASiS: no locality."""
    plain = PdOrsPolicy(search=SearchRule(inside=False), locality="apart")
    return replace(plain, **changes)  # type: ignore[arg-type]  # names are checked there


class _PdOrs:
    def __init__(self, policy: PdOrsPolicy, cluster: SharedCluster, seed: int) -> None:
        self._policy, self._cluster = policy, cluster
        self._board = PriceBoard(cluster, tight=policy.tight, span=policy.span)
        self._promised: dict[str, dict[int, Allocation]] = {}
        self._jobs: dict[str, ClusterJob] = {}
        self._rng = np.random.default_rng(seed)
        self._is_sure = not cluster.spot_S.any()
        import scipy.optimize  # noqa: F401  # takes seconds; no decision shall wait for it

    def decide(self, view: SlotView) -> SlotDecision:
        admissions = []
        for name in view.gone:
            self._forget(name, view.slot)
        if not self._is_sure:
            self._mend(view)
        if view.gone:
            self._offer(view)
        for job in view.arrived:
            self._board.learn(job)
            found = self._best(job, job.rows, view.slot)
            is_admitted = found is not None and found.payoff > 0
            payoff = None if found is None else found.payoff
            if found is not None and is_admitted:
                self._promise(job, found.allocations)
            admissions.append(Admission(job.id, view.slot, is_admitted, payoff))
        turned_away = {each.job for each in admissions if not each.is_admitted}
        given = {}
        for name, each in view.active.items():
            plan = self._promised.get(name)
            if name in turned_away or plan is None:
                continue
            if not plan or max(plan) < view.slot:
                # It overran its plan (it was slower, or lost a slot): the rest is planned anew,
                # whatever its payoff; what was admitted is not turned away.
                self._replan(each, view.slot)
                plan = self._promised[name]
            if view.slot in plan:
                given[name] = plan[view.slot]
        return SlotDecision(given, admissions)

    def _best(self, job: ClusterJob, rows: float, slot: int) -> BestSchedule | None:
        policy = self._policy
        capacity_NSR, usd_per_h_NSR = self._cluster.foreseen(slot, policy.window)
        slots = slice(slot, slot + len(capacity_NSR))
        price_NSR = self._board.prices(slots, capacity_NSR)
        kappa = policy.search.worth_per_usd
        if kappa:
            price_NSR = price_NSR + kappa * self._cluster.slot_s / 3600.0 * usd_per_h_NSR
        free_NSR = np.maximum(0.0, capacity_NSR - self._board.promised_TSR[slots])
        offers = SlotOffers(slot, price_NSR, free_NSR)
        ways = self._ways(job)
        for rule in self._rules(job, rows, ways):
            found = best_schedule(self._cluster, job, rows, offers, ways, rule, self._rng)
            if found is not None:
                return found
        return None

    def _rules(self, job: ClusterJob, rows: float, ways: Sequence[SpreadWay]) -> list[SearchRule]:
        """Return the ways to cut a job's work that are tried, one after the other."""
        rule, window = self._policy.search, self._policy.window
        if not self._policy.fine:
            return [rule]
        workers_W = np.arange(1, min(job.demands.most_workers, job.speed.batch.rows) + 1)
        servers_W = -(-workers_W // job.demands.workers_per_server)
        links = [way.link for way in ways]
        if len(job.data) <= 1:
            links.append(LinkUsed(float(self._cluster.inside_mbps_S.max()), is_inside=True))
        per_s = max(
            float(job.speed.rows_per_s(workers_W, servers_W, job.speed.batch.rows, link).max())
            for link in links
        )
        slots = max(1, math.ceil(rows / (per_s * self._cluster.slot_s) - 1e-9))
        if slots > window:
            return []
        quanta = slots * max(1, rule.quanta // slots)
        # Uneven shares of the data leave some workers without work: then smaller parts may do.
        return [replace(rule, quanta=each) for each in (quanta, 2 * quanta) if each <= 2 * window]

    def _ways(self, job: ClusterJob) -> list[SpreadWay]:
        ways = spread_ways(self._cluster, job, self._policy.search.most_ways)
        if self._policy.locality == "any":
            return ways
        first = []
        for region in range(len(self._cluster.net.names)):
            own = np.flatnonzero(self._cluster.region_S == region)
            first.append(own[: max(1, round(self._policy.server_share * len(own)))])
        of_servers = np.concatenate(first)
        apart = []
        for way in ways:
            workers = way.workers[~np.isin(way.workers, of_servers)]
            servers = way.servers[np.isin(way.servers, of_servers)]
            if len(workers) and len(servers):
                apart.append(replace(way, workers=workers, servers=servers))
        return apart

    def _forget(self, name: str, slot: int) -> None:
        """Give others what was promised to a job that is gone."""
        plan, job = self._promised.pop(name, {}), self._jobs.pop(name, None)
        if job is not None:
            self._promise(job, {s: had for s, had in plan.items() if s >= slot}, times=-1)

    def _offer(self, view: SlotView) -> None:
        """Plan those who wait for their turn anew, as others have given room back."""
        for name, each in sorted(view.active.items(), key=lambda i: -i[1].job.utility.worth):
            plan = self._promised.get(name)
            if plan and view.slot not in plan and max(plan) > view.slot:
                self._replan(each, view.slot)

    def _promise(self, job: ClusterJob, plan: Mapping[int, Allocation], times: int = 1) -> None:
        for slot, had in plan.items():
            for site, count in had.workers:
                self._board.promised_TSR[slot, site] += times * count * job.demands.worker_R
            for site, count in had.servers:
                self._board.promised_TSR[slot, site] += times * count * job.demands.server_R
        if times > 0:
            self._promised[job.id], self._jobs[job.id] = dict(plan), job

    def _replan(self, each: JobProgress, slot: int) -> None:
        plan = self._promised.get(each.job.id, {})
        self._promise(each.job, {s: had for s, had in plan.items() if s >= slot}, times=-1)
        found = self._best(each.job, each.rows_left, slot)
        self._promised[each.job.id] = {}
        if found is not None:
            self._promise(each.job, found.allocations)

    def _mend(self, view: SlotView) -> None:
        """Schedule anew those whose place was taken back, the most worthy first."""
        room = SiteRoom(self._cluster, view.capacity_SR)
        lost = []
        for name, each in sorted(view.active.items(), key=lambda i: -i[1].job.utility.worth):
            had = self._promised.get(name, {}).get(view.slot)
            if had is None:
                continue
            if room.fits(each.job, had):
                room.take(each.job, had)
            else:
                lost.append(each)
        for each in lost:
            self._replan(each, view.slot)
