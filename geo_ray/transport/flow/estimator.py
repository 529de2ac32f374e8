"""A passive estimate of a link from the traffic that passes anyway: pure, fed by the transport.

It sends nothing itself. All values age: a sample loses half its weight in ``half_life_s``, so after
a silence the first new samples dominate; extremes are forgotten after ``window_s``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

_MEMORY: Final = 128  # samples behind a spread
_RTT_GAIN: Final = 0.125  # RFC 6298's weight of a new round trip


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """The estimate of one direction at one time; None means not known.

    Attributes:
        goodput_mbps: mean while the sender had more to send, in 10^6 bit/s.
        goodput_peak_mbps: the highest recent goodput, also while the sender had little to send.
        goodput_mad_mbps: median absolute deviation of the samples.
        rtt_s: smoothed round trip, queueing included.
        rtt_min_s: the shortest recent round trip: the path without queues.
        rtt_mad_s: median absolute deviation of round trips.
        loss: share of segments that were sent again.
        samples: number of goodput samples so far.
        weight_s: seconds of sending behind ``goodput_mbps``, old ones counted as less.
        age_s: seconds since the last goodput sample.
    """

    goodput_mbps: float | None
    goodput_peak_mbps: float | None
    goodput_mad_mbps: float | None
    rtt_s: float | None
    rtt_min_s: float | None
    rtt_mad_s: float | None
    loss: float | None
    samples: int
    weight_s: float
    age_s: float | None


class LinkEstimator:
    """Estimates one direction of one pair of regions. Not locked: calls must not overlap.

    Args:
        half_life_s: time after which a sample counts half.
        window_s: how long extremes (peak, shortest round trip) are remembered.
        sample_s: shortest time of sending that makes a sample; at least a round trip is taken,
            since acknowledgements come in lumps.
        min_segments: fewest segments from which a loss is computed.
    """

    def __init__(
        self,
        half_life_s: float = 30.0,
        window_s: float = 300.0,
        sample_s: float = 0.25,
        min_segments: int = 200,
    ) -> None:
        self._half_life_s = half_life_s
        self._sample_s = sample_s
        self._min_segments = min_segments
        self._rates: deque[float] = deque(maxlen=_MEMORY)
        self._rtts: deque[float] = deque(maxlen=_MEMORY)
        self._peak_mbps = _Extreme(window_s, 1)
        self._rtt_min_s = _Extreme(window_s, -1)
        self._goodput = _AgeingRatio(half_life_s)  # 10^6 bits over seconds
        self._segments = _AgeingRatio(half_life_s)
        self._loss: float | None = None
        self._rtt_s: float | None = None
        self._rtt_at_s = 0.0
        self._last_s: float | None = None
        self._taken_s: float | None = None
        self._open = _AgeingRatio(half_life_s)  # the sample that is still too short
        self._samples = 0

    def on_delivered(self, now_s: float, delivered_bytes: int, inflight_limited: bool) -> None:
        """The peer has acknowledged more.

        Args:
            now_s: of a clock that never goes back.
            delivered_bytes: acknowledged since the last call; 0 is fine.
            inflight_limited: whether the sender had more to send than the link took, all the time
                since the last call. False for the first acknowledgement after a pause: its time
                contains a round trip and the pause.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or now_s < last_s:
            return
        gap_s = now_s - last_s
        if inflight_limited:
            self._open.add(now_s, delivered_bytes * 8e-6, gap_s)
            busy_s = self._open.weight(now_s)
            rate_mbps = self._open.value()
            if rate_mbps is not None and busy_s >= self._shortest_s():
                self._take(now_s, rate_mbps, busy_s)
                self._open = _AgeingRatio(self._half_life_s)
        elif gap_s >= self._shortest_s():
            # The link carries at least that much: only a higher value than the estimate counts.
            floor_mbps = delivered_bytes * 8e-6 / gap_s
            self._peak_mbps.add(now_s, floor_mbps)
            known_mbps = self._goodput.value()
            if known_mbps is not None and floor_mbps > known_mbps:
                self._take(now_s, floor_mbps, self._sample_s)

    def on_rtt(self, now_s: float, rtt_s: float) -> None:
        """Take in a round trip, measured by a heartbeat or by the kernel."""
        if rtt_s <= 0:
            return
        self._rtts.append(rtt_s)
        self._rtt_min_s.add(now_s, rtt_s)
        old_s = rtt_s if self._rtt_s is None else self._rtt_s
        age_s = max(0.0, now_s - self._rtt_at_s)
        gain = max(_RTT_GAIN, 1.0 - 0.5 ** (age_s / self._half_life_s))
        self._rtt_s = old_s + gain * (rtt_s - old_s)
        self._rtt_at_s = now_s

    def on_segments(self, now_s: float, sent: int, retransmitted: int) -> None:
        """Take in the segments sent since the last call; see `TcpInfo.segments_since`."""
        if sent > 0:
            self._segments.add(now_s, float(min(retransmitted, sent)), float(sent))
            if self._segments.weight(now_s) >= self._min_segments:
                self._loss = self._segments.value()

    def snapshot(self, now_s: float) -> LinkEstimate:
        """Return the present estimate."""
        taken_s = self._taken_s
        return LinkEstimate(
            goodput_mbps=self._goodput.value(),
            goodput_peak_mbps=self._peak_mbps.value(now_s),
            goodput_mad_mbps=spread(self._rates),
            rtt_s=self._rtt_s,
            rtt_min_s=self._rtt_min_s.value(now_s),
            rtt_mad_s=spread(self._rtts),
            loss=self._loss,
            samples=self._samples,
            weight_s=self._goodput.weight(now_s),
            age_s=None if taken_s is None else max(0.0, now_s - taken_s),
        )

    def _take(self, now_s: float, rate_mbps: float, weight_s: float) -> None:
        self._goodput.add(now_s, rate_mbps * weight_s, weight_s)
        self._peak_mbps.add(now_s, rate_mbps)
        self._rates.append(rate_mbps)
        self._taken_s = now_s
        self._samples += 1

    def _shortest_s(self) -> float:
        return max(self._sample_s, self._rtt_s or 0.0)


