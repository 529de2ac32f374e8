"""The arithmetic of a probing transfer, pure: bytes to keep under way, and arrivals over time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from geo_ray.transport.flow.estimator import spread

MAX_CHUNK_BYTES: Final = 4 * 1024**2
_MIN_CHUNK_BYTES: Final = 8 * 1024
_FIRST_CHUNK_BYTES: Final = 16 * 1024
_MAX_MESSAGES: Final = 48  # an outbox takes 64
_MAX_AHEAD_BYTES: Final = 64 * 1024**2  # what the receiver may have to hold
_AHEAD_S: Final = 0.5  # this and the next bound the time that the rest takes at the end
_AHEAD_RTTS: Final = 6  # a lost packet may delay what follows for that long
_SLICES: Final = 20
_MAX_ARRIVALS: Final = 200_000


class SendWindow:
    """The bytes that a probing sender keeps under way: enough for the link, few enough to end soon.

    It grows: after each round trip it allows more than twice of what arrived in it.

    Args:
        rtt_s: the idle link's.
    """

    def __init__(self, rtt_s: float) -> None:
        self._rtt_s = rtt_s
        self._ahead_s = _AHEAD_S + _AHEAD_RTTS * rtt_s
        self._seen: deque[tuple[float, int]] = deque()
        self._sizes: deque[int] = deque()
        self._sent_bytes = 0
        self._got_bytes = 0
        self.rate_mbps: float | None = None

    @property
    def chunk_bytes(self) -> int:
        """Return the size of the next message."""
        if self.rate_mbps is None:
            return _FIRST_CHUNK_BYTES
        wanted = int(self.rate_mbps * 125_000 * self._ahead_s / (_MAX_MESSAGES - 8))
        return max(_MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, wanted))

    def has_room(self) -> bool:
        """Return whether the next message may be sent now."""
        if len(self._sizes) >= _MAX_MESSAGES:
            return False
        rate_mbps = self.rate_mbps or 0.0
        wanted = min(_MAX_AHEAD_BYTES, int(rate_mbps * 125_000 * self._ahead_s))
        window_bytes = max(4 * self.chunk_bytes, wanted)
        return self._sent_bytes - self._got_bytes < window_bytes

    def sent(self, size_bytes: int) -> None:
        """Count a message that was handed to the transport."""
        self._sent_bytes += size_bytes
        self._sizes.append(size_bytes)

    def arrived(self, now_s: float, got_bytes: int) -> None:
        """Take in the receiver's report of ``got_bytes`` in all."""
        if not self._got_bytes < got_bytes <= self._sent_bytes:
            return  # nothing new, or an impossible report
        done = got_bytes - self._got_bytes
        while self._sizes and done >= self._sizes[0]:
            done -= self._sizes.popleft()
        self._got_bytes = got_bytes - done
        self._seen.append((now_s, self._got_bytes))
        span_s = max(0.2, self._rtt_s)
        while len(self._seen) > 2 and now_s - self._seen[1][0] > span_s:
            self._seen.popleft()
        first_s, first_bytes = self._seen[0]
        if len(self._seen) > 1:
            # Two reports that were delayed together arrive at the same moment.
            passed_s = max(now_s - first_s, span_s / 2)
            self.rate_mbps = (self._got_bytes - first_bytes) * 8e-6 / passed_s


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a receiver found out.

    Attributes:
        goodput_mbps: payload that arrived after the ramp over the time that it took.
        goodput_mad_mbps: median absolute deviation of equal slices of time.
        samples: how many slices.
        size_bytes: payload that counts.
        seconds: time that counts.
    """

    goodput_mbps: float
    goodput_mad_mbps: float
    samples: int
    size_bytes: int
    seconds: float


class ArrivalLog:
    """Arrivals over time by the receiver's clock alone, so that clocks need not agree.

    Args:
        ramp_s: seconds after the first arrival that do not count, while TCP finds its rate.
    """

    def __init__(self, ramp_s: float) -> None:
        self._ramp_s = ramp_s
        self._arrivals: list[tuple[float, int]] = []
        self.got_bytes = 0

    def add(self, now_s: float, size_bytes: int) -> None:
        """Note a complete message."""
        self.got_bytes += size_bytes
        if len(self._arrivals) < _MAX_ARRIVALS:
            self._arrivals.append((now_s, size_bytes))
        else:
            last = self._arrivals[-1][1]
            self._arrivals[-1] = (now_s, last + size_bytes)

    def result(self) -> Arrived | None:
        """Return the result; None if too little arrived to compute a rate.

        If nothing arrived after the ramp, because the link is slower than expected, all but the
        first arrival count.
        """
        if not self._arrivals:
            return None
        counted_from_s = self._arrivals[0][0] + self._ramp_s
        counted = [one for one in self._arrivals if one[0] >= counted_from_s]
        if len(counted) < 3:
            counted = self._arrivals
        began_s, ended_s = counted[0][0], counted[-1][0]
        if len(counted) < 2 or ended_s <= began_s:
            return None
        size_bytes = sum(size for _, size in counted[1:])
        rates = _slice_rates(counted, (ended_s - began_s) / _SLICES)
        return Arrived(
            goodput_mbps=size_bytes * 8e-6 / (ended_s - began_s),
            goodput_mad_mbps=spread(rates) or 0.0,
            samples=max(1, len(rates)),
            size_bytes=size_bytes,
            seconds=ended_s - began_s,
        )


def _slice_rates(arrivals: Sequence[tuple[float, int]], slice_s: float) -> list[float]:
    rates = []
    began_s, size_bytes = arrivals[0][0], 0
    for at_s, size in arrivals[1:]:
        size_bytes += size
        if at_s - began_s >= slice_s:
            rates.append(size_bytes * 8e-6 / (at_s - began_s))
            began_s, size_bytes = at_s, 0
    return rates


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of ``values`` do not exceed; values must not be empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
