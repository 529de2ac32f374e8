"""Events of one process on their way to the controller, which writes them down.

Actors keep no files: the controller asks every so often and owns the one event log of the run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Final

_LOT: Final = 500
_GIVEN: Final = (
    4 * _LOT
)  # that can be recalled: all that a run actor can have taken and not written
_EVALUATIONS: Final = 64  # and those that may wait for others' evaluations


class EventBuffer:
    """A thread-safe list of events with the run's clock.

    Args:
        region: put into every event.
        origin_unix_s: when the run's clock was 0. Nothing is ordered by the time of day, on which
            machines may not agree: the controller corrects what is far off.
    """

    def __init__(self, region: str, origin_unix_s: float) -> None:
        self._region = region
        # Between events the monotonic clock counts, so that a step of the wall clock cannot show.
        self._offset_s = time.time() - origin_unix_s - time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._given: deque[dict[str, Any]] = deque(maxlen=_GIVEN)
        self._evaluations: deque[dict[str, Any]] = deque(maxlen=_EVALUATIONS)
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() + self._offset_s

    def add(self, kind: str, **fields: Any) -> None:
        """Note that something happened now."""
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
        """What `take` gives, and what this process takes for the present."""
        return {"events": self.take(), "now_s": self.now_s()}

    def recall(self) -> None:
        """Let the newest events be taken again: who took them may not have come to write them."""
        with self._lock:
            given = {id(event): event for event in (*self._evaluations, *self._given)}
            self._events = [*given.values(), *self._events]
            self._given.clear()
            self._evaluations.clear()
