"""Finds the best exchange, step time and machines by branch and bound, with a proven gap.

Small problems are enumerated. Prices that fall with age are searched per price bracket.
`RentalPool` holds the machines of all regions and limits the number of spot machines.
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

_STAIRS: Final = 96  # maximum number considered, over all regions


class _Stair(NamedTuple):
    """Cheapest machines of a region with a limit on spot machines.

    Attributes:
        pick: the machines; None if none were found and none are proven not to exist.
        spots: number of spot machines.
        least_spots: one more than the limit of the next step; below `spots` if steps are skipped.
        least_usd_per_h: lower bound on the price of any machines with at least that many.
    """

    pick: Pick | None
    spots: int
    least_spots: int
    least_usd_per_h: float


@dataclass(frozen=True)
class RentalPool:
    """Machines of all regions, with a limit on spot machines.

    A preemption delays all regions that wait for the affected one, so the choices of regions are
    coupled by one number: the spot machines of all regions or, if regions do not wait for each
    other, of the region with the most. All spot machines lose the same fraction of their time,
    since `plan.spot` is global. Given a limit, each region's cheapest machines with at most ``k``
    spot machines form a step function over ``k``, and the cheapest total is found exactly by
    combining the step functions. With very many spot machines only some steps are evaluated,
    geometrically spaced; the possible error is reported.

    Shape legend: K = spot machines, from 0 on.

    Attributes:
        fleets: fleets of all regions.
        synchronous: whether all regions wait for each other.
    """

    fleets: Sequence[RegionFleet]
    synchronous: bool

    @cached_property
    def most_spots(self) -> int:
        """Return the maximum number of spot machines."""
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
            raise InvariantError(f"spot machines lose unequal fractions: {text}")
        return max(fractions, default=0.0)

    @cached_property
    def _shrink(self) -> float:
        """Return the factor between the numbers of machines of consecutive steps."""
        most = max(fleet.most_spots for fleet in self.fleets)
        if most * len(self.fleets) <= _STAIRS:
            return 1.0
        return math.exp(-math.log(most + 1) * len(self.fleets) / _STAIRS)

    def stall(self, spots: int) -> float:
        """Return the factor by which steps and exchanges are extended."""
        return stall_of(spots * self._lost_fraction)

    def spots(self, picks: Sequence[Pick]) -> int:
        """Return the number of spot machines that can delay all regions."""
        if not self._lost_fraction:
            return 0
        pairs = zip(self.fleets, picks, strict=True)
        each = [fleet.spots(pick.counts) for fleet, pick in pairs]
        return sum(each) if self.synchronous else max(each)

    def slowest_s(self) -> list[float]:
        """Return an upper bound on each region's step time with reasonable machines."""
        if not self._lost_fraction:
            return [fleet.slowest_s() for fleet in self.fleets]
        return [max(fleet.slowest_s(), fleet.capped(0).slowest_s()) for fleet in self.fleets]

    def least_usd_per_h(self, limits_s: Sequence[float], most_spots: int) -> float:
        """Return a lower bound on the price of steps within each region's limit.

        Args:
            limits_s: limits by region.
            most_spots: maximum spot machines; see `spots`.
        """
        pairs = zip(self.fleets, limits_s, strict=True)
        return sum(fleet.capped(most_spots).least_usd_per_h(limit_s) for fleet, limit_s in pairs)

    def cheapest(
        self, limits_s: Sequence[float], most_spots: int
    ) -> tuple[tuple[Pick, ...] | None, float]:
        """Return the cheapest machines within each region's limit, and a lower bound on the price.

        Args:
            limits_s: limits by region.
            most_spots: maximum spot machines; see `spots`.

        Returns:
            The machines, None if none were found, and a lower bound on the hourly price, which is
            infinite if there are none.
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
        """Return a lower bound on the price; infinite if a region has no suitable machines."""
        pairs = zip(self.fleets, limits_s, strict=True)
        if any(fleet.capped(most_spots).is_too_short(limit_s) for fleet, limit_s in pairs):
            return math.inf
        return self.least_usd_per_h(limits_s, most_spots)

    def _shared(
        self, limits_s: Sequence[float], most_spots: int
    ) -> tuple[tuple[Pick, ...] | None, float]:
        """Return the same if the cheapest machines of all regions exceed the limit together."""
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


# choices times options times regions, per search; age tiers and fronts need many searches
_MOST: Final = 200_000


class _Machines(NamedTuple):
    """All machine choices: step seconds, dollars, workers and stall of each."""

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
    """Return the best choice; the best without limits if none meets them.

    Args:
        fleets: fleets of all regions.
        option_set: exchange options.
        pool: the same fleets as a pool.
        objective: the objective; the other measure breaks ties.
        limits: the limits.

    Returns:
        None if there are too many choices to enumerate.
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
    """Return seconds and dollars of each choice with one exchange option."""
    work, one, timing = option_set.work, option.exchange, option.timing
    exchange_s_R, step_s_NR = np.array(one.seconds_by_region), machines.step_s_NR
    lines = [
        first * exchange_s_R + fraction * step_s_NR for first, fraction in timing.lines(work.steps)
    ]
    step_times_NR = np.max(lines, axis=0)
    if timing.is_of_machines:
        step_times_NR = (
            step_times_NR + timing.more_s_R(work.steps, step_s_NR, exchange_s_R) / work.steps
        )
    start_s_N = work.startup_s + work.worker_start_s * machines.workers_N
    trained_s_N = work.steps * step_times_NR.max(axis=1) * machines.stall_N
    seconds_N = start_s_N + work.evaluations_s + trained_s_N + option.last_s
    counts_NR = timing.counts_R(work.steps, step_s_NR, exchange_s_R)
    egress_N = counts_NR @ np.array(one.usd_by_region)
    if option.last is not None:
        egress_N = egress_N + option.last.usd
    hourly_N = machines.usd_per_h_N + option.usd_per_h
    return seconds_N, option_set.bracket.billed_h_K(seconds_N) * hourly_N + egress_N


