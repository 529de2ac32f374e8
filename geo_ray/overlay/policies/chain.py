"""The order of regions in a chain whose slowest link is as fast as possible.

Exact search grows too fast. The order is built by inserting regions one by one where they cost
least, then moving single ones as long as that helps.

Shape legend: N = regions; rows send, columns receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

_PASSES: Final = 8


def best_chain(
    rate_NN: NDArray[np.float64],
    nodes: Sequence[int],
    start: int | None = None,
    end: int | None = None,
) -> list[int]:
    """Return ``nodes`` in a good order, after ``start`` and before ``end`` if these are given.

    Regions that make no difference stay in the order in which they are given.
    """
    slow = (1.0 / rate_NN).tolist()
    head = [] if start is None else [start]
    tail = [] if end is None else [end]
    inner: list[int] = []
    for node in nodes:
        inner = _insert(slow, head, inner, tail, node)
    for _ in range(_PASSES):
        before = inner
        for node in nodes:
            rest = [other for other in inner if other != node]
            moved = _insert(slow, head, rest, tail, node)
            if _cost(slow, [*head, *moved, *tail]) < _cost(slow, [*head, *inner, *tail]):
                inner = moved
        if inner == before:
            break
    return [*head, *inner, *tail]


def _insert(
    slow: list[list[float]], head: list[int], inner: list[int], tail: list[int], node: int
) -> list[int]:
    options = [[*inner[:at], node, *inner[at:]] for at in range(len(inner), -1, -1)]
    return min(options, key=lambda order: _cost(slow, [*head, *order, *tail]))


def _cost(slow: list[list[float]], order: list[int]) -> tuple[float, float]:
    """Return the cost of the slowest link, then of all; rounded, so that equal links are equal."""
    links = [slow[a][b] for a, b in pairwise(order)]
    return round(max(links, default=0.0), 12), round(sum(links), 12)
