"""One alarm clock: calls a function at a time that may be moved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Alarm:
    """Set it again and again; only the last time counts.

    Args:
        ring: called in a thread of its own, never twice for one setting.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._at_s: float | None = None

    def set(self, at_s: float | None) -> None:
        """Ring at ``at_s`` (`time.monotonic`), and at no other time; None: not at all."""
        with self._lock:
            if at_s == self._at_s:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._at_s, self._timer = at_s, None
            if at_s is not None:
                wait_s = max(0.0, at_s - time.monotonic())
                self._timer = threading.Timer(wait_s, self._rang, (at_s,))
                self._timer.daemon = True
                self._timer.start()

    def _rang(self, at_s: float) -> None:
        with self._lock:
            if at_s != self._at_s:
                return
            self._at_s = self._timer = None
        self._ring()
