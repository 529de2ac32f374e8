"""Find the best exchange, step time and machines by branch and bound, with a proven gap.

Enumerates when there are few choices; prices that fall with age are searched per price bracket.
`RentalPool` holds the machines of all regions and limits those that may be preempted.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geo_ray.base.errors import InvariantError
from geo_ray.planner.config import Objective
from geo_ray.planner.cover import Floats
from geo_ray.planner.exchange import SLACK, Limits, Option, OptionSet
from geo_ray.planner.fleet import Pick, RegionFleet
from geo_ray.planner.price_brackets import UNCHANGING, Bracket, Usd, brackets_of
from geo_ray.planner.request import Request
from geo_ray.planner.timing import HOUR_S, JobWork, stall_of

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
    """The machines of all regions together, with at most so many that may be preempted.

    A preemption makes all wait who wait for its region, so what regions rent is tied by one number:
    the machines that may be preempted, of all regions or, where regions do not wait for each other,
    of the region that has most. All of them lose the same share of their time: `plan.spot` is one
    for all. For a cap on that number each region's cheapest machines with at most ``k`` of them are
    a staircase over ``k``, and the cheapest sum of all regions is found by adding up their
    staircases, exactly. Where there are very many such machines, only some steps of a staircase are
    looked at, geometrically spaced; what may be missed between them is told.

    Shape legend: K = machines that may be preempted, from 0 on.

    Attributes:
        fleets: of all regions.
        synchronous: whether all wait for each other.
    """

    fleets: Sequence[RegionFleet]
    synchronous: bool

    @cached_property
    def most_spots(self) -> int:
        """Return the most machines that may be preempted."""
        if not self._lost_fraction:
            return 0
        each = [fleet.most_spots for fleet in self.fleets]
        return sum(each) if self.synchronous else max(each)

    @cached_property
    def _lost_fraction(self) -> float:
        fractions = {
            o.lost_fraction for fleet in self.fleets for o in fleet.offers if o.lost_fraction
        }
        if len(fractions) > 1:
            text = ", ".join(f"{fraction:g}" for fraction in sorted(fractions))
            raise InvariantError(f"machines that may be preempted lose unequal shares: {text}")
        return max(fractions, default=0.0)

    @cached_property
    def _shrink(self) -> float:
        """Return how many fewer machines than a stair the next one has, as a factor."""
        most = max(fleet.most_spots for fleet in self.fleets)
        if most * len(self.fleets) <= _STAIRS:
            return 1.0
        return math.exp(-math.log(most + 1) * len(self.fleets) / _STAIRS)

    def stall(self, spots: int) -> float:
        """Return how much longer steps and exchanges take."""
        return stall_of(spots * self._lost_fraction)

    def spots(self, picks: Sequence[Pick]) -> int:
        """Return how many machines may be preempted, as they count for the standstill of all."""
        if not self._lost_fraction:
            return 0
        pairs = zip(self.fleets, picks, strict=True)
        each = [fleet.spots(pick.counts) for fleet, pick in pairs]
        return sum(each) if self.synchronous else max(each)

    def slowest_s(self) -> list[float]:
        """Return how long each region's step takes at most on machines that are worth a thought."""
        if not self._lost_fraction:
            return [fleet.slowest_s() for fleet in self.fleets]
        return [max(fleet.slowest_s(), fleet.capped(0).slowest_s()) for fleet in self.fleets]

    def least_usd_per_h(self, limits_s: Sequence[float], most_spots: int) -> float:
        """Return a lower bound of the price of steps that keep each region's limit.

        Args:
            limits_s: the limits, by region.
            most_spots: that may be preempted, see `spots`.
        """
        pairs = zip(self.fleets, limits_s, strict=True)
        return sum(fleet.capped(most_spots).least_usd_per_h(limit_s) for fleet, limit_s in pairs)

    def cheapest(
        self, limits_s: Sequence[float], most_spots: int
    ) -> tuple[tuple[Pick, ...] | None, float]:
        """Return the cheapest machines that keep each region's limit, and what any cost at least.

        Args:
            limits_s: the limits, by region.
            most_spots: that may be preempted, see `spots`.

        Returns:
            The machines, None if none were found, and a lower bound of the dollars an hour, which
            is infinite if there are none.
        """
        picks = []
        for fleet, limit_s in zip(self.fleets, limits_s, strict=True):
            pick = fleet.capped(most_spots).cheapest(limit_s)
            if pick is None:
                return None, self._least_usd_if_any(limits_s, most_spots)
            picks.append(pick)
        if self.spots(picks) <= most_spots:
            return tuple(picks), sum(pick.least_usd_per_h for pick in picks)
        return self._shared(limits_s, most_spots)

    def _least_usd_if_any(self, limits_s: Sequence[float], most_spots: int) -> float:
        """Return a lower bound of the price; infinite if a region has no such machines."""
        pairs = zip(self.fleets, limits_s, strict=True)
        if any(fleet.capped(most_spots).is_too_short(limit_s) for fleet, limit_s in pairs):
            return math.inf
        return self.least_usd_per_h(limits_s, most_spots)

    def _shared(
        self, limits_s: Sequence[float], most_spots: int
    ) -> tuple[tuple[Pick, ...] | None, float]:
        """Return the same where each region's cheapest have too many together."""
        least_K, real_K = np.zeros(most_spots + 1), np.zeros(most_spots + 1)
        chosen: list[tuple[list[_Stair], NDArray[np.intp]]] = []
        for fleet, limit_s in zip(self.fleets, limits_s, strict=True):
            stairs = list(self._stairs(fleet, limit_s, most_spots))
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

    def _stairs(self, fleet: RegionFleet, limit_s: float, most_spots: int) -> Iterator[_Stair]:
        cap = min(most_spots, fleet.most_spots)
        while cap >= 0:
            capped = fleet.capped(cap)
            pick = capped.cheapest(limit_s)
            if pick is None:
                if not capped.is_too_short(limit_s):
                    yield _Stair(None, cap, 0, capped.least_usd_per_h(limit_s))
                return
            spots = fleet.spots(pick.counts)
            cap = min(spots - 1, int(spots * self._shrink))
            yield _Stair(pick, spots, cap + 1, pick.least_usd_per_h)


