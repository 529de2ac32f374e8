"""Events of one process, buffered until the controller records them.

Actors write no files: the controller polls them and owns the event log of the run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Final

_LOT: Final = 500
_GIVEN: Final = 4 * _LOT  # for recall: all events that a run actor may have taken but not written
_EVALUATIONS: Final = 64  # evaluations that may wait for those of other regions


class EventBuffer:
    """A thread-safe list of events with the run's clock.

    Args:
        region: region added to every event.
        origin_unix_s: time at which the run's clock was 0. Events are not ordered by the time of
            day, on which machines may disagree; the controller corrects large differences.
    """

    def __init__(self, region: str, origin_unix_s: float) -> None:
        self._region = region
        # The monotonic clock counts between events, so that steps of the wall clock have no effect.
        self._offset_s = time.time() - origin_unix_s - time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._given: deque[dict[str, Any]] = deque(maxlen=_GIVEN)
        self._evaluations: deque[dict[str, Any]] = deque(maxlen=_EVALUATIONS)
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() + self._offset_s

    def add(self, kind: str, **fields: Any) -> None:
        """Record an event that happens now."""
        event = {"kind": kind, "t_s": self.now_s(), "region": self._region, **fields}
        with self._lock:
            self._events.append(event)

    def take(self, limit: int = _LOT) -> list[dict[str, Any]]:
        """Remove and return the oldest events, few enough for one small message."""
        with self._lock:
            taken, self._events = self._events[:limit], self._events[limit:]
            self._given.extend(taken)
            self._evaluations.extend(event for event in taken if event["kind"] == "stats")
            return taken

    def news(self) -> dict[str, Any]:
        """Return the result of `take`, and the current time of this process."""
        return {"events": self.take(), "now_s": self.now_s()}

    def recall(self) -> None:
        """Offer the newest events again, because their receiver may not have written them."""
        with self._lock:
            given = {id(event): event for event in (*self._evaluations, *self._given)}
            self._events = [*given.values(), *self._events]
            self._given.clear()
            self._evaluations.clear()
