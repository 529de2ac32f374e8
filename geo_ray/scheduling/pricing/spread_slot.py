"""The cheapest way to spread so many workers and their parameter servers over sites in one slot.

    min  sum_h (price of a worker on h) w_h + (price of a parameter server on h) s_h
    s.t. what they need of each resource on each site <= what is free there      (packing)
         sum_h w_h >= W, in each region with data its share of W                 (cover)
         gamma sum_h s_h >= sum_h w_h                                            (cover)

Filling the cheapest sites first, workers and parameter servers each by themselves, gives a lower
bound; workers first and then parameter servers into what is left a plan. Where the two are not
within ``gap`` of each other, the programme's relaxation is solved (HiGHS), its solution rounded at
random with G, and repaired: rounded down, then workers on the cheapest sites until the cover holds,
then parameter servers. Of all plans the cheapest counts.

For speed, only the cheapest sites with several times the room that is needed take part.

Source: the programme and randomized rounding are PD-ORS's (reconstructed); the repair after
measurements of a prototype, where plain rounding gave a plan in a quarter of the cases; the bound
that saves the relaxation is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from geo_ray.scheduling.model.cluster import Floats
from geo_ray.scheduling.policies.packing import fill, rooms_of
from geo_ray.scheduling.pricing.rounding import rounded

_ROOM = 3  # times what is needed, on the sites that take part


@dataclass(frozen=True, slots=True)
class RoundingRule:
    """How the relaxation becomes whole numbers.

    Attributes:
        factor: G.
        tries: of rounding.
        gap: share of the lower bound within which no relaxation is solved; below 0: always.
    """

    factor: float = 1.0
    tries: int = 4
    gap: float = 0.1


@dataclass(frozen=True, eq=False)
class SpreadQuestion:
    """One slot for one job.

    Attributes:
        free_SR: what is free, and the prices of a worker and a server by site.
        worker_cost_S: of a worker.
        server_cost_S: of a parameter server.
        worker_R: what a worker needs.
        server_R: what a parameter server needs.
        groups: sites that may have the workers of each region with data.
        servers: sites that may have parameter servers.
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
    """An answer: workers and parameter servers by site, and their price."""

    workers: dict[int, int]
    servers: dict[int, int]
    cost: float


class SpreadSolver:
    """Answers for several numbers of workers in one slot; sorts sites once."""

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
            key: rooms_of(question.free_SR[sites], question.worker_R)
            for key, sites in self._workers.items()
        }
        self._servers = _by_cost(question.servers, question.server_cost_S)
        self._server_rooms = rooms_of(question.free_SR[self._servers], question.server_R)

    def least(self, workers: Mapping[int | None, int], servers: int) -> float:
        """Return a price below which no plan is; infinite if there is none."""
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
        """Solve the relaxation: sites of workers and of servers, values, price; None: none."""
        from scipy.optimize import linprog  # slow to import
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

    def _some(self, sites: np.ndarray, rooms: np.ndarray, count: int) -> np.ndarray:
        total = np.cumsum(rooms)
        last = int(np.searchsorted(total, _ROOM * count)) + 4
        return sites[:last][rooms[:last] > 0]

    def _rounded_plans(self, workers: Mapping[int | None, int], servers: int) -> list[SpreadFound]:
        solved = self.relaxed(workers, servers)
        if solved is None:
            return []
        of_workers, of_servers, values, _ = solved
        num, found = len(of_workers), []
        starts = [np.floor(values + 1e-9).astype(np.int64)]
        starts += [rounded(values, self._rule.factor, self._rng) for _ in range(self._rule.tries)]
        seen: set[bytes] = set()
        for start in starts:
            if start.tobytes() in seen:
                continue
            seen.add(start.tobytes())
            begun = {int(s): int(n) for s, n in zip(of_workers, start[:num], strict=True) if n}
            plan = self._completed(begun, workers, servers)
            if plan is not None:
                found.append(plan)
        del of_servers
        return found

    def _completed(
        self, begun: dict[int, int], workers: Mapping[int | None, int], servers: int
    ) -> SpreadFound | None:
        """Repair: cut workers to what fits and is asked, add the missing ones, then the servers."""
        q, free_SR = self._q, self._q.free_SR.copy()
        placed: dict[int, int] = {}
        for key, count in workers.items():
            left, sites = count, self._workers[key]
            for site in sites[np.isin(sites, list(begun))] if begun else ():
                room = int(rooms_of(free_SR[site : site + 1], q.worker_R)[0])
                here = min(begun[int(site)], left, room)
                if here > 0:
                    placed[int(site)] = placed.get(int(site), 0) + here
                    free_SR[site] -= here * q.worker_R
                    left -= here
            more: dict[int, int] = {}
            rooms = rooms_of(free_SR[sites], q.worker_R) if begun else self._rooms[key]
            if not fill(sites, rooms, left, more):
                return None
            for site, extra in more.items():
                placed[site] = placed.get(site, 0) + extra
                free_SR[site] -= extra * q.worker_R
        of_servers: dict[int, int] = {}
        rooms = rooms_of(free_SR[self._servers], q.server_R)
        if not fill(self._servers, rooms, servers, of_servers):
            return None
        cost = sum(n * float(q.worker_cost_S[site]) for site, n in placed.items())
        cost += sum(n * float(q.server_cost_S[site]) for site, n in of_servers.items())
        return SpreadFound(placed, of_servers, cost)


def _by_cost(sites: np.ndarray, cost_S: Floats) -> np.ndarray:
    return np.asarray(sites[np.argsort(cost_S[sites], kind="stable")])


def _filled(costs: Floats, rooms: np.ndarray, count: int) -> float:
    """Return the price of so many on the cheapest places; infinite if there is no room."""
    total = np.cumsum(rooms)
    if not len(total) or total[-1] < count:
        return math.inf if count else 0.0
    place = int(np.searchsorted(total, count))
    before = int(total[place - 1]) if place else 0
    return float((costs[:place] * rooms[:place]).sum() + costs[place] * (count - before))
