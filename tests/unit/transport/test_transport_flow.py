"""Window and stream count against links that are played, with explicit times."""

from __future__ import annotations

import pytest

from geo_ray.transport.config import TransportConfig
from geo_ray.transport.flow import BusyPeriod, FlowControl, StreamCount, Window

RTT_S = 0.1


def _learn(count: StreamCount, rates: dict[int, float], rounds: int = 40) -> int:
    """Play stretches of half a second on a link that carries ``rates`` by number of streams."""
    for n in range(rounds):
        streams = count.target
        rate = rates[max(level for level in rates if level <= streams)]
        count.observe(n * 0.5, BusyPeriod(int(rate * 0.5), 0.5, streams, 0.9, is_whole=False))
    return count.target


def test_streams_are_opened_while_they_carry_more() -> None:
    assert _learn(StreamCount(1, 96, 4), {n: 2e6 * n for n in (1, 2, 4, 8, 16)}) == 16
    assert _learn(StreamCount(1, 96, 1), {n: 2e5 * n for n in (1, 2, 4, 8, 16, 32, 64, 96)}) == 96
    assert _learn(StreamCount(1, 8, 4), {n: 1e6 * n for n in (1, 2, 4, 8)}) == 8


def test_idle_streams_are_closed_again() -> None:
    count = StreamCount(1, 96, 4)
    assert _learn(count, {1: 12e6}) == 4  # sixteen were tried, and carried the same


def test_streams_that_were_given_up_come_back_when_the_few_slow_down() -> None:
    """A fresh stream is fast until its first losses, and makes few look like enough."""
    count = StreamCount(1, 96, 4)

    def carry(mb_per_s: float) -> int:
        for _ in range(3):
            period = BusyPeriod(int(mb_per_s * 5e5), 0.5, count.target, 0.9, is_whole=False)
            count.observe(1.0, period)
        return count.target

    assert [carry(10), carry(10), carry(10.5)] == [8, 16, 4]
    assert carry(9.5) == 4, "tried not long ago"
    assert [carry(4), carry(5), carry(9)] == [8, 16, 32]


def test_streams_are_left_alone_while_nothing_waits_for_them() -> None:
    count = StreamCount(1, 96, 4)
    for n in range(10):
        count.observe(n, BusyPeriod(10**6, 0.5, 4, 0.0, is_whole=False))
    assert count.target == 4


def test_a_measurement_while_streams_open_is_ignored() -> None:
    count = StreamCount(1, 96, 4)
    assert count.observe(0.0, BusyPeriod(10**6, 0.5, 3, 1.0, is_whole=True)) == 4


def test_measurements_expire_after_a_minute() -> None:
    count = StreamCount(1, 96, 4)
    _learn(count, {1: 12e6})
    for _ in range(3):
        count.observe(200.0, BusyPeriod(10**6, 0.5, 4, 0.9, is_whole=False))
    assert count.target == 8


def test_bursts_and_long_transfers_are_learned_apart_and_the_larger_wish_counts() -> None:
    count = StreamCount(1, 96, 4)
    for n in range(40):
        streams = count.target
        burst = BusyPeriod(10**6, 4.0 / streams, streams, 1.0, is_whole=True)
        count.observe(float(n), burst)  # twice as fast with twice as many
    assert count.target == 96
    for n in range(40, 60):
        count.observe(float(n), BusyPeriod(10**7, 1.0, 96, 0.0, is_whole=False))
    assert count.target == 96
    assert count.observe(200.0, BusyPeriod(10**7, 1.0, 96, 0.0, is_whole=False)) == 4


def test_streams_that_split_every_burst_are_given_up() -> None:
    """A slow link: first flights of many streams overflow its queue, and TCP waits for timeouts.

    What then takes longer than a burst does must not count as a long transfer, of which nothing
    better is known.
    """
    count = StreamCount(1, 96, 4)
    seen = set()
    for n in range(60):
        streams = count.target
        seen.add(streams)
        lasted_s = 1.4 if streams >= 32 else 0.65 if n < 3 else 0.45
        size_bytes = 467_432 if streams < 32 else 200_000
        count.observe(float(n), BusyPeriod(size_bytes, lasted_s, streams, 1.0, streams < 32))
    assert max(seen) == 32, "tried"
    assert count.target < 32


def test_no_more_streams_than_the_window_has_first_flights() -> None:
    count = StreamCount(1, 96, 4)
    for n in range(100):
        streams = count.target
        period = BusyPeriod(10**6, 4.0 / streams, streams, 1.0, is_whole=True, most=18)
        count.observe(float(n), period)
    assert count.target == 16


def test_a_link_whose_queue_was_seen_gets_no_more_streams_than_its_window_holds() -> None:
    """As the long transfer below that opens 96 streams, but with a queue from the beginning."""
    flow, now_s = FlowControl(TransportConfig(), is_shaped=False), 0.0
    flow.on_rtt(now_s, 0.1)
    for _ in range(1500):
        now_s += 0.01
        flow.on_rtt(now_s, 0.16)
        flow.on_acked(now_s, 2000 * flow.streams, 100_000)
        flow.look(now_s, flow.streams, is_busy=True, has_more=True, waits=True)
    assert flow.window.has_met_queue and flow.window.size_bytes == 8 * 16 * 1024
    assert flow.streams == 8
    assert flow.chunk_bytes(8) == 16 * 1024  # a heartbeat waits for one


