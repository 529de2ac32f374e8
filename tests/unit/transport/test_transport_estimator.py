"""The passive estimator against links that are known; what the kernel tells of its own."""

from __future__ import annotations

import socket
import struct
import sys
from random import Random

import pytest

from geo_ray.transport.emulation import LinkModel, LinkSpec
from geo_ray.transport.links import LinkEstimator, spread
from geo_ray.transport.wire.sockets import TcpInfo, parse, read_tcp_info

CHUNK_BYTES = 65536


def transfer(
    estimator: LinkEstimator, link: LinkModel, back_s: float, start_s: float, chunks: int
) -> float:
    """Send chunks back to back over a modelled link and feed the acknowledgements; the end."""
    now_s = start_s
    for number in range(chunks):
        now_s = link.transfer(start_s, CHUNK_BYTES) + back_s
        estimator.on_delivered(now_s, CHUNK_BYTES, inflight_limited=number > 0)
    return now_s


# ------------------------------------------------------------------ goodput


@pytest.mark.parametrize("rate_mbps", [1.0, 20.0, 100.0, 2000.0])
def test_a_steady_link_is_measured_exactly(rate_mbps: float) -> None:
    estimator = LinkEstimator()
    link = LinkModel(LinkSpec(rate_mbps=rate_mbps, delay_s=0.15), seed=1)
    end_s = transfer(estimator, link, 0.15, 5.0, chunks=int(rate_mbps * 20))
    found = estimator.snapshot(end_s)
    assert found.goodput_mbps == pytest.approx(rate_mbps)
    assert found.goodput_peak_mbps == pytest.approx(rate_mbps)
    assert found.goodput_mad_mbps == pytest.approx(0.0, abs=rate_mbps * 1e-6)
    assert found.samples > 3 and found.age_s is not None and found.age_s >= 0
    assert found.loss is found.rtt_s is None


def test_pauses_between_transfers_do_not_count() -> None:
    estimator = LinkEstimator()
    link = LinkModel(LinkSpec(rate_mbps=50.0, delay_s=0.1), seed=1)
    now_s = 0.0
    for _ in range(20):
        now_s = transfer(estimator, link, 0.1, now_s + 7.0, chunks=40)
    assert estimator.snapshot(now_s).goodput_mbps == pytest.approx(50.0)


def test_lossy_and_jittery_links_have_a_spread() -> None:
    estimator = LinkEstimator(half_life_s=1e6)
    link = LinkModel(LinkSpec(rate_mbps=100.0, delay_s=0.05, loss=0.01, jitter_s=0.02), seed=3)
    end_s = transfer(estimator, link, 0.05, 0.0, chunks=20_000)
    found = estimator.snapshot(end_s)
    passed_mbps = 20_000 * CHUNK_BYTES * 8e-6 / end_s
    assert found.goodput_mbps == pytest.approx(passed_mbps, rel=0.02)
    assert found.goodput_mad_mbps is not None and found.goodput_mad_mbps > 0
    assert found.goodput_peak_mbps is not None and found.goodput_peak_mbps > passed_mbps


def test_a_change_is_followed_and_the_old_peak_forgotten() -> None:
    estimator = LinkEstimator(half_life_s=10.0, window_s=60.0)
    now_s = transfer(estimator, LinkModel(LinkSpec(rate_mbps=100.0), 1), 0.0, 0.0, chunks=10_000)
    slow = LinkModel(LinkSpec(rate_mbps=20.0), 1)
    first_s = now_s
    while now_s < first_s + 30.0:
        now_s = transfer(estimator, slow, 0.0, now_s, chunks=20)
    found = estimator.snapshot(now_s)
    # three half-lives on, an eighth of the weight is the old rate's
    assert found.goodput_mbps == pytest.approx(20.0 + 80.0 / 8, rel=0.15)
    assert found.goodput_peak_mbps == pytest.approx(100.0)
    while now_s < first_s + 70.0:
        now_s = transfer(estimator, slow, 0.0, now_s, chunks=20)
    assert estimator.snapshot(now_s).goodput_peak_mbps == pytest.approx(20.0)


