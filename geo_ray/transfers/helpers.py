"""The scheduler with helper regions, which may order updates to be summed on the way.

A group has a deadline. If its sum was not asked for by then (the helper died, a part is slow), the
group is dissolved: its parts wait for the averager again, each by itself, and a late sum is
refused. Because one party decides, no update is counted both ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

from geo_ray.transfers.config import TransfersConfig
from geo_ray.transfers.grouping import UploadGroup, UploadPath, plan_groups
from geo_ray.transfers.requests import Decision, Dissolve, Drop, Gather, UploadRequest
from geo_ray.transfers.scheduler import TransferScheduler

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
