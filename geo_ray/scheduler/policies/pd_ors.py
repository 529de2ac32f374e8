"""Online admission and placement by prices: PD-ORS, its load-aware variant, and OASiS.

Idea: the price of a resource grows exponentially with its use, so that capacity is reserved for
more valuable jobs. Rule: find the schedule of a new job with the largest surplus (utility minus
price); admit the job if the surplus is positive and reserve the schedule, else reject it. Prices:
``p = L (U / L)^(rho / C)``, with both bounds learned from past jobs; `BasePrice` adds a minimum
price, estimated from the bids of recent jobs. When: deadlines and values differ, and arrivals are
not known in advance. Source: PD-ORS (arXiv 2108.02917), reconstructed; regions, money, spot
machines, blocks of slots and `pd_ors_load` are ours. OASiS: the same without locality, with
separate sites for parameter servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from geo_ray.scheduler.cluster import Allocation, Floats, SharedCluster
from geo_ray.scheduler.job import ClusterJob, LinkUsed
from geo_ray.scheduler.placement import SiteCapacity
from geo_ray.scheduler.policy import JobProgress, SlotDecision, SlotScheduler, SlotView
from geo_ray.scheduler.pricing import (
    BestSchedule,
    PlacementPattern,
    SearchRule,
    SlotOffers,
    best_schedule,
    placement_patterns,
)
from geo_ray.scheduler.schedule import Admission

_RECENT: Final = 200
"""Number of newest jobs that count: bounds the decision time, and forgets old load."""


@dataclass(frozen=True, eq=False)
class _Bid:
    slot: int
    value: float
    units_R: Floats


class BasePrice:
    """Estimates a minimum price of each resource from the bids of recent jobs.

    Idea: if prices start near zero, the first jobs fill an empty cluster although more jobs will
    come than fit. If arrivals continue at the same rate, the jobs of ``n`` slots compete for
    the capacity of ``n`` slots, so scarcity can be estimated in advance. Rule: the dual prices
    of

        max sum_i u_i x_i   such that   sum_i d_i_r x_i <= sum_t,s C_t_s_r  for each r,   0 <= x <=
        1

    with ``t`` the slots since the first of these jobs, ``u_i`` the value of job ``i`` at full
    speed, and ``d_i_r`` the amount of ``r`` that its work takes with the fastest workers and
    parameter servers. When: demand exceeds capacity for a long time. Source: learning dual prices
    from a sample, as in online linear programming; its use as the minimum price of PD-ORS is ours.

    Attributes:
        price_R: price of a unit per slot.
    """

    def __init__(self, cluster: SharedCluster) -> None:
        self._cluster = cluster
        self._link = LinkUsed(float(cluster.inside_mbps_S.max()), is_inside=True)
        self._bids: dict[str, _Bid] = {}  # by job, in order of arrival
        self.price_R = np.zeros(len(cluster.resources))

    def learn(self, job: ClusterJob) -> None:
        """Add a new job. Jobs without any feasible placement bid nothing."""
        from scipy.optimize import linprog  # slow import

        if len(self._bids) == _RECENT:
            del self._bids[next(iter(self._bids))]
        self._bids[job.id] = self._bid(job)
        bids = list(self._bids.values())
        since = slice(min(bid.slot for bid in bids), job.arrival_slot + 1)
        capacity_R = self._cluster.capacity_TSR[since].sum(axis=(0, 1))
        if not capacity_R.any():
            self.price_R = np.zeros(len(capacity_R))
            return
        done = linprog(
            [-bid.value for bid in bids],
            A_ub=np.stack([bid.units_R for bid in bids], axis=1),
            b_ub=capacity_R,
            bounds=(0, 1),
            method="highs",
        )
        self.price_R = -np.asarray(done.ineqlin.marginals)

    def _bid(self, job: ClusterJob) -> _Bid:
        demands, batch = job.demands, job.speed.batch.rows
        workers_W = np.arange(1, min(demands.most_workers, batch) + 1)
        servers_W = -(-workers_W // demands.workers_per_server)
        per_s_W = job.speed.rows_per_s(workers_W, servers_W, batch, self._link)
        slots_W = job.rows / (per_s_W * self._cluster.slot_s)
        least_slots = max(1, int(np.ceil(slots_W.min() - 1e-9)))
        units_R = demands.units_R(
            float((workers_W * slots_W).min()), float((servers_W * slots_W).min())
        )
        return _Bid(job.arrival_slot, job.utility.of(least_slots - 1), units_R)


class PriceTable:
    """Prices of resources by site and slot, exponential in the reserved fraction.

    ``p = L (U / L)^(rho / C)``: without reservations the price is L, which any job can pay; at full
    capacity it is U, which none can. Both bounds are learned from the jobs that have arrived:

        U_r = max_i u_i(fastest) / d_i_r          value per unit, at full speed
        L   = min_i u_i(until the end) / (2 T sum_{s,r} C)      value per unit, if it finishes last

    ``d_i_r`` is the amount of ``r`` that the job uses in all its slots at full speed (``tight``),
    or the demand of one worker and one parameter server, as in the paper. ``L`` is at least
    ``U / e^span``: otherwise a job that is worthless when late would make it 0.

    The analysis assumes that the allocation of one job in a slot is small compared with ``C``, so
    that the price is constant meanwhile. For larger allocations, `surcharge` returns the increase.

    With ``load_fraction``, no price is lower than that fraction of the base price; see `BasePrice`.

    Source: PD-ORS (arXiv 2108.02917); the form is reconstructed, its constants are derived
    independently, and the tight bounds and the span are ours.

    Attributes:
        promised_TSR: reserved units by slot.
    """

    def __init__(
        self,
        cluster: SharedCluster,
        *,
        tight: bool = True,
        span: float = 6.0,
        load_fraction: float = 0.0,
    ) -> None:
        self._cluster = cluster
        self._tight = tight
        self._span = span
        self._load_fraction = load_fraction
        self._base_price = BasePrice(cluster)
        self.promised_TSR = np.zeros(cluster.capacity_TSR.shape)
        self._top_R = np.zeros(len(cluster.resources))
        self._low = math.inf
        self._units = float(cluster.capacity_TSR[0].sum()) * cluster.slots
        self._link = LinkUsed(float(cluster.inside_mbps_S.max()), is_inside=True)

    def learn(self, job: ClusterJob, *, is_new: bool = True) -> None:
        """Update the bounds with a new job.

        Args:
            job: the job.
            is_new: whether it adds to the load; a readmitted job does not.
        """
        demands, batch = job.demands, job.speed.batch.rows
        workers = min(demands.most_workers, batch)
        servers = demands.servers(workers)
        per_s = float(job.speed.rows_per_s(workers, servers, batch, self._link))
        slots = max(1, math.ceil(job.rows / (per_s * self._cluster.slot_s) - 1e-9))
        best = job.utility.of(slots - 1)
        if self._tight:
            fraction = job.rows / (per_s * self._cluster.slot_s)
            used_R = demands.units_R(workers, servers) * fraction
        else:
            used_R = demands.units_R(1, 1)
        paid = used_R > 0
        self._top_R[paid] = np.maximum(self._top_R[paid], best / used_R[paid])
        last = job.utility.of(self._cluster.slots - job.arrival_slot)
        self._low = min(self._low, last / (2 * self._units))
        if self._load_fraction and is_new:
            self._base_price.learn(job)

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        """Highest and lowest price of each resource, (R,) each."""
        base_price_R = self._load_fraction * self._base_price.price_R
        top_R = np.maximum(np.maximum(self._top_R, 1e-12), base_price_R)
        low_R = np.maximum(min(self._low, float(top_R.min())), top_R * math.exp(-self._span))
        return top_R, np.maximum(low_R, base_price_R)

    def surcharge(self, slot: int, used_SR: Floats) -> float:
        """Return the extra cost of an allocation whose own size raises the price.

        The extra cost is the integral of the price over the allocation, minus what the allocation
        costs at the initial price.

        Args:
            slot: the slot.
            used_SR: used units by site.
        """
        top_R, low_R = self.bounds
        capacity_SR = self._cluster.capacity_TSR[slot]
        growth_SR = np.divide(
            np.log(top_R / low_R), capacity_SR, out=np.zeros_like(used_SR), where=capacity_SR > 0
        )
        before_SR = low_R * np.exp(growth_SR * np.minimum(self.promised_TSR[slot], capacity_SR))
        rise_SR = growth_SR * used_SR
        factor_SR = np.divide(
            np.expm1(rise_SR), rise_SR, out=np.ones_like(used_SR), where=rise_SR > 0
        )
        return float((used_SR * before_SR * (factor_SR - 1.0)).sum())

    def prices(self, slots: slice, capacity_NSR: Floats) -> Floats:
        """Return the prices of some slots, (N, S, R).

        Args:
            slots: the slots.
            capacity_NSR: expected capacity in them.
        """
        top_R, low_R = self.bounds
        promised_NSR = self.promised_TSR[slots]
        fraction_NSR = np.divide(
            promised_NSR, capacity_NSR, out=np.zeros_like(promised_NSR), where=capacity_NSR > 0
        )
        fraction_NSR = np.minimum(fraction_NSR, 1.0)
        return np.asarray(low_R * np.exp(fraction_NSR * np.log(top_R / low_R)))


Locality = Literal["any", "separate"]
_MOST_PARTS: Final = 60  # parts of a long job's work
_FEWER: Final = 4  # factor by which each further try reduces the number of workers


@dataclass(frozen=True, slots=True)
class PdOrsPolicy:
    """Online admission and placement by prices: PD-ORS, extended to regions.

    Idea: the price of a resource grows exponentially with its use, so that capacity is reserved for
    more valuable jobs. Rule: for a new job, find the schedule with the largest surplus (utility
    minus price); admit the job if the surplus is positive and reserve the schedule, else reject it.
    A schedule may use one site or several, and its placement changes from slot to slot. With
    ``value_per_usd``, egress and dollars are part of the price. After a spot preemption, the rest
    of the job is scheduled again on capacity that no other job has reserved. A job that lost
    processes or regions for another reason keeps its priority: it is rescheduled before later jobs
    that have not begun, which are delayed. An admitted job is never rejected. A job that does not
    fit into single slots even on an empty cluster is planned in longer blocks (ours), so no job is
    rejected on an empty cluster for lack of a schedule. When: deadlines and values differ, and
    arrivals are not known in advance. Source: the abstract of PD-ORS (Yu, Liu, Wu, Ji, Bentley,
    arXiv 2108.02917); the algorithm is reconstructed, and the extensions to regions, money and spot
    machines are ours.

    `pd_ors_load` starts prices at half of what the past load bids (`BasePrice`), so that the first
    jobs do not fill an empty cluster. When: demand exceeds capacity and arrivals continue; with few
    arrivals it rejects some jobs that would have fit. Source: ours.

    OASiS is the same without locality: workers and parameter servers use separate sites. Rule: in
    each region the first sites host parameter servers only, the others workers only. Source: OASiS,
    the online scheduler that PD-ORS is compared with; reconstructed.

    Attributes:
        search: rule of the schedule search.
        window: number of slots considered from a job's arrival on.
        tight: see `PriceTable`.
        span: see `PriceTable`.
        load_fraction: see `PriceTable`.
        locality: ``separate``: no site hosts both workers and parameter servers, as in OASiS.
        server_fraction: fraction of sites reserved for parameter servers if ``locality`` is
            ``separate``.
        fine: divide the work of a job into parts that each take one slot at full speed, or a whole
            fraction of one; with other parts, rounding makes plans longer than the job. Not in the
            paper.
        endless: whether the cluster continues after its last slot; a longer job is then planned in
            part. Not in the paper.
        change_s: seconds lost by a planned change of the allocation; zero, because members change
            without a restart.
    """

    search: SearchRule = field(default_factory=SearchRule)
    window: int = 40
    tight: bool = True
    span: float = 6.0
    load_fraction: float = 0.0
    locality: Locality = "any"
    server_fraction: float = 0.3
    change_s: float = 0.0
    fine: bool = False
    endless: bool = False

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        return _PdOrs(self, cluster, seed)


def oasis(**changes: float) -> PdOrsPolicy:
    """Return OASiS: no locality."""
    plain = PdOrsPolicy(search=SearchRule(inside=False), locality="separate")
    return replace(plain, **changes)  # type: ignore[arg-type]  # names are checked there


def pd_ors_load() -> PdOrsPolicy:
    """Return PD-ORS with base prices from the load."""
    return PdOrsPolicy(load_fraction=0.5)


def _value(active: tuple[str, JobProgress]) -> float:
    _, progress = active
    return progress.job.utility.value


def _most_valuable_first(view: SlotView) -> list[tuple[str, JobProgress]]:
    return sorted(view.active.items(), key=_value, reverse=True)


class _PdOrs:
    def __init__(self, policy: PdOrsPolicy, cluster: SharedCluster, seed: int) -> None:
        self._policy, self._cluster = policy, cluster
        self._prices = PriceTable(
            cluster, tight=policy.tight, span=policy.span, load_fraction=policy.load_fraction
        )
        self._promised: dict[str, dict[int, Allocation]] = {}
        self._jobs: dict[str, ClusterJob] = {}
        self._rng = np.random.default_rng(seed)
        self._is_sure = not cluster.spot_S.any()
        import scipy.optimize  # noqa: F401  # takes seconds; no decision shall wait for it

    def decide(self, view: SlotView) -> SlotDecision:
        for name in view.gone:
            self._forget(name, view.slot)
        again = {job.id: job for job in view.arrived if job.id in view.admitted}
        admissions = [self._readmit(job, view) for job in again.values()]
        if not self._is_sure:
            self._mend(view)
        for name in view.active:
            if name in view.lost and name in self._promised and name not in again:
                self._keep_place(name, view)
        if view.gone:
            self._offer(view)
        new = [job for job in view.arrived if job.id not in again]
        admissions += [self._admit(job, view.slot) for job in new]
        rejected = {each.job for each in admissions if not each.is_admitted}
        given = {}
        for name, each in view.active.items():
            plan = self._promised.get(name)
            if name in rejected or plan is None:
                continue
            if not plan or max(plan) < view.slot:
                # It overran its plan (it was slower, or lost a slot): reschedule the rest whatever
                # its surplus, since an admitted job is never rejected.
                self._replan(each, view.slot)
                plan = self._promised[name]
            if view.slot in plan:
                given[name] = plan[view.slot]
        return SlotDecision(given, admissions)

    def _admit(self, job: ClusterJob, slot: int) -> Admission:
        self._prices.learn(job)
        found = self._best(job, job.rows, slot)
        if found is None:
            return Admission(job.id, slot, False, None)
        is_admitted = found.surplus > 0
        if is_admitted:
            self._promise(job, found.allocations)
        return Admission(job.id, slot, is_admitted, found.surplus)

    def _readmit(self, job: ClusterJob, view: SlotView) -> Admission:
        """Reschedule an admitted job whose specification has changed, whatever its value."""
        self._prices.learn(job, is_new=False)
        self._promise(job, {})
        if job.id in view.lost:
            surplus = self._keep_place(job.id, view)
        else:
            surplus = self._replan(view.active[job.id], view.slot)
        if surplus is None:
            self._forget(job.id, view.slot)
        return Admission(job.id, view.slot, surplus is not None, surplus)

    def _keep_place(self, name: str, view: SlotView) -> float | None:
        """Reschedule a job before later jobs that have not begun; return its surplus.

        Those jobs keep their plans if these still fit, and are rescheduled otherwise.
        """
        names, slot = list(view.active), view.slot
        behind = [
            other
            for other in names[names.index(name) + 1 :]
            if self._promised.get(other) and view.active[other].had is None
        ]
        plans = {other: self._take_back(other, slot) for other in behind}
        surplus = self._replan(view.active[name], slot)
        for other, plan in plans.items():
            if self._fits(self._jobs[other], plan, slot):
                self._promise(self._jobs[other], plan)
            else:
                self._replan(view.active[other], slot)
        return surplus

    def _fits(self, job: ClusterJob, plan: Mapping[int, Allocation], slot: int) -> bool:
        """Return whether a plan fits in addition to all reservations."""
        capacity_NSR, _ = self._cluster.foreseen(slot, self._policy.window)
        for at, had in plan.items():
            if at - slot >= len(capacity_NSR):
                return False
            free_SR = capacity_NSR[at - slot] - self._prices.promised_TSR[at]
            if not SiteCapacity(self._cluster, free_SR).fits(job, had):
                return False
        return bool(plan)

    def _best(self, job: ClusterJob, rows: float, slot: int) -> BestSchedule | None:
        policy = self._policy
        offers = self._offers(slot, policy.window)
        patterns = self._patterns(job)
        rules = self._rules(job, rows, patterns)
        for rule in rules:
            found = best_schedule(self._cluster, job, rows, offers, patterns, rule, self._rng)
            if found is not None:
                return found
        capacity_NSR, _ = self._cluster.foreseen(slot, policy.window)
        empty = replace(offers, price_NSR=np.zeros_like(capacity_NSR), free_NSR=capacity_NSR)
        rng = np.random.default_rng(
            0
        )  # feasibility check: the randomness does not affect the decision
        for rule in rules:
            if best_schedule(self._cluster, job, rows, empty, patterns, rule, rng) is not None:
                return None  # other jobs have reserved the capacity
        return self._coarse(job, rows, slot, patterns)

    def _offers(self, slot: int, slots: int) -> SlotOffers:
        """Return prices and capacity of the next slots."""
        capacity_NSR, usd_per_h_NSR = self._cluster.foreseen(slot, slots)
        at = slice(slot, slot + len(capacity_NSR))
        price_NSR = self._prices.prices(at, capacity_NSR)
        kappa = self._policy.search.value_per_usd
        if kappa:
            price_NSR = price_NSR + kappa * self._cluster.slot_s / 3600.0 * usd_per_h_NSR
        free_NSR = np.maximum(0.0, capacity_NSR - self._prices.promised_TSR[at])
        return SlotOffers(slot, price_NSR, free_NSR)

    def _coarse(
        self, job: ClusterJob, rows: float, slot: int, patterns: Sequence[PlacementPattern]
    ) -> BestSchedule | None:
        """Plan a job that does not fit into single slots of the window even on an empty cluster.

        The work is divided into parts, and each part gets a block of several slots. The plan is
        tried with the largest number of workers, then with a quarter of them, and so on; fewer
        workers need more slots, and the last try uses one worker up to the last slot. The price
        includes the rise that the job itself causes (`surcharge`). So an empty cluster with
        capacity for a worker in each of the job's regions has a schedule. In an endless cluster,
        work after the last known slot is planned later, and is priced like the planned part.
        """
        known = self._cluster.slots - slot
        links = [pattern.link for pattern in patterns]
        if len(job.data) <= 1:
            links.append(LinkUsed(float(self._cluster.inside_mbps_S.max()), is_inside=True))
        if not links or known < 1:
            return None
        counts, batch = [], job.speed.batch.rows
        count = min(job.demands.most_workers, batch)
        while count:
            counts.append(count)
            count //= _FEWER
        if counts[-1] != 1:
            counts.append(1)
        slots_of = {}
        for count in counts:
            servers = job.demands.servers(count)
            per_s = min(float(job.speed.rows_per_s(count, servers, batch, link)) for link in links)
            slots_of[count] = rows / (per_s * self._cluster.slot_s)
        offers = self._offers(slot, known)
        for fraction in (1.0, None) if self._policy.endless else (1.0,):
            for count in counts:
                found = self._in_blocks(job, rows, offers, patterns, slots_of[count], fraction)
                if found is not None:
                    return found
        return None

    def _in_blocks(
        self,
        job: ClusterJob,
        rows: float,
        offers: SlotOffers,
        patterns: Sequence[PlacementPattern],
        slots: float,
        fraction: float | None,
    ) -> BestSchedule | None:
        """Plan a job in parts of one block each, ``slots`` in all.

        Args:
            job: the job.
            rows: its remaining rows.
            offers: all known slots.
            patterns: placement patterns.
            slots: number of slots that the whole work takes with the tried number of workers.
            fraction: fraction of the work to plan; None: what fits into half of the slots.
        """
        known = len(offers.price_NSR)
        if fraction is None:
            fraction = min(1.0, known / 2 / slots)
            later_slots = slots * (1.0 - fraction)
            offers = replace(offers, later_slots=later_slots, later_fraction=1.0 / fraction)
        planned = slots * fraction
        quanta = min(_MOST_PARTS, max(1, math.ceil(planned - 1e-9)))
        span = max(1, math.ceil(planned / quanta - 1e-9))
        if span > known:
            return None
        blocks = offers.in_blocks(span, max(self._policy.window, 4 * quanta))
        rule = replace(self._policy.search, quanta=quanta)
        found = best_schedule(
            self._cluster, job, rows * fraction, blocks, list(patterns), rule, self._rng
        )
        if found is None:
            return None
        # Such a job uses much of the cluster, so its own allocation raises the price.
        more = offers.later_fraction * sum(
            self._prices.surcharge(slot, self._used_SR(job, had))
            for slot, had in found.allocations.items()
        )
        return replace(found, surplus=found.surplus - more, cost=found.cost + more)

    def _rules(
        self, job: ClusterJob, rows: float, patterns: Sequence[PlacementPattern]
    ) -> list[SearchRule]:
        """Return the ways to divide a job's work that are tried in order."""
        rule, window = self._policy.search, self._policy.window
        if not self._policy.fine:
            return [rule]
        workers_W = np.arange(1, min(job.demands.most_workers, job.speed.batch.rows) + 1)
        servers_W = -(-workers_W // job.demands.workers_per_server)
        links = [pattern.link for pattern in patterns]
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
        # Uneven data leave some workers idle: smaller parts may fit then.
        return [replace(rule, quanta=each) for each in (quanta, 2 * quanta) if each <= 2 * window]

    def _patterns(self, job: ClusterJob) -> list[PlacementPattern]:
        patterns = placement_patterns(self._cluster, job, self._policy.search.max_patterns)
        if self._policy.locality == "any":
            return patterns
        first = []
        for region in range(len(self._cluster.net.names)):
            own = np.flatnonzero(self._cluster.region_S == region)
            first.append(own[: max(1, round(self._policy.server_fraction * len(own)))])
        of_servers = np.concatenate(first)
        separate = []
        for pattern in patterns:
            workers = pattern.workers[~np.isin(pattern.workers, of_servers)]
            servers = pattern.servers[np.isin(pattern.servers, of_servers)]
            if len(workers) and len(servers):
                separate.append(replace(pattern, workers=workers, servers=servers))
        return separate

    def _forget(self, name: str, slot: int) -> None:
        """Release the reservations of a finished job."""
        if name in self._jobs:
            self._take_back(name, slot)
            del self._promised[name], self._jobs[name]

    def _take_back(self, name: str, slot: int) -> dict[int, Allocation]:
        """Remove the reservations of a job from a slot on; return them."""
        plan = {s: had for s, had in self._promised[name].items() if s >= slot}
        self._promise(self._jobs[name], plan, times=-1)
        self._promised[name] = {}
        return plan

    def _offer(self, view: SlotView) -> None:
        """Reschedule jobs that have not begun, since others have released capacity."""
        for name, each in _most_valuable_first(view):
            plan = self._promised.get(name)
            if plan and view.slot not in plan and max(plan) > view.slot:
                self._replan(each, view.slot)

    def _promise(self, job: ClusterJob, plan: Mapping[int, Allocation], times: int = 1) -> None:
        for slot, had in plan.items():
            self._prices.promised_TSR[slot] += times * self._used_SR(job, had)
        if times > 0:
            self._promised[job.id], self._jobs[job.id] = dict(plan), job

    def _used_SR(self, job: ClusterJob, had: Allocation) -> Floats:
        """Return the units of each site's resources that a job uses."""
        used_SR = np.zeros((len(self._cluster.sites), len(self._cluster.resources)))
        for site, count in had.workers:
            used_SR[site] += count * job.demands.worker_R
        for site, count in had.servers:
            used_SR[site] += count * job.demands.server_R
        return used_SR

    def _replan(self, each: JobProgress, slot: int) -> float | None:
        """Reschedule the rest of a job, whatever its value.

        Return its surplus, None: infeasible.
        """
        self._take_back(each.job.id, slot)
        found = self._best(each.job, each.rows_left, slot)
        if found is None:
            return None
        self._promise(each.job, found.allocations)
        return found.surplus

    def _mend(self, view: SlotView) -> None:
        """Reschedule jobs whose capacity was reclaimed, most valuable first."""
        capacity = SiteCapacity(self._cluster, view.capacity_SR)
        lost = []
        for name, each in _most_valuable_first(view):
            had = self._promised.get(name, {}).get(view.slot)
            if had is None:
                continue
            if capacity.fits(each.job, had):
                capacity.take(each.job, had)
            else:
                lost.append(each)
        for each in lost:
            self._replan(each, view.slot)
