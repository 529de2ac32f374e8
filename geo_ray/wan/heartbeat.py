"""When to say that one is alive, and how long the way there and back takes: pure bookkeeping."""

from __future__ import annotations

from geo_ray.errors import FrameError
from geo_ray.wan.frames import Frame, FrameKind
from geo_ray.wan.meta import Meta


class Heartbeat:
    """Pings that are due, and the peer's that are to be answered.

    Args:
        interval_s: between two pings, in seconds.

    Attributes:
        rtt_s: the last round trip, or None.
        rtt_min_s: the shortest one, or None.
    """

    def __init__(self, interval_s: float) -> None:
        self.rtt_s: float | None = None
        self.rtt_min_s: float | None = None
        self._interval_s = interval_s
        self._is_due = False
        self._last_s: float | None = None
        self._unanswered_s: float | None = None  # the peer's time of its last ping

    def restart(self) -> None:
        """A new connection: ping at once, and forget the old one's."""
        self._is_due = True
        self._unanswered_s = None

    def tick(self, now_s: float) -> bool:
        """Look whether a ping has become due."""
        if self._last_s is not None and now_s - self._last_s < self._interval_s:
            return False
        self._last_s = now_s
        self._is_due = True
        return True

    def next_frame(self, now_s: float) -> Frame | None:
        """What is to be sent now, if anything."""
        if self._unanswered_s is not None:
            at_s, self._unanswered_s = self._unanswered_s, None
            return Frame(FrameKind.PONG, {"at_s": at_s})
        if self._is_due:
            self._is_due = False
            return Frame(FrameKind.PING, {"at_s": now_s})
        return None

    def ping(self, meta: Meta) -> None:
        """The peer pinged; only its last one is answered.

        Raises:
            FrameError: the frame is malformed.
        """
        self._unanswered_s = _seconds(meta)

    def pong(self, meta: Meta, now_s: float) -> None:
        """The peer answered.

        Raises:
            FrameError: the frame is malformed.
        """
        self.rtt_s = now_s - _seconds(meta)
        self.rtt_min_s = self.rtt_s if self.rtt_min_s is None else min(self.rtt_min_s, self.rtt_s)


def _seconds(meta: Meta) -> float:
    at_s = meta.get("at_s")
    if type(at_s) is not float:
        raise FrameError(f"a heartbeat's time is {at_s!r:.100}")
    return at_s