_BELOW: Final = 1 - 1e-8  # a pace slightly faster than the one found
_NARROW_PACE: Final = 1.05
_FEW: Final = 8  # number of options below which they are separated immediately
_PATIENCE: Final = 20  # factor on the number of intervals while nothing was found


@dataclass(frozen=True, slots=True)
class Found:
    """A complete solution.

    Attributes:
        option: exchange option.
        picks: machines by region, in the order of the fleets.
        straggler: index of the region that all others wait for.
        step_time_s: seconds per step.
        stall: factor by which preemptions extend steps and exchanges.
        seconds: duration of the job.
        egress_usd: egress of the job.
        usd: cost of the job, including egress.
    """

    option: Option
    picks: tuple[Pick, ...]
    straggler: int
    step_time_s: float
    stall: float
    seconds: float
    egress_usd: float
    usd: float

    def value(self, objective: Objective) -> tuple[float, float]:
        """Objective value, and the tie breaker."""
        return (self.usd, self.seconds) if objective == "cost" else (self.seconds, self.usd)


@dataclass(frozen=True, slots=True)
class _Node:
    """Subproblem: intervals of pace and of the number of spot machines.

    A set of options is evaluated as if each region had the shortest wait of any option.
    """

    option_set: OptionSet
    low_s: float
    high_s: float
    least_spots: int = 0
    most_spots: int = 0
    least_usd: float = 0.0  # hourly price of all machines; lower bound from a larger interval
    is_left: bool = False  # nothing is faster than its left end

    @property
    def is_group(self) -> bool:
        return len(self.option_set.options) > 1