class _AgeingRatio:
    """Sum of parts over sum of wholes, in which older ones count less."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._part = 0.0
        self._whole = 0.0
        self._at_s = 0.0

    def add(self, now_s: float, part: float, whole: float) -> None:
        fade = self._fade(now_s)
        self._part = self._part * fade + part
        self._whole = self._whole * fade + whole
        self._at_s = max(now_s, self._at_s)

    def value(self) -> float | None:
        return self._part / self._whole if self._whole > 0 else None

    def weight(self, now_s: float) -> float:
        return self._whole * self._fade(now_s)

    def _fade(self, now_s: float) -> float:
        return float(0.5 ** (max(0.0, now_s - self._at_s) / self._half_life_s))


class _Extreme:
    """The largest (sign 1) or smallest (sign -1) value of the last ``window_s`` seconds.

    Only values that no later one beats are kept, so a value costs a step or two.
    """

    def __init__(self, window_s: float, sign: int) -> None:
        self._window_s = window_s
        self._sign = sign
        self._kept: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> None:
        while self._kept and self._kept[-1][1] * self._sign <= value * self._sign:
            self._kept.pop()
        self._kept.append((now_s, value))
        self._forget(now_s)

    def value(self, now_s: float) -> float | None:
        """None if there was no value for that long."""
        self._forget(now_s)
        return self._kept[0][1] if self._kept else None

    def _forget(self, now_s: float) -> None:
        while self._kept and now_s - self._kept[0][0] > self._window_s:
            self._kept.popleft()


def spread(values: Sequence[float]) -> float | None:
    """Return the median absolute deviation from the median; None for no values."""
    if not values:
        return None
    middle = median(values)
    return median(abs(value - middle) for value in values)
