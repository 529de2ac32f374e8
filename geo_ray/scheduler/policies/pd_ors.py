"""Online admission and placement by prices: PD-ORS, its load-aware variant, and OASiS.

Idea: scarce resources have a price that grows exponentially with their use, so that capacity is
left for jobs that are worth more. Rule: find the schedule of a new job with the largest
surplus, utility less price; admit it if that is positive and promise the schedule, else reject
the job. Prices: ``p = L (U / L)^(rho / C)``, both bounds learned from the jobs so far;
`BasePrice` raises them to what the recent load bids. When: deadlines and worth differ, and jobs
come unannounced. Source: PD-ORS (arXiv 2108.02917), reconstructed; regions, money, spot
machines, blocks of slots and `pd_ors_load` are ours. OASiS: the same without locality, with
sites for parameter servers only.
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

_RECENT: Final = 200  # jobs that are looked at: a decision stays short, and loads change


@dataclass(frozen=True, eq=False)
class _Bid:
    slot: int
    value: float
    units_R: Floats


class BasePrice:
    """What the jobs that came lately would bid a unit of each resource up to.

    Idea: prices that start near nothing sell an empty cluster to whoever comes first, although more
    jobs come than it can hold. If jobs keep coming as they did, those of ``n`` slots have the
    capacity of ``n`` slots; what is scarce then, and how much, is known before it is sold. Rule:
    the dual prices of

        max sum_i u_i x_i   such that   sum_i d_i_r x_i <= sum_t,s C_t_s_r  for each r,   0 <= x <=
        1

    with ``t`` the slots since the first of these jobs came, ``u_i`` the worth of job ``i`` at its
    fastest, and ``d_i_r`` what its work takes of ``r`` with the workers and parameter servers that
    do most each. When: more is asked for than there is, for long. Source: learning dual prices from
    a sample, as in online linear programming (memory); its use as the least price of PD-ORS is
    ours.

    Attributes:
        price_R: of a unit in a slot.
    """

    def __init__(self, cluster: SharedCluster) -> None:
        self._cluster = cluster
        self._link = LinkUsed(float(cluster.inside_mbps_S.max()), is_inside=True)
        self._bids: dict[str, _Bid] = {}  # by job, in their order
        self.price_R = np.zeros(len(cluster.resources))

    def learn(self, job: ClusterJob) -> None:
        """Take in a job that has come; nothing is bid where there was no room at all."""
        from scipy.optimize import linprog  # slow to import

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
    """Prices of resources by site and slot: exponential in how much of them is promised.

    ``p = L (U / L)^(rho / C)``: with nothing promised a price is L, which any job can pay; with all
    of it U, which none can. Both are learned from the jobs that have come so far, each when it
    comes:

        U_r = max_i u_i(fastest) / d_i_r          worth per unit, if it finishes as fast as it can
        L   = min_i u_i(until the end) / (2 T sum_{s,r} C)      worth per unit, if it finishes last

    ``d_i_r`` is what the job uses of ``r`` in all its slots together at its fastest (``tight``), or
    the demand of one worker and one parameter server, as in the paper. ``L`` is kept within a
    factor ``e^span`` of U, since a job that is worth nothing when late would make it 0.

    The analysis takes what a job has in a slot to be small beside ``C``, so that the price hardly
    moves while it is sold. For a job that has much of a slot, `surcharge` gives what the rise adds.

    With ``load_fraction`` no price is less than that part of what the load so far bids; see
    `BasePrice`.

    Source: PD-ORS (arXiv 2108.02917); the form is reconstructed from memory, its constants are
        derived
    anew, tight bounds and the span are ours.

    Attributes:
        promised_TSR: what is given away of each slot.
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
        """Take in the bounds of a job that has come.

        Args:
            job: the job.
            is_new: whether it adds to the load; one that was taken on before does not once more.
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
        """The largest and the least price of each resource, (R,) each."""
        base_price_R = self._load_fraction * self._base_price.price_R
        top_R = np.maximum(np.maximum(self._top_R, 1e-12), base_price_R)
        low_R = np.maximum(min(self._low, float(top_R.min())), top_R * math.exp(-self._span))
        return top_R, np.maximum(low_R, base_price_R)

    def surcharge(self, slot: int, used_SR: Floats) -> float:
        """Return how much more some use of a slot costs if prices rise while it is sold.

        That is the integral of the price from what is promised to that and the use, less the use at
        the price before.

        Args:
            slot: which.
            used_SR: of each site's resources.
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
            slots: which.
            capacity_NSR: what there is in them, as it is expected.
        """
        top_R, low_R = self.bounds
        promised_NSR = self.promised_TSR[slots]
        fraction_NSR = np.divide(
            promised_NSR, capacity_NSR, out=np.zeros_like(promised_NSR), where=capacity_NSR > 0
        )
        fraction_NSR = np.minimum(fraction_NSR, 1.0)
        return np.asarray(low_R * np.exp(fraction_NSR * np.log(top_R / low_R)))


Locality = Literal["any", "apart"]
_MOST_PARTS: Final = 60  # of a long job's work
_FEWER: Final = 4  # times fewer workers, from one try to the next


@dataclass(frozen=True, slots=True)
class PdOrsPolicy:
    """Online admission and placement by prices: PD-ORS, from machines to regions.

    Idea: what is scarce has a price that grows exponentially with its use, so that room is left for
    jobs that are worth more. Rule: when a job comes, find the schedule with the largest payoff,
    utility less price; admit it if that is positive and promise what the schedule has, else turn it
    away. The schedule may lie inside one site or be spread; its places change from slot to slot.
    Egress and dollars are part of the price with ``value_per_usd``. Where machines of the spot
    market were taken back, the rest of a job is scheduled anew, and what was promised is not taken
    from others. A job that lost its processes or regions otherwise keeps its place: it is scheduled
    anew before those that came after it and have not begun, which wait for longer. Who was taken on
    is not turned away. When: deadlines and worth differ, and jobs come unannounced. A job that
    single slots could not hold even if it were alone is planned in longer blocks (ours): no job is
    turned away for want of a schedule where the cluster is empty. Source: PD-ORS (Yu, Liu, Wu, Ji,
    Bentley, arXiv 2108.02917); only its abstract could be read, the algorithm is reconstructed;
    what was added for regions, money and spot machines is ours.

    `pd_ors_load` is the same with prices that start at half of what the load so far bids
    (`BasePrice`), so that an empty cluster is not sold to whoever comes first. When: more is asked
    for than there is, and jobs keep coming; where few come, it turns away some that would have
    fitted. Source: ours.

    OASiS is the same without locality: workers and parameter servers on sites of their own. Rule:
    the first sites, a share of them by what all parameter servers need, have parameter servers
    only.
    Source: OASiS, the online
    scheduler that PD-ORS compares itself with, reconstructed.

    Attributes:
        search: how a schedule is looked for.
        window: slots that are looked at from a job's arrival on.
        tight: see `PriceTable`.
        span: see `PriceTable`.
        load_fraction: see `PriceTable`.
        locality: ``apart``: no site has both workers and parameter servers, as in OASiS.
        server_fraction: of the sites, that have parameter servers if apart.
        fine: whether a job's work is cut into as many parts as it takes slots at its fastest, or a
            multiple of that; else jobs are planned longer than they take. Not in the paper.
        endless: whether the cluster goes on behind its last slot: then a job that takes longer is
            planned in part. Not in the paper.
        change_s: none: moves between slots are planned and go through members, not a restart.
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
    plain = PdOrsPolicy(search=SearchRule(inside=False), locality="apart")
    return replace(plain, **changes)  # type: ignore[arg-type]  # names are checked there


