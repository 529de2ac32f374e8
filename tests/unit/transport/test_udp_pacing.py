"""The pacing of datagrams on a made-up clock: exact rates, and who gives way to whom."""

from __future__ import annotations

import pytest

from geo_ray.transport.datagrams import REPORT_S, TARGET_QUEUE_S, Seen, TokenBucket, YieldingRate
from geo_ray.transport.flow import QUEUE_MIN_S

SIZE = 1400


def passed_bytes(bucket: TokenBucket, begin_s: float, end_s: float) -> int:
    now_s, total = begin_s, 0
    while now_s < end_s:
        wait_s = bucket.take(now_s, SIZE)
        total += SIZE if wait_s == 0.0 else 0
        now_s += wait_s
    return total


@pytest.mark.parametrize("mbps", [0.2, 8.0, 900.0])
def test_a_bucket_limits_the_rate(mbps: float) -> None:
    want = 10.0 * mbps / 8e-6
    assert passed_bytes(TokenBucket(mbps), 0.0, 10.0) == pytest.approx(want, rel=0.03)


def test_a_pause_is_worth_a_few_datagrams_only() -> None:
    bucket = TokenBucket(8.0)
    bucket.take(0.0, SIZE)
    burst = 0
    while bucket.take(100.0, SIZE) == 0.0:
        burst += 1
    assert burst == 2  # 4 ms of 1 MB/s


def test_another_rate_counts_from_now_on() -> None:
    bucket = TokenBucket(8.0)
    first = passed_bytes(bucket, 0.0, 1.0)
    bucket.set_rate(1.0, 80.0)
    assert passed_bytes(bucket, 1.0, 2.0) == pytest.approx(10 * first, rel=0.02)


class Path:
    """A bottleneck with a queue, seen through the reports of its far end."""

    def __init__(self, rate: YieldingRate, mbps: float, loss: float = 0.0) -> None:
        self.rate, self.mbps, self.loss = rate, mbps, loss
        self.others_mbps = 0.0
        self.queue_mbit = self.sent = self.received = 0.0
        self.now_s = 0.0
        self.most_queue_s = 1.0

    def run(self, seconds: float, wanted_mbps: float = 1e9) -> None:
        for _ in range(round(seconds / REPORT_S)):
            mbps = min(self.rate.mbps, wanted_mbps)
            bytes_sent = mbps * REPORT_S / 8e-6
            self.rate.on_sent(int(bytes_sent))
            self.sent += bytes_sent / SIZE
            grown = (mbps + self.others_mbps - self.mbps) * REPORT_S
            self.queue_mbit = max(0.0, self.queue_mbit + grown)
            spilt = max(0.0, self.queue_mbit - self.most_queue_s * self.mbps)
            self.queue_mbit -= spilt
            share = spilt / max(1e-9, (mbps + self.others_mbps) * REPORT_S)
            self.received += bytes_sent / SIZE * (1 - self.loss) * (1 - min(1.0, share))
            self.now_s += REPORT_S
            delay_s = 5.0 + self.queue_mbit / self.mbps
            self.rate.on_seen(self.now_s, Seen(int(self.sent), int(self.received), delay_s))


@pytest.mark.parametrize("mbps", [5.0, 40.0, 400.0])
def test_alone_it_takes_most_of_the_link_with_a_short_queue(mbps: float) -> None:
    path = Path(YieldingRate(1.0), mbps)
    path.run(10.0)
    before = path.received
    path.run(20.0)
    goodput_mbps = (path.received - before) * SIZE * 8e-6 / 20.0
    assert goodput_mbps > 0.7 * mbps
    assert path.queue_mbit / mbps < 4 * TARGET_QUEUE_S


def test_it_gives_way_to_a_connection_that_aims_at_the_shortest_queue() -> None:
    """Connections of the transport hold a queue of `window.QUEUE_MIN_S`, or a longer one."""
    path = Path(YieldingRate(1.0), 40.0)
    path.run(10.0)
    for _ in range(30):
        path.rate.on_sent(int(path.rate.mbps * REPORT_S / 8e-6))
        path.sent += 100
        path.received += 100
        path.now_s += REPORT_S
        path.rate.on_seen(path.now_s, Seen(int(path.sent), int(path.received), 5.0 + QUEUE_MIN_S))
    assert path.rate.mbps < 1.0


def test_it_gives_way_to_a_connection_that_fills_the_queue_and_comes_back() -> None:
    path = Path(YieldingRate(1.0), 40.0)
    path.run(10.0)
    path.others_mbps = 40.0
    path.run(2.0)
    assert path.rate.mbps < 2.0
    path.others_mbps = 0.0
    path.run(3.0)
    before = path.received
    path.run(5.0)
    assert (path.received - before) * SIZE * 8e-6 / 5.0 > 20.0


@pytest.mark.parametrize("loss", [0.01, 0.03, 0.1])
def test_a_link_that_always_loses_some_is_not_crowded(loss: float) -> None:
    path = Path(YieldingRate(10.0), 40.0, loss)
    path.run(20.0)
    assert path.rate.mbps > 15.0
    assert path.rate.loss == pytest.approx(loss, abs=0.02)


def test_a_short_queue_that_overflows_shows_as_loss() -> None:
    path = Path(YieldingRate(10.0), 40.0)
    path.most_queue_s = TARGET_QUEUE_S / 2
    path.run(20.0)
    assert path.rate.mbps < 60.0


def test_unused_windows_do_not_grow() -> None:
    path = Path(YieldingRate(10.0), 1000.0)
    path.run(10.0, wanted_mbps=2.0)
    assert path.rate.mbps == 10.0


def test_it_stays_within_bounds() -> None:
    path = Path(YieldingRate(10.0, most_mbps=12.0), 1000.0)
    path.run(10.0)
    assert path.rate.mbps == 12.0
    path.others_mbps = 2000.0
    path.run(10.0)
    assert path.rate.mbps == 0.2


def test_few_datagrams_say_nothing_of_loss() -> None:
    rate = YieldingRate(1.0)
    rate.on_seen(0.1, Seen(20, 1, 0.0))
    assert rate.loss is None
    rate.on_seen(0.2, Seen(60, 30, 0.0))
    assert rate.loss == 0.5