def _play(window: Window, rate_bytes_per_s: float, seconds: float, start_s: float = 0.0) -> float:
    """A link that carries a rate, with an endless queue: acks every 10 ms, round trips of 50 ms.

    Returns the largest queue in the last second.
    """
    worst_s = 0.0
    for tick in range(int(seconds * 100)):
        now_s = start_s + tick * 0.01
        held = rate_bytes_per_s * RTT_S
        queue_s = max(0.0, window.size_bytes - held) / rate_bytes_per_s
        carried = int(min(rate_bytes_per_s, window.size_bytes / RTT_S) * 0.01)
        window.on_acked(carried, int(window.size_bytes))
        if tick % 5 == 0:
            window.on_rtt(now_s, RTT_S + queue_s)
        if now_s - start_s > seconds - 1.0:
            worst_s = max(worst_s, queue_s)
    return worst_s


def test_the_window_keeps_the_link_full_and_its_queue_short() -> None:
    for rate in (1.25e6, 12.5e6, 50e6):
        window = Window(64 * 1024)
        window.on_rtt(0.0, RTT_S)
        worst_s = _play(window, rate, 20.0)
        assert window.size_bytes >= 0.99 * rate * RTT_S, rate
        assert worst_s < 0.5 * RTT_S, (rate, worst_s)


def test_the_window_follows_a_link_that_changes() -> None:
    window = Window(64 * 1024)
    window.on_rtt(0.0, RTT_S)
    _play(window, 12.5e6, 10.0)
    assert _play(window, 2.5e6, 20.0, start_s=10.0) < 0.5 * RTT_S
    _play(window, 12.5e6, 10.0, start_s=30.0)
    assert window.size_bytes >= 0.99 * 12.5e6 * RTT_S


def test_a_near_peer_gets_one_stream_and_an_emulated_link_no_window() -> None:
    near = FlowControl(TransportConfig(), is_shaped=False)
    near.on_rtt(0.0, 0.0002)
    assert near.streams == 1
    far = FlowControl(TransportConfig(), is_shaped=False)
    assert far.streams == 1  # nothing is known yet
    far.on_rtt(0.0, 0.1)
    assert far.streams == 4
    shaped = FlowControl(TransportConfig(), is_shaped=True)
    shaped.on_rtt(0.0, 0.1)
    assert shaped.streams == 1 and shaped.may_send(2**40)


def test_a_long_transfer_over_streams_that_are_too_few_opens_more() -> None:
    flow = FlowControl(TransportConfig(), is_shaped=False)
    flow.on_rtt(0.0, 0.1)
    now_s = 0.0
    for _ in range(1500):
        now_s += 0.01
        flow.on_acked(now_s, 2000 * flow.streams, 100_000)
        flow.look(now_s, flow.streams, is_busy=True, has_more=True, waits=True)
    assert flow.streams == 96
    assert flow.estimate.goodput_mbps is not None and flow.estimate.goodput_mbps > 50
    flow.window.size_bytes = 1e6
    assert flow.chunk_bytes(96) == 13 * 1024 and flow.chunk_bytes(4) == 64 * 1024


def test_messages_are_spread_over_all_streams_but_on_a_host_and_on_emulated_links() -> None:
    flow = FlowControl(TransportConfig(), is_shaped=False)
    assert (flow.shares(0), flow.shares(4)) == (1, 4)
    assert FlowControl(TransportConfig(), is_shaped=True).shares(4) == 1
    flow.connected(one_address=True)
    flow.on_rtt(1.0, 0.0005)
    assert flow.is_on_host and flow.shares(4) == 1


@pytest.mark.parametrize(
    ("window_kib", "streams", "chunk_kib"),
    [(4096, 4, 64), (8192, 4, 128), (16384, 4, 256), (2**20, 4, 256), (2**20, 8, 128)],
)
def test_chunks_are_longer_where_the_window_holds_64_of_them(
    window_kib: int, streams: int, chunk_kib: int
) -> None:
    flow = FlowControl(TransportConfig(), is_shaped=False)
    flow.window.size_bytes = window_kib * 1024
    assert flow.chunk_bytes(streams) == chunk_kib * 1024
    shaped = FlowControl(TransportConfig(), is_shaped=True)
    shaped.window.size_bytes = window_kib * 1024
    assert shaped.chunk_bytes(streams) == 64 * 1024


