"""The sending end of a line: packets leave one after the other at a rate, behind a bounded queue.

Nothing is stored here. Because packets come in order of time, the moment at which one has left is
known when it comes, and the bytes that wait are the time until the line is free, times the rate.
"""

from __future__ import annotations


class Serialiser:
    """A rate with a drop-tail queue; times are nanoseconds of any one clock.

    Args:
        rate_mbps: 10^6 bit/s of whole IP packets; None is unlimited.
        limit_bytes: bytes that may wait. A packet that finds the line free always passes.
    """

    __slots__ = ("_limit_ns", "_ns_per_byte", "free_ns", "peak_ns")

    def __init__(self, rate_mbps: float | None, limit_bytes: int) -> None:
        self._ns_per_byte = 8e3 / rate_mbps if rate_mbps else 0.0
        self._limit_ns = limit_bytes * self._ns_per_byte
        self.free_ns = 0.0
        self.peak_ns = 0.0

    def finish_ns(self, at_ns: float, size_bytes: int) -> float | None:
        """Take a packet that comes at ``at_ns``, not before the one taken last.

        Returns:
            When its last bit has left, or None: it found the queue full and is dropped.
        """
        cost_ns = size_bytes * self._ns_per_byte
        if self.free_ns <= at_ns:
            self.free_ns = done_ns = at_ns + cost_ns
            return done_ns
        waiting_ns = self.free_ns - at_ns + cost_ns
        if waiting_ns > self._limit_ns:
            return None
        if waiting_ns > self.peak_ns:
            self.peak_ns = waiting_ns
        self.free_ns = done_ns = self.free_ns + cost_ns
        return done_ns

    def waiting_bytes(self, now_ns: float) -> int:
        """Bytes that have come and not left by ``now_ns``."""
        return self._bytes_of(self.free_ns - now_ns)

    def peak_bytes(self) -> int:
        """The most that waited since `forget_peak`, in bytes at the present rate."""
        return self._bytes_of(self.peak_ns)

    def forget_peak(self) -> None:
        """Begin `peak_bytes` anew."""
        self.peak_ns = 0.0

    def reshape(self, now_ns: float, rate_mbps: float | None, limit_bytes: int) -> float:
        """Go on with another rate and limit; what waits leaves at the new rate.

        Returns:
            The factor by which the time from now until any waiting packet has left changes.
        """
        old = self._ns_per_byte
        self._ns_per_byte = 8e3 / rate_mbps if rate_mbps else 0.0
        self._limit_ns = limit_bytes * self._ns_per_byte
        factor = self._ns_per_byte / old if old else 1.0
        self.peak_ns *= factor
        if self.free_ns > now_ns:
            self.free_ns = now_ns + (self.free_ns - now_ns) * factor
        return factor

    def empty(self, now_ns: float) -> None:
        """Forget what waits."""
        self.free_ns = min(self.free_ns, now_ns)

    def _bytes_of(self, span_ns: float) -> int:
        return round(max(0.0, span_ns) / self._ns_per_byte) if self._ns_per_byte else 0