# Choices times ways times regions, in each of the searches; age tiers and fronts need many.
_MOST: Final = 200_000


class _Machines(NamedTuple):
    """All choices of machines: seconds of steps, and of each choice dollars, workers and stall."""

    step_s_NR: Floats
    usd_per_h_N: Floats
    workers_N: Floats
    stall_N: Floats


def best_of_all(
    fleets: Sequence[RegionFleet],
    option_set: OptionSet,
    pool: RentalPool,
    objective: Objective,
    limits: Limits,
) -> tuple[tuple[Pick, ...], Option] | None:
    """Return the best choice; the best that keeps no limit if none does.

    Args:
        fleets: of all regions.
        option_set: to exchange.
        pool: the same fleets together.
        objective: what counts; the other measure breaks ties.
        limits: to keep.

    Returns:
        None if there are too many choices to go through.
    """
    most = _MOST // (len(fleets) * len(option_set.options))
    picks = []
    for fleet in fleets:
        there = fleet.choices(most)
        if there is None or not there:
            return None
        most //= len(there)
        picks.append(there)
    shape = tuple(map(len, picks))
    machines = _machines(fleets, picks, pool)
    best, least = (0, 0), (math.inf, math.inf, math.inf)
    for k, option in enumerate(option_set.options):
        seconds_N, usd_N = _values(option_set, option, machines)
        first_N, second_N = (usd_N, seconds_N) if objective == "cost" else (seconds_N, usd_N)
        broken_N = (seconds_N > limits.deadline_s * SLACK) | (usd_N > limits.budget_usd * SLACK)
        n = int(np.lexsort((second_N, first_N, broken_N))[0])
        value = float(broken_N[n]), float(first_N[n]), float(second_N[n])
        if value < least:
            best, least = (k, n), value
    indices = np.unravel_index(best[1], shape)
    chosen = tuple(there[int(i)] for there, i in zip(picks, indices, strict=True))
    return chosen, option_set.options[best[0]]


