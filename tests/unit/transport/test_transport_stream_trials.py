"""What trials of more streams cost on slow links: exchanges on a virtual clock, half an hour long.

TCP is played in rounds: every stream begins with ten segments and doubles; once the streams
together exceed what path and queue hold, what was lost waits for a timeout.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from geo_ray.transport.flow import BusyPeriod, StreamCount

EVERY_S = 10.0
EXCHANGES = 180
FLIGHT_BYTES = 13 * 1024


def burst_s(streams: int, size_bytes: float, mbps: float, base_s: float, queue: float) -> float:
    """The time of one exchange; ``queue`` is what the queue holds, as a share of the path's."""
    rate, left, lasted_s, each = mbps * 125_000, size_bytes, 0.0, float(FLIGHT_BYTES)
    holds = rate * base_s * (1.0 + queue)
    while left > 0:
        sent = min(left, streams * each)
        if sent <= holds:
            lasted_s += max(base_s, sent / rate)
            left -= sent
            each = min(2 * each, holds / streams)
        else:
            lasted_s += holds / rate + max(0.3, 2 * base_s)
            left -= holds
            each = max(2 * 1448, each / 4)
    return lasted_s


def exchanges(size_bytes: float, mbps: float, base_s: float, queue: float) -> Iterator[float]:
    """The times of all exchanges, as `FlowControl` cuts them into stretches."""
    count, longest_s = StreamCount(1, 96, 4), max(0.4, 8 * base_s)
    for number in range(EXCHANGES):
        now_s, streams = number * EVERY_S, count.target
        lasted_s = burst_s(streams, size_bytes, mbps, base_s, queue)
        yield lasted_s
        if lasted_s <= longest_s:
            count.observe(now_s, BusyPeriod(int(size_bytes), lasted_s, streams, 1.0, is_whole=True))
        part = int(size_bytes * longest_s / lasted_s)
        for piece in range(int(lasted_s / longest_s)):
            period = BusyPeriod(part, longest_s, streams, 0.9, is_whole=False)
            count.observe(now_s + piece * longest_s, period)


@pytest.mark.parametrize(
    ("size_bytes", "mbps", "base_s", "queue"),
    [(5e5, 20, 0.05, 0.25), (2e5, 10, 0.05, 0.25), (2e5, 5, 0.1, 0.25), (5e5, 10, 0.2, 0.5)],
)
def test_a_trial_of_too_many_streams_costs_one_slow_exchange(
    size_bytes: float, mbps: float, base_s: float, queue: float
) -> None:
    """Five trials in half an hour, since each waits for longer than the one before."""
    times_s = list(exchanges(size_bytes, mbps, base_s, queue))
    slow = sum(each > 1.5 * min(times_s) for each in times_s[3:])
    assert slow <= 5
    assert sum(times_s) < 1.15 * len(times_s) * min(times_s)


def test_more_streams_are_used_where_they_help() -> None:
    """A fast line far away: after a pause many streams begin with more."""
    times_s = list(exchanges(2e6, 1000, 0.2, 1.0))
    assert times_s[-1] == min(times_s) < 0.5 * times_s[0]
