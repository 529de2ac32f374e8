"""Bounded covering knapsacks over machines, for the planner and the autoscaler.

`cheapest_cover` finds the cheapest machines for the rows of a step (`Cover`), or for a rate
(`Cover.of_rate`). `split_rows` splits the rows of a step among machines in whole numbers.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

CLOSE: Final = 1e-9  # relative difference below which numbers count as equal


def most_rows(seconds: float, rows_per_s: float) -> int:
    """Return the rows that a machine computes within a time."""
    return math.floor(seconds * rows_per_s * (1 + CLOSE))


def slowest_s(
    rows: int, counts: Sequence[int], speeds: Sequence[float], max_rows: Sequence[int]
) -> float:
    """Return the seconds of the slowest machine if rows are split optimally, at least one each.

    Infinite if the rows do not fit into memory.

    Args:
        rows: at least the number of machines.
        counts: machines of each kind.
        speeds: rows/s of one machine of each kind.
        max_rows: largest number of rows that one machine of each kind has memory for.
    """
    kinds = zip(counts, speeds, max_rows, strict=True)
    used = [(count, speed, most) for count, speed, most in kinds if count]
    power = sum(count * speed for count, speed, _ in used)
    if not power:
        return math.inf
    level_s = rows / power
    given = [min(most, most_rows(level_s, speed)) for _, speed, most in used]
    left = rows - sum(count * each for (count, _, _), each in zip(used, given, strict=True))
    last_s = max(each / speed for (_, speed, _), each in zip(used, given, strict=True))
    nexts = [(_next_s(used[i], each), i, each + 1) for i, each in enumerate(given)]
    heapq.heapify(nexts)
    while left > 0:
        done_s, i, each = heapq.heappop(nexts)
        if math.isinf(done_s):
            return math.inf
        last_s = max(last_s, done_s)
        left -= used[i][0]
        heapq.heappush(nexts, (_next_s(used[i], each), i, each + 1))
    return max(last_s, 1 / min(speed for _, speed, _ in used))


def _next_s(kind: tuple[int, float, int], given: int) -> float:
    _, speed, most = kind
    return (given + 1) / speed if given < most else math.inf


def split_rows(rows: int, speeds: Sequence[float], max_rows: Sequence[int]) -> list[int]:
    """Split rows among machines so that the last one finishes as early as possible.

    Args:
        rows: at least the number of speeds, and at most what fits into memory.
        speeds: rows/s of each machine.
        max_rows: largest number of rows that each has memory for.
    """
    level_s = rows / sum(speeds)
    pairs = zip(speeds, max_rows, strict=True)
    given = [min(most, max(1, most_rows(level_s, speed))) for speed, most in pairs]
    indices = range(len(speeds))
    while sum(given) < rows:
        roomy = [i for i in indices if given[i] < max_rows[i]]
        given[min(roomy, key=lambda i: ((given[i] + 1) / speeds[i], i))] += 1
    while sum(given) > rows:
        able = [i for i in indices if given[i] > 1]
        given[max(able, key=lambda i: (given[i] / speeds[i], i))] -= 1
    return given


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _cheapest_whole(
    price_I: Floats,
    rows_I: Ints,
    cap_I: Ints,
    rows: int,
    spot_I: NDArray[np.bool_] | None = None,
    most_spot: int = 0,
) -> Ints | None:
    """Return the count of each offer; None if all of them are not enough.

    Args:
        price_I: price of one machine, above 0.
        rows_I: rows that one computes in time; 0: none.
        cap_I: maximum count of each.
        rows: rows to compute, at least one.
        spot_I: which offers are spot; None if it does not matter.
        most_spot: maximum number of spot machines.
    """
    if spot_I is None:
        spot_I, most_spot = np.zeros(len(price_I), dtype=bool), 0
    least_KR = np.full((most_spot + 1, rows + 1), np.inf)
    least_KR[:, 0] = 0.0
    taken: list[tuple[int, int, NDArray[np.bool_]]] = []
    for i in np.flatnonzero(rows_I > 0).tolist():
        for lot in _lots(min(int(cap_I[i]), -(-rows // int(rows_I[i])))):
            spots = lot if spot_I[i] else 0
            if spots > most_spot:
                break
            done, with_KR = min(lot * int(rows_I[i]), rows + 1), np.full_like(least_KR, np.inf)
            before_KR = least_KR[: most_spot + 1 - spots]
            with_KR[spots:, :done] = before_KR[:, :1]  # more rows may be computed than required
            with_KR[spots:, done:] = before_KR[:, : rows + 1 - done]
            with_KR += lot * price_I[i]
            taken.append((i, lot, with_KR < least_KR))
            np.minimum(least_KR, with_KR, out=least_KR)
    if np.isinf(least_KR[most_spot, rows]):
        return None
    counts_I = np.zeros(len(price_I), dtype=np.int64)
    left = rows
    for i, lot, better_KR in reversed(taken):
        if better_KR[most_spot, left]:
            counts_I[i] += lot
            left = max(0, left - lot * int(rows_I[i]))
            most_spot -= lot if spot_I[i] else 0
    return counts_I


def _passes(rows_I: Ints, cap_I: Ints, rows: int) -> int:
    """Return the number of entries that `_cheapest_whole` would compute."""
    most_I = np.minimum(cap_I, -(-rows // np.maximum(rows_I, 1)))
    return int(np.ceil(np.log2(most_I[rows_I > 0] + 1)).sum()) * (rows + 1)


def _lots(count: int) -> Iterator[int]:
    """Return lot sizes whose sums are all numbers up to ``count``: 1, 2, 4, ..., the rest."""
    lot = 1
    while count > 0:
        yield min(lot, count)
        count -= lot
        lot *= 2


_MOST_PASSES: Final = 4_000_000  # about 10 ms

SHORT: Final = 0.005
"""Relative shortfall of the rate that `Cover.of_rate` accepts."""

_LEAST_PARTS: Final = 2000
_MOST_PARTS: Final = 200_000
_LEAST_USD: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Cover:
    """A covering problem.

    Attributes:
        price_I: price of one machine of each offer, above 0.
        speed_I: rows/s of one.
        cap_I: maximum count of each.
        rows: rows per step.
        limit_s: time limit of a step.
        lan_I: seconds that one machine adds to a step.
        max_rows_I: maximum rows that fit into the memory of one.
        most: maximum number of machines.
        least: minimum number of machines, if `lan_I` is not 0.
        most_nodes: maximum nodes of the search tree.
        known_usd: price of a known solution; only cheaper ones are searched.
        one_is_free: whether one machine adds no time.
        spot_I: which offers are spot; None if it does not matter.
        most_spot: maximum number of spot machines.
        is_whole: whether the answer must be exact regardless of time, which requires `lan_I` of 0.
    """

    price_I: Floats
    speed_I: Floats
    cap_I: Floats
    rows: int
    limit_s: float
    lan_I: Floats
    max_rows_I: NDArray[np.int64]
    most: int
    most_nodes: int = 20_000
    known_usd: float = math.inf
    one_is_free: bool = False
    spot_I: NDArray[np.bool_] | None = None
    most_spot: int = 0
    is_whole: bool = False
    least: int = 1

    @classmethod
    def of_rate(
        cls,
        usd_per_hour: Sequence[float],
        rows_per_s: Sequence[float],
        most: Sequence[int],
        wanted_rows_per_s: float,
    ) -> Cover:
        """Return the problem of the cheapest machines that compute at a rate, within `SHORT` of it.

        Args:
            usd_per_hour: price of one machine of each offer.
            rows_per_s: rate of one machine of each offer.
            most: maximum count of each offer.
            wanted_rows_per_s: required total rate, above 0.
        """
        slowest = min((each for each in rows_per_s if each > 0), default=wanted_rows_per_s)
        wanted = math.ceil(wanted_rows_per_s / slowest / SHORT)
        total = min(_MOST_PARTS, max(_LEAST_PARTS, wanted))
        parts_I = np.array(
            [max(0, math.ceil(each / wanted_rows_per_s * total - 1e-6)) for each in rows_per_s],
            dtype=np.int64,
        )
        return cls(
            np.array([max(each, _LEAST_USD) for each in usd_per_hour]),
            parts_I.astype(float),
            np.array([min(max(0, each), total) for each in most], dtype=float),
            rows=total,
            limit_s=1.0,
            lan_I=np.zeros(len(parts_I)),
            max_rows_I=parts_I,
            most=sum(most),
            is_whole=True,
        )


@dataclass(frozen=True, slots=True)
class Covered:
    """Solution of a covering problem.

    Attributes:
        counts_I: count of each offer; None if none is fast enough and cheaper than the known price.
        usd: its price, or the known one.
        least_usd: lower bound on the price of any solution; equals ``usd`` after a complete search.
    """

    counts_I: Floats | None
    usd: float
    least_usd: float


def cheapest_cover(cover: Cover) -> Covered:
    """Return the cheapest solution, or a good one with a bound."""
    if not cover.lan_I.any():
        each_I = np.array([most_rows(cover.limit_s, speed) for speed in cover.speed_I.tolist()])
        each_I = np.minimum(each_I, cover.max_rows_I)
        cap_I = cover.cap_I.astype(np.int64)
        layers = 1 if cover.spot_I is None else cover.most_spot + 1
        if each_I @ cap_I < cover.rows:
            return _of_whole(cover, None)
        if cover.is_whole or layers * _passes(each_I, cap_I, cover.rows) <= _MOST_PASSES:
            question = cover.price_I, each_I, cap_I, cover.rows, cover.spot_I, cover.most_spot
            return _of_whole(cover, _cheapest_whole(*question))
    tree = _Tree(cover)
    whole = tree.search(0, 0.0, (0, 0), 0.0, Lan(0.0, 0.0))
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
    """Seconds that machines add to a step: their sum, and the largest term."""

    total_s: float
    most_s: float

    def plus(self, number: int, each_s: float) -> Lan:
        """Return the same with more machines."""
        if not number:
            return self
        return Lan(self.total_s + number * each_s, max(self.most_s, each_s))

    def seconds(self, *, one_is_free: bool) -> float:
        """Return the seconds added to a step."""
        return self.total_s - self.most_s if one_is_free else self.total_s


class _Offer(NamedTuple):
    """An offer of `Cover`."""

    price: float
    speed: float
    cap: int
    lan_s: float
    max_rows: int
    is_spot: bool


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
        spot_I = np.zeros(len(cover.price_I), bool) if cover.spot_I is None else cover.spot_I
        columns = (cover.price_I, cover.speed_I, cover.cap_I, cover.lan_I, cover.max_rows_I, spot_I)
        price, speed, cap, lan, max_rows, spot = (column[self.order].tolist() for column in columns)
        self._offers = list(map(_Offer, price, speed, map(int, cap), lan, max_rows, spot))
        self._least_lan_s = 0.0 if cover.one_is_free else min(lan, default=0.0)
        self._counts = [0] * len(self._offers)
        # cumulative speed and price of all earlier offers
        self._powers = [0.0, *accumulate(o.speed * o.cap for o in self._offers)]
        self._prices = [0.0, *accumulate(o.price * o.cap for o in self._offers)]

    def bound(self) -> float:
        """Lower bound on the price of any solution."""
        return self._bound(0, 0.0, Lan(0.0, 0.0))

    def search(self, at: int, power: float, counts: tuple[int, int], paid: float, lan: Lan) -> bool:
        """Search all solutions with a prefix; False if the search was cut off."""
        self._nodes += 1
        count, spots = counts
        if count >= self.cover.least and self._fits(power, lan, at):
            if paid < self.least:
                self.least, self.best = paid, self._counts[:]
            return True
        if at == len(self._offers) or count >= self.cover.most:
            return True
        if paid + self._bound(at, power, lan) >= self.least * (1 - 1e-12):
            return True
        if self._nodes > self.cover.most_nodes:
            return False
        price, speed, cap, lan_s, _, is_spot = self._offers[at]
        cap = min(cap, self.cover.most - count)
        cap = min(cap, self.cover.most_spot - spots) if is_spot else cap
        top = cap
        for k in range(1, cap):
            self._counts[at] = k
            is_enough = count + k >= self.cover.least
            if is_enough and self._fits(power + k * speed, lan.plus(k, lan_s), at + 1):
                top = k
                break
        whole = True
        for k in range(top, -1, -1):
            if self._nodes > self.cover.most_nodes:
                whole = False
                break
            self._counts[at] = k
            more = lan.plus(k, lan_s)
            chosen = count + k, spots + (k if is_spot else 0)
            whole &= self.search(at + 1, power + k * speed, chosen, paid + k * price, more)
        self._counts[at] = 0
        return whole

    def _fits(self, power: float, lan: Lan, end: int) -> bool:
        """Whether the machines of the first ``end`` offers are enough."""
        limit_s = self.cover.limit_s - lan.seconds(one_is_free=self.cover.one_is_free)
        if power * limit_s * (1 + CLOSE) < self.cover.rows:  # quick check with fractional machines
            return False
        done = 0
        for n, offer in zip(self._counts[:end], self._offers, strict=False):
            if n:
                each = min(offer.max_rows, most_rows(limit_s, offer.speed))
                if not each:
                    return False
                done += n * each
        return done >= self.cover.rows

    def _bound(self, at: int, power: float, lan: Lan) -> float:
        """Lower bound on the rest, with fractional machines and without LAN time."""
        lan_s = lan.seconds(one_is_free=self.cover.one_is_free) + self._least_lan_s
        limit_s = self.cover.limit_s * (1 + CLOSE) - lan_s
        if limit_s <= 0:
            return math.inf
        goal = self._powers[at] + max(0.0, self.cover.rows / limit_s - power)
        end = bisect_left(self._powers, goal * (1 - CLOSE), at)
        if end == len(self._powers):
            return math.inf
        if end == at:
            return 0.0
        price, speed, *_ = self._offers[end - 1]
        part = (goal - self._powers[end - 1]) * price / speed
        return self._prices[end - 1] - self._prices[at] + part