def test_after_a_pause_the_first_measurement_counts_most() -> None:
    estimator = LinkEstimator(half_life_s=10.0)
    now_s = transfer(estimator, LinkModel(LinkSpec(rate_mbps=100.0), 1), 0.0, 0.0, chunks=10_000)
    before = estimator.snapshot(now_s)
    later = estimator.snapshot(now_s + 100.0)
    assert later.goodput_mbps == before.goodput_mbps  # old, but all there is
    assert later.weight_s == pytest.approx(before.weight_s / 1024)
    assert later.age_s is not None and later.age_s >= 100.0
    slow = LinkModel(LinkSpec(rate_mbps=10.0), 1)
    now_s = transfer(estimator, slow, 0.0, now_s + 100.0, chunks=30)
    found = estimator.snapshot(now_s).goodput_mbps
    assert found == pytest.approx(10.0, rel=0.1)


def test_an_idle_sender_does_not_lower_the_estimate_of_a_link() -> None:
    estimator = LinkEstimator()
    for second in range(10):
        estimator.on_delivered(float(second), 100, inflight_limited=False)
    idle = estimator.snapshot(9.0)
    assert idle.goodput_mbps is None and idle.samples == 0
    assert idle.goodput_peak_mbps == pytest.approx(0.0008)
    now_s = transfer(estimator, LinkModel(LinkSpec(rate_mbps=80.0), 1), 0.0, 9.0, chunks=200)
    for second in range(10):
        estimator.on_delivered(now_s + second, 100, inflight_limited=False)
    assert estimator.snapshot(now_s + 9.0).goodput_mbps == pytest.approx(80.0)
    # but it may show that the link is better than was believed
    estimator.on_delivered(now_s + 10.0, 25_000_000, inflight_limited=False)
    found = estimator.snapshot(now_s + 10.0).goodput_mbps
    assert found is not None and 80.0 < found < 200.0


def test_lumps_of_acknowledgements_are_not_taken_for_a_fast_link() -> None:
    estimator = LinkEstimator()
    now_s = 0.0
    estimator.on_delivered(now_s, 0, inflight_limited=False)
    for _ in range(100):  # 20 Mbit/s, all of a round trip's acknowledgements within 10 us
        now_s += 0.1
        for lump in range(4):
            estimator.on_delivered(now_s + lump * 1e-5, CHUNK_BYTES, inflight_limited=True)
    found = estimator.snapshot(now_s)
    assert found.goodput_mbps == pytest.approx(4 * CHUNK_BYTES * 8e-6 / 0.1, rel=0.1)
    assert found.goodput_peak_mbps == pytest.approx(4 * CHUNK_BYTES * 8e-6 / 0.1, rel=0.5)


def test_an_outage_counts() -> None:
    estimator = LinkEstimator(half_life_s=1e6)
    link = LinkModel(LinkSpec(rate_mbps=100.0, outages=((5.0, 10.0),)), seed=1)
    end_s = transfer(estimator, link, 0.0, 0.0, chunks=2000)
    found = estimator.snapshot(end_s).goodput_mbps
    assert found == pytest.approx(2000 * CHUNK_BYTES * 8e-6 / end_s, rel=0.01)


# ------------------------------------------------------------------ round trips and loss


def test_round_trips_are_smoothed_and_the_shortest_recorded() -> None:
    estimator = LinkEstimator(window_s=100.0)
    random = Random(1)
    for second in range(50):
        estimator.on_rtt(float(second), 0.1 + random.uniform(0.0, 0.02))
    found = estimator.snapshot(49.0)
    assert found.rtt_s == pytest.approx(0.11, abs=0.006)
    assert found.rtt_min_s == pytest.approx(0.1, abs=0.002)
    assert found.rtt_mad_s == pytest.approx(0.005, abs=0.003)
    for second in range(50, 200):
        estimator.on_rtt(float(second), 0.3)
    later = estimator.snapshot(199.0)
    assert later.rtt_s == pytest.approx(0.3, rel=0.01) and later.rtt_min_s == 0.3
    estimator.on_rtt(2000.0, 0.05)  # after a long silence
    assert estimator.snapshot(2000.0).rtt_s == pytest.approx(0.05, rel=0.01)


