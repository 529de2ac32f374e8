"""How fast datagrams may leave: a token bucket, and a rate that yields to other traffic. Pure.

Datagrams matter less than other traffic on the link. `YieldingRate` therefore falls when
datagrams wait in a queue longer than `TARGET_QUEUE_S`, long before the queue overflows, and when
more of them get lost than the link always loses. The target is below the queue that connections of
the transport aim at, `geo_ray.transport.flow.window.QUEUE_MIN_S` or more, so connections push
datagrams aside within a few reports, and not the reverse. When connections are silent the rate
grows fast up to what the link was seen to carry, and slowly beyond that: growth between two reports
becomes queue.

Source: the idea of LEDBAT (RFC 6817), reconstructed. It uses one-way delay over its own minimum, so
the two clocks need not agree.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

TARGET_QUEUE_S: Final = 0.006
REPORT_S: Final = 0.1
"""How often a receiver reports while datagrams arrive."""

_BURST_S: Final = 0.004  # the shortest sleep that the system keeps to
_LEAST_BURST_BYTES: Final = 2 * 1400
_ROUNDING_BYTES: Final = 0.5  # else the time to wait could round to zero
_LOWEST_MBPS: Final = 0.2
_HIGHEST_MBPS: Final = 10_000.0
_GROW: Final = 1.5  # with an empty queue; half a queue grows half as much
_GROW_SLOWLY: Final = 1.08
_KNOWN: Final = 0.8  # the rate may grow fast up to this share of what the link carried
_OVERSHOT: Final = 0.9  # of the rate at which datagrams began to wait
_FADING: Final = 0.95  # of what was carried, if now it is less
_SHRINK: Final = 0.7
_EXTRA_LOSS: Final = 0.05  # above what the link always loses
_ENOUGH: Final = 50  # fewest datagrams from which a share of lost ones is computed
_MEMORY_S: Final = 30.0  # after which the least delay and loss are forgotten
_IN_USE: Final = 0.6  # share of the rate that must have been used before a good report raises it


@dataclass(frozen=True, slots=True)
class Seen:
    """A receiver's report on the datagrams of a session.

    Attributes:
        highest: number of the newest datagram.
        received: how many datagrams have arrived.
        delay_s: shortest delay since the last report, measured with two clocks that need not agree.
    """

    highest: int
    received: int
    delay_s: float


class TokenBucket:
    """Lets bytes pass at a rate, with a burst of a few milliseconds' worth after a pause.

    Args:
        rate_mbps: the rate in 10^6 bit/s.
    """

    def __init__(self, rate_mbps: float) -> None:
        self._rate_mbps = rate_mbps
        self._tokens_bytes = float(_LEAST_BURST_BYTES)
        self._at_s: float | None = None

    def set_rate(self, now_s: float, rate_mbps: float) -> None:
        """Continue at another rate."""
        self._fill(now_s)
        self._rate_mbps = rate_mbps

    def take(self, now_s: float, size_bytes: int) -> float:
        """Take tokens for a datagram if there are enough.

        Returns:
            0 if the datagram may leave now; otherwise the seconds to wait, and nothing was taken.
        """
        self._fill(now_s)
        missing_bytes = min(size_bytes, _LEAST_BURST_BYTES) - self._tokens_bytes
        if missing_bytes > _ROUNDING_BYTES:
            return missing_bytes * 8e-6 / self._rate_mbps
        self._tokens_bytes -= size_bytes
        return 0.0

    def _fill(self, now_s: float) -> None:
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        bytes_per_s = self._rate_mbps / 8e-6
        most_bytes = max(_LEAST_BURST_BYTES, _BURST_S * bytes_per_s)
        self._tokens_bytes = min(most_bytes, self._tokens_bytes + passed_s * bytes_per_s)


class YieldingRate:
    """A rate that falls when datagrams queue or get lost; see the module's docstring.

    Args:
        start_mbps: first rate.
        most_mbps: upper bound of the rate; None for no bound.

    Attributes:
        mbps: the present rate.
        loss: share of datagrams lost recently; None if too few were sent to tell.
    """

    def __init__(self, start_mbps: float, most_mbps: float | None = None) -> None:
        self._most_mbps = _HIGHEST_MBPS if most_mbps is None else most_mbps
        self.mbps = self._within(start_mbps)
        self.loss: float | None = None
        self._last = Seen(0, 0, 0.0)
        self._sent_bytes = 0
        self._carried_mbps: float | None = None  # before datagrams began to wait
        self._changed_s: float | None = None
        self._delays_s = _Least(_MEMORY_S)
        self._losses = _Least(_MEMORY_S)

    def on_sent(self, size_bytes: int) -> None:
        """Count a datagram that has left."""
        self._sent_bytes += size_bytes

    def on_seen(self, now_s: float, seen: Seen) -> None:
        """Adapt the rate to a receiver's report."""
        self._delays_s.add(now_s, seen.delay_s)
        queue_s = seen.delay_s - self._delays_s.value
        sent = seen.highest - self._last.highest
        crowded = queue_s > TARGET_QUEUE_S
        if sent >= _ENOUGH:
            got = seen.received - self._last.received
            self.loss = min(1.0, max(0.0, 1.0 - got / sent))
            self._losses.add(now_s, self.loss)
            self._last = seen
            crowded |= self.loss > self._losses.value + _EXTRA_LOSS
        before_s, self._changed_s = self._changed_s, now_s
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        if crowded:
            faded_mbps = _FADING * (self._carried_mbps or 0.0)
            self._carried_mbps = max(_OVERSHOT * self.mbps, faded_mbps)
            self.mbps = self._within(self.mbps * _SHRINK)
        elif before_s is not None:
            passed_s = min(max(now_s - before_s, 1e-3), 2 * REPORT_S)
            if sent_bytes * 8e-6 / passed_s >= _IN_USE * self.mbps:
                room = 1.0 - max(0.0, queue_s) / TARGET_QUEUE_S
                carried_mbps = self._carried_mbps
                is_known = carried_mbps is None or self.mbps < _KNOWN * carried_mbps
                gain = (_GROW if is_known else _GROW_SLOWLY) - 1.0
                self.mbps = self._within(self.mbps * (1.0 + gain * room))

    def _within(self, mbps: float) -> float:
        return min(self._most_mbps, max(_LOWEST_MBPS, mbps))


class _Least:
    """The least value of the last ``memory_s`` seconds; the newest value always counts."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._kept: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> None:
        while self._kept and self._kept[-1][1] >= value:
            self._kept.pop()
        self._kept.append((now_s, value))
        while now_s - self._kept[0][0] > self._memory_s:
            self._kept.popleft()

    @property
    def value(self) -> float:
        return self._kept[0][1]
