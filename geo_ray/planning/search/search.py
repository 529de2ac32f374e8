"""The best exchange, pace and machines by branch and bound, with a proven gap.

For a way to exchange and a pace ``p`` (see `work`) the regions are independent: each takes its
cheapest machines whose step leaves time for its exchange (`RegionFleet.cheapest`), ``P(p)`` dollars
an hour in all. ``P`` falls with the pace and everything else rises with it, so on an interval
nothing is better than the left end's time at the right end's price. Intervals are opened from the
most promising on, first of all ways together, as if each region had the shortest wait of any, then,
where an interval is narrow, of each way by itself; until what is left cannot beat the best found by
more than the gap that is allowed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from geo_ray.planning.model.work import JobWork, stall_of
from geo_ray.planning.search.bracket import UNCHANGING, Bracket
from geo_ray.planning.search.fleet import Pick, RegionFleet
from geo_ray.planning.search.ways import Limits, Objective, Option, Ways

_BELOW: Final = 1 - 1e-8  # a pace just too fast for what was found
_NARROW: Final = 1.05
_PATIENCE: Final = 20  # times as many intervals while nothing was found


@dataclass(frozen=True, slots=True)
class Found:
    """A complete choice.

    Attributes:
        option: the exchanges.
        picks: machines by region, in the order of the fleets.
        straggler: index of the region that all others wait for.
        pace_s: see `work`.
        stall: how much longer preemptions make steps and exchanges.
        seconds: of the job.
        egress_usd: of the job.
        usd: of the job, egress included.
    """

    option: Option
    picks: tuple[Pick, ...]
    straggler: int
    pace_s: float
    stall: float
    seconds: float
    egress_usd: float
    usd: float

    def value(self, objective: Objective) -> tuple[float, float]:
        """What counts, and what breaks ties."""
        return (self.usd, self.seconds) if objective == "cost" else (self.seconds, self.usd)


@dataclass(frozen=True, slots=True)
class _Node:
    """Choices whose pace lies in an interval.

    A group of ways counts its pace as if each region had the shortest wait of any of them.
    """

    ways: Ways
    low_s: float
    high_s: float
    is_left: bool = False  # nothing is faster than its left end, where right ends never come

    @property
    def is_group(self) -> bool:
        return len(self.ways.options) > 1


@dataclass
class Search:
    """Finds the best choice, and keeps all complete choices that it meets.

    Attributes:
        work: the job.
        fleets: of all regions; none is empty.
        options: exchanges to choose from; at least one.
        bracket: of the hours that prices are for.
        least_stall: that any choice is known to have.
        met: complete choices, in the order of finding.
    """

    work: JobWork
    fleets: Sequence[RegionFleet]
    options: Sequence[Option]
    bracket: Bracket = UNCHANGING
    least_stall: float = 1.0
    met: list[Found] = field(default_factory=list)

    def best(
        self,
        objective: Objective,
        limits: Limits,
        gap: float = 1e-4,
        most_opened: int = 400,
        known: float = math.inf,
    ) -> tuple[Found | None, float]:
        """Return the best choice within the limits, and what any choice is worth at least.

        Args:
            objective: fewest dollars, or least time; the other one breaks ties.
            limits: to keep.
            gap: share that is not worth looking for.
            most_opened: intervals of paces that are looked into; more if nothing was found in them.
            known: value of a choice that is known; only better ones are looked for.
        """
        best: Found | None = None
        value = known
        lower = math.inf
        number = itertools.count()
        root = self._root
        heap = [(self._bound(root, objective, limits), next(number), root)]
        for opened in itertools.count():
            enough = most_opened if math.isfinite(value) else most_opened * _PATIENCE
            if not heap or opened >= enough:
                break
            bound, _, node = heapq.heappop(heap)
            # What preemptions cost beyond the least of them no bound can tell apart.
            share = (1 - gap) * (1.0 if best is None else self.least_stall / best.stall)
            if bound >= value * share:
                lower = min(lower, bound)
                break
            picks: tuple[Pick, ...] | None = None
            for pace_s in [node.low_s, node.high_s] if node.is_left else [node.high_s]:
                picks = self._cheapest(node.ways, pace_s)
                if picks is None:
                    continue  # too fast for some region
                found = self._met(picks, node.ways, objective, limits)
                if limits.keeps(found.seconds, found.usd) and (
                    found.value(objective) < (best.value(objective) if best else (value, math.inf))
                ):
                    best, value = found, found.value(objective)[0]
            if picks is None:
                continue
            if node.is_group:
                parts = self._parts(node)
            else:
                pace_s = self._pace_s([pick.step_s for pick in picks], node.ways)
                # What trees that were cut off may have missed between there and here.
                missed = sum(pick.least_usd_per_h for pick in picks)
                lower = min(lower, node.ways.bound(pace_s, missed, objective, limits))
                parts = _halves(node, pace_s * _BELOW)
            for part in parts:
                below = self._bound(part, objective, limits)
                if below < value * share:
                    heapq.heappush(heap, (below, next(number), part))
                else:
                    lower = min(lower, below)
        return best, min([lower, value, *(entry[0] for entry in heap[:1])])

    def complete(self, picks: Sequence[Pick], option: Option) -> Found:
        """Return the complete choice of given machines and exchanges."""
        work, steps_s = self.work, [pick.step_s for pick in picks]
        paces_s = self.ways([option]).whole_paces_KR(steps_s)[0].tolist()
        pace_s = max(paces_s)
        workers, stall = sum(sum(pick.counts) for pick in picks), self._stall(picks)
        seconds = work.seconds(pace_s, option.last_s, workers, stall)
        hourly = option.usd_per_h + sum(pick.usd_per_h for pick in picks)
        egress_usd = option.egress_usd(work.steps, np.array(steps_s))
        usd = self.bracket.billed_h(seconds) * hourly + egress_usd
        straggler = paces_s.index(pace_s)
        return Found(option, tuple(picks), straggler, pace_s, stall, seconds, egress_usd, usd)

    def _stall(self, picks: Sequence[Pick]) -> float:
        """How much longer preemptions make it: who stands still holds up all who wait for it."""
        pairs = zip(self.fleets, picks, strict=True)
        shares = [fleet.lost_share(pick.counts) for fleet, pick in pairs]
        return stall_of(sum(shares) if self.work.pattern.together else max(shares))

    def ways(self, options: Sequence[Option]) -> Ways:
        """Return some ways to exchange with the regions' machines."""
        return Ways(self.work, tuple(options), self._fastest_s, self.bracket, self.least_stall)

    @cached_property
    def _fastest_s(self) -> tuple[float, ...]:
        return tuple(fleet.fastest().step_s for fleet in self.fleets)

    @cached_property
    def _root(self) -> _Node:
        ways = self.ways(self.options).not_beaten()
        low_s, high_s = self._range(ways)
        return _Node(ways, low_s, max([high_s, *(self._range(w)[1] for w in ways.singles)]), True)

    def _range(self, ways: Ways) -> tuple[float, float]:
        """Return the fastest pace, and the pace of the smallest machines."""
        low_s = self._pace_s([fleet.fastest().step_s for fleet in self.fleets], ways)
        return low_s, max(low_s, self._pace_s([fleet.slowest_s() for fleet in self.fleets], ways))

    def _parts(self, node: _Node) -> Iterator[_Node]:
        """Return the halves of a group's interval, or its ways one by one."""
        if node.high_s > node.low_s * _NARROW:
            yield from _halves(node, node.high_s)
            return
        for way in node.ways.singles:
            more_s = way.slower_s(node.ways)
            fastest_s = self._range(way)[0]
            low_s = max(node.low_s, fastest_s)
            if low_s <= node.high_s + more_s:
                yield _Node(way, low_s, node.high_s + more_s, low_s == fastest_s)

    def _met(
        self, picks: Sequence[Pick], ways: Ways, objective: Objective, limits: Limits
    ) -> Found:
        usd_per_h = sum(pick.usd_per_h for pick in picks)
        workers = sum(sum(pick.counts) for pick in picks)
        steps_s = [pick.step_s for pick in picks]
        stalled = replace(ways, least_stall=self._stall(picks))
        option = stalled.best(steps_s, usd_per_h, workers, objective, limits)
        self.met.append(self.complete(picks, option))
        return self.met[-1]

    def _pace_s(self, steps_s: Sequence[float], ways: Ways) -> float:
        return float(ways.paces_KR(steps_s).min(axis=0).max())

    def _cheapest(self, ways: Ways, pace_s: float) -> tuple[Pick, ...] | None:
        """Return every region's cheapest machines that keep the pace; None if a region cannot."""
        picks = []
        for fleet, room_s in zip(self.fleets, ways.rooms_s(pace_s), strict=True):
            pick = fleet.cheapest(room_s)
            if pick is None:
                return None
            picks.append(pick)
        return tuple(picks)

    def _bound(self, node: _Node, objective: Objective, limits: Limits) -> float:
        """Return a lower bound of all choices of a node."""
        usd_per_h = 0.0
        for fleet, room_s in zip(self.fleets, node.ways.rooms_s(node.high_s), strict=True):
            usd_per_h += fleet.least_usd_per_h(room_s)
        return node.ways.bound(node.low_s, usd_per_h, objective, limits)


def _halves(node: _Node, high_s: float) -> Iterator[_Node]:
    """Return the part of a node up to ``high_s`` in two halves; nothing if it is empty."""
    if high_s < node.low_s:
        return
    middle_s = math.sqrt(node.low_s * high_s)
    yield _Node(node.ways, node.low_s, middle_s)
    yield _Node(node.ways, middle_s, high_s)
