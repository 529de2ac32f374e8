"""Best schedule of a job at given prices, by dynamic programming over its work.

The work is divided into ``quanta``; the minimum price of ``v`` quanta until slot ``t`` is ``cost(t,
v) = min_k cost(t - 1, v - k) + slot(t, k)``. A slot's work uses one site or several. The latter is
a mixed packing and covering program. Filling the cheapest sites first gives a lower bound and a
plan; if they are within 10 %, the plan is used. Otherwise the LP relaxation is solved (HiGHS),
multiplied by G (1), rounded at random and repaired: rounded down, then workers on the cheapest
sites until the cover holds, then parameter servers. Source: PD-ORS (reconstructed) and Chernoff
bounds as in SMD; the repair and the bound that avoids the relaxation are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from geo_ray.scheduler.cluster import Allocation, Floats, SharedCluster, counts_of
from geo_ray.scheduler.job import ClusterJob, LinkUsed
from geo_ray.scheduler.placement import capacities_of, fill, split_workers


def packing_factor(rows: int, width: float, delta: float = 0.5) -> float:
    """Return the scaling factor that preserves packing constraints, in (0, 1]."""
    part = 3 * math.log(3 * rows / delta) / (2 * width)
    return 1 + part - math.sqrt(part * part + 2 * part)


def cover_factor(rows: int, width: float, delta: float = 0.5) -> float:
    """Return the scaling factor that preserves covering constraints, above 1."""
    part = math.log(3 * rows / delta) / width
    return 1 + part + math.sqrt(part * part + 2 * part)


def rounded(relaxed: Floats, factor: float, rng: np.random.Generator) -> np.ndarray:
    """Return integers: each scaled value is rounded up with the probability of its fraction."""
    scaled = relaxed * factor
    down = np.floor(scaled + 1e-9)
    return np.asarray((down + (rng.random(len(scaled)) < scaled - down)).astype(np.int64))


_ROOM = 3  # multiple of the needed capacity on the candidate sites


@dataclass(frozen=True, slots=True)
class RoundingRule:
    """Randomized rounding of the relaxation.

    Attributes:
        factor: scaling factor G.
        tries: number of roundings.
        gap: relative distance to the lower bound within which the relaxation is skipped; below 0:
            never skipped.
    """

    factor: float = 1.0
    tries: int = 4
    gap: float = 0.1


@dataclass(frozen=True, eq=False)
class SpreadQuestion:
    """Spread placement problem of one job in one slot.

    Attributes:
        free_SR: free capacity by site.
        worker_cost_S: price of a worker.
        server_cost_S: price of a parameter server.
        worker_R: demand of a worker.
        server_R: demand of a parameter server.
        groups: allowed sites of the workers of each region with data.
        servers: allowed sites of parameter servers.
    """

    free_SR: Floats
    worker_cost_S: Floats
    server_cost_S: Floats
    worker_R: Floats
    server_R: Floats
    groups: Mapping[int | None, np.ndarray]
    servers: np.ndarray


@dataclass(frozen=True, eq=False)
class SpreadFound:
    """Solution: workers and parameter servers by site, and their price."""

    workers: dict[int, int]
    servers: dict[int, int]
    cost: float


class SpreadSolver:
    """Solves the problem for several numbers of workers in one slot; sorts sites once."""

    def __init__(
        self, question: SpreadQuestion, rule: RoundingRule, rng: np.random.Generator
    ) -> None:
        self._q = question
        self._rule = rule
        self._rng = rng
        self._workers = {
            key: _by_cost(sites, question.worker_cost_S) for key, sites in question.groups.items()
        }
        self._rooms = {
            key: capacities_of(question.free_SR[sites], question.worker_R)
            for key, sites in self._workers.items()
        }
        self._servers = _by_cost(question.servers, question.server_cost_S)
        self._server_rooms = capacities_of(question.free_SR[self._servers], question.server_R)

    def least(self, workers: Mapping[int | None, int], servers: int) -> float:
        """Return a lower bound on the price of any plan; infinite if infeasible."""
        cost = _filled(self._q.server_cost_S[self._servers], self._server_rooms, servers)
        for key, count in workers.items():
            sites = self._workers[key]
            cost += _filled(self._q.worker_cost_S[sites], self._rooms[key], count)
        return cost

    def cheapest(self, workers: Mapping[int | None, int], servers: int) -> SpreadFound | None:
        """Return a plan; None if none was found."""
        least = self.least(workers, servers)
        if math.isinf(least):
            return None
        best = self._completed({}, workers, servers)
        if best is not None and best.cost <= least * (1 + self._rule.gap):
            return best
        for found in self._rounded_plans(workers, servers):
            if best is None or found.cost < best.cost:
                best = found
        return best

    def relaxed(
        self, workers: Mapping[int | None, int], servers: int
    ) -> tuple[np.ndarray, np.ndarray, Floats, float] | None:
        """Solve the relaxation.

        Sites of workers and of servers, values, price; None: infeasible.
        """
        from scipy.optimize import linprog  # slow import
        from scipy.sparse import csr_matrix

        q = self._q
        chosen = [self._some(self._workers[k], self._rooms[k], n) for k, n in workers.items()]
        of_workers = np.concatenate(chosen)
        of_servers = self._some(self._servers, self._server_rooms, servers)
        num = len(of_workers)
        sites = np.unique(np.concatenate([of_workers, of_servers]))
        at = {int(site): place for place, site in enumerate(sites)}
        width, rows, cols, data = len(q.worker_R), [], [], []
        for column, site in enumerate((*of_workers, *of_servers)):
            need_R = q.worker_R if column < num else q.server_R
            for r in np.flatnonzero(need_R):
                rows.append(at[int(site)] * width + int(r))
                cols.append(column)
                data.append(float(need_R[r]))
        right = list(q.free_SR[sites].ravel())
        row, first = len(right), 0
        for part, count in zip(chosen, workers.values(), strict=True):
            rows += [row] * len(part)
            cols += range(first, first + len(part))
            data += [-1.0] * len(part)
            right.append(-float(count))
            row, first = row + 1, first + len(part)
        rows += [row] * len(of_servers)
        cols += range(num, num + len(of_servers))
        data += [-1.0] * len(of_servers)
        right.append(-float(servers))
        cost = np.concatenate([q.worker_cost_S[of_workers], q.server_cost_S[of_servers]])
        matrix = csr_matrix((data, (rows, cols)), shape=(row + 1, len(cost)))
        done = linprog(cost, A_ub=matrix, b_ub=np.array(right), method="highs")
        if done.status != 0:
            return None
        return of_workers, of_servers, np.maximum(0.0, done.x), float(done.fun)

    def _some(self, sites: np.ndarray, capacities: np.ndarray, count: int) -> np.ndarray:
        total = np.cumsum(capacities)
        last = int(np.searchsorted(total, _ROOM * count)) + 4
        return sites[:last][capacities[:last] > 0]

    def _rounded_plans(self, workers: Mapping[int | None, int], servers: int) -> list[SpreadFound]:
        solved = self.relaxed(workers, servers)
        if solved is None:
            return []
        of_workers, of_servers, values, _ = solved
        num, found = len(of_workers), []
        starts = [np.floor(values + 1e-9).astype(np.int64)]
        starts += [rounded(values, self._rule.factor, self._rng) for _ in range(self._rule.tries)]
        observed: set[bytes] = set()
        for start in starts:
            if start.tobytes() in observed:
                continue
            observed.add(start.tobytes())
            begun = {int(s): int(n) for s, n in zip(of_workers, start[:num], strict=True) if n}
            plan = self._completed(begun, workers, servers)
            if plan is not None:
                found.append(plan)
        del of_servers
        return found

    def _completed(
        self, begun: dict[int, int], workers: Mapping[int | None, int], servers: int
    ) -> SpreadFound | None:
        """Repair a rounded plan: trim excess workers, add missing ones, then the servers."""
        q, free_SR = self._q, self._q.free_SR.copy()
        placed: dict[int, int] = {}
        for key, count in workers.items():
            left, sites = count, self._workers[key]
            for site in sites[np.isin(sites, list(begun))] if begun else ():
                capacity = int(capacities_of(free_SR[site : site + 1], q.worker_R)[0])
                here = min(begun[int(site)], left, capacity)
                if here > 0:
                    placed[int(site)] = placed.get(int(site), 0) + here
                    free_SR[site] -= here * q.worker_R
                    left -= here
            more: dict[int, int] = {}
            capacities = capacities_of(free_SR[sites], q.worker_R) if begun else self._rooms[key]
            if not fill(sites, capacities, left, more):
                return None
            for site, extra in more.items():
                placed[site] = placed.get(site, 0) + extra
                free_SR[site] -= extra * q.worker_R
        of_servers: dict[int, int] = {}
        capacities = capacities_of(free_SR[self._servers], q.server_R)
        if not fill(self._servers, capacities, servers, of_servers):
            return None
        cost = sum(n * float(q.worker_cost_S[site]) for site, n in placed.items())
        cost += sum(n * float(q.server_cost_S[site]) for site, n in of_servers.items())
        return SpreadFound(placed, of_servers, cost)


def _by_cost(sites: np.ndarray, cost_S: Floats) -> np.ndarray:
    return np.asarray(sites[np.argsort(cost_S[sites], kind="stable")])


def _filled(costs: Floats, capacities: np.ndarray, count: int) -> float:
    """Return the price of a number of processes on the cheapest sites.

    Infinite if they do not fit.
    """
    total = np.cumsum(capacities)
    if not len(total) or total[-1] < count:
        return math.inf if count else 0.0
    place = int(np.searchsorted(total, count))
    before = int(total[place - 1]) if place else 0
    return float((costs[:place] * capacities[:place]).sum() + costs[place] * (count - before))


@dataclass(frozen=True, eq=False)
class PlacementPattern:
    """Allowed sites of a job that is spread over several sites.

    Attributes:
        workers: indices of sites that may have workers.
        servers: indices of sites that may have parameter servers.
        link: slowest link between them.
        server_region: the single region of the parameter servers.
    """

    workers: np.ndarray
    servers: np.ndarray
    link: LinkUsed
    server_region: int


def placement_patterns(
    cluster: SharedCluster, job: ClusterJob, most: int
) -> list[PlacementPattern]:
    """Return placement patterns with distinct sites, fastest links first, at most ``most``.

    Args:
        cluster: the cluster.
        job: the job; its workers run where its data are.
        most: maximum number of patterns; those with the slowest links are dropped.
    """
    net, region_S = cluster.net, cluster.region_S
    both_GG = np.minimum(net.mbps_GG, net.mbps_GG.T)
    regions = range(len(net.names))
    allowed_S = job.may_work_S(cluster)
    sources = list(job.data) if job.data else list(regions)
    found: list[PlacementPattern] = []
    for anchor in regions:
        servers = np.flatnonzero(region_S == anchor)
        for mbps in sorted({float(both_GG[source, anchor]) for source in sources}, reverse=True):
            near = [source for source in sources if both_GG[source, anchor] >= mbps]
            if len(job.data) > 1 and len(near) < len(job.data):
                continue
            workers = np.flatnonzero(allowed_S & np.isin(region_S, near))
            rtt_s = float(net.rtt_s_GG[near, anchor].max())
            if len(workers) and len(servers):
                found.append(
                    PlacementPattern(workers, servers, LinkUsed(mbps, False, rtt_s), anchor)
                )
    found.sort(key=attrgetter("link.mbps"), reverse=True)
    if not job.data or len(job.data) < 2:
        return found[:most]
    # Links inside a region come first and may be many: prefer the regions with data.
    near_data = [pattern for pattern in found if pattern.server_region in job.data]
    rest = [pattern for pattern in found if pattern.server_region not in job.data]
    return (near_data + rest)[:most]


@dataclass(frozen=True, slots=True)
class SearchRule:
    """Parameters of the schedule search.

    Attributes:
        quanta: parts of the work.
        rounding: rounding of spread slots.
        inside: whether a job may use one site only.
        value_per_usd: utility per dollar; 0: money does not count.
        max_patterns: maximum placement patterns tried.
    """

    quanta: int = 10
    rounding: RoundingRule = field(default_factory=RoundingRule)
    inside: bool = True
    value_per_usd: float = 0.0
    max_patterns: int = 6


@dataclass(frozen=True, eq=False)
class SlotOffers:
    """Prices and capacity of a window of slots.

    Attributes:
        first: first slot.
        price_NSR: price of a unit per slot, including money.
        free_NSR: capacity without reservations.
        span: number of slots per row; allocations are constant within it.
        later_slots: slots that the job continues after the schedule, if only part of its work is
            planned.
        later_fraction: price of the whole job relative to the planned part.
    """

    first: int
    price_NSR: Floats
    free_NSR: Floats
    span: int = 1
    later_slots: float = 0.0
    later_fraction: float = 1.0

    def in_blocks(self, span: int, most: int) -> SlotOffers:
        """Return the same in blocks of several slots, with at most ``most`` blocks."""
        blocks = min(most, len(self.price_NSR) // span)
        shape = (blocks, span, *self.price_NSR.shape[1:])
        price_NSR = self.price_NSR[: blocks * span].reshape(shape).sum(axis=1)
        free_NSR = self.free_NSR[: blocks * span].reshape(shape).min(axis=1)
        return replace(self, price_NSR=price_NSR, free_NSR=free_NSR, span=span)


@dataclass(frozen=True, eq=False)
class BestSchedule:
    """Result of the search.

    Attributes:
        allocations: by slot.
        surplus: utility minus price.
        cost: the price.
        last: last slot of the job.
    """

    allocations: Mapping[int, Allocation]
    surplus: float
    cost: float
    last: int


def best_schedule(
    cluster: SharedCluster,
    job: ClusterJob,
    rows_left: float,
    offers: SlotOffers,
    patterns: list[PlacementPattern],
    rule: SearchRule,
    rng: np.random.Generator,
) -> BestSchedule | None:
    """Return the best schedule from the first slot of the window; None if infeasible.

    Args:
        cluster: the cluster.
        job: the job.
        rows_left: its remaining work.
        offers: prices and capacity.
        patterns: placement patterns.
        rule: search parameters.
        rng: random generator of the rounding.
    """
    return _Search(cluster, job, rows_left, offers, patterns, rule, rng).run()


class _Search:
    def __init__(
        self,
        cluster: SharedCluster,
        job: ClusterJob,
        rows_left: float,
        offers: SlotOffers,
        patterns: list[PlacementPattern],
        rule: SearchRule,
        rng: np.random.Generator,
    ) -> None:
        self._cluster, self._job, self._rows = cluster, job, rows_left
        self._offers, self._rule, self._rng = offers, rule, rng
        self._batch = job.speed.batch.rows
        most = min(job.demands.most_workers, self._batch)
        self._block_s = cluster.slot_s * offers.span
        self._workers_W = np.arange(1, most + 1)
        self._servers_W = -(-self._workers_W // job.demands.workers_per_server)
        self._parts_K = rows_left / rule.quanta * np.arange(1, rule.quanta + 1)
        self._patterns = [(pattern, self._needed_K(pattern.link)) for pattern in patterns]
        self._allowed_S = job.may_work_S(cluster)

    def _needed_K(self, link: LinkUsed) -> np.ndarray:
        """Return the number of workers for each number of quanta in a slot; 0: infeasible."""
        per_s_W = self._job.speed.rows_per_s(self._workers_W, self._servers_W, self._batch, link)
        done_W = np.maximum.accumulate(per_s_W) * self._block_s
        place_K = np.searchsorted(done_W, self._parts_K * (1 - 1e-12))
        return np.where(place_K < len(done_W), place_K + 1, 0)

    def run(self) -> BestSchedule | None:
        job, offers, quanta = self._job, self._offers, self._rule.quanta
        slots = len(offers.price_NSR)
        inside_NK, site_NK, inside_K = self._inside()
        cost_NK = np.full((slots, quanta), math.inf)
        plans: list[dict[int, Allocation]] = []
        for n in range(slots):
            same = n > 0 and np.array_equal(offers.price_NSR[n], offers.price_NSR[n - 1])
            if same and np.array_equal(offers.free_NSR[n], offers.free_NSR[n - 1]):
                cost_NK[n] = cost_NK[n - 1]
                plans.append(plans[-1])
                continue
            plans.append(self._slot(n, inside_NK[n], site_NK[n], inside_K, cost_NK[n]))
        total_NK = np.full((slots + 1, quanta + 1), math.inf)
        total_NK[:, 0] = 0.0
        taken_NK = np.zeros((slots + 1, quanta + 1), dtype=np.int64)
        for n in range(slots):
            here_K = np.concatenate([[0.0], cost_NK[n]])
            for k in range(1, quanta + 1):
                sums = total_NK[n, k::-1] + here_K[: k + 1]
                taken_NK[n + 1, k] = int(sums.argmin())
                total_NK[n + 1, k] = sums[taken_NK[n + 1, k]]
        ends_N = offers.first - job.arrival_slot + offers.span * (np.arange(slots) + 1) - 1
        value_N = np.array([job.utility.of(end + offers.later_slots) for end in ends_N.tolist()])
        surplus_N = value_N - total_NK[1:, quanta] * offers.later_fraction
        end = int(surplus_N.argmax())
        if not math.isfinite(surplus_N[end]):
            return None
        found: dict[int, Allocation] = {}
        left = quanta
        for n in range(end + 1, 0, -1):
            k = int(taken_NK[n, left])
            if k:
                begins = offers.first + (n - 1) * offers.span
                found |= dict.fromkeys(range(begins, begins + offers.span), plans[n - 1][k])
                left -= k
        cost = float(total_NK[end + 1, quanta]) * offers.later_fraction
        last = offers.first + (end + 1) * offers.span - 1
        return BestSchedule(found, float(surplus_N[end]), cost, last)

    def _inside(self) -> tuple[Floats, np.ndarray, np.ndarray]:
        """Return price and site of every number of quanta inside one site, by slot."""
        cluster, demands, quanta = self._cluster, self._job.demands, self._rule.quanta
        price_NSR, free_NSR = self._offers.price_NSR, self._offers.free_NSR
        slots = len(price_NSR)
        best_NK = np.full((slots, quanta), math.inf)
        site_NK = np.zeros((slots, quanta), dtype=np.int64)
        workers_NK = np.zeros((slots, quanta), dtype=np.int64)
        if not self._rule.inside or len(self._job.data) > 1:
            return best_NK, site_NK, workers_NK
        for mbps in np.unique(cluster.inside_mbps_S[self._allowed_S]):
            sites = np.flatnonzero(self._allowed_S & (cluster.inside_mbps_S == mbps))
            needed_K = self._needed_K(LinkUsed(float(mbps), is_inside=True))
            for k, workers in enumerate(needed_K):
                if not workers:
                    break
                need_R = demands.units_R(int(workers), demands.servers(int(workers)))
                fits_NS = (free_NSR[:, sites] + 1e-9 >= need_R).all(axis=2)
                if not fits_NS.any():
                    break
                cost_NS = np.where(fits_NS, price_NSR[:, sites] @ need_R, math.inf)
                place_N = cost_NS.argmin(axis=1)
                cost_N = cost_NS[np.arange(slots), place_N]
                better_N = cost_N < best_NK[:, k]
                best_NK[better_N, k] = cost_N[better_N]
                site_NK[better_N, k] = sites[place_N[better_N]]
                workers_NK[better_N, k] = workers
        return best_NK, site_NK, workers_NK

    def _slot(
        self,
        n: int,
        inside_K: Floats,
        site_K: np.ndarray,
        workers_NK: np.ndarray,
        cost_K: Floats,
    ) -> dict[int, Allocation]:
        """Add the prices of a slot; return the allocation for each number of quanta."""
        job, found = self._job, dict[int, Allocation]()
        cost_K[:] = inside_K
        for k in np.flatnonzero(np.isfinite(inside_K)).tolist():
            workers, site = int(workers_NK[n, k]), int(site_K[k])
            servers = job.demands.servers(workers)
            found[k + 1] = Allocation(((site, workers),), ((site, servers),), self._batch)
        for pattern, needed_K in self._patterns:
            solver = self._solver(n, pattern)
            for k, needed in enumerate(needed_K):
                if not needed:
                    break
                split = split_workers(job, int(needed))
                total = sum(split.values())
                if total > self._workers_W[-1]:
                    break
                servers = job.demands.servers(total)
                least = solver.least(split, servers)
                if math.isinf(least):
                    break
                if least >= cost_K[k]:
                    continue
                plan = solver.cheapest(split, servers)
                if plan is None:
                    continue
                had = Allocation(counts_of(plan.workers), counts_of(plan.servers), self._batch)
                cost = plan.cost + self._egress(had)
                if cost < cost_K[k]:
                    cost_K[k] = cost
                    found[k + 1] = had
        return found

    def _egress(self, had: Allocation) -> float:
        if not self._rule.value_per_usd:
            return 0.0
        per_s = self._job.egress_usd_per_s(self._cluster, had)
        return self._rule.value_per_usd * per_s * self._block_s

    def _solver(self, n: int, pattern: PlacementPattern) -> SpreadSolver:
        demands, region_S = self._job.demands, self._cluster.region_S
        price_SR = self._offers.price_NSR[n]
        groups: dict[int | None, np.ndarray] = {None: pattern.workers}
        if self._job.data:
            groups = {g: pattern.workers[region_S[pattern.workers] == g] for g in self._job.data}
        question = SpreadQuestion(
            self._offers.free_NSR[n],
            price_SR @ demands.worker_R,
            price_SR @ demands.server_R,
            demands.worker_R,
            demands.server_R,
            groups,
            pattern.servers,
        )
        return SpreadSolver(question, self._rule.rounding, self._rng)
