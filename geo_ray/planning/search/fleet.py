"""The machines that a region could rent, and the cheapest of them that make a step short enough.

A region's rows of a step are shared among its machines so that the last one is done first. A step
takes

    ``fixed_s + rows / C + sum_i n_i lan_i``,  ``C = sum_i n_i p_i`` rows/s,

and somewhat more, because every machine computes whole rows (`whole_rows`). If the parameter server
is on one of the machines, the largest ``lan_i`` among them does not count once.

Source: the right-sizing of Cloudless-Training, reconstructed; ``lan_i`` after Scavenger's
"synchronisation grows with the workers" (arXiv 2303.06659).

Shape legend: I = offers of a region.
"""

from __future__ import annotations

import itertools
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
ANY_ROWS: Final = 2**40


@dataclass(frozen=True, slots=True)
class Offer:
    """Machines of one type in one market of one region.

    Attributes:
        type: the instance type.
        market: how it is bought.
        usd_per_h: of one.
        rows_per_s: that one computes.
        cap: most of them; 0 for none.
        lan_s: that one adds to a step.
        room_rows: most rows of a step that one has the memory for.
        lost_share: of the time of all who wait for it that its preemptions take.
    """

    type: str
    market: Market
    usd_per_h: float
    rows_per_s: float
    cap: int
    lan_s: float = 0.0
    room_rows: int = ANY_ROWS
    lost_share: float = 0.0


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
        one_is_free: whether the parameter server is on one of the machines, which adds nothing.
        most_nodes: of the tree that looks for the cheapest machines; `Pick.least_usd_per_h` tells
            what a tree that was cut off may have missed.
        most_spot: machines that may be preempted, at most; None for any number.
    """

    name: str
    offers: Sequence[Offer]
    rows: int
    fixed_s: float = 0.0
    one_is_free: bool = False
    most_nodes: int = 20_000
    most_spot: int | None = None
    _spot_I: NDArray[np.bool_] = field(init=False)
    _spots: int = field(init=False)  # that there are
    _capped: dict[int, RegionFleet] = field(init=False, default_factory=dict)
    _lan_I: Floats = field(init=False)
    _room_I: NDArray[np.int64] = field(init=False)
    _least_lan_s: float = field(init=False)
    _price_I: Floats = field(init=False)
    _speed_I: Floats = field(init=False)
    _cap_I: Floats = field(init=False)
    _better_I: tuple[Floats, Floats, Floats, Floats] | None = field(init=False, default=None)
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
        self._spot_I = np.array([o.lost_share > 0 for o in self.offers], dtype=bool)
        if self.most_spot is not None:
            self._cap_I[self._spot_I] = np.minimum(self._cap_I[self._spot_I], self.most_spot)
        self._spots = int(self._cap_I[self._spot_I].sum())
        self._room_I = np.array([o.room_rows for o in self.offers], dtype=np.int64)
        self._lan_I = np.array([o.lan_s for o in self.offers], dtype=float)
        allowed_I = self._lan_I[self._cap_I > 0]
        self._least_lan_s = 0.0 if self.one_is_free else float(allowed_I.min(initial=math.inf))
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
        """Return whether there is nothing to rent, or too little memory for its rows."""
        return float(np.minimum(self._room_I, self.rows) @ self._cap_I) < self.rows

    def capped(self, most_spot: int) -> RegionFleet:
        """Return the fleet with at most so many machines that may be preempted."""
        if most_spot >= self._spots:
            return self
        if most_spot not in self._capped:
            self._capped[most_spot] = replace(self, most_spot=most_spot)
        return self._capped[most_spot]

    def spots(self, counts: Sequence[int] | Floats) -> int:
        """Return how many of some machines may be preempted."""
        return int(np.asarray(counts)[self._spot_I].sum())

    @property
    def most_spots(self) -> int:
        """Return how many machines may be preempted at most."""
        return min(self._spots, self._most)

    def pick(self, counts: Sequence[int]) -> Pick:
        """Return price and step time of given machines; at least one."""
        return self._pick(np.asarray(counts, dtype=float))

    def _pick(self, counts_I: NDArray[Any]) -> Pick:
        counts = tuple(counts_I.astype(int).tolist())
        return Pick(counts, float(counts_I @ self._price_I), self._step(counts_I))

    def choices(self, most: int) -> list[Pick] | None:
        """Return all machines that it could rent and that have room; None if more than ``most``."""
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
        """Return the machines with the shortest step: the fastest N of them, for the best N.

        Where networks of types differ, of those types whose network is fast enough, for the best
        limit; a mixture of types could do better than that by a little.
        """
        if self._fastest is None:
            index = self._from_fast_to_slow()
            choices = [np.zeros(len(self.offers), dtype=np.int64)]
            for limit_s in np.unique(self._lan_I[index]).tolist():
                allowed = index[self._lan_I[index] <= limit_s]
                choices += [
                    np.bincount(allowed[: n + 1], minlength=len(self.offers))
                    for n in range(len(allowed))
                ]
            self._fastest = self._pick(min(choices, key=self._step))
        return self._fastest

    def _from_fast_to_slow(self) -> NDArray[np.intp]:
        """Return the offer of each machine, as many as there are rows for."""
        order = np.lexsort((self._price_I, -self._speed_I))
        index = np.repeat(order, self._cap_I[order].astype(int))
        if self.most_spot is not None:
            spot = self._spot_I[index]
            index = index[~spot | (np.cumsum(spot) <= self.most_spot)]
        return index[: self._most]

    def slowest_s(self) -> float:
        """Return how long a step takes at most on any machines that are worth a thought."""
        smallest_s = self.smallest().step_s
        if not math.isinf(smallest_s):
            return smallest_s
        there = self._cap_I > 0
        if not there.any():
            return 0.0
        rows_I = np.minimum(self._room_I[there], self.rows)
        lan_s = float(self._lan_I @ self._cap_I)
        return self.fixed_s + float((rows_I / self._speed_I[there]).max()) + lan_s

    def smallest(self) -> Pick:
        """Return the machine that costs least."""
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
        """Return a lower bound of the price of steps that take at most ``limit_s``.

        The bound allows fractions of machines and counts the LAN of one machine only.
        """
        powers, prices = self._in_pieces
        room_s = limit_s - self.fixed_s - self._least_lan_s
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
        power_I, price_I, count_I, better_lan_I = self._better_I
        known = self._quick(limit_s)
        # A machine's last row may not fit, so this many rows are done at least.
        alone_I = power_I * (limit_s - self.fixed_s - better_lan_I) - count_I
        alone_I = np.where(self._room_I < self.rows, -np.inf, alone_I)
        dear_I = price_I + self._price_I > known.usd_per_h * (1 + CLOSE)
        keep_I = np.flatnonzero((self._cap_I > 0) & ~dear_I & (alone_I < self.rows))
        cover = Cover(
            self._price_I[keep_I],
            self._speed_I[keep_I],
            self._cap_I[keep_I],
            self.rows,
            limit_s - self.fixed_s,
            self._lan_I[keep_I],
            self._room_I[keep_I],
            self._most,
            self.most_nodes,
            known.usd_per_h,
            self.one_is_free,
            None if self.most_spot is None else self._spot_I[keep_I],
            self.most_spot or 0,
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
        order, lan_I = self._order, self._lan_I[self._order]
        cap_I = self._cap_I[order]
        if self.most_spot is not None:  # those of the best value
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
                    return self.fastest()
                if self._step(counts_I) <= limit_s:
                    return self._pick(counts_I)
        return self.fastest()

    def _step(self, counts_I: NDArray[Any]) -> float:
        used = np.flatnonzero(counts_I)
        counts: list[int] = counts_I[used].astype(int).tolist()
        number = sum(counts)
        columns = self._speed_I[used].tolist(), self._room_I[used].tolist()
        rows_s = slowest_s(max(self.rows, number), counts, *columns)
        return self.fixed_s + rows_s + self.lan_s(counts_I)

    def lost_share(self, counts: Sequence[int]) -> float:
        """Return the share of their time that preemptions of some machines take."""
        return sum(n * offer.lost_share for n, offer in zip(counts, self.offers, strict=True) if n)

    def lan_s(self, counts_I: NDArray[Any]) -> float:
        """Return what the network inside the region adds to a step with some machines."""
        total_s = float(counts_I @ self._lan_I)
        if not self.one_is_free:
            return total_s
        return total_s - float(self._lan_I[counts_I > 0].max(initial=0.0))

    def _sums_of_better(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return rows/s, dollars, number and LAN of all machines as good as each offer's."""
        price_I, speed_I = self._price_I, self._speed_I
        room_I = np.minimum(self._room_I, self.rows)
        columns = [(price_I, 1), (speed_I, -1), (self._lan_I, 1), (room_I, -1)]
        if self.most_spot is not None:  # what counts against the cap is no better than what not
            columns.append((self._spot_I, 1))
        number = np.arange(len(price_I))
        worse_II = number[None] >= number[:, None]  # of equals the first is better
        better_II = np.ones_like(worse_II)
        for column, sign in columns:
            better_II &= sign * column[None] <= sign * column[:, None]
            worse_II &= column[None] == column[:, None]
        better_II &= ~worse_II
        cap_I = self._cap_I
        amounts_4I = np.array([cap_I * speed_I, cap_I * price_I, cap_I, cap_I * self._lan_I])
        power_I, cost_I, count_I, lan_I = amounts_4I @ better_II.T.astype(float)
        return power_I, cost_I, count_I, lan_I
