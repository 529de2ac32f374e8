"""Upload scheduling with helper regions, which sum waiting updates on their way.

The first updates of the queue go straight to the averager, which would be idle otherwise. The
next ones are summed at one of their senders, the helper, so k updates cost one transfer on the
bottleneck. Every number of direct uploads is tried, and the plan that finishes first is taken. A
group has a deadline: if its sum was not requested by then, the group is dissolved, its parts
queue again, and a late sum is refused, so no update is counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

from geo_ray.transport.uploads import (
    Decision,
    Dissolve,
    Drop,
    Gather,
    TransferScheduler,
    TransfersConfig,
    UploadRequest,
)

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


_TRIPS: Final = 1.5
_MOMENT_S: Final = 1e-6
_MEMORY: Final = 0.5


@dataclass(slots=True)
class _Open:
    total: UploadRequest
    since_s: float
    deadline_s: float


@dataclass(slots=True)
class HelperScheduler:
    """See the module's docstring; the events are those of `TransferScheduler`.

    Attributes:
        config: how to decide.
        home: the averager's region.
        into_mbps: what regions receive from each other, by region that receives; learned.
        paused: form no groups; the open ones go on.
        line: the scheduler beneath.
    """

    config: TransfersConfig
    home: str
    into_mbps: dict[str, float] = field(default_factory=dict)
    paused: bool = False
    line: TransferScheduler = field(init=False)
    _open: dict[int, _Open] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _plan_s: float = math.inf  # when a group must be formed at the latest

    def __post_init__(self) -> None:
        self.line = TransferScheduler(self.config)

    def ask(self, now_s: float, version: int, ask: UploadRequest) -> list[Decision]:
        """See `TransferScheduler.ask`; a sum is asked for by its helper."""
        if not ask.parts:
            decisions = self._take_out(ask)
            return self._settle(now_s, version, decisions + self.line.ask(now_s, version, ask))
        opened = self._match(ask)
        if opened is None:
            return [Dissolve(ask.seq)]
        self._note_gathered(now_s, opened, ask)
        present = {part.key for part in ask.parts}
        missing = [part for part in opened.total.parts if part.key not in present]
        self.line.release(opened.total.key, [*missing, *ask.parts])
        opened.total = ask
        self.line.hold(ask)
        return self._settle(now_s, version, self.line.ask(now_s, version, ask))

    def began(self, now_s: float, ask: UploadRequest) -> list[Decision]:
        """See `TransferScheduler.began`."""
        decisions = self._take_out(ask)
        self.line.began(now_s, ask)
        return decisions

    def arrived(self, now_s: float, version: int, ask: UploadRequest) -> list[Decision]:
        """See `TransferScheduler.arrived`; a sum that is refused gives nothing but `Dissolve`."""
        decisions: list[Decision] = []
        if not ask.parts:
            decisions = self._take_out(ask)
        elif (opened := self._match(ask)) is None:
            return [Dissolve(ask.seq)]
        else:
            opened.deadline_s = math.inf
        arrived = self.line.arrived(now_s, version, ask)
        return self._settle(now_s, version, decisions + arrived)

    def committed(self, group: int) -> None:
        """Note that the averager has taken a sum in."""
        self._open.pop(group, None)

    def refuse(self, now_s: float, version: int, group: int) -> list[Decision]:
        """Refuse a sum for the averager; its parts are sent by themselves."""
        opened = self._open.pop(group, None)
        if opened is None:
            return []
        self.line.forget(opened.total.key)
        self.line.release(opened.total.key, opened.total.parts)
        return [Dissolve(group), *self.line.tick(now_s, version)]

    def tick(self, now_s: float, version: int) -> list[Decision]:
        """See `TransferScheduler.tick`."""
        late = [group for group, o in self._open.items() if o.deadline_s <= now_s]
        decisions = [d for group in late for d in self.refuse(now_s, version, group)]
        return self._settle(now_s, version, decisions + self.line.tick(now_s, version))

    def next_deadline_s(self) -> float | None:
        """When `tick` should be called at the latest; None if nothing is open."""
        deadlines = [o.deadline_s for o in self._open.values() if o.deadline_s < math.inf]
        line_s = self.line.next_deadline_s()
        times_s = [*deadlines, self._plan_s, math.inf if line_s is None else line_s]
        return None if min(times_s) == math.inf else min(times_s)

    @property
    def is_quiet(self) -> bool:
        """Return whether a sender would have the averager to itself."""
        return self.line.is_quiet

    # ------------------------------------------------------------------ inside

    def _match(self, ask: UploadRequest) -> _Open | None:
        """Return the open group whose sum this may be."""
        opened = self._open.get(ask.seq)
        if opened is None or opened.total.region != ask.region:
            return None
        return opened if set(ask.parts) <= set(opened.total.parts) else None

    def _take_out(self, ask: UploadRequest) -> list[Decision]:
        """Dissolve the group of a sender that sends by itself after all."""
        for group, opened in list(self._open.items()):
            keys = {part.key for part in opened.total.parts}
            if ask.key in keys:
                del self._open[group]
                self.line.forget(opened.total.key)
                others = [part for part in opened.total.parts if part.key != ask.key]
                self.line.release(opened.total.key, others)
                return [Dissolve(group)]
        return []

    def _settle(self, now_s: float, version: int, decisions: list[Decision]) -> list[Decision]:
        """Dissolve sums that would be too stale; then form groups if that is faster."""
        settled: list[Decision] = []
        while decisions:
            decision = decisions.pop(0)
            if isinstance(decision, Drop) and decision.ask.parts:
                decisions += self.refuse(now_s, version, decision.ask.seq)
            else:
                settled.append(decision)
        return self._group(now_s, settled)

    def _group(self, now_s: float, decisions: list[Decision]) -> list[Decision]:
        self._plan_s = math.inf
        line, limit_mbps = self.line.waiting(), self.line.rates.limit_mbps
        if not self.config.aggregate or self.paused or len(line) < 2 or limit_mbps is None:
            return decisions
        path = UploadPath(self.home, self.line.busy_s(now_s), limit_mbps, self._duration_s)
        # The members must be told, the helper must ask, and its grant must come back.
        lead_s = _TRIPS * max(self.line.rates.latency_s.values(), default=0.0)
        for group in plan_groups(line, path):
            if group.spare_s <= lead_s + _MOMENT_S:
                decisions.append(self._gather(now_s, group))
            else:
                self._plan_s = min(self._plan_s, now_s + group.spare_s - lead_s)
        return decisions

    def _gather(self, now_s: float, group: UploadGroup) -> Gather:
        number = next(self._numbers)
        total = UploadRequest(
            group.helper,
            epoch=0,
            seq=number,
            size_bytes=group.asks[0].size_bytes,
            base_version=min(ask.base_version for ask in group.asks),
            parts=group.asks,
        )
        self.line.hold(total)
        self._open[number] = _Open(total, now_s, now_s + self.config.grant_s)
        return Gather(number, group.helper, group.asks)

    def _duration_s(self, src: str, dst: str, size_bytes: int) -> float:
        rates = self.line.rates
        if dst == self.home:
            return rates.duration_s(src, size_bytes)
        # What a region can receive is learned at its first sum; until then its rate of sending
        # counts.
        mbps = self.into_mbps.get(dst) or rates.paths.get(dst)
        own_mbps = rates.paths.get(src)
        if mbps is None or own_mbps is None:
            return math.inf
        return size_bytes * 8e-6 / (mbps if dst in self.into_mbps else min(mbps, own_mbps))

    def _note_gathered(self, now_s: float, opened: _Open, ask: UploadRequest) -> None:
        """Learn a helper's rate of receiving from the time in which all parts were summed."""
        parts = opened.total.parts
        took_s = now_s - opened.since_s - max(self.line.rates.latency_s.values(), default=0.0)
        if len(ask.parts) < len(parts) or took_s <= 0 or not ask.size_bytes:
            return
        seen = (len(parts) - 1) * ask.size_bytes * 8e-6 / took_s
        known = self.into_mbps.get(ask.region, seen)
        self.into_mbps[ask.region] = _MEMORY * known + (1 - _MEMORY) * seen


def part_of(total: UploadRequest, present: tuple[UploadRequest, ...]) -> UploadRequest:
    """Return the request for a sum of only some of its parts."""
    oldest = min(ask.base_version for ask in present)
    return replace(total, parts=present, base_version=oldest)
