"""What is under way to one other region: how much more may be sent, and how fast it went.

Goodput is what was acknowledged over the time in which something was under way. Pauses in which
there was nothing to send do not count, so that a link is not blamed for a slow one before it.
"""

from __future__ import annotations

from collections import deque

from geo_ray.errors import FrameError


class Pace:
    """Counts parts to one region.

    Args:
        window: parts that may be under way at a time.

    Attributes:
        sent: parts so far.
        rtt_s: round trip, of which one is taken off each time that nothing is under way any more.
    """

    def __init__(self, window: int) -> None:
        self.sent = 0
        self.rtt_s = 0.0
        self._window = window
        self._sizes: deque[int] = deque()
        self._asked = 0  # up to which part an acknowledgement was asked for
        self._busy_from_s = 0.0
        self._heard_s = 0.0
        self._bytes = 0
        self._busy_s = 0.0

    @property
    def acked(self) -> int:
        """Parts that have arrived."""
        return self.sent - len(self._sizes)

    @property
    def has_room(self) -> bool:
        """Whether one more part may be sent."""
        return len(self._sizes) < self._window

    def push(self, size_bytes: int, now_s: float) -> None:
        """A part is sent."""
        if not self._sizes:
            self._busy_from_s = self._heard_s = now_s
        self._sizes.append(size_bytes)
        self.sent += 1

    def ask(self, *, is_last: bool) -> bool:
        """Whether to ask for an acknowledgement with the part that was just pushed."""
        due = is_last or not self.has_room or self.sent - self._asked >= max(1, self._window // 4)
        if due:
            self._asked = self.sent
        return due

    def ack(self, count: int, now_s: float) -> None:
        """``count`` parts have arrived so far.

        Raises:
            FrameError: it is more than were sent.
        """
        if count > self.sent:
            raise FrameError(f"{count} parts are acknowledged, {self.sent} were sent")
        if count <= self.acked:
            return
        while self.acked < count:
            self._bytes += self._sizes.popleft()
        self._busy_s += now_s - self._busy_from_s
        self._busy_from_s = self._heard_s = now_s
        if not self._sizes:
            # One of the round trips was the answer's; a short burst is mostly that.
            self._busy_s -= min(self.rtt_s, self._busy_s / 2)

    def silent_s(self, now_s: float) -> float:
        """For how long something is under way of which nothing is heard; 0 if there is nothing."""
        return now_s - self._heard_s if self._sizes else 0.0

    def excuse(self, now_s: float) -> None:
        """Count the silence from now on anew."""
        self._heard_s = now_s

    def take(self) -> tuple[int, float]:
        """Bytes that have arrived since the last call, and the busy seconds for them."""
        taken = self._bytes, self._busy_s
        self._bytes, self._busy_s = 0, 0.0
        return taken