def test_loss_is_reported_when_there_were_enough_segments() -> None:
    estimator = LinkEstimator()
    estimator.on_segments(0.0, 100, 100)
    assert estimator.snapshot(0.0).loss is None
    for tenth in range(1, 3000):
        estimator.on_segments(tenth / 10, 1000, 10)
    assert estimator.snapshot(300.0).loss == pytest.approx(0.01, rel=0.01)
    assert estimator.snapshot(3000.0).loss == pytest.approx(0.01, rel=0.01)
    estimator.on_segments(3001.0, 0, 0)
    estimator.on_segments(3002.0, 10, 99)  # counters that contradict each other
    assert estimator.snapshot(3002.0).loss == pytest.approx(0.01, rel=0.01)
    estimator.on_segments(3003.0, 1000, 5000)
    assert estimator.snapshot(3003.0).loss == pytest.approx(1.0, rel=0.01)


def test_odd_input_does_no_harm() -> None:
    estimator = LinkEstimator()
    estimator.on_delivered(10.0, 1000, inflight_limited=True)
    estimator.on_delivered(9.0, 1000, inflight_limited=True)
    estimator.on_delivered(9.0, 0, inflight_limited=True)
    estimator.on_rtt(1.0, 0.0)
    estimator.on_rtt(1.0, -1.0)
    found = estimator.snapshot(0.0)
    assert found.goodput_mbps is found.rtt_s is found.age_s is None


def test_spread_is_the_median_deviation() -> None:
    assert spread([]) is None
    assert spread([3.0]) == 0.0
    assert spread([1.0, 1.0, 2.0, 2.0, 4.0, 6.0, 9.0]) == 1.0


# ------------------------------------------------------------------ the kernel's view


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel has no TCP_INFO")
def test_the_kernel_reports_on_a_real_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        before = read_tcp_info(sender)
        assert before is not None and before.segments_out == 0
        sender.sendall(b"x" * 100_000)
        left = 100_000
        while left:
            left -= len(receiver.recv(left))
        receiver.sendall(b"y")
        assert sender.recv(1) == b"y"
        info = read_tcp_info(sender)
        assert info is not None
        assert info.bytes_acked >= 100_000 and info.segments_out >= 1
        assert info.rtt_s is not None and 0 < info.rtt_s < 60
        assert info.rtt_min_s is not None and info.rtt_min_s <= info.rtt_s * 1000
        assert info.delivery_rate_mbps > 0 and info.window_segments > 0
        assert info.segments_since(before) == (info.segments_out, 0)
    assert read_tcp_info(sender) is None  # closed


def kernel_struct(size: int, **values: int) -> bytes:
    """As the kernel would fill it, 232 bytes in all today."""
    data = bytearray(232)
    for name, offset in (("retrans", 100), ("segs", 156), ("dsack", 216), ("rtt", 68)):
        struct.pack_into("=I", data, offset, values.get(name, 0))
    struct.pack_into("=I", data, 148, 2**32 - 1)
    struct.pack_into("=Q", data, 160, values.get("rate", 0))
    return bytes(data[:size])


def test_an_older_kernel_reports_less_and_a_much_older_one_nothing() -> None:
    values = {"retrans": 7, "segs": 900, "dsack": 2, "rtt": 1500, "rate": 12_500_000}
    new = parse(kernel_struct(232, **values))
    assert new is not None
    assert (new.retransmitted, new.spurious, new.segments_out) == (7, 2, 900)
    assert new.rtt_s == pytest.approx(0.0015) and new.rtt_min_s is None
    assert new.delivery_rate_mbps == pytest.approx(100.0)
    assert new.segments_since(None) == (900, 5)
    old = parse(kernel_struct(168, **values))
    assert old is not None and old.spurious == 0 and old.segments_since(None) == (900, 7)
    assert parse(kernel_struct(167, **values)) is None
    assert parse(b"") is None


def test_wrapped_counters_are_unwrapped() -> None:
    def at(segs: int, retrans: int) -> TcpInfo:
        info = parse(kernel_struct(232, segs=segs, retrans=retrans))
        assert info is not None
        return info

    assert at(50, 3).segments_since(at(2**32 - 50, 2**32 - 1)) == (100, 4)