def pd_ors_load() -> PdOrsPolicy:
    """Return PD-ORS with prices that start where the load puts them."""
    return PdOrsPolicy(load_fraction=0.5)


def _value(active: tuple[str, JobProgress]) -> float:
    _, progress = active
    return progress.job.utility.value


def _worthiest_first(view: SlotView) -> list[tuple[str, JobProgress]]:
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
        """Plan a job that was taken on before and is another one now, whatever it is value."""
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
        """Plan a job anew before those that come after it and have not begun; its payoff.

        Those keep their plans where these still fit, and are planned anew where not.
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
        """Return whether there is capacity for a plan beside all that is promised."""
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
        rng = np.random.default_rng(0)  # of a question that decides nothing by itself
        for rule in rules:
            if best_schedule(self._cluster, job, rows, empty, patterns, rule, rng) is not None:
                return None  # others have the room
        return self._coarse(job, rows, slot, patterns)

    def _offers(self, slot: int, slots: int) -> SlotOffers:
        """Return what the next slots offer."""
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
        """Plan a job that no schedule of single slots of the window holds, were it alone.

        A part of its work is what some number of workers does in a block of slots; with fewer
        workers, parts are smaller and blocks longer, down to one worker that takes until the
        cluster's last slot. So a cluster with room for a worker in each of the job's regions has a
        schedule for it. In an endless cluster work beyond the last slot that is known is planned
        when that is near, and counts here at the price of the part that is planned.
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
        """Plan a job in parts that take a block each; ``slots`` in all.

        Args:
            job: which.
            rows: that are left of it.
            offers: all slots that are known.
            patterns: to spread it.
            slots: that all of its work takes with the workers that parts are made for.
            fraction: of its work that is planned; None: what half of the slots is enough for.
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
        # Such a job has much of the cluster: it does not get all of it at the price before it came.
        more = offers.later_fraction * sum(
            self._prices.surcharge(slot, self._used_SR(job, had))
            for slot, had in found.allocations.items()
        )
        return replace(found, surplus=found.surplus - more, cost=found.cost + more)

    def _rules(
        self, job: ClusterJob, rows: float, patterns: Sequence[PlacementPattern]
    ) -> list[SearchRule]:
        """Return the ways to cut a job's work that are tried, one after the other."""
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
        # Uneven shares of the data leave some workers without work: then smaller parts may do.
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
        apart = []
        for pattern in patterns:
            workers = pattern.workers[~np.isin(pattern.workers, of_servers)]
            servers = pattern.servers[np.isin(pattern.servers, of_servers)]
            if len(workers) and len(servers):
                apart.append(replace(pattern, workers=workers, servers=servers))
        return apart

    def _forget(self, name: str, slot: int) -> None:
        """Give others what was promised to a job that is gone."""
        if name in self._jobs:
            self._take_back(name, slot)
            del self._promised[name], self._jobs[name]

    def _take_back(self, name: str, slot: int) -> dict[int, Allocation]:
        """Take back what is promised to a job from a slot on; return what that was."""
        plan = {s: had for s, had in self._promised[name].items() if s >= slot}
        self._promise(self._jobs[name], plan, times=-1)
        self._promised[name] = {}
        return plan

    def _offer(self, view: SlotView) -> None:
        """Plan those who wait for their turn anew, as others have given capacity back."""
        for name, each in _worthiest_first(view):
            plan = self._promised.get(name)
            if plan and view.slot not in plan and max(plan) > view.slot:
                self._replan(each, view.slot)

    def _promise(self, job: ClusterJob, plan: Mapping[int, Allocation], times: int = 1) -> None:
        for slot, had in plan.items():
            self._prices.promised_TSR[slot] += times * self._used_SR(job, had)
        if times > 0:
            self._promised[job.id], self._jobs[job.id] = dict(plan), job

    def _used_SR(self, job: ClusterJob, had: Allocation) -> Floats:
        """Return what a job uses of each site's resources."""
        used_SR = np.zeros((len(self._cluster.sites), len(self._cluster.resources)))
        for site, count in had.workers:
            used_SR[site] += count * job.demands.worker_R
        for site, count in had.servers:
            used_SR[site] += count * job.demands.server_R
        return used_SR

    def _replan(self, each: JobProgress, slot: int) -> float | None:
        """Plan what is left of a job anew, whatever it is worth; its payoff, None: no place."""
        self._take_back(each.job.id, slot)
        found = self._best(each.job, each.rows_left, slot)
        if found is None:
            return None
        self._promise(each.job, found.allocations)
        return found.surplus

    def _mend(self, view: SlotView) -> None:
        """Schedule anew those whose place was taken back, the most worthy first."""
        capacity = SiteCapacity(self._cluster, view.capacity_SR)
        lost = []
        for name, each in _worthiest_first(view):
            had = self._promised.get(name, {}).get(view.slot)
            if had is None:
                continue
            if capacity.fits(each.job, had):
                capacity.take(each.job, had)
            else:
                lost.append(each)
        for each in lost:
            self._replan(each, view.slot)
