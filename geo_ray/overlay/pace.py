"""The parts under way to one other region: how many more may be sent, and the goodput.

Transfers that share a line must not flood it together, so each keeps no more under way than its
rate of delivery times round trip, with a margin that lets the rate grow if the line has more to
give.

Goodput is what was acknowledged over the time in which something was under way. If there was often
nothing to send, because it comes over a slower link, goodput is only a lower bound.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from geo_ray.errors import FrameError

_OFTEN: Final = 0.25  # of the busy time
_GAIN: Final = 2.0  # on rate times round trip: doubles what is under way until the rate stays
_SLACK_S: Final = 0.1  # added to the round trip, for busy processes and a short queue
_START: Final = 4  # parts, before a rate is known
_LEAST: Final = 4
_RATES: Final = 32  # acknowledgements over which the highest rate counts


@dataclass(frozen=True, slots=True)
class _Out:
    """A part under way, and how much had been delivered when it was sent."""

    size_bytes: int
    sent_s: float
    delivered_bytes: int
    delivered_s: float


class Pace:
    """Counts the parts to one region.

    Args:
        window: most parts that may be under way at a time.

    Attributes:
        sent: number of parts sent.
        rtt_s: round trip of the path; 0 while it is not known.
        limit: parts that may be under way at present.
    """

    def __init__(self, window: int) -> None:
        self.sent = 0
        self.rtt_s = 0.0
        self.limit = min(window, _START)
        self._window = window
        self._out: deque[_Out] = deque()
        self._asked = 0  # the last part for which an acknowledgement was asked
        self._heard_s = 0.0
        self._delivered_bytes = 0
        self._delivered_s = 0.0
        self._rates: deque[float] = deque(maxlen=_RATES)  # bytes per second
        self._least_s = float("inf")  # from sending a part to its acknowledgement
        self._busy_from_s = 0.0
        self._lacks_from_s: float | None = None
        self._seen = [0.0, 0.0, 0.0]  # since `take`: bytes, busy seconds, of them without a part

    @property
    def acked(self) -> int:
        """The number of parts that have arrived."""
        return self.sent - len(self._out)

    @property
    def has_room(self) -> bool:
        """Return whether one more part may be sent."""
        # The limit may have shrunk below what is under way: ask, or no acknowledgement comes.
        return len(self._out) < self.limit or self._asked <= self.acked

    def push(self, size_bytes: int, now_s: float) -> None:
        """Count a part that is sent."""
        if not self._out:
            self._busy_from_s = self._delivered_s = now_s
        elif self._lacks_from_s is not None:
            self._seen[2] += now_s - self._lacks_from_s
        self._lacks_from_s = None
        if self._asked <= self.acked:
            self._heard_s = now_s
        self._out.append(_Out(size_bytes, now_s, self._delivered_bytes, self._delivered_s))
        self.sent += 1

    def ask(self, *, is_last: bool) -> bool:
        """Return whether the part just pushed asks for an acknowledgement."""
        due = is_last or not self.has_room or self.sent - self._asked >= max(1, self.limit // 4)
        if due:
            self._asked = self.sent
        return due

    def lacks(self, now_s: float) -> None:
        """Note that there is room, but the next part to send is not here yet."""
        if self._lacks_from_s is None:
            self._lacks_from_s = now_s

    def ack(self, count: int, now_s: float) -> None:
        """Take in that ``count`` parts have arrived so far.

        Raises:
            FrameError: fewer parts were sent.
        """
        if count > self.sent:
            raise FrameError(f"{count} parts are acknowledged, {self.sent} were sent")
        if count <= self.acked:
            return
        while self.acked < count:
            last = self._out.popleft()
            self._delivered_bytes += last.size_bytes
            self._seen[0] += last.size_bytes
        self._delivered_s = now_s
        self._seen[1] += now_s - self._busy_from_s
        self._busy_from_s = self._heard_s = now_s
        self._learn(last, now_s)

    def _learn(self, last: _Out, now_s: float) -> None:
        took_s = now_s - last.delivered_s
        if took_s <= 0:
            return
        self._rates.append((self._delivered_bytes - last.delivered_bytes) / took_s)
        self._least_s = min(self._least_s, now_s - last.sent_s)
        path_s = (self.rtt_s or self._least_s) + _SLACK_S
        parts = _GAIN * max(self._rates) * path_s / last.size_bytes
        self.limit = max(_LEAST, min(self._window, 1 + round(parts)))

    def silent_s(self, now_s: float) -> float:
        """Return the seconds without expected progress; 0 if no progress is expected."""
        # A part for which no acknowledgement was asked is no trouble while the next part is
        # awaited.
        waits = self._asked > self.acked or (bool(self._out) and self._lacks_from_s is None)
        return now_s - self._heard_s if waits else 0.0

    def excuse(self, now_s: float) -> None:
        """Count the seconds without progress from now on."""
        self._heard_s = now_s

    def take(self) -> tuple[int, float, bool]:
        """What was seen since the last call.

        Returns:
            Bytes that have arrived, the busy seconds for them, and whether there was often nothing
            to send meanwhile.
        """
        size_bytes, busy_s, lacked_s = self._seen
        self._seen = [0.0, 0.0, 0.0]
        # The last part's round trip is no time in which it was sent.
        sending_s = busy_s - min(self.rtt_s, busy_s / 2)
        return int(size_bytes), sending_s, lacked_s > _OFTEN * busy_s
