"""A curve of bounded size, however long what it is drawn of."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class BoundedCurve:
    """Means of so many points each that there are never more than ``most`` of them.

    Args:
        most: points, even and at least 4.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._each = 1  # points that a mean is of
        self._done: list[tuple[float, float]] = []
        self._open: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """Take the next point; one that is not finite is left out."""
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        self._open.append((x, y))
        if len(self._open) < self._each:
            return
        self._done.append(_mean(self._open))
        self._open.clear()
        if len(self._done) == self._most:
            pairs = zip(self._done[::2], self._done[1::2], strict=True)
            self._done = [_mean(pair) for pair in pairs]
            self._each *= 2

    def points(self) -> tuple[Floats, Floats]:
        """Give places and means, those of the newest points last; float64 (N,) each."""
        rows = [*self._done, *([_mean(self._open)] if self._open else [])]
        both = np.array(rows, dtype=np.float64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def __len__(self) -> int:
        return len(self._done) + bool(self._open)


def _mean(
    points: list[tuple[float, float]] | tuple[tuple[float, float], ...],
) -> tuple[float, float]:
    count = len(points)
    return sum(x for x, _ in points) / count, sum(y / count for _, y in points)