def _machines(
    fleets: Sequence[RegionFleet], picks: Sequence[Sequence[Pick]], pool: RentalPool
) -> _Machines:
    def of_all(values: Sequence[Sequence[float]]) -> Floats:
        return np.stack([each.ravel() for each in np.meshgrid(*values, indexing="ij")], axis=-1)

    spots_NR = of_all(
        [[fleet.spots(p.counts) for p in there] for fleet, there in zip(fleets, picks, strict=True)]
    )
    spots_N = spots_NR.sum(axis=1) if pool.synchronous else spots_NR.max(axis=1)
    stalls = np.array([pool.stall(spots) for spots in range(int(spots_N.max()) + 1)])
    return _Machines(
        of_all([[pick.step_s for pick in there] for there in picks]),
        of_all([[pick.usd_per_h for pick in there] for there in picks]).sum(axis=1),
        of_all([[sum(pick.counts) for pick in there] for there in picks]).sum(axis=1),
        stalls[spots_N.astype(int)],
    )


def _values(option_set: OptionSet, option: Option, machines: _Machines) -> tuple[Floats, Floats]:
    """Return seconds and dollars of each choice with one way to exchange."""
    work, one, timing = option_set.work, option.exchange, option.timing
    exchange_s_R, step_s_NR = np.array(one.seconds_by_region), machines.step_s_NR
    lines = [
        first * exchange_s_R + fraction * step_s_NR for first, fraction in timing.lines(work.steps)
    ]
    paces_NR = np.max(lines, axis=0)
    if timing.is_of_machines:
        paces_NR = paces_NR + timing.more_s_R(work.steps, step_s_NR, exchange_s_R) / work.steps
    start_s_N = work.startup_s + work.worker_start_s * machines.workers_N
    trained_s_N = work.steps * paces_NR.max(axis=1) * machines.stall_N
    seconds_N = start_s_N + work.evaluations_s + trained_s_N + option.last_s
    counts_NR = timing.counts_R(work.steps, step_s_NR, exchange_s_R)
    egress_N = counts_NR @ np.array(one.usd_by_region)
    if option.last is not None:
        egress_N = egress_N + option.last.usd
    hourly_N = machines.usd_per_h_N + option.usd_per_h
    return seconds_N, option_set.bracket.billed_h_K(seconds_N) * hourly_N + egress_N


