"""Machines that a region can launch, and the cheapest ones for a given step time.

The rows of a region's step are divided among its machines so that the last one finishes first. A
step takes

    ``fixed_s + rows / C + sum_i n_i lan_i``,  ``C = sum_i n_i p_i`` rows/s,

and slightly more because every machine computes whole rows (`whole_rows`). If the parameter server
runs on one of the machines, the largest ``lan_i`` among them is not counted once. A machine that is
the only one may have another ``lan_i``.

Source: the right-sizing of Cloudless-Training, reconstructed; ``lan_i`` follows Scavenger's
"synchronisation grows with the workers" (arXiv 2303.06659).

Shape legend: I = offers of a region.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.planner.cover import (
    CLOSE,
    Cover,
    Covered,
    Floats,
    cheapest_cover,
    most_rows,
    slowest_s,
)
from geo_ray.prices.price import Market

_TRIES: Final = 3
_MOST_COVERS: Final = 400  # in the search for the shortest step
_COVER_NODES: Final = 2_000
_EQUAL: Final = 1 - 1e-8  # relative difference below which steps count as equal
ANY_ROWS: Final = 2**40


@dataclass(frozen=True, slots=True)
class Offer:
    """Machines of one type in one market of one region.

    Attributes:
        type: instance type.
        market: market.
        usd_per_h: price of one.
        rows_per_s: speed of one.
        cap: maximum count; 0 for none.
        lan_s: seconds that one adds to a step.
        max_rows: maximum rows of a step that fit into the memory of one.
        lost_fraction: fraction of the time of all waiting regions that its preemptions cost.
        alone_lan_s: `lan_s` of a region's only machine; None: the same.
    """

    type: str
    market: Market
    usd_per_h: float
    rows_per_s: float
    cap: int
    lan_s: float = 0.0
    max_rows: int = ANY_ROWS
    lost_fraction: float = 0.0
    alone_lan_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pick:
    """A selection of a region's machines.

    Attributes:
        counts: count of each offer.
        usd_per_h: total price.
        step_s: seconds of a step.
        least_usd_per_h: lower bound on the price of any machines that meet the requested limit;
            below `usd_per_h` if the search was cut off.
    """

    counts: tuple[int, ...]
    usd_per_h: float
    step_s: float
    least_usd_per_h: float = 0.0


@dataclass(slots=True)
class RegionFleet:
    """Offers of a region and its rows of a step.

    Attributes:
        name: name of the region.
        offers: available offers.
        rows: rows of the region in a step of the global batch.
        fixed_s: constant seconds of every step.
        one_is_free: whether the parameter server runs on one of the machines, whose LAN time is 0.
        most_nodes: maximum nodes of the search tree; `Pick.least_usd_per_h` shows what a search
            that was cut off may have missed.
        most_spot: maximum number of spot machines; None: no limit.
        gang: machines of an offer that are taken together, all or none; the region takes one such
            gang. Price, speed and rows of the offers are then those of a gang. 0: machines are
            taken one by one.
    """

    name: str
    offers: Sequence[Offer]
    rows: int
    fixed_s: float = 0.0
    one_is_free: bool = False
    most_nodes: int = 20_000
    most_spot: int | None = None
    gang: int = 0
    _spot_I: NDArray[np.bool_] = field(init=False)
    _spot_at: list[int] = field(init=False)  # indices of spot offers
    _spots: int = field(init=False)  # number of spot machines
    _capped: dict[int, RegionFleet] = field(init=False, default_factory=dict)
    _lan_I: Floats = field(init=False)
    _alone_lan_I: Floats = field(init=False)
    _max_rows_I: NDArray[np.int64] = field(init=False)
    _least_lan_s: float = field(init=False)
    _price_I: Floats = field(init=False)
    _speed_I: Floats = field(init=False)
    _cap_I: Floats = field(init=False)
    _better_I: tuple[Floats, Floats, Floats, Floats] | None = field(init=False, default=None)
    _solved: list[tuple[float, Pick]] = field(init=False, default_factory=list)
    _order: NDArray[np.intp] = field(init=False)  # of available offers, by dollars per row
    _in_pieces: tuple[list[float], list[float]] = field(
        init=False
    )  # cumulative rows/s and dollars in that order
    _least_usd: float = field(init=False)  # price of the cheapest machine
    _fastest: tuple[Pick, float] | None = field(init=False, default=None)
    _smallest: Pick | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._price_I = np.array([o.usd_per_h for o in self.offers], dtype=float)
        self._speed_I = np.array([o.rows_per_s for o in self.offers], dtype=float)
        caps = [0 if self._is_too_small(o) else min(o.cap, self._most) for o in self.offers]
        self._cap_I = np.array(caps, dtype=float)
        self._spot_I = np.array([o.lost_fraction > 0 for o in self.offers], dtype=bool)
        self._spot_at = np.flatnonzero(self._spot_I).tolist()
        if self.most_spot is not None:
            most = self.most_spot // self._each
            self._cap_I[self._spot_I] = np.minimum(self._cap_I[self._spot_I], most)
        self._spots = int(self._cap_I[self._spot_I].sum()) * self._each
        self._max_rows_I = np.array([o.max_rows for o in self.offers], dtype=np.int64)
        self._lan_I = np.array([o.lan_s for o in self.offers], dtype=float)
        alone = [o.lan_s if o.alone_lan_s is None else o.alone_lan_s for o in self.offers]
        self._alone_lan_I = np.zeros(len(alone)) if self.one_is_free else np.array(alone, float)
        allowed_I = np.minimum(self._alone_lan_I, self._lan_I)[self._cap_I > 0]
        self._least_lan_s = float(allowed_I.min(initial=math.inf))
        order = np.argsort(self._price_I / self._speed_I, kind="stable")
        self._order = order[self._cap_I[order] > 0]
        power, price = self._speed_I * self._cap_I, self._price_I * self._cap_I
        self._in_pieces = (
            [0.0, *np.cumsum(power[self._order]).tolist()],
            [0.0, *np.cumsum(price[self._order]).tolist()],
        )
        self._least_usd = float(self._price_I[self._order].min(initial=np.inf))

    @property
    def _most(self) -> int:
        return 1 if self.gang else max(1, self.rows)  # each machine computes at least one row

    @property
    def _each(self) -> int:
        """Machines that are counted as one."""
        return self.gang or 1

    def _is_too_small(self, offer: Offer) -> bool:
        """Whether a gang, which computes all rows alone, lacks memory for them."""
        return self.gang > 0 and offer.max_rows < self.rows

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to launch, or too little memory for the rows."""
        return float(np.minimum(self._max_rows_I, self.rows) @ self._cap_I) < self.rows

    def capped(self, most_spot: int) -> RegionFleet:
        """Return the fleet with a limit on spot machines."""
        if most_spot >= self._spots:
            return self
        if most_spot not in self._capped:
            capped = self._capped[most_spot] = replace(self, most_spot=most_spot)
            if self._fastest is not None and self.spots(self._fastest[0].counts) <= most_spot:
                capped._fastest = self._fastest
        return self._capped[most_spot]

    def spots(self, counts: Sequence[int] | Floats) -> int:
        """Return the number of spot machines in a selection."""
        return int(sum([counts[i] for i in self._spot_at])) * self._each

    @property
    def most_spots(self) -> int:
        """Return the maximum number of spot machines."""
        return min(self._spots, self._most * self._each)

    def pick(self, counts: Sequence[int]) -> Pick:
        """Return price and step time of at least one machine."""
        return self._pick(np.asarray(counts, dtype=float))

    def _pick(self, counts_I: NDArray[Any]) -> Pick:
        counts = tuple(counts_I.astype(int).tolist())
        return Pick(counts, float(counts_I @ self._price_I), self._step(counts_I))

    def choices(self, most: int) -> list[Pick] | None:
        """Return all selections with enough memory; None if more than ``most``."""
        ranges = [range(int(cap) + 1) for cap in self._cap_I]
        if math.prod(map(len, ranges)) > most:
            return None
        some = (counts for counts in itertools.product(*ranges) if 1 <= sum(counts) <= self._most)
        return [pick for pick in map(self.pick, some) if not math.isinf(pick.step_s)]

    def everything(self) -> Pick:
        """Return all machines; the fastest ones if there are more machines than rows."""
        index = self._from_fast_to_slow()
        return self.pick(np.bincount(index, minlength=len(self.offers)).tolist())

    def fastest(self) -> Pick:
        """Return the machines with the shortest step found; see `least_step_s`."""
        return self._shortest()[0]

    @property
    def least_step_s(self) -> float:
        """Lower bound on every step: that of `fastest`, unless its search was cut off."""
        return self._shortest()[1]

    def _shortest(self) -> tuple[Pick, float]:
        if self._fastest is None:
            first = self._pick(min(self._prefixes(), key=self._step))
            exact = self._prefixes_suffice or not len(self._order)
            self._fastest = (first, first.step_s) if exact else self._shorter_than(first)
        return self._fastest

    @property
    def _prefixes_suffice(self) -> bool:
        """Whether the fastest N machines are the best N for every N."""
        there = self._cap_I > 0
        rows_bind = bool((self._max_rows_I[there] < self.rows).any())
        lans = self._lan_I[there], self._alone_lan_I[there]
        if not any(lan_I.any() for lan_I in lans):
            return not rows_bind or self.most_spot is None
        return all(len(np.unique(lan_I)) == 1 for lan_I in lans) and not rows_bind

    def _prefixes(self) -> Iterator[NDArray[np.intp]]:
        """Return the fastest N machines of the types with a fast enough network, for every N."""
        index = self._from_fast_to_slow()
        yield np.zeros(len(self.offers), dtype=np.intp)
        for limit_s in np.unique(self._lan_I[index]).tolist():
            allowed = index[self._lan_I[index] <= limit_s]
            for n in range(len(allowed)):
                yield np.bincount(allowed[: n + 1], minlength=len(self.offers))

    def _shorter_than(self, best: Pick) -> tuple[Pick, float]:
        """Return the shortest step and a lower bound, by branch and bound over the compute time.

        The minimum LAN time of machines that compute all rows within ``t`` seconds is a covering
        knapsack problem and decreases with ``t``. So no step with ``t`` in an interval is shorter
        than the left end of the interval plus the LAN time at its right end.
        """
        least_s = math.inf
        low_s = self.rows / self._in_pieces[0][-1]
        full_s = float((np.minimum(self._max_rows_I, self.rows) / self._speed_I)[self._order].max())
        heap = [(0.0, low_s, min(full_s, best.step_s - self.fixed_s))]
        for _ in range(_MOST_COVERS):
            if not heap or heap[0][0] >= best.step_s * _EQUAL:
                break
            _, low_s, high_s = heapq.heappop(heap)
            found = self._least_lan(high_s)
            if found.counts_I is None:
                continue  # too fast
            pick = self._pick(found.counts_I)
            if pick.step_s < best.step_s:
                best = pick
            rows_s = pick.step_s - self.fixed_s - self.lan_s(found.counts_I)
            if found.least_usd < found.usd:
                least_s = min(least_s, self.fixed_s + rows_s + found.least_usd)
            end_s = rows_s * _EQUAL
            middle_s = math.sqrt(low_s * end_s)
            for left_s, right_s in ((low_s, middle_s), (middle_s, end_s)):
                if left_s <= right_s:
                    lan_s = max(found.least_usd, self._least_lan_s_in(right_s))
                    heapq.heappush(heap, (self.fixed_s + left_s + lan_s, left_s, right_s))
        return best, min([least_s, best.step_s, *(entry[0] for entry in heap[:1])])

    def _least_lan(self, seconds: float) -> Covered:
        """Return the machines with minimum LAN time (as "USD") that compute all rows in a time."""
        if not self.one_is_free:
            found = self._least_lan_of(seconds, None)
            for counts_I in self._with_able(seconds):
                lan_s = self.lan_s(counts_I)
                if lan_s < found.usd:
                    found = replace(found, counts_I=counts_I, usd=lan_s)
            return replace(found, least_usd=min(found.least_usd, found.usd))
        # Try each kind as the machine without LAN time, the most promising first.
        of_spot = self._spot_I & (self.most_spot is not None)
        columns = self._lan_I, self._speed_I, self._max_rows_I, of_spot
        kinds = {tuple(column[i] for column in columns): i for i in self._order.tolist()}
        bounds = [(self._lan_in_pieces(seconds, self._done(i, seconds)), i) for i in kinds.values()]
        best, least = Covered(None, math.inf, math.inf), math.inf
        for bound, free in sorted(bounds):
            if bound >= best.usd:
                least = min(least, bound)
                break
            found = self._least_lan_of(seconds, free)
            least = min(least, found.least_usd)
            best = found if found.usd < best.usd else best
        return replace(best, least_usd=min(least, best.usd))

    def _with_able(self, seconds: float) -> Iterator[NDArray[np.float64]]:
        """Yield the best selections with a machine that computes all rows in a time.

        It is alone, or a second machine makes its LAN time that of several machines.
        """
        one_II = np.eye(len(self.offers))
        alone = self._fastest_alone(seconds)
        if alone is None:
            return
        yield one_II[alone]
        others = [i for i in self._order.tolist() if self._done(i, seconds)]
        able = [i for i in others if self._done(i, seconds) >= self.rows]
        for i, j in itertools.product(able, others):
            pair_I = one_II[i] + one_II[j]
            spots_fit = self.most_spot is None or self.spots(pair_I) <= self.most_spot
            if self._most > 1 and (pair_I <= self._cap_I).all() and spots_fit:
                yield pair_I

    def _fastest_alone(self, seconds: float) -> int | None:
        """Return the offer with minimum LAN time of which one computes all rows in a time."""
        able = [i for i in self._order.tolist() if self._done(i, seconds) >= self.rows]
        return min(able, key=self._alone_lan_I.__getitem__, default=None)

    def _done(self, offer: int, seconds: float) -> int:
        """Return the rows that one machine of an offer computes in a time."""
        each = self.offers[offer]
        return min(each.max_rows, most_rows(seconds, each.rows_per_s))

    def _least_lan_of(self, seconds: float, free: int | None) -> Covered:
        """Return the machines with minimum LAN time; without ``free``, none computes all rows."""
        there_I = self._order
        rows, most, most_spot, cap_I = self.rows, self._most, self.most_spot, self._cap_I
        if free is None:
            done_I = np.array([self._done(i, seconds) for i in range(len(self.offers))])
            cap_I = np.where(done_I >= rows, 0.0, cap_I)
        else:
            done = self._done(free, seconds)
            taken_I = np.zeros(len(self.offers))
            taken_I[free] = 1
            if done >= rows:
                return Covered(taken_I, 0.0, 0.0)
            if not done:
                return Covered(None, math.inf, math.inf)
            rows, most, cap_I = rows - done, most - 1, cap_I - taken_I
            if most_spot is not None and self._spot_I[free]:
                most_spot -= 1
        cover = Cover(
            self._lan_I[there_I],
            self._speed_I[there_I],
            cap_I[there_I],
            rows,
            seconds,
            np.zeros(len(there_I)),
            self._max_rows_I[there_I],
            most,
            min(_COVER_NODES, self.most_nodes),
            spot_I=None if most_spot is None else self._spot_I[there_I],
            most_spot=most_spot or 0,
        )
        found = cheapest_cover(cover)
        if found.counts_I is None:
            return found
        counts_I = np.zeros(len(self.offers))
        counts_I[there_I] = found.counts_I
        return replace(found, counts_I=counts_I if free is None else counts_I + taken_I)

    def _least_lan_s_in(self, seconds: float) -> float:
        """Return a lower bound on the LAN time of machines that compute all rows in a time."""
        alone = self._fastest_alone(seconds)
        alone_s = math.inf if alone is None else float(self._alone_lan_I[alone])
        free = max(self._done(i, seconds) for i in self._order.tolist()) if self.one_is_free else 0
        return min(alone_s, self._lan_in_pieces(seconds, free))

    def _lan_in_pieces(self, seconds: float, done: int) -> float:
        """Return the minimum LAN time for all rows but ``done``, with fractional machines."""
        order = self._order
        rows_I = np.floor(seconds * self._speed_I[order] * (1 + CLOSE))
        able_I = order[rows_I >= 1]
        rows_I = np.minimum(rows_I[rows_I >= 1], self._max_rows_I[able_I])
        lan_I = self._lan_I[able_I]
        by_lan = np.argsort(lan_I / rows_I, kind="stable")
        sums = np.cumsum((rows_I * self._cap_I[able_I])[by_lan])
        if self.rows - done > sums[-1:].sum():
            return math.inf
        paid = np.cumsum((lan_I * self._cap_I[able_I])[by_lan])
        return float(np.interp(self.rows - done, [0.0, *sums], [0.0, *paid]))

    def _from_fast_to_slow(self) -> NDArray[np.intp]:
        """Return the offer of each machine, at most one machine per row."""
        order = np.lexsort((self._price_I, -self._speed_I))
        index = np.repeat(order, self._cap_I[order].astype(int))
        if self.most_spot is not None:
            spot = self._spot_I[index]
            index = index[~spot | (np.cumsum(spot) <= self.most_spot)]
        return index[: self._most]

    def slowest_s(self) -> float:
        """Return an upper bound on the step time of any reasonable selection."""
        smallest_s = self.smallest().step_s
        if not math.isinf(smallest_s):
            return smallest_s
        there = self._cap_I > 0
        if not there.any():
            return 0.0
        rows_I = np.minimum(self._max_rows_I[there], self.rows)
        lan_s = max(float(self._lan_I @ self._cap_I), float(self._alone_lan_I[there].max()))
        return self.fixed_s + float((rows_I / self._speed_I[there]).max()) + lan_s

    def smallest(self) -> Pick:
        """Return the cheapest machine."""
        if self._smallest is None:
            allowed = np.where(self._cap_I > 0, self._price_I, np.inf)
            if np.isinf(allowed).all():
                self._smallest = self._pick(np.zeros(len(self.offers)))
                return self._smallest
            least = np.flatnonzero(allowed == allowed.min())
            counts_I = np.zeros(len(self.offers))
            counts_I[least[np.argmax(self._speed_I[least])]] = 1
            self._smallest = self._pick(counts_I)
        return self._smallest

    def least_usd_per_h(self, limit_s: float) -> float:
        """Return a lower bound on the price of steps of at most ``limit_s``.

        The bound allows fractional machines and counts the LAN time of one machine only.
        """
        powers, prices = self._in_pieces
        left_s = limit_s - self.fixed_s - self._least_lan_s
        if left_s <= 0:
            return math.inf
        need = self.rows / left_s
        if need > powers[-1] * (1 + CLOSE):
            return math.inf
        at = min(bisect_left(powers, need), len(powers) - 1)
        part = (need - powers[at - 1]) / (powers[at] - powers[at - 1]) if at else 0.0
        least = prices[at - 1] + min(part, 1.0) * (prices[at] - prices[at - 1]) if at else 0.0
        least = max(least, self._least_usd)
        for asked_s, pick in self._solved:  # a shorter step is not cheaper
            if limit_s <= asked_s and pick.least_usd_per_h > least:
                least = pick.least_usd_per_h
        return least

    def cheapest(self, limit_s: float) -> Pick | None:
        """Return the cheapest machines whose step takes at most ``limit_s``.

        The result may be more expensive if a search was cut off; see `Pick.least_usd_per_h`.

        Returns:
            None if none was found; see `is_too_short`.
        """
        for asked_s, pick in self._solved:
            # A cheapest selection for a looser limit that also meets this one is optimal.
            if pick.step_s <= limit_s * (1 + CLOSE) and limit_s <= asked_s:
                return pick
        if self.is_too_short(limit_s):
            return None
        found = self._solve(limit_s)
        if found is not None:
            self._solved.append((limit_s, found))
        return found

    def is_too_short(self, limit_s: float) -> bool:
        """Return whether no selection meets the limit."""
        return limit_s * (1 + CLOSE) < self.least_step_s

    def _solve(self, limit_s: float) -> Pick | None:
        """Solve exactly: an offer is needed only if all better offers are used up.

        This is impossible if the better ones meet the limit alone, or cost more than a selection
        that meets it.
        """
        if self.gang:
            return self._cheapest_gang(limit_s)
        if self._better_I is None:
            self._better_I = self._sums_of_better()
        power_I, price_I, count_I, better_lan_I = self._better_I
        known = min(
            (pick for pick in (self._quick(limit_s), self._cheapest_one(limit_s)) if pick),
            key=attrgetter("usd_per_h"),
            default=None,
        )
        # The last row of a machine may not fit, so at least this many rows are completed.
        alone_I = power_I * (limit_s - self.fixed_s - better_lan_I) - count_I
        alone_I = np.where(self._max_rows_I < self.rows, -np.inf, alone_I)
        known_usd = math.inf if known is None else known.usd_per_h
        dear_I = price_I + self._price_I > known_usd * (1 + CLOSE)
        keep_I = np.flatnonzero((self._cap_I > 0) & ~dear_I & (alone_I < self.rows))
        cover = Cover(
            self._price_I[keep_I],
            self._speed_I[keep_I],
            self._cap_I[keep_I],
            self.rows,
            limit_s - self.fixed_s,
            self._lan_I[keep_I],
            self._max_rows_I[keep_I],
            self._most,
            self.most_nodes,
            known_usd,
            self.one_is_free,
            None if self.most_spot is None else self._spot_I[keep_I],
            self.most_spot or 0,
            least=1 if self.one_is_free else 2,  # `known` has the best single machine
        )
        found = cheapest_cover(cover)
        if found.counts_I is not None:
            counts_I = np.zeros(len(self.offers))
            counts_I[keep_I] = found.counts_I
        elif known is not None:
            counts_I = np.array(known.counts, dtype=float)
        else:
            return None
        least_usd = min(found.least_usd, known_usd) * (1 - CLOSE)
        return replace(self._pick(counts_I), least_usd_per_h=least_usd)

    def _cheapest_gang(self, limit_s: float) -> Pick | None:
        best = self._cheapest_one(limit_s)
        return None if best is None else replace(best, least_usd_per_h=best.usd_per_h)

    def _cheapest_one(self, limit_s: float) -> Pick | None:
        """Return the cheapest single machine, or gang, that meets the limit."""
        singles = np.eye(len(self.offers))[self._cap_I > 0]
        within = [p for p in map(self._pick, singles) if p.step_s <= limit_s * (1 + CLOSE)]
        return min(within, key=attrgetter("usd_per_h"), default=None)

    def _quick(self, limit_s: float) -> Pick | None:
        """Return a nearly cheapest selection that meets the limit: best value first.

        Returns:
            None if neither this selection nor the fastest one meets it.
        """
        order, lan_I = self._order, self._lan_I[self._order]
        cap_I = self._cap_I[order]
        if self.most_spot is not None:  # best value first
            spots_I = np.where(self._spot_I[order], cap_I, 0.0)
            left_I = self.most_spot - (np.cumsum(spots_I) - spots_I)
            cap_I = np.where(self._spot_I[order], np.clip(left_I, 0.0, cap_I), cap_I)
        power = np.cumsum(cap_I * self._speed_I[order])
        lan_s = np.cumsum(cap_I * lan_I)
        lan_s -= np.maximum.accumulate(lan_I) if self.one_is_free else 0.0
        with np.errstate(divide="ignore"):
            fits = self.fixed_s + self.rows / power + lan_s <= limit_s
        counts_I = np.zeros(len(self.offers))
        for index in np.flatnonzero(fits)[:_TRIES]:
            counts_I[order[:index]] = cap_I[:index]
            for number in range(1, int(cap_I[index]) + 1):
                counts_I[order[index]] = number
                if counts_I.sum() > self._most:
                    return self._fastest_within(limit_s)
                if self._step(counts_I) <= limit_s:
                    return self._pick(counts_I)
        return self._fastest_within(limit_s)

    def _fastest_within(self, limit_s: float) -> Pick | None:
        fastest = self.fastest()
        return fastest if fastest.step_s <= limit_s * (1 + CLOSE) else None

    def _step(self, counts_I: NDArray[Any]) -> float:
        used = np.flatnonzero(counts_I)
        counts: list[int] = counts_I[used].astype(int).tolist()
        number = sum(counts)
        columns = self._speed_I[used].tolist(), self._max_rows_I[used].tolist()
        rows_s = slowest_s(max(self.rows, number), counts, *columns)
        return self.fixed_s + rows_s + self.lan_s(counts_I)

    def lost_fraction(self, counts: Sequence[int]) -> float:
        """Return the fraction of time that preemptions of a selection cost."""
        lost = (n * offer.lost_fraction for n, offer in zip(counts, self.offers, strict=True) if n)
        return sum(lost) * self._each

    def lan_s(self, counts_I: NDArray[Any]) -> float:
        """Return the LAN time that a selection adds to a step."""
        if counts_I.sum() == 1:
            return float(counts_I @ self._alone_lan_I)
        total_s = float(counts_I @ self._lan_I)
        if not self.one_is_free:
            return total_s
        return total_s - float(self._lan_I[counts_I > 0].max(initial=0.0))

    def _sums_of_better(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return speed, price, number and LAN time of all machines as good as each offer's."""
        price_I, speed_I = self._price_I, self._speed_I
        max_rows_I = np.minimum(self._max_rows_I, self.rows)
        columns = [(price_I, 1), (speed_I, -1), (self._lan_I, 1), (max_rows_I, -1)]
        if (
            self.most_spot is not None
        ):  # spot machines are not better than others if their number is limited
            columns.append((self._spot_I, 1))
        number = np.arange(len(price_I))
        worse_II = number[None] >= number[:, None]  # the first of equal offers is better
        better_II = np.ones_like(worse_II)
        for column, sign in columns:
            better_II &= sign * column[None] <= sign * column[:, None]
            worse_II &= column[None] == column[:, None]
        better_II &= ~worse_II
        cap_I = self._cap_I
        amounts_4I = np.array([cap_I * speed_I, cap_I * price_I, cap_I, cap_I * self._lan_I])
        power_I, cost_I, count_I, lan_I = amounts_4I @ better_II.T.astype(float)
        alone_I = (cap_I * self._alone_lan_I) @ better_II.T.astype(float)
        return power_I, cost_I, count_I, np.where(count_I == 1, alone_I, lan_I)
