"""The schedule of a job that is worth most beyond its price, by dynamic programming over its work.

The work is cut into ``quanta``. For each slot and each number of quanta there is the cheapest way
to do them in it: inside one site, or spread. The least price of ``v`` quanta until slot ``t`` is
``cost(t, v) = min_k cost(t - 1, v - k) + slot(t, k)``, and the job ends in the slot whose utility
less price is largest. Money is a part of the price: ``worth_per_usd`` for each dollar of resources
and egress.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from geo_ray.scheduling.model.allocation import Allocation, counts_of
from geo_ray.scheduling.model.cluster import Floats, SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.speed import LinkUsed
from geo_ray.scheduling.policies.packing import split_workers
from geo_ray.scheduling.pricing.spread_slot import RoundingRule, SpreadQuestion, SpreadSolver
from geo_ray.scheduling.pricing.ways import SpreadWay


@dataclass(frozen=True, slots=True)
class SearchRule:
    """How a best schedule is looked for.

    Attributes:
        quanta: parts of the work.
        rounding: of spread slots.
        inside: whether everything may be on one site.
        worth_per_usd: utility that a dollar costs; 0: money does not count.
        most_ways: of spreads that are tried.
    """

    quanta: int = 10
    rounding: RoundingRule = field(default_factory=RoundingRule)
    inside: bool = True
    worth_per_usd: float = 0.0
    most_ways: int = 6


@dataclass(frozen=True, eq=False)
class SlotOffers:
    """What a window of slots offers.

    Attributes:
        first: its first slot.
        price_NSR: of a unit in a slot, money included.
        free_NSR: what is not promised.
        span: slots that each row stands for: a job has the same in all of them.
        later_slots: that a job goes on for behind the schedule, as work is planned in part only.
        later_share: price of the whole job, to that of the part that is planned.
    """

    first: int
    price_NSR: Floats
    free_NSR: Floats
    span: int = 1
    later_slots: float = 0.0
    later_share: float = 1.0

    def in_blocks(self, span: int, most: int) -> SlotOffers:
        """Return the same in blocks of so many slots, at most so many blocks."""
        blocks = min(most, len(self.price_NSR) // span)
        shape = (blocks, span, *self.price_NSR.shape[1:])
        price_NSR = self.price_NSR[: blocks * span].reshape(shape).sum(axis=1)
        free_NSR = self.free_NSR[: blocks * span].reshape(shape).min(axis=1)
        return replace(self, price_NSR=price_NSR, free_NSR=free_NSR, span=span)


@dataclass(frozen=True, eq=False)
class BestSchedule:
    """An answer.

    Attributes:
        allocations: by slot.
        payoff: utility less price.
        cost: the price.
        last: slot in which the job ends.
    """

    allocations: Mapping[int, Allocation]
    payoff: float
    cost: float
    last: int


def best_schedule(
    cluster: SharedCluster,
    job: ClusterJob,
    rows_left: float,
    offers: SlotOffers,
    ways: list[SpreadWay],
    rule: SearchRule,
    rng: np.random.Generator,
) -> BestSchedule | None:
    """Return the best schedule from the window's first slot on; None if the job cannot be done.

    Args:
        cluster: the cluster.
        job: the job.
        rows_left: of its work.
        offers: prices and room.
        ways: to spread it.
        rule: how to look.
        rng: of the rounding.
    """
    return _Search(cluster, job, rows_left, offers, ways, rule, rng).run()


class _Search:
    def __init__(
        self,
        cluster: SharedCluster,
        job: ClusterJob,
        rows_left: float,
        offers: SlotOffers,
        ways: list[SpreadWay],
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
        self._ways = [(way, self._needed_K(way.link)) for way in ways]
        self._allowed_S = job.may_work_S(cluster)

    def _needed_K(self, link: LinkUsed) -> np.ndarray:
        """Return the workers that each number of quanta takes in a slot; 0: cannot be done."""
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
        worth_N = np.array([job.utility.of(end + offers.later_slots) for end in ends_N.tolist()])
        payoff_N = worth_N - total_NK[1:, quanta] * offers.later_share
        end = int(payoff_N.argmax())
        if not math.isfinite(payoff_N[end]):
            return None
        found: dict[int, Allocation] = {}
        left = quanta
        for n in range(end + 1, 0, -1):
            k = int(taken_NK[n, left])
            if k:
                begins = offers.first + (n - 1) * offers.span
                found |= dict.fromkeys(range(begins, begins + offers.span), plans[n - 1][k])
                left -= k
        cost = float(total_NK[end + 1, quanta]) * offers.later_share
        last = offers.first + (end + 1) * offers.span - 1
        return BestSchedule(found, float(payoff_N[end]), cost, last)

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
        """Fill in the prices of a slot, and return what to do for each number of quanta."""
        job, found = self._job, dict[int, Allocation]()
        cost_K[:] = inside_K
        for k in np.flatnonzero(np.isfinite(inside_K)).tolist():
            workers, site = int(workers_NK[n, k]), int(site_K[k])
            servers = job.demands.servers(workers)
            found[k + 1] = Allocation(((site, workers),), ((site, servers),), self._batch)
        for way, needed_K in self._ways:
            solver = self._solver(n, way)
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
        if not self._rule.worth_per_usd:
            return 0.0
        per_s = self._job.egress_usd_per_s(self._cluster, had)
        return self._rule.worth_per_usd * per_s * self._block_s

    def _solver(self, n: int, way: SpreadWay) -> SpreadSolver:
        demands, region_S = self._job.demands, self._cluster.region_S
        price_SR = self._offers.price_NSR[n]
        groups: dict[int | None, np.ndarray] = {None: way.workers}
        if self._job.data:
            groups = {g: way.workers[region_S[way.workers] == g] for g in self._job.data}
        question = SpreadQuestion(
            self._offers.free_NSR[n],
            price_SR @ demands.worker_R,
            price_SR @ demands.server_R,
            demands.worker_R,
            demands.server_R,
            groups,
            way.servers,
        )
        return SpreadSolver(question, self._rule.rounding, self._rng)
