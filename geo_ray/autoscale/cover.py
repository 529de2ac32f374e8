"""The cheapest machines that are fast enough together: those at hand, and those that could be had.

The exact dynamic programme of the planner over whole parts of the speed that is needed. Speeds are
rounded up to the next part, so that what is just enough is enough; there are so many parts that all
machines together lack no more than `SHORT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import numpy as np

from geo_ray.planning.search.whole_cover import cheapest_whole

SHORT: Final = 0.005
"""Share of the speed by which a cover may fall short of it."""

_LEAST_PARTS: Final = 2000
_MOST_PARTS: Final = 200_000
_LEAST_USD: Final = 1e-9


@dataclass(frozen=True, slots=True)
class CoverItem:
    """Machines that are alike.

    Attributes:
        rows_per_s: of one.
        usd_per_hour: of one.
        most: how many there are.
    """

    rows_per_s: float
    usd_per_hour: float
    most: int = 1


def cheapest_cover(items: Sequence[CoverItem], rows_per_s: float) -> list[int]:
    """Return how many of each; all of them if that is not enough.

    Args:
        items: to choose from.
        rows_per_s: that they must compute together.
    """
    if rows_per_s <= 0 or not items:
        return [0] * len(items)
    slowest = min((item.rows_per_s for item in items if item.rows_per_s > 0), default=rows_per_s)
    wanted = ceil(rows_per_s / slowest / SHORT)
    total = min(_MOST_PARTS, max(_LEAST_PARTS, wanted))
    parts = [max(0, ceil(item.rows_per_s / rows_per_s * total - 1e-6)) for item in items]
    caps = [min(max(0, item.most), total) for item in items]
    if sum(part * cap for part, cap in zip(parts, caps, strict=True)) < total:
        return caps
    counts = cheapest_whole(
        np.array([max(item.usd_per_hour, _LEAST_USD) for item in items]),
        np.array(parts, dtype=np.int64),
        np.array(caps, dtype=np.int64),
        total,
    )
    return caps if counts is None else [int(count) for count in counts]
