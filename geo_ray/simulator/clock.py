"""A queue of things that will happen, in virtual time; ties happen in the order of their making."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from geo_ray.base.clock import VirtualClock


class Scheduler:
    """Runs callbacks in the order of their times."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._idle: set[int] = set()  # numbers of those that need not happen
        self._holds = 0

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self.clock.now_s()

    def at(self, when_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` at ``when_s``, or now if that has passed."""
        heapq.heappush(self._queue, (max(when_s, self.now_s), next(self._number), callback))

    def idly_at(self, when_s: float, callback: Callable[[], None]) -> None:
        """Schedule a call that runs only if other events remain by then."""
        number = next(self._number)
        self._idle.add(number)
        heapq.heappush(self._queue, (max(when_s, self.now_s), number, callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` ``delay_s`` seconds from now."""
        self.at(self.now_s + delay_s, callback)

    def hold(self) -> None:
        """Let idle callbacks happen too, whatever is left, until `let_go`; they may be nested."""
        self._holds += 1

    def let_go(self) -> None:
        """See `hold`."""
        self._holds -= 1

    def run(self, needs_idle: Callable[[], bool] | None = None) -> None:
        """Run until no event remains.

        Args:
            needs_idle: tells whether idle callbacks happen although no other event remains.
        """
        while self._queue:
            is_over = len(self._queue) == len(self._idle) and not self._holds
            if is_over and (needs_idle is None or not needs_idle()):
                return
            when_s, number, callback = heapq.heappop(self._queue)
            self._idle.discard(number)
            self.clock.advance_to_s(when_s)
            callback()
