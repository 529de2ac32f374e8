"""The best exchange, pace and machines by branch and bound, with a proven gap.

For a way to exchange and a pace ``p`` (see `work`) the regions are independent: each takes its
cheapest machines whose step leaves time for its exchange (`RegionFleet.cheapest`), ``P(p)`` dollars
an hour in all. ``P`` falls with the pace and everything else rises with it, so on an interval
nothing is better than the left end's time at the right end's price. Intervals are opened from the
most promising on, first of all ways together, as if each region had the shortest wait of any, then,
where an interval is narrow or ways are few, of each way by itself; until what is left cannot beat
the best found by more than the gap that is allowed.

Where machines may be preempted, an interval is one of two numbers: the pace, and how many such
machines there are (`RentalPool`), which say how much longer everything takes. Nothing in it is
better than the left end's time with the fewest of them at the price of the right end with the
most. What was found at the right end beats all that is slower than it and has as many
of them or more.
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

from geo_ray.planning.model.work import JobWork
from geo_ray.planning.search.bracket import UNCHANGING, Bracket
from geo_ray.planning.search.fleet import Pick, RegionFleet
from geo_ray.planning.search.one_by_one import best_of_all
from geo_ray.planning.search.pool import RentalPool
from geo_ray.planning.search.ways import Limits, Objective, Option, Ways

_BELOW: Final = 1 - 1e-8  # a pace just too fast for what was found
_NARROW: Final = 1.05
_FEW: Final = 8  # ways, which are told apart from the beginning
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
    """Choices whose pace and number of machines that may be preempted lie in intervals.

    A group of ways counts its pace as if each region had the shortest wait of any of them.
    """

    ways: Ways
    low_s: float
    high_s: float
    least_spots: int = 0
    most_spots: int = 0
    least_usd: float = 0.0  # an hour, of all machines; as known from a larger interval
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
        met: complete choices, in the order of finding.
    """

    work: JobWork
    fleets: Sequence[RegionFleet]
    options: Sequence[Option]
    bracket: Bracket = UNCHANGING
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
        if self._root.ways.depends:
            all_of = self._root.ways, self._pool, objective, limits
            chosen = best_of_all(self.fleets, *all_of)
            if chosen is not None:
                self.met.append(self.complete(*chosen))
                return self._if_better(self.met[-1], objective, limits, known)
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
            if bound >= value * (1 - gap):
                lower = min(lower, bound)
                break
            picks: tuple[Pick, ...] | None = None
            least_usd = math.inf
            for pace_s in [node.low_s, node.high_s] if node.is_left else [node.high_s]:
                rooms_s = node.ways.rooms_s(pace_s)
                picks, least_usd = self._pool.cheapest(rooms_s, node.most_spots)
                if picks is None:
                    continue
                found = self._met(picks, node.ways, objective, limits)
                if limits.keeps(found.seconds, found.usd) and (
                    found.value(objective) < (best.value(objective) if best else (value, math.inf))
                ):
                    best, value = found, found.value(objective)[0]
            if picks is None:
                if math.isfinite(least_usd):  # not proven to be too fast for some region
                    lower = min(lower, bound)
                continue
            node = replace(node, least_usd=max(node.least_usd, least_usd))
            if node.is_group:
                parts = self._parts(node)
            else:
                pace_s = min(self._pace_s([pick.step_s for pick in picks], node.ways), node.high_s)
                spots = max(node.least_spots, self._pool.spots(picks))
                # What a search that was cut off may have missed between there and here.
                stall = self._pool.stall(spots)
                missed = node.ways.bound(pace_s, least_usd, stall, objective, limits)
                lower = min(lower, missed)
                parts = self._left(node, pace_s, spots)
            for part in parts:
                below = self._bound(part, objective, limits)
                if below < value * (1 - gap):
                    heapq.heappush(heap, (below, next(number), part))
                else:
                    lower = min(lower, below)
        return best, min([lower, value, *(entry[0] for entry in heap[:1])])

    def _if_better(
        self, found: Found, objective: Objective, limits: Limits, known: float
    ) -> tuple[Found | None, float]:
        """Return the best of all choices, as `best` does."""
        value = found.value(objective)[0]
        if value < known and limits.keeps(found.seconds, found.usd):
            return found, value
        return None, known

    def complete(self, picks: Sequence[Pick], option: Option) -> Found:
        """Return the complete choice of given machines and exchanges."""
        work, steps_s = self.work, [pick.step_s for pick in picks]
        paces_s = self.ways([option]).whole_paces_KR(steps_s)[0].tolist()
        pace_s = max(paces_s)
        workers = sum(sum(pick.counts) for pick in picks)
        stall = self._pool.stall(self._pool.spots(picks))
        seconds = work.seconds(pace_s, option.last_s, workers, stall)
        hourly = option.usd_per_h + sum(pick.usd_per_h for pick in picks)
        egress_usd = option.egress_usd(work.steps, np.array(steps_s))
        usd = self.bracket.billed_h(seconds) * hourly + egress_usd
        straggler = paces_s.index(pace_s)
        return Found(option, tuple(picks), straggler, pace_s, stall, seconds, egress_usd, usd)

    def ways(self, options: Sequence[Option]) -> Ways:
        """Return some ways to exchange with the regions' machines."""
        return Ways(self.work, tuple(options), self._fastest_s, self.bracket)

    @cached_property
    def _pool(self) -> RentalPool:
        return RentalPool(self.fleets, self.work.pattern.together)

    @cached_property
    def _fastest_s(self) -> tuple[float, ...]:
        return tuple(fleet.least_step_s for fleet in self.fleets)

    @cached_property
    def _root(self) -> _Node:
        ways = self.ways(self.options).not_beaten()
        low_s, high_s = self._range(ways)
        high_s = max([high_s, *(self._range(way)[1] for way in ways.singles)])
        return _Node(ways, low_s, high_s, most_spots=self._pool.most_spots, is_left=True)

    def _range(self, ways: Ways) -> tuple[float, float]:
        """Return the fastest pace, and the pace of the smallest machines."""
        low_s = self._pace_s(self._fastest_s, ways)
        return low_s, max(low_s, self._pace_s(self._pool.slowest_s(), ways))

    def _parts(self, node: _Node) -> Iterator[_Node]:
        """Return the halves of a group's intervals, or its ways one by one."""
        is_wide = self._width(node) > _NARROW or node.high_s > node.low_s * _NARROW
        if is_wide and len(node.ways.options) > _FEW:
            yield from self._halves(node)
            return
        for way in node.ways.singles:
            more_s = way.slower_s(node.ways)
            fastest_s = self._range(way)[0]
            low_s = max(node.low_s, fastest_s)
            if low_s <= node.high_s + more_s:
                high_s = node.high_s + more_s
                # Its prices are those of a longer step than the group's.
                found = replace(node, ways=way, low_s=low_s, high_s=high_s, least_usd=0.0)
                yield replace(found, is_left=low_s == fastest_s)

    def _left(self, node: _Node, pace_s: float, spots: int) -> Iterator[_Node]:
        """Return what the cheapest at a node's right end do not beat.

        Args:
            node: of one way.
            pace_s: theirs.
            spots: of theirs that may be preempted; the node's fewest, if they have fewer.
        """
        if pace_s * _BELOW >= node.low_s:
            yield from self._halves(replace(node, high_s=pace_s * _BELOW))
        if spots > node.least_spots:
            low_s = max(node.low_s, pace_s * _BELOW)
            yield from self._halves(
                replace(node, low_s=low_s, most_spots=spots - 1, is_left=True), by_spots=True
            )

    def _width(self, node: _Node) -> float:
        return self._pool.stall(node.most_spots) / self._pool.stall(node.least_spots)

    def _halves(self, node: _Node, *, by_spots: bool = False) -> Iterator[_Node]:
        """Return a node in two parts: by pace or preempted machines, where they differ more."""
        if by_spots or self._width(node) > node.high_s / node.low_s:
            middle = (node.least_spots + node.most_spots) // 2
            yield replace(node, most_spots=middle, is_left=True)
            if middle < node.most_spots:
                yield replace(node, least_spots=middle + 1)
            return
        middle_s = math.sqrt(node.low_s * node.high_s)
        yield replace(node, high_s=middle_s, is_left=False)
        yield replace(node, low_s=middle_s, is_left=False)

    def _met(
        self, picks: Sequence[Pick], ways: Ways, objective: Objective, limits: Limits
    ) -> Found:
        usd_per_h = sum(pick.usd_per_h for pick in picks)
        workers = sum(sum(pick.counts) for pick in picks)
        steps_s = [pick.step_s for pick in picks]
        stall = self._pool.stall(self._pool.spots(picks))
        option = ways.best(steps_s, usd_per_h, workers, stall, objective, limits)
        self.met.append(self.complete(picks, option))
        return self.met[-1]

    def _pace_s(self, steps_s: Sequence[float], ways: Ways) -> float:
        return float(ways.paces_KR(steps_s).min(axis=0).max())

    def _bound(self, node: _Node, objective: Objective, limits: Limits) -> float:
        """Return a lower bound of all choices of a node."""
        rooms_s = node.ways.rooms_s(node.high_s)
        usd_per_h = max(node.least_usd, self._pool.least_usd_per_h(rooms_s, node.most_spots))
        stall = self._pool.stall(node.least_spots)
        return node.ways.bound(node.low_s, usd_per_h, stall, objective, limits)
