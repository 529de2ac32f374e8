"""The schedule of rate changes of all traces of a lab. Pure: times are given."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from geo_ray.lab.relay.traces import Trace

Target: TypeAlias = tuple[str, int, int]
"""("link", source, destination), ("up", region, region) or ("down", region, region)."""


class TraceSchedule:
    """The next change of every trace.

    Args:
        traces: traces by the target that they change.
    """

    def __init__(self, traces: Mapping[Target, Trace]) -> None:
        self._traces = dict(traces)
        self._began_s = 0.0
        self._heap: list[tuple[float, Target, float]] = []
        self._changes: dict[Target, Iterator[tuple[float, float]]] = {}

    def start(self, now_s: float) -> None:
        """Start or restart all traces."""
        self._began_s = now_s
        self._heap = []
        self._changes = {target: trace.changes() for target, trace in self._traces.items()}
        for target in self._traces:
            self._push_next(target)

    def drop(self, target: Target) -> None:
        """Forget a trace, because its rate was set by hand."""
        self._traces.pop(target, None)
        self._changes.pop(target, None)
        self._heap = [entry for entry in self._heap if entry[1] != target]
        heapq.heapify(self._heap)

    def next_s(self) -> float | None:
        """Return when a rate changes next; None: never."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[tuple[Target, float]]:
        """Return the changes until now: (target, Mbit/s) in order of time."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            _, target, rate_mbps = heapq.heappop(self._heap)
            found.append((target, rate_mbps))
            self._push_next(target)
        return found

    def _push_next(self, target: Target) -> None:
        change = next(self._changes[target], None)
        if change is not None:
            time_s, rate_mbps = change
            heapq.heappush(self._heap, (self._began_s + time_s, target, rate_mbps))
