"""The best step time, exchange and machines by branch and bound, with a proven gap.

For a step time ``tau`` the regions no longer hang together: each takes its cheapest machines that
keep it (`RegionFleet.cheapest`), ``P(tau)`` dollars an hour in all, and the best exchange is read
off. ``P`` falls with tau and everything else rises with it, so on an interval nothing is better
than the left end's time at the right end's price. Intervals are opened from the most promising on,
until what is left cannot beat the best found by more than the gap that is allowed.

The front of time and money is what the search met on its way, thinned to what nothing else beats,
after a sweep over step times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from geo_ray.planning.exchange import Exchange
from geo_ray.planning.fleet import Pick, RegionFleet
from geo_ray.planning.work import HOUR_S, Work

Objective = Literal["cost", "time"]
_BELOW: Final = 1 - 1e-6  # a step time just too short for what was found
_SWEEP: Final = 24
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep.

    Attributes:
        deadline_s: longest time of the job.
        budget_usd: most dollars.
    """

    deadline_s: float = math.inf
    budget_usd: float = math.inf


@dataclass(frozen=True, slots=True)
class Option:
    """A way to exchange: where the averager is, how often, with which codec.

    Attributes:
        interval: local steps between exchanges.
        exchange: one of them.
        usd_per_h: what stands in the regions whatever machines are rented: servers, disks.
    """

    interval: int
    exchange: Exchange
    usd_per_h: float


@dataclass(frozen=True, slots=True)
class Found:
    """A complete choice.

    Attributes:
        option: the exchanges.
        picks: machines by region, in the order of the fleets.
        step_s: of the slowest region.
        seconds: of the job.
        usd: of the job.
    """

    option: Option
    picks: tuple[Pick, ...]
    step_s: float
    seconds: float
    usd: float


