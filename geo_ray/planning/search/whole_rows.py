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


def slowest_s(
    rows: int, counts: Sequence[int], speeds: Sequence[float], room_rows: Sequence[int]
) -> float:
    """Return the seconds of the last machine if rows are split best, at least one for each machine.

    Infinite if they have no room for all rows.

    Args:
        rows: at least as many as there are machines.
        counts: machines of each kind.
        speeds: rows/s of one of each kind.
        room_rows: most rows that one of each kind has room for.
    """
    kinds = zip(counts, speeds, room_rows, strict=True)
    used = [(count, speed, room) for count, speed, room in kinds if count]
    power = sum(count * speed for count, speed, _ in used)
    if not power:
        return math.inf
    level_s = rows / power
    given = [min(room, most_rows(level_s, speed)) for _, speed, room in used]
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
    _, speed, room = kind
    return (given + 1) / speed if given < room else math.inf


def shares(rows: int, speeds: Sequence[float], room_rows: Sequence[int]) -> list[int]:
    """Split rows among machines so that the last one ends as early as possible.

    Args:
        rows: at least as many as there are speeds, and no more than there is room for.
        speeds: rows/s of each machine.
        room_rows: most rows that each has room for.
    """
    level_s = rows / sum(speeds)
    pairs = zip(speeds, room_rows, strict=True)
    given = [min(room, max(1, most_rows(level_s, speed))) for speed, room in pairs]
    indices = range(len(speeds))
    while sum(given) < rows:
        roomy = [i for i in indices if given[i] < room_rows[i]]
        given[min(roomy, key=lambda i: ((given[i] + 1) / speeds[i], i))] += 1
    while sum(given) > rows:
        able = [i for i in indices if given[i] > 1]
        given[max(able, key=lambda i: (given[i] / speeds[i], i))] -= 1
    return given
