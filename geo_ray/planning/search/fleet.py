"""The machines that a region could rent, and the cheapest of them that make a step short enough.

A region's rows of a step are shared among its machines so that the last one is done first. A step
takes

    ``fixed_s + rows / C + lan_s * N``,  ``C = sum_i n_i p_i`` rows/s,  ``N = sum_i n_i`` machines,

and somewhat more, because every machine computes whole rows (`whole_rows`).

Source: the right-sizing of Cloudless-Training, reconstructed; ``lan_s * N`` after Scavenger's
"synchronisation grows with the workers" (arXiv 2303.06659).

Shape legend: I = offers of a region.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.clouds.price import Market
from geo_ray.planning.search.knapsack import Cover, cheapest_cover
from geo_ray.planning.search.whole_cover import Floats
from geo_ray.planning.search.whole_rows import CLOSE, slowest_s

_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Offer:
    """Machines of one type in one market of one region.

    Attributes:
        type: the instance type.
        market: how it is bought.
        usd_per_h: of one.
        rows_per_s: that one computes; of spot machines, less what preemptions are expected to take.
        cap: most of them; 0 for none.
    """

    type: str
    market: Market
    usd_per_h: float
    rows_per_s: float
    cap: int


@dataclass(frozen=True, slots=True)
class Pick:
    """Some machines of a region.

    Attributes:
        counts: of each offer.
        usd_per_h: of all.
        step_s: how long a step takes on them.
        least_usd_per_h: of the cheapest machines that keep the limit that was asked; below
            `usd_per_h` if the search for them was cut off.
    """

    counts: tuple[int, ...]
    usd_per_h: float
    step_s: float
    least_usd_per_h: float = 0.0


@dataclass(slots=True)
class RegionFleet:
    """A region's offers and its share of a step.

    Attributes:
        name: the region.
        offers: what it could rent.
        rows: of a step; the region's share of the global batch.
        fixed_s: of every step, whatever is rented.
        lan_s: that every further machine adds to a step.
        most_nodes: of the tree that looks for the cheapest machines; `Pick.least_usd_per_h` tells
            what a tree that was cut off may have missed.
    """

    name: str
    offers: Sequence[Offer]
    rows: int
    fixed_s: float = 0.0
    lan_s: float = 0.0
    most_nodes: int = 20_000
    _price_I: Floats = field(init=False)
    _speed_I: Floats = field(init=False)
    _cap_I: Floats = field(init=False)
    _better_I: tuple[Floats, Floats, Floats] | None = field(init=False, default=None)
    _solved: list[tuple[float, Pick]] = field(init=False, default_factory=list)
    _order: NDArray[np.intp] = field(init=False)  # of what there is, by dollars per row
    _in_pieces: tuple[list[float], list[float]] = field(
        init=False
    )  # rows/s and dollars in that order
    _least_usd: float = field(init=False)  # of one machine
    _fastest: Pick | None = field(init=False, default=None)
    _smallest: Pick | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._price_I = np.array([o.usd_per_h for o in self.offers], dtype=float)
        self._speed_I = np.array([o.rows_per_s for o in self.offers], dtype=float)
        self._cap_I = np.array([min(o.cap, self._most) for o in self.offers], dtype=float)
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
        return max(1, self.rows)  # a machine computes at least one

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to rent."""
        return not bool((self._cap_I > 0).any())

    def pick(self, counts: Sequence[int]) -> Pick:
        """Return price and step time of given machines; at least one."""
        return self._pick(np.asarray(counts, dtype=float))

    def _pick(self, counts_I: NDArray[Any]) -> Pick:
        counts = tuple(counts_I.astype(int).tolist())
        return Pick(counts, float(counts_I @ self._price_I), self._step(counts_I))

    def everything(self) -> Pick:
        """Return all machines; the fastest ones if there are more machines than rows."""
        index = self._from_fast_to_slow()
        return self.pick(np.bincount(index, minlength=len(self.offers)).tolist())

    def fastest(self) -> Pick:
        """Return the machines with the shortest step: the fastest N of them, for the best N."""
        if self._fastest is None:
            index = self._from_fast_to_slow()
            firsts = (
                np.bincount(index[: n + 1], minlength=len(self.offers)) for n in range(len(index))
            )
            best_I = min(firsts, key=self._step)
            self._fastest = self._pick(best_I)
        return self._fastest

    def _from_fast_to_slow(self) -> NDArray[np.intp]:
        """Return the offer of each machine, as many as there are rows for."""
        order = np.lexsort((self._price_I, -self._speed_I))
        return np.repeat(order, self._cap_I[order].astype(int))[: self._most]

    def smallest(self) -> Pick:
        """Return the machine that costs least."""
        if self._smallest is None:
            allowed = np.where(self._cap_I > 0, self._price_I, np.inf)
            least = np.flatnonzero(allowed == allowed.min())
            counts_I = np.zeros(len(self.offers))
            counts_I[least[np.argmax(self._speed_I[least])]] = 1
            self._smallest = self._pick(counts_I)
        return self._smallest

    def least_usd_per_h(self, limit_s: float) -> float:
        """Return a lower bound of the price of steps that take at most ``limit_s``.

        The bound allows fractions of machines and counts `lan_s` for one machine only.
        """
        powers, prices = self._in_pieces
        room_s = limit_s - self.fixed_s - self.lan_s
        if room_s <= 0:
            return math.inf
        need = self.rows / room_s
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
        """Return the cheapest machines whose step takes at most ``limit_s``, or None.

        They may be dearer than the cheapest if a tree was cut off; see `Pick.least_usd_per_h`.
        """
        for asked_s, pick in self._solved:
            # It is as cheap as can be for a laxer limit, and keeps this one.
            if pick.step_s <= limit_s * (1 + CLOSE) and limit_s <= asked_s:
                return pick
        if limit_s * (1 + CLOSE) < self.fastest().step_s:
            return None
        found = self._solve(limit_s)
        self._solved.append((limit_s, found))
        return found

    def _solve(self, limit_s: float) -> Pick:
        """An offer is needed only if all that is better than it is used up.

        That is ruled out where the better ones keep the limit alone, or cost more than a choice
        that keeps it.
        """
        if self._better_I is None:
            self._better_I = self._sums_of_better()
        power_I, price_I, count_I = self._better_I
        known = self._quick(limit_s)
        # A machine's last row may not fit, so this many rows are done at least.
        alone_I = power_I * (limit_s - self.fixed_s - self.lan_s * count_I) - count_I
        dear_I = price_I + self._price_I > known.usd_per_h * (1 + CLOSE)
        keep_I = np.flatnonzero((self._cap_I > 0) & ~dear_I & (alone_I < self.rows))
        cover = Cover(
            self._price_I[keep_I],
            self._speed_I[keep_I],
            self._cap_I[keep_I],
            self.rows,
            limit_s - self.fixed_s,
            self.lan_s,
            self._most,
            self.most_nodes,
            known.usd_per_h,
        )
        found = cheapest_cover(cover)
        counts_I = np.array(known.counts, dtype=float)
        if found.counts_I is not None:
            counts_I = np.zeros(len(self.offers))
            counts_I[keep_I] = found.counts_I
        least_usd = found.least_usd * (1 - CLOSE)
        return replace(self._pick(counts_I), least_usd_per_h=least_usd)

    def _quick(self, limit_s: float) -> Pick:
        """Return a choice that keeps the limit, close to the cheapest: best value first."""
        order, power = self._order, np.array(self._in_pieces[0][1:])
        count = np.cumsum(self._cap_I[order])
        fits = self.fixed_s + self.rows / power + self.lan_s * count <= limit_s
        counts_I = np.zeros(len(self.offers))
        for index in np.flatnonzero(fits)[:_TRIES]:
            counts_I[order[:index]] = self._cap_I[order[:index]]
            for number in range(1, int(self._cap_I[order[index]]) + 1):
                counts_I[order[index]] = number
                if counts_I.sum() > self._most:
                    return self.fastest()
                if self._step(counts_I) <= limit_s:
                    return self._pick(counts_I)
        return self.fastest()

    def _step(self, counts_I: NDArray[Any]) -> float:
        used = np.flatnonzero(counts_I)
        counts: list[int] = counts_I[used].astype(int).tolist()
        number = sum(counts)
        rows_s = slowest_s(max(self.rows, number), counts, self._speed_I[used].tolist())
        return self.fixed_s + rows_s + self.lan_s * number

    def _sums_of_better(self) -> tuple[Floats, Floats, Floats]:
        """Return rows/s, dollars and number of all machines that are as good as each offer's."""
        price_I, speed_I = self._price_I, self._speed_I
        better_II = (price_I[None] <= price_I[:, None]) & (speed_I[None] >= speed_I[:, None])
        equal_II = (price_I[None] == price_I[:, None]) & (speed_I[None] == speed_I[:, None])
        later_II = np.arange(len(price_I))[None] >= np.arange(len(price_I))[:, None]
        better_II &= ~(equal_II & later_II)  # of equals the first is better
        cap_I = self._cap_I
        return better_II @ (cap_I * speed_I), better_II @ (cap_I * price_I), better_II @ cap_I
