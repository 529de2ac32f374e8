"""The best choice where machines are preempted, which makes all wait who wait for them.

How much longer a job takes depends on the number of spot machines of all regions, so that regions
are not independent. `BracketSearch` prices whole choices truly, but knows of others only that they
stall no less than some factor. It is asked for choices without such machines, which is exact; for
all others with the factor of one such machine, which bounds them; and with the factors of what was
found, and prices that charge a machine for the standstill of all, which finds better ones. How much
better another choice could be at most is the bound, and told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from geo_ray.errors import PlanInfeasibleError
from geo_ray.planning.model.work import stall_of
from geo_ray.planning.request import Rental, Request
from geo_ray.planning.search.bracket_search import BracketSearch
from geo_ray.planning.search.search import Found
from geo_ray.planning.search.ways import Limits, Objective

_ROUNDS: Final = 4


@dataclass
class StallSearch:
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
    _charged: dict[float, BracketSearch] = field(default_factory=dict)

    def best(self, objective: Objective, limits: Limits) -> tuple[Found | None, float]:
        """Return the best choice within the limits, and what any choice is worth at least.

        Args:
            objective: fewest dollars, or least time; the other one breaks ties.
            limits: to keep.
        """
        if not self._least_share:
            return self.plain.best(objective, limits)
        best, lower = None, float("inf")
        if self._steady is not None:
            best, lower = self._steady.best(objective, limits)
        found, least = self.plain.best(objective, limits)
        for other in (found, *self._others(found, objective, limits)):
            if other is not None and (
                best is None or other.value(objective) < best.value(objective)
            ):
                best = other
        return best, min(lower, least)

    def priced(self, found: Found) -> Found:
        """Return the choice with the dollars of its own length."""
        return self.plain.priced(found)

    def _others(
        self, found: Found | None, objective: Objective, limits: Limits
    ) -> Iterator[Found | None]:
        """Choices that were found as if each machine were charged for the standstill of all."""
        asked: set[float] = set()
        for _ in range(_ROUNDS):
            hourly = round(self._hourly(found), 3)
            if hourly in asked:
                return
            asked.add(hourly)
            if hourly not in self._charged:
                self._charged[hourly] = self._search(self._charge(hourly), self._least_stall)
            other, _ = self._charged[hourly].best(objective, limits)
            found = None if other is None else self.plain.priced(other)
            if found is not None and limits.keeps(found.seconds, found.usd):
                yield found

    def _hourly(self, found: Found | None) -> float:
        """Dollars an hour of all machines; of a dear choice if there is none yet."""
        if found is None:
            return 10 * sum(min(r.usd(1.0) for r in s.rentals) for s in self.request.sites)
        return sum(pick.usd_per_h for pick in found.picks)

    def _charge(self, hourly: float) -> Request:
        return self._changed(
            lambda r: replace(r, usd=lambda h: r.usd(h) + r.lost_share * hourly * h)
        )

    def _changed(self, change: Callable[[Rental], Rental]) -> Request:
        sites = [
            replace(site, rentals=[change(rental) for rental in site.rentals])
            for site in self.request.sites
        ]
        return replace(self.request, sites=sites)

    @cached_property
    def plain(self) -> BracketSearch:
        """The search of all machines, none of which stall less than one preempted machine does."""
        return self._search(self.request, self._least_stall)

    @cached_property
    def _steady(self) -> BracketSearch | None:
        """The search of machines that are not preempted; None if a region has too few."""
        steady = self._changed(lambda r: replace(r, cap=0) if r.lost_share else r)
        try:
            steady.fleets()
        except PlanInfeasibleError:
            return None
        return self._search(steady, 1.0)

    @cached_property
    def _least_share(self) -> float:
        shares = [self._share(rental) for site in self.request.sites for rental in site.rentals]
        return min((share for share in shares if share), default=0.0)

    @property
    def _least_stall(self) -> float:
        return stall_of(self._least_share)

    def _share(self, rental: Rental) -> float:
        return rental.lost_share if rental.cap else 0.0

    def _search(self, request: Request, least_stall: float) -> BracketSearch:
        return BracketSearch(request, self.gap, self.most_nodes, self.most_opened, least_stall)
