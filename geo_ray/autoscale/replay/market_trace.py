"""The price and the stock of one pool over time, as steps."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class MarketTrace:
    """Two series of (unix seconds, value that holds from then on), ascending.

    Attributes:
        prices: US dollars per hour; before the first, the first holds.
        stocks: machines that one customer can have at once; who has more loses some.
    """

    prices: tuple[tuple[float, float], ...]
    stocks: tuple[tuple[float, int], ...]

    def usd_at(self, unix_s: float) -> float:
        """Return the price of an hour at a moment."""
        return self.prices[max(0, bisect_right(self.prices, (unix_s, float("inf"))) - 1)][1]

    def stock_at(self, unix_s: float) -> int:
        """Return how many one customer can have at a moment."""
        return self.stocks[max(0, bisect_right(self.stocks, (unix_s, 1 << 62)) - 1)][1]

    def usd_between(self, start_unix_s: float, end_unix_s: float) -> float:
        """Return what one machine costs: by the second, at the price of each second."""
        if end_unix_s <= start_unix_s:
            return 0.0
        edges = [when for when, _ in self.prices if start_unix_s < when < end_unix_s]
        total = 0.0
        for low, high in pairwise([start_unix_s, *edges, end_unix_s]):
            total += (high - low) / 3600.0 * self.usd_at(low)
        return total
