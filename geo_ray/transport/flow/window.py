"""The number of bytes that may be under way on a link: pure, from acknowledgements and round trips.

TCP fills whatever queue the bottleneck has, and a heartbeat then waits behind it. So the link has a
window of its own, over all streams, that aims at a short queue like LEDBAT (RFC 6817): the window
grows while round trips are shorter than the aim, whatever was lost, and shrinks while they are
longer. Unlike LEDBAT's, the step is a share of the window, so that a large window is found as fast
as a small one.

On a link that is never idle each round trip contains the aimed queue, and after a minute the aim
would be a share of that. So all windows let the line run empty at the same times of day: for a
round trip and a half they take a part of themselves only, twice a minute, and see its length anew.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_START_BYTES: Final = 256 * 1024  # a slow link has no more room; on a fast one it soon doubles
_LARGEST_BYTES: Final = 1024**3
_QUEUE_SHARE: Final = 0.3  # the aimed queue, as a share of the shortest round trip
QUEUE_MIN_S: Final = 0.010
"""The shortest queue that is aimed at; shorter delays come from the machine, not the link."""

_BASE_MEMORY_S: Final = 60.0
_LOOK_RTTS: Final = 1.5
_FULL: Final = 0.9  # share of the window under way from which on the window limits the data
_CLEAR: Final = 0.7  # above that pull there is hardly a queue
_CLEAR_LOOKS: Final = 30
_BLIND_RTTS: Final = 2.5
_LOOK_SAMPLES: Final = 4
_GAIN: Final = 0.25  # largest growth between two looks
_YOUNG_GAIN: Final = 1.0  # largest growth until the first queue
_STEEPEST: Final = -2.0
_DRAIN_EVERY_S: Final = 30.0  # twice in the memory of the shortest round trip
_DRAIN_SHARE: Final = 0.4
_DRAIN_RTTS: Final = 1.5
_DRAIN_MIN_S: Final = 0.1  # many times the spread of clocks and heartbeats


class Window:
    """Window of one direction of a link.

    Args:
        smallest_bytes: lower bound; enough for a chunk per stream.
        unix_offset_s: of the time of day to that of the calls, so that windows of several hosts
            whose data share a line let it run empty together.

    Attributes:
        size_bytes: how much may be under way, but for the moments in which the line runs empty.
        base_rtt_s: the shortest round trip lately, or None.
    """

    def __init__(self, smallest_bytes: int, unix_offset_s: float = 0.0) -> None:
        self.size_bytes = float(_START_BYTES)
        self.base_rtt_s: float | None = None
        self._smallest_bytes = smallest_bytes
        self._is_young = True
        self._base: deque[tuple[float, float]] = deque()  # (when, rtt), ascending in both
        self._unix_offset_s = unix_offset_s
        self._slot: float | None = None
        self._begun_s = 0.0  # since when the link was never idle
        self._drain_s = (-1.0, 0.0)  # from when, and for how long
        self._looked_s = 0.0
        self._quiet_until_s = 0.0
        self._held_bytes: float | None = None  # what the path held when there was a short queue
        self._clear_looks = 0
        self._rtts: list[float] = []  # since the last look
        self._acked_bytes = 0
        self._was_full = False

    @property
    def has_met_queue(self) -> bool:
        """Whether a queue was seen, so that the size says something about the path."""
        return not self._is_young

    def begin(self, now_s: float) -> None:
        """The link was silent and has something to do again.

        Until its first round trips are back nothing tells of a queue, and nothing must grow.
        """
        self._begun_s = now_s
        if self._is_young:  # round trips from before the first data say nothing of their queue
            self._looked_s, self._rtts = now_s, []
        self._quiet_until_s = now_s + _BLIND_RTTS * (self.base_rtt_s or 0.0)
        if self._held_bytes is not None:
            self.size_bytes = min(self.size_bytes, self._held_bytes)

    def room_bytes(self, now_s: float) -> float:
        """How much may be under way now."""
        start_s, length_s = self._drain_s
        since_s = now_s - start_s
        if not 0.0 <= since_s < 2.0 * length_s:
            return self.size_bytes
        back = max(0.0, since_s / length_s - 1.0)  # not all at once: that would make a queue
        return self.size_bytes * (_DRAIN_SHARE + (1.0 - _DRAIN_SHARE) * back)

    def _plan_drain(self, now_s: float, rtt_s: float) -> bool:
        """Begin to let the line run empty if it is time; returns whether that is going on."""
        slot = (now_s + self._unix_offset_s) // _DRAIN_EVERY_S
        earlier, self._slot = self._slot, slot
        if earlier is not None and slot != earlier:
            start_s = slot * _DRAIN_EVERY_S - self._unix_offset_s
            if not self._is_young and now_s - self._begun_s > _DRAIN_EVERY_S / 2:
                self._drain_s = start_s, max(_DRAIN_MIN_S, _DRAIN_RTTS * rtt_s)
        start_s, length_s = self._drain_s
        return 0.0 <= now_s - start_s < 2.0 * length_s + rtt_s

    def on_rtt(self, now_s: float, rtt_s: float) -> None:
        """Take in a heartbeat's round trip."""
        while self._base and self._base[-1][1] >= rtt_s:
            self._base.pop()
        self._base.append((now_s, rtt_s))
        while now_s - self._base[0][0] > _BASE_MEMORY_S:
            self._base.popleft()
        self.base_rtt_s = self._base[0][1]
        if self._plan_drain(now_s, rtt_s):
            self._looked_s, self._rtts = now_s, []
            self._acked_bytes, self._was_full = 0, False
            return
        if self._is_young and now_s - rtt_s <= self._looked_s:
            return  # begun before the window doubled: it would double again into a queue
        self._rtts.append(rtt_s)
        is_time = now_s - self._looked_s >= _LOOK_RTTS * self.base_rtt_s
        if is_time and len(self._rtts) >= _LOOK_SAMPLES:
            self._look(now_s, self.base_rtt_s)

    def on_acked(self, size_bytes: int, in_flight_bytes: int) -> None:
        """Take in an acknowledgement of chunks.

        Args:
            size_bytes: size of the chunks.
            in_flight_bytes: bytes under way before that.
        """
        self._acked_bytes += size_bytes
        self._was_full = self._was_full or in_flight_bytes > _FULL * self.size_bytes

    def _look(self, now_s: float, base_s: float) -> None:
        # A lost packet of the heartbeats' own stream delays some of them, but not the last ones of
        # the batch that then comes: the shortest round trip is the queue's.
        queue_s = min(self._rtts) - base_s
        pull = max(_STEEPEST, 1.0 - queue_s / max(QUEUE_MIN_S, _QUEUE_SHARE * base_s))
        if pull < 0.5:
            self._is_young = False
        self._remember(pull)
        is_blind = now_s < self._quiet_until_s and not self._is_young
        if pull < 0.0 or (self._was_full and not is_blind):  # else it is no limit
            gain = _YOUNG_GAIN if self._is_young else _GAIN
            moved = gain * pull * min(self._acked_bytes, self.size_bytes)
            grown = self.size_bytes + moved
            self.size_bytes = min(float(_LARGEST_BYTES), max(float(self._smallest_bytes), grown))
        self._looked_s, self._rtts = now_s, []
        self._acked_bytes, self._was_full = 0, False

    def _remember(self, pull: float) -> None:
        """Keep the size that made a short queue: the next burst begins with it.

        While TCP recovers from a loss the window fills with what the kernel did not send yet, and
        says nothing about the path.
        """
        if pull > _CLEAR:
            self._clear_looks += 1
            if self._clear_looks >= _CLEAR_LOOKS:  # the link has become faster
                self._held_bytes = None
            return
        self._clear_looks = 0
        if pull >= -0.5:
            held = self.size_bytes if self._held_bytes is None else self._held_bytes
            self._held_bytes = 0.5 * (held + self.size_bytes)
