"""Which waiting updates are summed on the way, and where.

The averager takes the first of the line itself: it would be idle otherwise. Those that come next
are summed at one of them, a helper, for as long as the averager is busy with those before: a group
grows as long as its sum is ready in time. So k updates cost one transfer on the bottleneck. How
many go straight is tried out; what is through first wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from geo_ray.transfers.requests import UploadRequest

_LONGEST_LINE: Final = 32
_LATE: Final = 0.25  # of a transfer

Duration = Callable[[str, str, int], float]
"""``duration(src, dst, size_bytes)``: seconds that a transfer between two regions takes."""


@dataclass(frozen=True, slots=True)
class UploadGroup:
    """Updates to be summed at one of their senders.

    Attributes:
        helper: where.
        asks: what, in order.
        spare_s: how long to wait with it for more updates without delaying it.
    """

    helper: str
    asks: tuple[UploadRequest, ...]
    spare_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UploadPath:
    """What the way to the averager is like.

    Attributes:
        home: the averager's region.
        busy_s: how long it still receives what was granted.
        limit_mbps: what it can receive in all.
        duration_s: how long transfers take that run alone.
    """

    home: str
    busy_s: float
    limit_mbps: float
    duration_s: Duration

    def through_s(self, region: str, size_bytes: int, ready_s: float, free_s: float) -> float:
        """When a transfer is through that is ready and finds the averager free at these times."""
        bottleneck_s = size_bytes * 8e-6 / self.limit_mbps
        path_s = self.duration_s(region, self.home, size_bytes)
        return max(max(ready_s, free_s) + bottleneck_s, ready_s + path_s)


@dataclass(frozen=True, slots=True)
class _Plan:
    end_s: float
    total_s: float  # over all updates, of when each is through
    groups: tuple[UploadGroup, ...]


def plan_groups(line: Sequence[UploadRequest], path: UploadPath) -> tuple[UploadGroup, ...]:
    """The groups worth forming now; updates in none of them go straight.

    Args:
        line: what waits for the averager, in the order in which it would go.
        path: the way there.
    """
    asks = [ask for ask in line if not ask.final and not ask.parts][:_LONGEST_LINE]
    sizes = {ask.size_bytes for ask in asks}
    if len(asks) < 2 or len(sizes) > 1:
        return ()
    plans = [_with_straight(number, asks, path) for number in range(len(asks) + 1)]
    # Equal within rounding: the fewer groups the better, nothing can go wrong with the others.
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
    """The longest beginning of ``asks`` whose sum is ready when the averager is free; 2 at least.

    Returns:
        The group, and when its sum is ready.
    """
    # A little late is better than one transfer more.
    latest_s = free_s + _LATE * asks[0].size_bytes * 8e-6 / path.limit_mbps
    group, ready_s = UploadGroup(asks[0].region, tuple(asks[:1])), 0.0
    for size in range(2, len(asks) + 1):
        helper, gathered_s = _best_helper(asks[:size], path)
        if size > 2 and gathered_s > latest_s:
            break
        group, ready_s = UploadGroup(helper, tuple(asks[:size])), gathered_s
    return group, ready_s


def _best_helper(asks: Sequence[UploadRequest], path: UploadPath) -> tuple[str, float]:
    """The sender from which the sum is soonest at the averager, and when it is ready there."""

    def ready_s(helper: str) -> float:
        others = [ask for ask in asks if ask.region != helper]
        return sum(path.duration_s(ask.region, helper, ask.size_bytes) for ask in others)

    size_bytes = asks[0].size_bytes
    helper = min(
        (ask.region for ask in asks),
        key=lambda h: (ready_s(h) + path.duration_s(h, path.home, size_bytes), h),
    )
    return helper, ready_s(helper)
