"""The bound on staleness in a line of updates: which must go first, and which cannot be in time.

The *slack* of a waiting update is the number of commits that may still come before it. In a line,
the commits of those ahead use it up. If any order keeps all updates in time, the order by least
slack (earliest deadline first) does, so that order answers both questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from geo_ray.transfers.requests import UploadRequest

WithSlack = tuple[float, UploadRequest]
"""An update with its slack, as of the moment at which the line begins to move."""


def is_in_time(line: Iterable[WithSlack], first_commits: int = 0) -> bool:
    """Return whether some order of ``line`` keeps all updates in time.

    Args:
        line: the updates, in any order.
        first_commits: commits that come before all of them.
    """
    before = first_commits
    for slack, ask in _by_deadline(line):
        if before > slack:
            return False
        before += ask.commits
    return True


def too_late(
    line: Sequence[WithSlack], loss: Callable[[UploadRequest], float]
) -> list[UploadRequest]:
    """Return the fewest updates to give up so that the rest can be in time.

    Args:
        line: the updates, in any order.
        loss: returns what is lost with an update; where there is a choice, the least is given up.
    """
    kept: list[WithSlack] = []
    given_up: list[UploadRequest] = []
    for slack, ask in _by_deadline(line):
        before = sum(other.commits for _, other in kept)
        kept.append((slack, ask))
        while before > slack and (slack, ask) in kept:
            victims = kept if slack >= 0 else kept[-1:]
            victim = min(
                (k for k in victims if k[0] < math.inf),
                key=lambda k: (loss(k[1]), k[1].key),
            )
            kept.remove(victim)
            given_up.append(victim[1])
            before -= victim[1].commits
    return given_up


def _by_deadline(line: Iterable[WithSlack]) -> list[WithSlack]:
    return sorted(line, key=lambda r: (r[0] + r[1].commits, r[1].key))
