"""The cheapest machines whose step is short enough: a bounded covering knapsack.

    minimise ``sum_i n_i c_i``  so that  ``sum_i n_i floor((room_s - lan) p_i) >= rows``,
    ``lan = sum_i n_i lan_i``, ``1 <= sum_i n_i <= most``, ``0 <= n_i <= cap_i`` whole:

every machine computes whole rows, one at least, in the time that is left for it. If the parameter
server is on one of the machines, the largest ``lan_i`` among them does not count once. Where
machines do not slow each other down and rows are not too many, `whole_cover` answers exactly. Else
a tree does: depth first over offers from the cheapest row on; what is left is bounded by machines
and rows that may be cut in pieces. A tree that grows too large is cut off: what was found by then
is good, and how much better another could be is told with it.

These programs are small and asked for by the thousand. HiGHS takes some 30 ms for each on the
machine of our results, this one or two; a test holds the two against each other.

Shape legend: I = offers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geo_ray.planning.search.whole_cover import Floats, cheapest_whole, passes
from geo_ray.planning.search.whole_rows import CLOSE, most_rows

_MOST_PASSES: Final = 4_000_000  # some 10 ms


@dataclass(frozen=True, slots=True)
class Cover:
    """The question.

    Attributes:
        price_I: of one machine of each offer, above 0.
        speed_I: rows/s of one.
        cap_I: most of each, whole numbers.
        rows: to be computed in a step.
        room_s: how long that may take.
        lan_I: seconds that one adds to a step.
        room_I: most rows that one has room for.
        most: machines in all.
        most_nodes: of the tree.
        known_usd: what a choice costs that is known; only cheaper ones are looked for.
        one_is_free: whether one machine adds nothing.
    """

    price_I: Floats
    speed_I: Floats
    cap_I: Floats
    rows: int
    room_s: float
    lan_I: Floats
    room_I: NDArray[np.int64]
    most: int
    most_nodes: int = 20_000
    known_usd: float = math.inf
    one_is_free: bool = False


@dataclass(frozen=True, slots=True)
class Covered:
    """The answer.

    Attributes:
        counts_I: how many of each offer; None if none is fast enough and cheaper than the known.
        usd: what they cost, or the known one.
        least_usd: what any choice costs at least; ``usd`` if the tree was searched to its end.
    """

    counts_I: Floats | None
    usd: float
    least_usd: float


def cheapest_cover(cover: Cover) -> Covered:
    """The cheapest choice, or a good one with a bound."""
    if not cover.lan_I.any():
        each_I = np.array([most_rows(cover.room_s, speed) for speed in cover.speed_I.tolist()])
        each_I = np.minimum(each_I, cover.room_I)
        cap_I = cover.cap_I.astype(np.int64)
        if passes(each_I, cap_I, cover.rows) <= _MOST_PASSES:
            return _of_whole(cover, cheapest_whole(cover.price_I, each_I, cap_I, cover.rows))
    tree = _Tree(cover)
    whole = tree.search(0, 0.0, 0, 0.0, Lan(0.0, 0.0))
    least_usd = tree.least if whole else min(tree.least, tree.bound())
    if tree.best is None:
        return Covered(None, tree.least, least_usd)
    counts_I = np.zeros(len(cover.price_I))
    counts_I[tree.order] = tree.best
    return Covered(counts_I, tree.least, least_usd)


def _of_whole(cover: Cover, counts_I: NDArray[np.int64] | None) -> Covered:
    usd = math.inf if counts_I is None else float(counts_I @ cover.price_I)
    if counts_I is None or usd >= cover.known_usd:
        return Covered(None, cover.known_usd, cover.known_usd)
    return Covered(counts_I.astype(float), usd, usd)


class Lan(NamedTuple):
    """What some machines add to a step: together, and the one that adds most."""

    total_s: float
    most_s: float

    def plus(self, number: int, each_s: float) -> Lan:
        """Return the same with so many more machines."""
        if not number:
            return self
        return Lan(self.total_s + number * each_s, max(self.most_s, each_s))

    def seconds(self, *, one_is_free: bool) -> float:
        """Return what a step takes longer."""
        return self.total_s - self.most_s if one_is_free else self.total_s


class _Offer(NamedTuple):
    """One of `Cover`."""

    price: float
    speed: float
    cap: int
    lan_s: float
    room: int


@dataclass(slots=True)
class _Tree:
    cover: Cover
    order: NDArray[np.intp] = field(init=False)
    best: list[int] | None = None
    least: float = field(init=False)
    _nodes: int = 0
    _offers: list[_Offer] = field(init=False)
    _least_lan_s: float = field(init=False)
    _counts: list[int] = field(init=False)
    _powers: list[float] = field(init=False)
    _prices: list[float] = field(init=False)

    def __post_init__(self) -> None:
        cover = self.cover
        self.least = cover.known_usd
        self.order = np.argsort(cover.price_I / cover.speed_I, kind="stable")
        columns = (cover.price_I, cover.speed_I, cover.cap_I, cover.lan_I, cover.room_I)
        price, speed, cap, lan, room = (column[self.order].tolist() for column in columns)
        self._offers = list(map(_Offer, price, speed, map(int, cap), lan, room))
        self._least_lan_s = 0.0 if cover.one_is_free else min(lan, default=0.0)
        self._counts = [0] * len(self._offers)
        # Power and price of all offers before each.
        self._powers = [0.0, *accumulate(o.speed * o.cap for o in self._offers)]
        self._prices = [0.0, *accumulate(o.price * o.cap for o in self._offers)]

    def bound(self) -> float:
        """What any choice costs at least."""
        return self._bound(0, 0.0, Lan(0.0, 0.0))

    def search(self, at: int, power: float, count: int, paid: float, lan: Lan) -> bool:
        """Look through all choices that begin like this; False if the tree was cut off."""
        self._nodes += 1
        if count and self._fits(power, lan, at):
            if paid < self.least:
                self.least, self.best = paid, self._counts[:]
            return True
        if at == len(self._offers) or count >= self.cover.most:
            return True
        if paid + self._bound(at, power, lan) >= self.least * (1 - 1e-12):
            return True
        if self._nodes > self.cover.most_nodes:
            return False
        price, speed, cap, lan_s, _ = self._offers[at]
        cap = min(cap, self.cover.most - count)
        top = cap
        for k in range(1, cap):
            self._counts[at] = k
            if self._fits(power + k * speed, lan.plus(k, lan_s), at + 1):
                top = k
                break
        whole = True
        for k in range(top, -1, -1):
            if self._nodes > self.cover.most_nodes:
                whole = False
                break
            self._counts[at] = k
            more = lan.plus(k, lan_s)
            whole &= self.search(at + 1, power + k * speed, count + k, paid + k * price, more)
        self._counts[at] = 0
        return whole

    def _fits(self, power: float, lan: Lan, end: int) -> bool:
        """Whether the machines of the first ``end`` offers are enough."""
        room_s = self.cover.room_s - lan.seconds(one_is_free=self.cover.one_is_free)
        if power * room_s * (1 + CLOSE) < self.cover.rows:  # in pieces, which is quick to tell
            return False
        done = 0
        for n, offer in zip(self._counts[:end], self._offers, strict=False):
            if n:
                each = min(offer.room, most_rows(room_s, offer.speed))
                if not each:
                    return False
                done += n * each
        return done >= self.cover.rows

    def _bound(self, at: int, power: float, lan: Lan) -> float:
        """The least that the rest costs, if machines could be cut in pieces and lines were free."""
        lan_s = lan.seconds(one_is_free=self.cover.one_is_free) + self._least_lan_s
        room_s = self.cover.room_s * (1 + CLOSE) - lan_s
        if room_s <= 0:
            return math.inf
        goal = self._powers[at] + max(0.0, self.cover.rows / room_s - power)
        end = bisect_left(self._powers, goal * (1 - CLOSE), at)
        if end == len(self._powers):
            return math.inf
        if end == at:
            return 0.0
        price, speed, *_ = self._offers[end - 1]
        part = (goal - self._powers[end - 1]) * price / speed
        return self._prices[end - 1] - self._prices[at] + part
