"""The sending end of a line: a rate behind a bounded queue.

No packets are stored. Because packets come in order of time, the time at which one has left is
known when it comes, and the waiting bytes are the time until the line is free, times the rate.
"""

from __future__ import annotations


class Serialiser:
    """A rate with a drop-tail queue; times are seconds of any one clock.

    Args:
        rate_mbps: 10^6 bit/s of whole IP packets; None is unlimited.
        limit_bytes: bytes that may wait. A packet that finds the line free always passes.
    """

    __slots__ = ("_limit_s", "_s_per_byte", "free_s", "peak_s")

    def __init__(self, rate_mbps: float | None, limit_bytes: int) -> None:
        self._s_per_byte = 8e-6 / rate_mbps if rate_mbps else 0.0
        self._limit_s = limit_bytes * self._s_per_byte
        self.free_s = 0.0
        self.peak_s = 0.0

    def finish_s(self, at_s: float, size_bytes: int) -> float | None:
        """Take a packet that comes at ``at_s``, not before the one taken last.

        Returns:
            When its last bit has left; None if the queue was full and the packet is dropped.
        """
        cost_s = size_bytes * self._s_per_byte
        if self.free_s <= at_s:
            self.free_s = done_s = at_s + cost_s
            return done_s
        waiting_s = self.free_s - at_s + cost_s
        if waiting_s > self._limit_s and cost_s:
            return None
        if waiting_s > self.peak_s:
            self.peak_s = waiting_s
        self.free_s = done_s = self.free_s + cost_s
        return done_s

    def waiting_bytes(self, now_s: float) -> int:
        """Return the bytes that have come and not left by ``now_s``."""
        return self._bytes_of(self.free_s - now_s)

    def peak_bytes(self) -> int:
        """Return the most bytes that waited since `forget_peak`, at the present rate."""
        return self._bytes_of(self.peak_s)

    def forget_peak(self) -> None:
        """Reset `peak_bytes`."""
        self.peak_s = 0.0

    def reshape(self, now_s: float, rate_mbps: float | None, limit_bytes: int) -> float:
        """Change rate and limit; waiting packets leave at the new rate.

        Returns:
            The factor by which the remaining time of every waiting packet changes.
        """
        old = self._s_per_byte
        self._s_per_byte = 8e-6 / rate_mbps if rate_mbps else 0.0
        self._limit_s = limit_bytes * self._s_per_byte
        factor = self._s_per_byte / old if old else 1.0
        self.peak_s *= factor
        if self.free_s > now_s:
            self.free_s = now_s + (self.free_s - now_s) * factor
        return factor

    def empty(self, now_s: float) -> None:
        """Forget waiting packets."""
        self.free_s = min(self.free_s, now_s)

    def _bytes_of(self, span_s: float) -> int:
        return round(max(0.0, span_s) / self._s_per_byte) if self._s_per_byte else 0