@dataclass
class Search:
    """Finds the best solution, and collects all complete solutions on the way.

    Attributes:
        work: the job.
        fleets: nonempty fleets of all regions.
        options: candidate exchange options; at least one.
        bracket: hours that the prices apply to.
        met: complete solutions, in order of discovery.
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
        """Return the best solution within the limits, and a bound on any solution.

        Args:
            objective: minimum dollars, or minimum time; the other one breaks ties.
            limits: the limits.
            gap: accepted relative distance to the optimum.
            most_opened: maximum number of explored intervals; more if they contain no solution.
            known: value of a known solution; only better ones are searched.
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
            for step_time_s in [node.low_s, node.high_s] if node.is_left else [node.high_s]:
                limits_s = node.option_set.limits_s(step_time_s)
                picks, least_usd = self._pool.cheapest(limits_s, node.most_spots)
                if picks is None:
                    continue
                found = self._met(picks, node.option_set, objective, limits)
                if limits.keeps(found.seconds, found.usd) and (
                    found.value(objective) < (best.value(objective) if best else (value, math.inf))
                ):
                    best, value = found, found.value(objective)[0]
            if picks is None:
                if math.isfinite(least_usd):  # not proven infeasible for some region
                    lower = min(lower, bound)
                continue
            node = replace(node, least_usd=max(node.least_usd, least_usd))
            if node.is_group:
                parts = self._parts(node)
            else:
                step_time_s = min(
                    self._step_time_s([pick.step_s for pick in picks], node.option_set), node.high_s
                )
                spots = max(node.least_spots, self._pool.spots(picks))
                # solutions that a truncated search may have missed in between
                stall = self._pool.stall(spots)
                missed = node.option_set.bound(step_time_s, least_usd, stall, objective, limits)
                lower = min(lower, missed)
                parts = self._left(node, step_time_s, spots)
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
        """Return the best of all solutions, as `best` does."""
        value = found.value(objective)[0]
        if value < known and limits.keeps(found.seconds, found.usd):
            return found, value
        return None, known

    def complete(self, picks: Sequence[Pick], option: Option) -> Found:
        """Return the complete solution of given machines and exchanges."""
        work, steps_s = self.work, [pick.step_s for pick in picks]
        step_times_s = self.option_set([option]).whole_step_times_KR(steps_s)[0].tolist()
        step_time_s = max(step_times_s)
        workers = sum(sum(pick.counts) for pick in picks)
        stall = self._pool.stall(self._pool.spots(picks))
        seconds = work.seconds(step_time_s, option.last_s, workers, stall)
        hourly = option.usd_per_h + sum(pick.usd_per_h for pick in picks)
        egress_usd = option.egress_usd(work.steps, np.array(steps_s))
        usd = self.bracket.billed_h(seconds) * hourly + egress_usd
        straggler = step_times_s.index(step_time_s)
        return Found(option, tuple(picks), straggler, step_time_s, stall, seconds, egress_usd, usd)

    def option_set(self, options: Sequence[Option]) -> OptionSet:
        """Return a set of exchange options for the regions' machines."""
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
        low_s = self._step_time_s(self._fastest_s, option_set)
        return low_s, max(low_s, self._step_time_s(self._pool.slowest_s(), option_set))

    def _parts(self, node: _Node) -> Iterator[_Node]:
        """Return the halves of a subproblem's intervals, or its options one by one."""
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
                # its prices are those of a longer step than the group's
                found = replace(node, option_set=single, low_s=low_s, high_s=high_s, least_usd=0.0)
                yield replace(found, is_left=low_s == fastest_s)

    def _left(self, node: _Node, step_time_s: float, spots: int) -> Iterator[_Node]:
        """Return the subproblems that remain after the cheapest solution at the right end.

        Args:
            node: subproblem with one option.
            step_time_s: pace of that solution.
            spots: its number of spot machines; at least the minimum of the subproblem.
        """
        if step_time_s * _BELOW >= node.low_s:
            yield from self._halves(replace(node, high_s=step_time_s * _BELOW))
        if spots > node.least_spots:
            low_s = max(node.low_s, step_time_s * _BELOW)
            yield from self._halves(
                replace(node, low_s=low_s, most_spots=spots - 1, is_left=True), by_spots=True
            )

    def _width(self, node: _Node) -> float:
        return self._pool.stall(node.most_spots) / self._pool.stall(node.least_spots)

    def _halves(self, node: _Node, *, by_spots: bool = False) -> Iterator[_Node]:
        """Split a subproblem by pace or by spot machines, whichever range is wider."""
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

    def _step_time_s(self, steps_s: Sequence[float], option_set: OptionSet) -> float:
        return float(option_set.step_times_KR(steps_s).min(axis=0).max())

    def _bound(self, node: _Node, objective: Objective, limits: Limits) -> float:
        """Return a lower bound on all solutions of a subproblem."""
        limits_s = node.option_set.limits_s(node.high_s)
        usd_per_h = max(node.least_usd, self._pool.least_usd_per_h(limits_s, node.most_spots))
        stall = self._pool.stall(node.least_spots)
        return node.option_set.bound(node.low_s, usd_per_h, stall, objective, limits)


_SEARCHES: Final = 200
_NARROW_BRACKET: Final = 1 + 1e-7


@dataclass
class BracketSearch:
    """Finds the best solutions for a request over all price brackets.

    Attributes:
        request: the request; its limits are ignored.
        gap: accepted relative distance to the optimum.
        most_nodes: maximum nodes of a region's search tree, per pace.
        most_opened: maximum intervals of paces per search.
    """

    request: Request
    gap: float = 0.0
    most_nodes: int = 20_000
    most_opened: int = 800
    _searches: dict[Bracket, Search] = field(default_factory=dict)

    def best(self, objective: Objective, limits: Limits) -> tuple[Found | None, float]:
        """Return the best solution within the limits, and a bound on any solution.

        Args:
            objective: minimum dollars, or minimum time; the other one breaks ties.
            limits: the limits.
        """
        best: Found | None = None
        value = lower = math.inf
        if self.request.lan_depends:
            for part in self._by_interval:
                found, least = part.best(objective, limits)
                lower = min(lower, least)
                if found is not None and (
                    best is None or found.value(objective) < best.value(objective)
                ):
                    best = found
            return best, lower
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

    @cached_property
    def _by_interval(self) -> list[BracketSearch]:
        return [replace(self, request=each, _searches={}) for each in self.request.by_interval()]

    def priced(self, found: Found) -> Found:
        """Return the solution with the cost of its own length."""
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
        """Return the solution if it meets the limits at its own prices, and the lower bound."""
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
        """Return an upper bound on the hours of a job: one machine computes, all are waited for."""
        work, steps_s, workers, fractions = self.request.work, [], 0, 0.0
        for fleet in self.request.fleets():
            count = sum(offer.cap for offer in fleet.offers)
            lan_s = sum(
                offer.cap * max(offer.lan_s, offer.alone_lan_s or 0.0) for offer in fleet.offers
            )
            slowest = min(offer.rows_per_s for offer in fleet.offers if offer.cap)
            steps_s.append(fleet.fixed_s + lan_s + fleet.rows / slowest)
            workers += count
            fractions += fleet.lost_fraction([offer.cap for offer in fleet.offers])
        found = [
            work.seconds(
                float(
                    OptionSet(work, (option,), tuple(steps_s)).whole_step_times_KR(steps_s).max()
                ),
                option.last_s,
                workers,
                stall_of(fractions),
            )
            for option in self.request.options()
        ]
        return max(found) / HOUR_S