@dataclass(slots=True)
class Search:
    """Finds the best choice; keeps what it met.

    Attributes:
        work: the job.
        fleets: of all regions; none is empty.
        options: exchanges to choose from; at least one.
        met: complete choices, in the order of finding.
    """

    work: Work
    fleets: Sequence[RegionFleet]
    options: Sequence[Option]
    met: list[Found] = field(default_factory=list)
    _interval_K: Floats = field(init=False)
    _exchange_s_K: Floats = field(init=False)
    _usd_K: Floats = field(init=False)
    _stands_K: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._interval_K = np.array([o.interval for o in self.options], dtype=float)
        self._exchange_s_K = np.array([o.exchange.seconds for o in self.options])
        rounds_K = self.work.steps / self._interval_K
        self._usd_K = rounds_K * np.array([o.exchange.usd for o in self.options])
        self._stands_K = np.array([o.usd_per_h for o in self.options])

    def best(
        self, objective: Objective, limits: Limits, gap: float = 1e-4, most_opened: int = 400
    ) -> tuple[Found | None, float]:
        """The best choice within the limits, and by what share another could be better at most.

        Args:
            objective: fewest dollars, or least time; the other one breaks ties.
            limits: to keep.
            gap: share that is not worth looking for.
            most_opened: intervals of step times that are looked into.
        """
        shortest_s, longest_s = self._range()
        best: Found | None = None
        value = math.inf
        lower = math.inf
        heap = [(self._bound(objective, limits, shortest_s, longest_s), shortest_s, longest_s)]
        at_once = self._at(shortest_s, objective, limits)  # the right ends never come quite there
        if at_once is not None and at_once[0] is not None:
            best, value = at_once[0], self._value(at_once[0], objective)
        for _ in range(most_opened):
            if not heap:
                break
            bound, low_s, high_s = heapq.heappop(heap)
            if bound >= value * (1 - gap):
                lower = min(lower, bound)
                break
            found = self._at(high_s, objective, limits)
            if found is None:
                continue  # too short for some region
            step_s = max(pick.step_s for pick in found[1])
            # What trees that were cut off may have missed between there and here.
            missed = sum(pick.least_usd_per_h for pick in found[1])
            lower = min(lower, float(self._values(step_s, missed, limits, objective)[0].min()))
            if found[0] is not None:
                mine = self._value(found[0], objective)
                if best is None or (mine, self._other(found[0], objective)) < (
                    value,
                    self._other(best, objective),
                ):
                    best, value = found[0], mine
            right_s = step_s * _BELOW
            if right_s < low_s:
                continue
            middle_s = math.sqrt(low_s * right_s)
            for left, right in ((low_s, middle_s), (middle_s, right_s)):
                below = self._bound(objective, limits, left, right)
                if below < value * (1 - gap):
                    heapq.heappush(heap, (below, left, right))
        if best is None:
            return None, 0.0
        lower = min([lower, value, *(entry[0] for entry in heap[:1])])
        return best, max(0.0, 1 - lower / value) if value > 0 else 0.0

    def front(self, limits: Limits, points: int = _SWEEP) -> list[Found]:
        """Choices that nothing that was met beats in both time and money, from fast to cheap."""
        shortest_s, longest_s = self._range()
        for step_s in np.geomspace(shortest_s, longest_s, points):
            self._at(float(step_s), "cost", limits)
            self._at(float(step_s), "time", limits)
        kept: list[Found] = []
        for found in sorted(self.met, key=lambda f: (f.seconds, f.usd)):
            is_within = found.seconds <= limits.deadline_s and found.usd <= limits.budget_usd
            if is_within and (not kept or found.usd < kept[-1].usd * (1 - 1e-9)):
                kept.append(found)
        return kept

    def complete(self, picks: Sequence[Pick], option: Option) -> Found:
        """The choice of given machines and exchanges."""
        step_s = max(pick.step_s for pick in picks)
        seconds = self.work.seconds(step_s, option.interval, option.exchange.seconds)
        hourly = option.usd_per_h + sum(pick.usd_per_h for pick in picks)
        egress = self.work.rounds(option.interval) * option.exchange.usd
        return Found(option, tuple(picks), step_s, seconds, seconds / HOUR_S * hourly + egress)

    def _range(self) -> tuple[float, float]:
        shortest_s = max(fleet.fastest().step_s for fleet in self.fleets)
        smallest_s = max(fleet.smallest().step_s for fleet in self.fleets)
        return shortest_s, max(shortest_s, smallest_s)

    def _times(self, step_s: float) -> Floats:
        rounds_K = self.work.steps / self._interval_K
        waits_K = self._exchange_s_K
        if self.work.overlaps:
            waits_K = np.maximum(0.0, waits_K - self._interval_K * step_s)
        return self.work.startup_s + self.work.steps * step_s + rounds_K * waits_K

    def _values(
        self, step_s: float, usd_per_h: float, limits: Limits, objective: Objective
    ) -> tuple[Floats, Floats]:
        """Objective and the other measure of every option; infinite where a limit is broken."""
        seconds_K = self._times(step_s)
        usd_K = seconds_K / HOUR_S * (usd_per_h + self._stands_K) + self._usd_K
        slack = 1 + 1e-9
        broken_K = (seconds_K > limits.deadline_s * slack) | (usd_K > limits.budget_usd * slack)
        first_K, second_K = (usd_K, seconds_K) if objective == "cost" else (seconds_K, usd_K)
        return np.where(broken_K, np.inf, first_K), second_K

    def _bound(self, objective: Objective, limits: Limits, left_s: float, right_s: float) -> float:
        at = np.array([right_s])
        usd_per_h = sum(float(fleet.least_usd_per_h(at)[0]) for fleet in self.fleets)
        if math.isinf(usd_per_h):
            return math.inf
        return float(self._values(left_s, usd_per_h, limits, objective)[0].min())

    def _at(
        self, limit_s: float, objective: Objective, limits: Limits
    ) -> tuple[Found | None, tuple[Pick, ...]] | None:
        picks = []
        for fleet in self.fleets:
            pick = fleet.cheapest(limit_s)
            if pick is None:
                return None
            picks.append(pick)
        step_s = max(pick.step_s for pick in picks)
        usd_per_h = sum(pick.usd_per_h for pick in picks)
        first_K, second_K = self._values(step_s, usd_per_h, limits, objective)
        index = int(np.lexsort((second_K, first_K))[0])
        if math.isinf(first_K[index]):
            return None, tuple(picks)
        found = self.complete(picks, self.options[index])
        self.met.append(found)
        return found, tuple(picks)

    @staticmethod
    def _value(found: Found, objective: Objective) -> float:
        return found.usd if objective == "cost" else found.seconds

    @staticmethod
    def _other(found: Found, objective: Objective) -> float:
        return found.seconds if objective == "cost" else found.usd
