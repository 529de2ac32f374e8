"""Decides which waiting updates are summed on the way, and in which region.

The first updates of the line go straight to the averager, which would be idle otherwise. The next
ones are summed at one of their senders, a helper, while the averager is busy with those before: a
group grows as long as its sum is ready in time. So k updates cost one transfer on the bottleneck.
Every number of straight updates is tried; the plan that finishes first is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from geo_ray.transfers.requests import UploadRequest

_LONGEST_LINE: Final = 32
_LATE: Final = 0.25  # share of a transfer

Duration = Callable[[str, str, int], float]
"""``duration(src, dst, size_bytes)``: seconds that a transfer between two regions takes."""


@dataclass(frozen=True, slots=True)
class UploadGroup:
    """Updates to be summed at one of their senders.

    Attributes:
        helper: the region that sums them.
        asks: the requests, in order.
        spare_s: how long the group can wait for more updates without delaying its sum.
    """

    helper: str
    asks: tuple[UploadRequest, ...]
    spare_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UploadPath:
    """The path to the averager.

    Attributes:
        home: the averager's region.
        busy_s: how long it still receives granted updates.
        limit_mbps: what it can receive in all.
        duration_s: how long a transfer takes alone.
    """

    home: str
    busy_s: float
    limit_mbps: float
    duration_s: Duration

    def through_s(self, region: str, size_bytes: int, ready_s: float, free_s: float) -> float:
        """Return the end of a transfer that is ready, and has a free averager, at these times."""
        bottleneck_s = size_bytes * 8e-6 / self.limit_mbps
        path_s = self.duration_s(region, self.home, size_bytes)
        return max(max(ready_s, free_s) + bottleneck_s, ready_s + path_s)


@dataclass(frozen=True, slots=True)
class _Plan:
    end_s: float
    total_s: float  # sum over all updates of the time when each is through
    groups: tuple[UploadGroup, ...]


def plan_groups(line: Sequence[UploadRequest], path: UploadPath) -> tuple[UploadGroup, ...]:
    """Return the groups worth forming now; other updates go straight.

    Args:
        line: requests that wait for the averager, in the order in which they would go.
        path: the path to the averager.
    """
    asks = [ask for ask in line if not ask.final and not ask.parts][:_LONGEST_LINE]
    sizes = {ask.size_bytes for ask in asks}
    if len(asks) < 2 or len(sizes) > 1:
        return ()
    plans = [_with_straight(number, asks, path) for number in range(len(asks) + 1)]
    # Equal within rounding: fewer groups are better, because single updates cannot fail as a group.
    best = min(plans, key=lambda p: (round(p.end_s, 9), round(p.total_s, 9), len(p.groups)))
    return best.groups


def _with_straight(number: int, asks: Sequence[UploadRequest], path: UploadPath) -> _Plan:
    free_s, end_s, total_s = path.busy_s, 0.0, 0.0
    bottleneck_s = asks[0].size_bytes * 8e-6 / path.limit_mbps
    groups: list[UploadGroup] = []
    first = 0
    while first < len(asks):
        group = UploadGroup(asks[first].region, (asks[first],))
        ready_s = 0.0
        if first >= number:
            group, ready_s = _largest(asks[first:], free_s, path)
        size = len(group.asks)
        through_s = path.through_s(group.helper, asks[0].size_bytes, ready_s, free_s)
        if size > 1:
            groups.append(replace(group, spare_s=max(0.0, free_s - ready_s)))
        free_s = max(ready_s, free_s) + bottleneck_s
        end_s, total_s = max(end_s, through_s), total_s + size * through_s
        first += size
    return _Plan(end_s, total_s, tuple(groups))


def _largest(
    asks: Sequence[UploadRequest], free_s: float, path: UploadPath
) -> tuple[UploadGroup, float]:
    """Return the longest prefix of ``asks``, at least 2, whose sum is ready in time.

    Returns:
        The group, and when its sum is ready.
    """
    # A slightly late sum is better than one more transfer.
    latest_s = free_s + _LATE * asks[0].size_bytes * 8e-6 / path.limit_mbps
    group, ready_s = UploadGroup(asks[0].region, tuple(asks[:1])), 0.0
    for size in range(2, len(asks) + 1):
        helper, gathered_s = _best_helper(asks[:size], path)
        if size > 2 and gathered_s > latest_s:
            break
        group, ready_s = UploadGroup(helper, tuple(asks[:size])), gathered_s
    return group, ready_s


def _best_helper(asks: Sequence[UploadRequest], path: UploadPath) -> tuple[str, float]:
    """Return the sender whose sum is soonest at the averager, and when its sum is ready."""

    def ready_s(helper: str) -> float:
        others = [ask for ask in asks if ask.region != helper]
        return sum(path.duration_s(ask.region, helper, ask.size_bytes) for ask in others)

    size_bytes = asks[0].size_bytes
    helper = min(
        (ask.region for ask in asks),
        key=lambda h: (ready_s(h) + path.duration_s(h, path.home, size_bytes), h),
    )
    return helper, ready_s(helper)
