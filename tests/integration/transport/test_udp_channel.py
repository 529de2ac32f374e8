"""Loose blocks over real UDP sockets: pacing, reports, stops, strangers, emulated loss."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from geo_ray.base.clock import SystemClock
from geo_ray.base.errors import TransportError
from geo_ray.transport.datagrams import BlockGroup, Sealer, Secret, Seen, new_session
from geo_ray.transport.emulation import DatagramShaper, LinkModel, LinkSpec
from geo_ray.transport.udp import LossyLoad, UdpChannel, UdpSender

WAIT_S = 240.0
SIZE = 1280


def eventually(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "it did not come true"
        time.sleep(0.002)
    return value


class Hub:
    """The receiving end, which records its input and passes reports to a sender."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.ranks: list[int] = []
        self.blocks: dict[int, bytes] = {}
        self.reports: list[tuple[str, bytes, Seen]] = []
        self.sender: UdpSender | None = None
        self.fail = False
        self.channel = UdpChannel((host, port), self.on_group, self.on_report, SystemClock())

    def on_group(self, peer: str, group: BlockGroup) -> None:
        if self.fail:
            raise RuntimeError("on purpose")
        assert peer == "us-east"
        for rank, block in enumerate(group.blocks, group.first_rank):
            self.ranks.append(rank)
            self.blocks[rank] = bytes(block)

    def on_report(self, peer: str, session: bytes, seen: Seen) -> None:
        self.reports.append((peer, session, seen))
        if self.sender is not None:
            self.sender.on_seen(session, seen)