_BELOW: Final = 1 - 1e-8  # a pace just too fast for what was found
_NARROW_PACE: Final = 1.05
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

    option_set: OptionSet
    low_s: float
    high_s: float
    least_spots: int = 0
    most_spots: int = 0
    least_usd: float = 0.0  # an hour, of all machines; as known from a larger interval
    is_left: bool = False  # nothing is faster than its left end, where right ends never come

    @property
    def is_group(self) -> bool:
        return len(self.option_set.options) > 1


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
        if self._root.option_set.depends:
            all_of = self._root.option_set, self._pool, objective, limits
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
                limits_s = node.option_set.limits_s(pace_s)
                picks, least_usd = self._pool.cheapest(limits_s, node.most_spots)
                if picks is None:
                    continue
                found = self._met(picks, node.option_set, objective, limits)
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
                pace_s = min(
                    self._pace_s([pick.step_s for pick in picks], node.option_set), node.high_s
                )
                spots = max(node.least_spots, self._pool.spots(picks))
                # What a search that was cut off may have missed between there and here.
                stall = self._pool.stall(spots)
                missed = node.option_set.bound(pace_s, least_usd, stall, objective, limits)
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
        paces_s = self.option_set([option]).whole_paces_KR(steps_s)[0].tolist()
        pace_s = max(paces_s)
        workers = sum(sum(pick.counts) for pick in picks)
        stall = self._pool.stall(self._pool.spots(picks))
        seconds = work.seconds(pace_s, option.last_s, workers, stall)
        hourly = option.usd_per_h + sum(pick.usd_per_h for pick in picks)
        egress_usd = option.egress_usd(work.steps, np.array(steps_s))
        usd = self.bracket.billed_h(seconds) * hourly + egress_usd
        straggler = paces_s.index(pace_s)
        return Found(option, tuple(picks), straggler, pace_s, stall, seconds, egress_usd, usd)

    def option_set(self, options: Sequence[Option]) -> OptionSet:
        """Return some ways to exchange with the regions' machines."""
        return OptionSet(self.work, tuple(options), self._fastest_s, self.bracket)

    @cached_property
    def _pool(self) -> RentalPool:
        return RentalPool(self.fleets, self.work.pattern.synchronous)

    @cached_property
    def _fastest_s(self) -> tuple[float, ...]:
        return tuple(fleet.least_step_s for fleet in self.fleets)

    @cached_property
    def _root(self) -> _Node:
        option_set = self.option_set(self.options).not_beaten()
        low_s, high_s = self._range(option_set)
        high_s = max([high_s, *(self._range(single)[1] for single in option_set.singles)])
        return _Node(option_set, low_s, high_s, most_spots=self._pool.most_spots, is_left=True)

    def _range(self, option_set: OptionSet) -> tuple[float, float]:
        """Return the fastest pace, and the pace of the smallest machines."""
        low_s = self._pace_s(self._fastest_s, option_set)
        return low_s, max(low_s, self._pace_s(self._pool.slowest_s(), option_set))

    def _parts(self, node: _Node) -> Iterator[_Node]:
        """Return the halves of a group's intervals, or its ways one by one."""
        is_wide = self._width(node) > _NARROW_PACE or node.high_s > node.low_s * _NARROW_PACE
        if is_wide and len(node.option_set.options) > _FEW:
            yield from self._halves(node)
            return
        for single in node.option_set.singles:
            more_s = single.slower_s(node.option_set)
            fastest_s = self._range(single)[0]
            low_s = max(node.low_s, fastest_s)
            if low_s <= node.high_s + more_s:
                high_s = node.high_s + more_s
                # Its prices are those of a longer step than the group's.
                found = replace(node, option_set=single, low_s=low_s, high_s=high_s, least_usd=0.0)
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
        self, picks: Sequence[Pick], option_set: OptionSet, objective: Objective, limits: Limits
    ) -> Found:
        usd_per_h = sum(pick.usd_per_h for pick in picks)
        workers = sum(sum(pick.counts) for pick in picks)
        steps_s = [pick.step_s for pick in picks]
        stall = self._pool.stall(self._pool.spots(picks))
        option = option_set.best(steps_s, usd_per_h, workers, stall, objective, limits)
        self.met.append(self.complete(picks, option))
        return self.met[-1]

    def _pace_s(self, steps_s: Sequence[float], option_set: OptionSet) -> float:
        return float(option_set.paces_KR(steps_s).min(axis=0).max())

    def _bound(self, node: _Node, objective: Objective, limits: Limits) -> float:
        """Return a lower bound of all choices of a node."""
        limits_s = node.option_set.limits_s(node.high_s)
        usd_per_h = max(node.least_usd, self._pool.least_usd_per_h(limits_s, node.most_spots))
        stall = self._pool.stall(node.least_spots)
        return node.option_set.bound(node.low_s, usd_per_h, stall, objective, limits)


_SEARCHES: Final = 200
_NARROW_BRACKET: Final = 1 + 1e-7


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
                if bracket.low_h and bracket.high_h > bracket.low_h * _NARROW_BRACKET:
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
            usd += site.fixed_usd(hours) + sum(n * each.usd(hours) for each, n in rented if n)
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
        return [*rented, *(site.fixed_usd for site in sites)]

    @cached_property
    def _brackets(self) -> list[Bracket]:
        edges_h = frozenset[float]().union(*(site.edges_h for site in self.request.sites))
        return brackets_of(edges_h, self._most_h(), self._items) if edges_h else [UNCHANGING]

    def _most_h(self) -> float:
        """Return hours that no job exceeds: one machine computes, all of them are waited for."""
        work, steps_s, workers, fractions = self.request.work, [], 0, 0.0
        for fleet in self.request.fleets():
            count = sum(offer.cap for offer in fleet.offers)
            lan_s = sum(offer.cap * offer.lan_s for offer in fleet.offers)
            slowest = min(offer.rows_per_s for offer in fleet.offers if offer.cap)
            steps_s.append(fleet.fixed_s + lan_s + fleet.rows / slowest)
            workers += count
            fractions += fleet.lost_fraction([offer.cap for offer in fleet.offers])
        found = [
            work.seconds(
                float(OptionSet(work, (option,), tuple(steps_s)).whole_paces_KR(steps_s).max()),
                option.last_s,
                workers,
                stall_of(fractions),
            )
            for option in self.request.options()
        ]
        return max(found) / HOUR_S
