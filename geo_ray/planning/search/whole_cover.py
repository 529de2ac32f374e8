"""The cheapest machines for a number of rows, exactly, by dynamic programming over rows.

    minimise ``sum_i n_i c_i``  so that  ``sum_i n_i w_i >= rows``,  ``0 <= n_i <= cap_i`` whole,

where a machine of offer ``i`` computes ``w_i`` whole rows in time. That is the whole question where
machines do not slow each other down: no cheapest choice has more machines than rows, since each
computes one at least. ``least[r]`` is the price of ``r`` rows with the offers so far; an offer's
machines are added in lots of 1, 2, 4, ..., so that an offer takes a few passes over the rows.

With at most ``K`` spot machines, ``least[k, r]`` has at most ``k`` of them.

Shape legend: I = offers, K = most spot machines, R = rows; K and R from 0 on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def cheapest_whole(
    price_I: Floats,
    rows_I: Ints,
    cap_I: Ints,
    rows: int,
    spot_I: NDArray[np.bool_] | None = None,
    most_spot: int = 0,
) -> Ints | None:
    """Return how many of each offer; None if all together are not enough.

    Args:
        price_I: of one machine, above 0.
        rows_I: that one computes; 0 if it computes none in time.
        cap_I: most of each.
        rows: to be computed, at least one.
        spot_I: which of them are spot machines; None if it does not matter.
        most_spot: of these in all.
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
            with_KR[spots:, :done] = before_KR[:, :1]  # it may compute more rows than there are
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


def passes(rows_I: Ints, cap_I: Ints, rows: int) -> int:
    """Return how many entries `cheapest_whole` would compute."""
    most_I = np.minimum(cap_I, -(-rows // np.maximum(rows_I, 1)))
    return int(np.ceil(np.log2(most_I[rows_I > 0] + 1)).sum()) * (rows + 1)


def _lots(count: int) -> Iterator[int]:
    """Return lots, sums of which are all numbers up to ``count``: 1, 2, 4, ..., the rest."""
    lot = 1
    while count > 0:
        yield min(lot, count)
        count -= lot
        lot *= 2
