"""When heartbeats are due, and the round trips that they measure: pure bookkeeping."""

from __future__ import annotations

import math

from geo_ray.errors import FrameError
from geo_ray.transport.wire.frames import Frame, FrameKind
from geo_ray.transport.wire.meta import Meta


class Heartbeat:
    """The pings that are due and the peer's pings to answer, of one connection.

    Args:
        interval_s: time between two pings while little happens, in seconds.

    Attributes:
        rtt_s: the last round trip, or None.
        rtt_min_s: the shortest round trip, or None.
    """

    def __init__(self, interval_s: float) -> None:
        self.rtt_s: float | None = None
        self.rtt_min_s: float | None = None
        self._interval_s = interval_s
        self._last_s: float | None = None
        self._unanswered_s: float | None = None  # the peer's time of its last ping

    def due_s(self, interval_s: float | None = None) -> float:
        """When the next ping is due; at once if there was none.

        Args:
            interval_s: between two pings, if that is to be shorter now.
        """
        if self._last_s is None:
            return 0.0
        return self._last_s + min(self._interval_s, interval_s or self._interval_s)

    def frames(self, now_s: float, interval_s: float | None = None) -> list[Frame]:
        """Return the frames to send now: an answer, a ping, both or none."""
        due = []
        if self._unanswered_s is not None:
            due.append(Frame(FrameKind.PONG, {"at_s": self._unanswered_s}))
            self._unanswered_s = None
        if now_s >= self.due_s(interval_s):
            self._last_s = now_s
            due.append(Frame(FrameKind.PING, {"at_s": now_s}))
        return due

    def ping(self, meta: Meta) -> None:
        """Note the peer's ping; only the last one is answered.

        Raises:
            FrameError: the frame is malformed.
        """
        self._unanswered_s = _seconds(meta)

    def pong(self, meta: Meta, now_s: float) -> float:
        """Take in the peer's answer and return the round trip in seconds.

        Raises:
            FrameError: the frame is malformed.
        """
        rtt_s = now_s - _seconds(meta)
        if rtt_s < 0.0:
            raise FrameError(f"a heartbeat came back {-rtt_s} s before it was sent")
        self.rtt_s = rtt_s
        self.rtt_min_s = self.rtt_s if self.rtt_min_s is None else min(self.rtt_min_s, self.rtt_s)
        return self.rtt_s


def _seconds(meta: Meta) -> float:
    at_s = meta.get("at_s")
    if type(at_s) is not float or not math.isfinite(at_s):
        raise FrameError(f"a heartbeat's time is {at_s!r:.100}")
    return at_s
