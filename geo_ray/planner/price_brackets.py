"""Price brackets: ranges of hours with constant prices, and one hourly price per item in each.

The cost of an instance is linear in its hours between two edges of its age tiers. Beyond the first
edge it is not proportional: earlier hours are paid at older prices. So between ``low`` and ``high``
hours every item is priced per *billed hour*,

    ``billed(T) = low + fraction * (max(T, low) - low)``,

at the highest price that never exceeds the cost of the item. If all items pay the same `fraction`
of their older price (one table of tiers for all), the two are equal. Otherwise the price is a lower
bound that becomes exact as the bracket narrows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from geo_ray.planner.cover import Floats
from geo_ray.planner.timing import HOUR_S

Usd = Callable[[float], float]
"""Cost of an item for a number of hours."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """A price bracket; see the module. The default is for constant prices.

    Attributes:
        low_h: start.
        high_h: end.
        fraction: price of a further hour relative to the mean price until `low_h`.
    """

    low_h: float = 0.0
    high_h: float = math.inf
    fraction: float = 1.0

    @classmethod
    def at(cls, hours: float) -> Bracket:
        """Return the bracket of a single length, for jobs of about that length."""
        return cls(hours, hours)

    def billed_h(self, seconds: float) -> float:
        """Return the billed hours of a job; a shorter job is billed like one of `low_h`."""
        return self.low_h + self.fraction * max(0.0, seconds / HOUR_S - self.low_h)

    def billed_h_K(self, seconds_K: Floats) -> Floats:
        """Return the billed hours of several jobs."""
        return self.low_h + self.fraction * np.maximum(0.0, seconds_K / HOUR_S - self.low_h)

    def usd_per_h(self, usd: Usd) -> float:
        """Return the highest hourly price that never exceeds the cost within the bracket."""
        if not self.low_h:  # proportional
            hours = 1.0 if math.isinf(self.high_h) else self.high_h
            return usd(hours) / hours
        ends_h = [self.low_h] if math.isinf(self.high_h) else [self.low_h, self.high_h]
        return min(usd(hours) / self.billed_h(hours * HOUR_S) for hours in ends_h)

    def halves(self, items: Sequence[Usd]) -> list[Bracket]:
        """Return the two halves of a bounded bracket."""
        middle_h = math.sqrt(self.low_h * self.high_h)
        return [
            _between(self.low_h, middle_h, items),
            _between(middle_h, self.high_h, items),
        ]


UNCHANGING: Final = Bracket()
"""Bracket for prices that do not change with age."""


def brackets_of(edges_h: Iterable[float], most_h: float, items: Sequence[Usd]) -> list[Bracket]:
    """Return the brackets between all price edges.

    Args:
        edges_h: hours at which a price changes, in any order.
        most_h: maximum length of a job.
        items: all items with an hourly price.
    """
    edges = sorted({edge for edge in edges_h if 0 < edge < most_h})
    return [_between(low, high, items) for low, high in pairwise([0.0, *edges, most_h])]


def _between(low_h: float, high_h: float, items: Sequence[Usd]) -> Bracket:
    """Return a bracket whose fraction is in the middle of those of the items."""
    if not low_h or high_h <= low_h:
        return Bracket(low_h, high_h)
    own = [(usd(high_h) / usd(low_h) - 1) / (high_h / low_h - 1) for usd in items if usd(low_h)]
    return Bracket(low_h, high_h, (min(own) + max(own)) / 2 if own else 1.0)
