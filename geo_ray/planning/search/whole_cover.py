"""The cheapest machines for a number of rows, exactly, by dynamic programming over rows.

    minimise ``sum_i n_i c_i``  so that  ``sum_i n_i w_i >= rows``,  ``0 <= n_i <= cap_i`` whole,

where a machine of offer ``i`` computes ``w_i`` whole rows in time. That is the whole question where
machines do not slow each other down: no cheapest choice has more machines than rows, since each
computes one at least. ``least[r]`` is the price of ``r`` rows with the offers so far; an offer's
machines are added in lots of 1, 2, 4, ..., so that an offer takes a few passes over the rows.

Shape legend: I = offers, R = rows, from 0 on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def cheapest_whole(price_I: Floats, rows_I: Ints, cap_I: Ints, rows: int) -> Ints | None:
    """Return how many of each offer; None if all together are not enough.

    Args:
        price_I: of one machine, above 0.
        rows_I: that one computes; 0 if it computes none in time.
        cap_I: most of each.
        rows: to be computed, at least one.
    """
    least_R = np.full(rows + 1, np.inf)
    least_R[0] = 0.0
    taken: list[tuple[int, int, NDArray[np.bool_]]] = []
    for i in np.flatnonzero(rows_I > 0).tolist():
        for lot in _lots(min(int(cap_I[i]), -(-rows // int(rows_I[i])))):
            done, with_R = min(lot * int(rows_I[i]), rows + 1), np.empty(rows + 1)
            with_R[:done] = least_R[0]  # it may compute more rows than there are
            with_R[done:] = least_R[: rows + 1 - done]
            with_R += lot * price_I[i]
            taken.append((i, lot, with_R < least_R))
            np.minimum(least_R, with_R, out=least_R)
    if np.isinf(least_R[rows]):
        return None
    counts_I = np.zeros(len(price_I), dtype=np.int64)
    left = rows
    for i, lot, better_R in reversed(taken):
        if better_R[left]:
            counts_I[i] += lot
            left = max(0, left - lot * int(rows_I[i]))
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