def load_of(count: int, seq: int = 1, size: int = SIZE) -> LossyLoad:
    data = b"".join(rank.to_bytes(4, "big") * (size // 4) for rank in range(count))
    return LossyLoad(1, seq, [2 * rank for rank in range(count)], memoryview(data), size, 4)


def expected(hub: Hub) -> Secret:
    """A session that both ends know, as if they had derived it from their connection."""
    secret = Secret.derived(new_session(), bytes(range(32)))
    hub.channel.expect("us-east", secret)
    return secret


@contextmanager
def pair(
    mbps: float = 200.0,
    model: LinkModel | None = None,
    is_drained: Callable[[float], bool] = lambda _: True,
    host: str = "127.0.0.1",
) -> Iterator[tuple[Hub, UdpSender]]:
    hub, clock = Hub(host), SystemClock()
    near = UdpChannel((host, 0), lambda *_: None, lambda *_: None, clock)
    address = (host, hub.channel.port)
    shaper = None
    if model is not None:
        start_s = clock.now_s()
        shaper = DatagramShaper(lambda d: near.send(d, address), model, clock, start_s)

    def send(datagram: bytes, band: int, bands: int) -> None:
        if shaper is not None:
            shaper.send(datagram)
        else:
            near.send(datagram, address, (bands - 1 - band) * 32)

    hub.sender = UdpSender(send, is_drained, lambda: mbps, None, clock)
    try:
        yield hub, hub.sender
    finally:
        hub.sender.close()
        if shaper is not None:
            shaper.close()
        near.close()
        hub.channel.close()


@pytest.mark.parametrize("size", [SIZE, 164])
def test_all_blocks_arrive_in_order_of_rank(size: int) -> None:
    with pair() as (hub, sender):
        sender.use(expected(hub))
        sender.start(load_of(100, size=size))
        eventually(lambda: len(hub.blocks) == 100)
        assert hub.ranks == sorted(hub.ranks)
        assert all(hub.blocks[rank] == rank.to_bytes(4, "big") * (size // 4) for rank in hub.blocks)
        assert sender.stop() == (1, 100)
        eventually(lambda: hub.reports)
        assert hub.reports[-1][2].received == sender.counts.datagrams


def test_reports_end_when_nothing_comes() -> None:
    with pair() as (hub, sender):
        sender.use(expected(hub))
        sender.start(load_of(3))
        eventually(lambda: hub.reports)

        def have_ended() -> bool:
            count = len(hub.reports)
            time.sleep(0.3)
            return len(hub.reports) == count

        eventually(have_ended)


def test_nothing_leaves_before_the_reliable_road_is_drained() -> None:
    drained = threading.Event()
    with pair(is_drained=drained.wait) as (hub, sender):
        sender.use(expected(hub))
        sender.start(load_of(10))
        time.sleep(0.4)
        assert not hub.blocks
        drained.set()
        eventually(lambda: len(hub.blocks) == 10)


def test_a_stop_returns_the_unsent_part_which_is_never_sent() -> None:
    with pair(mbps=1.0) as (hub, sender):
        sender.use(expected(hub))
        sender.start(load_of(1000))
        eventually(lambda: len(hub.blocks) > 5)
        stopped = sender.stop()
        assert stopped is not None
        seq, first = stopped
        assert seq == 1 and 5 < first < 1000
        eventually(lambda: len(hub.blocks) == first)
        sender.start(load_of(1, seq=2))
        eventually(lambda: sender.counts.blocks == first + 1)
        assert max(hub.ranks) < 1000 and sender.counts.unsent == 1000 - first


def test_without_a_session_nothing_leaves() -> None:
    with pair() as (_center, sender):
        sender.start(load_of(5))
        time.sleep(0.1)
        assert sender.stop() == (1, 0)
        assert sender.stop() is None


def test_a_new_session_ends_the_old_one_but_the_same_one_continues() -> None:
    with pair() as (hub, sender):
        old = expected(hub)
        sender.use(old)
        sender.start(load_of(3))
        eventually(lambda: len(hub.blocks) == 3)
        sender.use(old)
        sender.start(load_of(6, seq=2))
        eventually(lambda: len(hub.blocks) == 6)
        expected(hub)
        strange = hub.channel.counts.strange
        sender.start(load_of(9, seq=3))
        eventually(lambda: hub.channel.counts.strange >= strange + 9)
        assert len(hub.blocks) == 6


def test_strangers_and_repetitions_change_nothing() -> None:
    with pair() as (hub, _sender):
        secret = expected(hub)
        good = Sealer(secret).seal(load_of(1).group(0, 1).pack())
        forged = Sealer(Secret(secret.session, bytes(32))).seal(load_of(1).group(0, 1).pack())
        senseless = Sealer(secret)
        senseless.number = 1
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            bad = [b"", b"x" * 1400, b"y" * 9000, forged, good[:-1], senseless.seal(b"z" * 50)]
            for datagram in [*bad, good, good]:
                sock.sendto(datagram, ("127.0.0.1", hub.channel.port))
        eventually(lambda: hub.channel.counts.strange == 6)  # an empty one counts for nothing
        eventually(lambda: hub.ranks)
        assert hub.ranks == [0]


def test_a_handler_that_fails_does_not_end_the_channel() -> None:
    with pair() as (hub, sender):
        sender.use(expected(hub))
        hub.fail = True
        sender.start(load_of(5))
        eventually(lambda: hub.channel.counts.datagrams == 5)
        hub.fail = False
        sender.start(load_of(5, seq=2))
        eventually(lambda: len(hub.blocks) == 5)


def test_an_emulated_link_loses_and_delays_datagrams() -> None:
    model = LinkModel(LinkSpec(rate_mbps=40, delay_s=0.05, loss=0.2), seed=3)
    with pair(mbps=20.0, model=model) as (hub, sender):
        sender.use(expected(hub))
        sender.start(load_of(400))
        eventually(lambda: sender.counts.blocks == 400)
        eventually(lambda: hub.reports and hub.reports[-1][2].highest > 380)
        assert 240 < len(hub.blocks) < 380
        assert min(seen.delay_s for _, _, seen in hub.reports) >= 0.05


def test_pacing_finds_the_rate_of_an_emulated_link() -> None:
    model = LinkModel(LinkSpec(rate_mbps=8, delay_s=0.01), seed=3)
    with pair(mbps=1.0, model=model) as (hub, sender):
        sender.use(expected(hub))
        sender.start(load_of(3000))
        eventually(lambda: sender.mbps > 3.0)
        eventually(lambda: len(hub.blocks) > 1500)
        assert sender.mbps < 30.0


def test_over_ipv6() -> None:
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    with pair(host="::1") as (hub, sender):
        sender.use(expected(hub))
        sender.start(load_of(5))
        eventually(lambda: len(hub.blocks) == 5)


def test_the_port_of_the_listener_is_taken_if_it_is_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        first, second = Hub(port=port), Hub(port=port)
        assert first.channel.port == port and second.channel.port != port
        first.channel.close()
        second.channel.close()


def test_a_host_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(TransportError):
        Hub(host="192.0.2.1")


def test_an_unknown_name_is_an_error() -> None:
    hub = Hub()
    with pytest.raises(TransportError):
        hub.channel.resolve(("no such host", 1))
    assert hub.channel.resolve(("localhost", 7)) == ("127.0.0.1", 7)
    hub.channel.close()


def test_closing_wakes_the_thread_and_frees_the_port() -> None:
    hub = Hub()
    port = hub.channel.port
    hub.channel.close()
    again = Hub(port=port)
    assert again.channel.port == port
    again.channel.close()
