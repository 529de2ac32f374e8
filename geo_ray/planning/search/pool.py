"""The machines of all regions together, with at most so many that may be preempted.

A preemption makes all wait who wait for its region, so what regions rent is tied by one number: the
machines that may be preempted, of all regions or, where regions do not wait for each other, of the
region that has most. All of them lose the same share of their time: `plan.spot` is one for all. For
a cap on that number each region's cheapest machines with at most ``k`` of them are a staircase over
``k``, and the cheapest sum of all regions is found by adding up their staircases, exactly. Where
there are very many such machines, only some steps of a staircase are looked at, geometrically
spaced; what may be missed between them is told.

Shape legend: K = machines that may be preempted, from 0 on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geo_ray.errors import InvariantError
from geo_ray.planning.model.work import stall_of
from geo_ray.planning.search.fleet import Pick, RegionFleet

_STAIRS: Final = 96  # looked at, of all regions


class _Stair(NamedTuple):
    """A region's cheapest machines with at most some number that may be preempted.

    Attributes:
        pick: the machines; None if none were found and none are proven not to exist.
        spots: of them may be preempted.
        least_spots: one more than the next stair may have; below `spots` if some are left out.
        least_usd_per_h: of any machines with at least so many.
    """

    pick: Pick | None
    spots: int
    least_spots: int
    least_usd_per_h: float


@dataclass(frozen=True)
class RentalPool:
    """See the module's docstring.

    Attributes:
        fleets: of all regions.
        together: whether all wait for each other.
    """

    fleets: Sequence[RegionFleet]
    together: bool

    @cached_property
    def most_spots(self) -> int:
        """Return the most machines that may be preempted."""
        if not self._share:
            return 0
        each = [fleet.most_spots for fleet in self.fleets]
        return sum(each) if self.together else max(each)

    @cached_property
    def _share(self) -> float:
        shares = {o.lost_share for fleet in self.fleets for o in fleet.offers if o.lost_share}
        if len(shares) > 1:
            told = ", ".join(f"{share:g}" for share in sorted(shares))
            raise InvariantError(f"machines that may be preempted lose unequal shares: {told}")
        return max(shares, default=0.0)

    @cached_property
    def _shrink(self) -> float:
        """Return how many fewer machines than a stair the next one has, as a factor."""
        most = max(fleet.most_spots for fleet in self.fleets)
        if most * len(self.fleets) <= _STAIRS:
            return 1.0
        return math.exp(-math.log(most + 1) * len(self.fleets) / _STAIRS)

    def stall(self, spots: int) -> float:
        """Return how much longer steps and exchanges take."""
        return stall_of(spots * self._share)

    def spots(self, picks: Sequence[Pick]) -> int:
        """Return how many machines may be preempted, as they count for the standstill of all."""
        if not self._share:
            return 0
        pairs = zip(self.fleets, picks, strict=True)
        each = [fleet.spots(pick.counts) for fleet, pick in pairs]
        return sum(each) if self.together else max(each)

    def slowest_s(self) -> list[float]:
        """Return how long each region's step takes at most on machines that are worth a thought."""
        if not self._share:
            return [fleet.slowest_s() for fleet in self.fleets]
        return [max(fleet.slowest_s(), fleet.capped(0).slowest_s()) for fleet in self.fleets]

    def least_usd_per_h(self, rooms_s: Sequence[float], most_spots: int) -> float:
        """Return a lower bound of the price of steps that keep each region's limit.

        Args:
            rooms_s: the limits, by region.
            most_spots: that may be preempted, see `spots`.
        """
        pairs = zip(self.fleets, rooms_s, strict=True)
        return sum(fleet.capped(most_spots).least_usd_per_h(room_s) for fleet, room_s in pairs)

    def cheapest(
        self, rooms_s: Sequence[float], most_spots: int
    ) -> tuple[tuple[Pick, ...] | None, float]:
        """Return the cheapest machines that keep each region's limit, and what any cost at least.

        Args:
            rooms_s: the limits, by region.
            most_spots: that may be preempted, see `spots`.

        Returns:
            The machines, None if none were found, and a lower bound of the dollars an hour, which
            is infinite if there are none.
        """
        picks = []
        for fleet, room_s in zip(self.fleets, rooms_s, strict=True):
            pick = fleet.capped(most_spots).cheapest(room_s)
            if pick is None:
                return None, self._least_usd_if_any(rooms_s, most_spots)
            picks.append(pick)
        if self.spots(picks) <= most_spots:
            return tuple(picks), sum(pick.least_usd_per_h for pick in picks)
        return self._shared(rooms_s, most_spots)

    def _least_usd_if_any(self, rooms_s: Sequence[float], most_spots: int) -> float:
        """Return a lower bound of the price; infinite if a region has no such machines."""
        pairs = zip(self.fleets, rooms_s, strict=True)
        if any(fleet.capped(most_spots).is_too_short(room_s) for fleet, room_s in pairs):
            return math.inf
        return self.least_usd_per_h(rooms_s, most_spots)

    def _shared(
        self, rooms_s: Sequence[float], most_spots: int
    ) -> tuple[tuple[Pick, ...] | None, float]:
        """Return the same where each region's cheapest have too many together."""
        least_K, real_K = np.zeros(most_spots + 1), np.zeros(most_spots + 1)
        chosen: list[tuple[list[_Stair], NDArray[np.intp]]] = []
        for fleet, room_s in zip(self.fleets, rooms_s, strict=True):
            stairs = list(self._stairs(fleet, room_s, most_spots))
            bounds = np.full((len(stairs), most_spots + 1), np.inf)
            reals = bounds.copy()
            for i, (pick, spots, least_spots, least_usd) in enumerate(stairs):
                bounds[i, least_spots:] = least_K[: most_spots + 1 - least_spots] + least_usd
                if pick is not None:
                    reals[i, spots:] = real_K[: most_spots + 1 - spots] + pick.usd_per_h
            chosen.append((stairs, reals.argmin(axis=0)))
            least_K, real_K = bounds.min(axis=0), reals.min(axis=0)
        if math.isinf(real_K[most_spots]):
            return None, float(least_K[most_spots])
        picks: list[Pick] = []
        left = most_spots
        for stairs, index_K in reversed(chosen):
            stair = stairs[int(index_K[left])]
            assert stair.pick is not None, "its real price is finite"  # noqa: S101
            picks.append(stair.pick)
            left -= stair.spots
        return tuple(reversed(picks)), float(least_K[most_spots])

    def _stairs(self, fleet: RegionFleet, room_s: float, most_spots: int) -> Iterator[_Stair]:
        cap = min(most_spots, fleet.most_spots)
        while cap >= 0:
            capped = fleet.capped(cap)
            pick = capped.cheapest(room_s)
            if pick is None:
                if not capped.is_too_short(room_s):
                    yield _Stair(None, cap, 0, capped.least_usd_per_h(room_s))
                return
            spots = fleet.spots(pick.counts)
            cap = min(spots - 1, int(spots * self._shrink))
            yield _Stair(pick, spots, cap + 1, pick.least_usd_per_h)