def test_processes_of_one_host_get_long_chunks_over_one_stream_and_a_window_that_stays() -> None:
    """What delays their heartbeats is a busy processor, and every chunk costs it some time."""
    flow = FlowControl(TransportConfig(), is_shaped=False)
    flow.connected(one_address=True)
    assert not flow.is_on_host  # nothing is known yet: a tunnel may begin here
    flow.on_rtt(0.0, 0.0002)
    assert flow.is_on_host and flow.chunk_bytes(1) == 64 * 1024  # a relay's line may be slow
    now_s = 0.0
    for _ in range(1000):
        now_s += 0.01
        flow.on_rtt(now_s, 0.05)
        flow.on_acked(now_s, 2_000_000, 100_000)
        flow.look(now_s, flow.streams, is_busy=True, has_more=True, waits=True)
    assert flow.window.size_bytes < 2**20
    assert flow.streams == 1 and flow.chunk_bytes(1) == 2**20
    assert flow.may_send(2**25 - 1) and not flow.may_send(2**25)

    small = FlowControl(TransportConfig(chunk_bytes=16 * 1024, min_streams=4), is_shaped=False)
    small.connected(one_address=True)
    small.on_rtt(0.0, 0.0002)
    _pass(small, mbps=10_000)
    assert small.streams == 4 and small.chunk_bytes(4) == 256 * 1024


@pytest.mark.parametrize(("mbps", "chunk_bytes"), [(10, 64 * 1024), (40, 100_000), (160, 400_000)])
def test_a_chunk_between_processes_of_one_host_takes_no_longer_than_20_ms(
    mbps: int, chunk_bytes: int
) -> None:
    """A relay between them may stand for a slow line, and a chunk is acknowledged as a whole."""
    flow = FlowControl(TransportConfig(), is_shaped=False)
    flow.connected(one_address=True)
    flow.on_rtt(0.0, 0.0002)
    _pass(flow, mbps)
    assert flow.chunk_bytes(1) == pytest.approx(chunk_bytes, rel=0.01)


def test_only_processes_of_one_host_acknowledge_large_chunks_together() -> None:
    """A relay between them may stand for a slow line: the kernel holds little until it was fast."""
    far, near = (FlowControl(TransportConfig(), is_shaped=False) for _ in range(2))
    far.on_rtt(0.0, RTT_S)
    near.connected(one_address=True)
    near.on_rtt(0.0, 0.0002)
    assert [far.ack_delay_s(size) for size in (0, 2**20, 2**22)] == [0.0] * 3
    assert [near.ack_delay_s(size) for size in (0, 2**18, 2**20, 2**22)] == [0.0, 0.0, 0.002, 0.0]
    assert near.unsent_bytes(1) == far.unsent_bytes(1) == 2**18
    _pass(far, 10_000)
    _pass(near, 10_000)
    assert near.unsent_bytes(1) == 2**22 and far.unsent_bytes(1) == 2**18
    assert near.ping_every_s() == 0.05


def _pass(flow: FlowControl, mbps: int) -> None:
    """Two seconds of a transfer at that rate."""
    for step in range(1, 201):
        flow.on_acked(step * 0.01, int(mbps * 1e6 / 8 * 0.01), 100_000)
        flow.look(step * 0.01, flow.streams, is_busy=True, has_more=True, waits=True)


def test_streams_without_progress_are_given_up_later_each_time() -> None:
    """A chunk that takes longer than the limit would otherwise never arrive."""
    flow = FlowControl(TransportConfig(peer_timeout_s=1.0, heartbeat_s=0.5), is_shaped=False)
    assert flow.stall_limit_s == 2.0
    flow.on_stall()
    flow.on_stall()
    assert flow.stall_limit_s == 8.0
    flow.on_chunk(7.0)
    assert flow.stall_limit_s == 8.0  # the line is as slow as that
    flow.on_chunk(0.1)
    assert 2.0 < flow.stall_limit_s < 8.0
    for _ in range(100):
        flow.on_chunk(0.1)
    assert flow.stall_limit_s == 2.0
    for _ in range(100):
        flow.on_stall()
    assert flow.stall_limit_s == 128.0


@pytest.mark.parametrize(
    ("one_address", "rtt_s", "is_shaped"),
    [(False, 0.0002, False), (True, 0.02, False), (True, 0.0002, True)],
)
def test_another_host_a_tunnel_and_an_emulated_link_are_not_on_one_host(
    one_address: bool, rtt_s: float, is_shaped: bool
) -> None:
    flow = FlowControl(TransportConfig(), is_shaped=is_shaped)
    flow.connected(one_address=one_address)
    flow.on_rtt(0.0, rtt_s)
    assert not flow.is_on_host and flow.chunk_bytes(1) <= 64 * 1024


def test_a_young_window_doubles_only_on_round_trips_that_it_made() -> None:
    """On others it would double again into the queue that it has made already."""
    window = Window(64 * 1024)
    start_bytes, now_s = window.size_bytes, 10.0
    for _ in range(4):
        window.on_acked(10**6, int(window.size_bytes))
        window.on_rtt(now_s, RTT_S)
    assert window.size_bytes == 2 * start_bytes
    for tick in range(4):  # begun before it doubled
        window.on_acked(10**6, int(window.size_bytes))
        window.on_rtt(now_s + RTT_S * (tick + 1) / 5, RTT_S)
    for tick in range(3):
        window.on_rtt(now_s + 2 * RTT_S + tick / 1000, RTT_S)
    assert window.size_bytes == 2 * start_bytes
    window.on_rtt(now_s + 3 * RTT_S, RTT_S)
    assert window.size_bytes == 4 * start_bytes
