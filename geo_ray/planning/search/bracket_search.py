"""The best choice at prices that fall with age: one search per bracket of hours.

Between two edges of the age tiers prices are those of a `Bracket`, at which `Search` is exact or
finds a lower bound. What it finds is priced anew for its own length, by every item's own tiers, and
counts only if it keeps the limits then. Brackets whose lower bound is below the best choice are cut
in halves, the most promising one first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from geo_ray.planning.model.work import HOUR_S, stall_of
from geo_ray.planning.request import Request
from geo_ray.planning.search.bracket import UNCHANGING, Bracket, Usd, brackets_of
from geo_ray.planning.search.search import Found, Search
from geo_ray.planning.search.ways import SLACK, Limits, Objective, Ways

_SEARCHES: Final = 200
_NARROW: Final = 1 + 1e-7


@dataclass
class BracketSearch:
    """Finds the best choices for a request.

    Attributes:
        request: the question; its limits are not looked at.
        gap: share of the objective within which any choice is good enough.
        most_nodes: of a region's tree of machines, per pace.
        most_opened: intervals of paces per search.
    """

    request: Request
    gap: float = 0.0
    most_nodes: int = 20_000
    most_opened: int = 800
    _searches: dict[Bracket, Search] = field(default_factory=dict)

    def best(self, objective: Objective, limits: Limits) -> tuple[Found | None, float]:
        """Return the best choice within the limits, and what any choice is worth at least.

        Args:
            objective: fewest dollars, or least time; the other one breaks ties.
            limits: to keep.
        """
        best: Found | None = None
        value = lower = math.inf
        number = itertools.count()
        heap: list[tuple[float, int, Bracket]] = []
        waiting = list(self._brackets)
        while waiting:
            for bracket in waiting:
                if bracket.low_h * HOUR_S > limits.deadline_s * SLACK:
                    continue
                found, least = self._within(bracket, objective, limits, value)
                heapq.heappush(heap, (least, next(number), bracket))
                if found is not None and (
                    best is None or found.value(objective) < best.value(objective)
                ):
                    best, value = found, found.value(objective)[0]
            waiting = []
            while heap and not waiting and next(number) < _SEARCHES:
                if heap[0][0] >= value * (1 - self.gap):
                    break
                least, _, bracket = heapq.heappop(heap)
                if bracket.low_h and bracket.high_h > bracket.low_h * _NARROW:
                    waiting = bracket.halves(self._items)
                else:
                    lower = min(lower, least)
        return best, min([lower, value, *(entry[0] for entry in heap[:1])])

    def priced(self, found: Found) -> Found:
        """Return the choice with the dollars of its own length."""
        hours = found.seconds / HOUR_S
        usd = found.egress_usd
        for site, pick in zip(self.request.sites, found.picks, strict=True):
            rented = zip(site.rentals, pick.counts, strict=True)
            usd += site.stands_usd(hours) + sum(n * each.usd(hours) for each, n in rented if n)
        return replace(found, usd=usd)

    @property
    def any(self) -> Search:
        """A search with the request's machines, at the prices of some bracket."""
        return self._of(next(iter(self._searches), self._brackets[0]))

    def _of(self, bracket: Bracket) -> Search:
        search = self._searches.get(bracket)
        if search is None:
            fleets = self.request.fleets(bracket, self.most_nodes)
            options = self.request.options(bracket)
            search = Search(self.request.work, fleets, options, bracket)
            self._searches[bracket] = search
        return search

    def _within(
        self, bracket: Bracket, objective: Objective, limits: Limits, known: float
    ) -> tuple[Found | None, float]:
        """Return what was found if it keeps the limits at its own prices, and the lower bound."""
        search = self._of(bracket)
        deadline_s = min(limits.deadline_s, bracket.high_h * HOUR_S)
        inner = Limits(deadline_s, limits.budget_usd)
        found, least = search.best(objective, inner, self.gap, self.most_opened, known)
        if objective == "time":
            least = max(least, bracket.low_h * HOUR_S)
        found = None if found is None else self.priced(found)
        if found is None or not limits.keeps(found.seconds, found.usd):
            return None, least
        return found, least

    @cached_property
    def _items(self) -> Sequence[Usd]:
        sites = self.request.sites
        rented = [rental.usd for site in sites for rental in site.rentals if rental.cap]
        return [*rented, *(site.stands_usd for site in sites)]

    @cached_property
    def _brackets(self) -> list[Bracket]:
        edges_h = frozenset[float]().union(*(site.edges_h for site in self.request.sites))
        return brackets_of(edges_h, self._most_h(), self._items) if edges_h else [UNCHANGING]

    def _most_h(self) -> float:
        """Return hours that no job exceeds: one machine computes, all of them are waited for."""
        work, steps_s, workers, shares = self.request.work, [], 0, 0.0
        for fleet in self.request.fleets():
            count = sum(offer.cap for offer in fleet.offers)
            lan_s = sum(offer.cap * offer.lan_s for offer in fleet.offers)
            slowest = min(offer.rows_per_s for offer in fleet.offers if offer.cap)
            steps_s.append(fleet.fixed_s + lan_s + fleet.rows / slowest)
            workers += count
            shares += fleet.lost_share([offer.cap for offer in fleet.offers])
        found = [
            work.seconds(
                float(Ways(work, (option,), tuple(steps_s)).whole_paces_KR(steps_s).max()),
                option.last_s,
                workers,
                stall_of(shares),
            )
            for option in self.request.options()
        ]
        return max(found) / HOUR_S
