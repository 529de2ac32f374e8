"""The cheapest machines that are fast enough together: those at hand, and those that could be had.

The exact dynamic programme of the planner over whole parts of the speed that is needed; speeds are
rounded to a two-thousandth of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from geo_ray.planning.search.whole_cover import cheapest_whole

_PARTS: Final = 2000
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
    parts = [max(0, round(item.rows_per_s / rows_per_s * _PARTS)) for item in items]
    caps = [min(max(0, item.most), _PARTS) for item in items]
    if sum(part * cap for part, cap in zip(parts, caps, strict=True)) < _PARTS:
        return caps
    counts = cheapest_whole(
        np.array([max(item.usd_per_hour, _LEAST_USD) for item in items]),
        np.array(parts, dtype=np.int64),
        np.array(caps, dtype=np.int64),
        _PARTS,
    )
    return caps if counts is None else [int(count) for count in counts]
