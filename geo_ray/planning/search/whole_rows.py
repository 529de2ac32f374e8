"""Splits a step's rows among machines in whole numbers, so that the last one ends earliest.

A machine cannot compute a part of a row, so a step takes longer than rows over speed: much longer
with few rows per machine, hardly with hundreds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Final

CLOSE: Final = 1e-9  # relative: what is nearer than that is equal


def most_rows(seconds: float, rows_per_s: float) -> int:
    """Return the rows that a machine computes in so many seconds."""
    return math.floor(seconds * rows_per_s * (1 + CLOSE))


def slowest_s(rows: int, counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the seconds of the last machine if rows are split best, at least one for each machine.

    Args:
        rows: at least as many as there are machines.
        counts: machines of each kind.
        speeds: rows/s of one of each kind.
    """
    used = [(count, speed) for count, speed in zip(counts, speeds, strict=True) if count]
    power = sum(count * speed for count, speed in used)
    if not power:
        return math.inf
    level_s = rows / power
    given = [most_rows(level_s, speed) for _, speed in used]
    left = rows - sum(count * each for (count, _), each in zip(used, given, strict=True))
    last_s = max(each / speed for (_, speed), each in zip(used, given, strict=True))
    nexts = [((each + 1) / used[i][1], i, each + 1) for i, each in enumerate(given)]
    heapq.heapify(nexts)
    while left > 0:
        done_s, i, each = heapq.heappop(nexts)
        last_s = max(last_s, done_s)
        left -= used[i][0]
        heapq.heappush(nexts, ((each + 1) / used[i][1], i, each + 1))
    return max(last_s, 1 / min(speed for _, speed in used))


def shares(rows: int, speeds: Sequence[float]) -> list[int]:
    """Split rows among machines so that the last one ends as early as possible.

    Args:
        rows: at least as many as there are speeds.
        speeds: rows/s of each machine.
    """
    level_s = rows / sum(speeds)
    given = [max(1, most_rows(level_s, speed)) for speed in speeds]
    indices = range(len(speeds))
    while sum(given) < rows:
        given[min(indices, key=lambda i: ((given[i] + 1) / speeds[i], i))] += 1
    while sum(given) > rows:
        able = [i for i in indices if given[i] > 1]
        given[max(able, key=lambda i: (given[i] / speeds[i], i))] -= 1
    return given
