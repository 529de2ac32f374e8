"""Staleness on a line of updates: who must go first, who cannot be in time.

A waiting update has *room*: how many commits may still come before it. In a line, the commits of
those ahead use it up. A line in which everybody is in time exists if the one with the least room
first is such a line (earliest deadline first); so that order answers both questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from geo_ray.transfers.requests import UploadRequest

Roomy = tuple[float, UploadRequest]
"""An update with its room, as of the moment at which the line begins to move."""


def is_in_time(line: Iterable[Roomy], first_commits: int = 0) -> bool:
    """Whether some order of ``line`` makes everybody be in time.

    Args:
        line: the updates, in any order.
        first_commits: commits that come before all of them.
    """
    before = first_commits
    for room, ask in _by_deadline(line):
        if before > room:
            return False
        before += ask.commits
    return True


def too_late(line: Sequence[Roomy], loss: Callable[[UploadRequest], float]) -> list[UploadRequest]:
    """The updates to give up so that the rest can be in time: as few as possible.

    Args:
        line: the updates, in any order.
        loss: what is lost with one; where there is a choice, the least goes.
    """
    kept: list[Roomy] = []
    given_up: list[UploadRequest] = []
    for room, ask in _by_deadline(line):
        before = sum(other.commits for _, other in kept)
        kept.append((room, ask))
        while before > room and (room, ask) in kept:
            victims = kept if room >= 0 else kept[-1:]
            victim = min(
                (k for k in victims if k[0] < math.inf),
                key=lambda k: (loss(k[1]), k[1].key),
            )
            kept.remove(victim)
            given_up.append(victim[1])
            before -= victim[1].commits
    return given_up


def _by_deadline(line: Iterable[Roomy]) -> list[Roomy]:
    return sorted(line, key=lambda r: (r[0] + r[1].commits, r[1].key))
