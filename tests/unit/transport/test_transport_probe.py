"""The link probe over real sockets, plain and through emulated links."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from random import Random

import pytest

from geo_ray.base.errors import DeadlineExceededError, LinkDownError, TransportError
from geo_ray.transport.emulation import LinkModel, LinkSpec
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.probe import plan as words
from geo_ray.transport.probe.measurement import (
    ArrivalLog,
    SendWindow,
    UdpPort,
    new_token,
    packets_for,
    quantile,
)
from geo_ray.transport.probe.node import ProbeNode
from geo_ray.transport.probe.plan import ProbePlan
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import CONTROL, EndpointIdentity, Message

WAIT_S = 60.0
KEY = b"p" * 32
QUICK = ProbePlan(duration_s=0.6, ramp_s=0.2, pings=5, udp_s=0.0, timeout_s=WAIT_S)


class End:
    """A probe node with its endpoint; keeps when which payload of a transfer arrived."""

    def __init__(
        self, region: str, to: dict[str, LinkSpec] | None = None, udp_host: str = "127.0.0.1"
    ) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self.node = ProbeNode(region, (udp_host, 0))
        models = {peer: LinkModel(spec, 1) for peer, spec in (to or {}).items()}
        identity = EndpointIdentity("run", region, 1, KEY)
        self.endpoint = Endpoint(identity, self._on_message, shaping=models)
        self.node.use(self.endpoint)

    def _on_message(self, peer: str, message: Message) -> None:
        if message.kind == words.DATA_KIND:
            self.arrivals.append((time.monotonic(), view_of(message.payload).nbytes))
        self.node.on_message(peer, message)

    def counted_mbps(self, ramp_s: float) -> float:
        """Goodput of the bytes that came ``ramp_s`` after the first ones, by this end's clock."""
        counted = [one for one in self.arrivals if one[0] >= self.arrivals[0][0] + ramp_s]
        return sum(n for _, n in counted[1:]) * 8e-6 / (counted[-1][0] - counted[0][0])


@contextmanager
def pair(
    a_to_b: LinkSpec | None = None,
    b_to_a: LinkSpec | None = None,
    udp_host_of_b: str = "127.0.0.1",
) -> Iterator[list[End]]:
    ends = [
        End("a", {} if a_to_b is None else {"b": a_to_b}),
        End("b", {} if b_to_a is None else {"a": b_to_a}, udp_host_of_b),
    ]
    a, b = ends
    try:
        a.endpoint.connect("b", b.endpoint.listen())
        a.node.dialed("b", "127.0.0.1")
        a.endpoint.wait_connected(["b"], WAIT_S)
        b.endpoint.wait_connected(["a"], WAIT_S)
        yield ends
    finally:
        for end in ends:
            end.endpoint.close(0.0)
            end.node.close()


# ------------------------------------------------------------------ over sockets


def test_a_plain_connection_is_measured_in_both_directions() -> None:
    with pair() as (a, b):
        there = a.node.measure("b", QUICK)
        back = a.node.measure_back("b", QUICK)
        assert there.pair == ("a", "b") and back.pair == ("b", "a")
        for found in (there, back):
            assert found.goodput_mbps > 0 and found.samples > 0 and found.source == "probe"
            assert 0 < found.rtt_s <= (found.rtt_p99_s or 0)
            assert found.rtt_loaded_s is not None and found.rtt_loaded_s > 0
            assert found.loss is None  # no train was asked for
        assert b.node.wait_served(1, WAIT_S)
        assert a.endpoint.stats()["b"]["bytes_sent"]["probe"] > 0


@pytest.mark.parametrize("rate_mbps", [4.0, 40.0])
def test_an_emulated_link_shows_its_rate_and_delay(rate_mbps: float) -> None:
    there = LinkSpec(rate_mbps=rate_mbps, delay_s=0.02)
    with pair(there, LinkSpec(delay_s=0.01)) as (a, b):
        found = a.node.measure("b", QUICK)
    assert found.goodput_mbps == pytest.approx(b.counted_mbps(0.2), rel=0.2)
    assert rate_mbps / 2 <= found.goodput_mbps <= rate_mbps * 2
    assert found.rtt_s >= 0.03


def test_each_direction_has_its_own_rate() -> None:
    with pair(LinkSpec(rate_mbps=60.0), LinkSpec(rate_mbps=4.0)) as (a, _):
        there = a.node.measure("b", QUICK)
        back = a.node.measure_back("b", QUICK)
    assert back.goodput_mbps <= 8 and there.goodput_mbps >= 2 * back.goodput_mbps


def test_loss_is_counted_by_a_train_from_either_end() -> None:
    plan = QUICK.model_copy(update={"udp_s": 0.3})
    with pair() as (a, b):
        there = a.node.measure("b", plan)
        back = b.node.measure("a", plan)  # whose host b does not know: a opens the way
    for found in (there, back):
        assert found.loss is not None and found.loss_mad is not None
        assert found.loss < 0.5


def test_without_udp_loss_is_estimated_from_tcp_retransmissions() -> None:
    plan = QUICK.model_copy(update={"udp_s": 0.3})
    nobodys = "192.0.2.1"  # cannot be bound: there is no UDP at b
    with pair(udp_host_of_b=nobodys) as (a, b):
        for found in (a.node.measure("b", plan), b.node.measure("a", plan)):
            assert found.goodput_mbps > 0 and found.loss_mad is None
            assert found.loss is None or found.loss < 0.5


def test_a_third_region_must_wait() -> None:
    with pair(LinkSpec(rate_mbps=20.0)) as (a, b):
        c = End("c")
        try:
            address = b.endpoint.advertised
            c.endpoint.connect("b", address)
            c.endpoint.wait_connected(["b"], WAIT_S)
            long = QUICK.model_copy(update={"duration_s": 60.0})
            failed: list[BaseException] = []
            thread = started(lambda: a.node.measure("b", long), failed)
            until(lambda: b.node.progress().phase == "receiving")
            with pytest.raises(TransportError, match="probed by another"):
                c.node.measure("b", QUICK)
            until(lambda: a.node.progress().rate_mbps is not None)
            a.node.close()  # ends the long one at once
            thread.join(WAIT_S)
            assert not thread.is_alive()
            assert isinstance(failed[0], LinkDownError)
        finally:
            c.endpoint.close(0.0)
            c.node.close()


def started(work: Callable[[], object], failed: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def until(condition: Callable[[], bool]) -> None:
    gate = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        gate.wait(0.01)
    raise AssertionError("it never came to that")


def test_a_peer_that_sends_nothing_is_an_error() -> None:
    a = End("a")
    mute = Endpoint(EndpointIdentity("run", "b", 1, KEY), lambda peer, message: None)
    try:
        a.endpoint.connect("b", mute.listen())
        a.endpoint.wait_connected(["b"], WAIT_S)
        impatient = QUICK.model_copy(update={"timeout_s": 0.2})
        with pytest.raises(DeadlineExceededError, match="region b has not answered a ping"):
            a.node.measure("b", impatient)
    finally:
        a.endpoint.close(0.0)
        mute.close(0.0)
        a.node.close()


def test_an_error_at_the_other_end_comes_back() -> None:
    with pair() as (a, b):
        b.node.measure = lambda *_: (_ for _ in ()).throw(  # type: ignore[method-assign]
            TransportError("b's disk is on fire")
        )
        with pytest.raises(TransportError, match="on fire"):
            a.node.measure_back("b", QUICK)


NONSENSE: list[tuple[str, Meta]] = [
    (words.PING, {}),
    (words.PING, {"n": -1}),
    (words.BEGIN, {"id": 1, "ramp_s": float("nan")}),
    (words.BEGIN, {"id": 1, "ramp_s": "long"}),
    (words.BEGIN, {"id": 1, "ramp_s": True}),
    (words.DATA_KIND, {"id": "x"}),
    (words.END, {}),
    (words.TRAIN, {"id": 1, "token": b"short", "packets": 5, "seconds": 1, "port": 9}),
    (words.TRAIN, {"id": 1, "token": bytes(16), "packets": 2**40, "seconds": 1, "port": 9}),
    (words.TRAIN, {"id": 1, "token": bytes(16), "packets": 5, "seconds": 1, "port": 0}),
    (words.PLEASE, {"plan": "{}"}),
    (words.PLEASE, {"plan": '{"duration_s": 1e9}', "name": "x"}),
    (words.PLEASE, {"plan": "{}" * 10_000, "name": "x"}),
    (words.RESULT, {"id": 1}),
    ("probe.unheard_of", {}),
]


def test_invalid_messages_are_dropped_and_the_probe_continues() -> None:
    with pair() as (a, b):
        for kind, meta in NONSENSE:
            a.endpoint.send("b", Message(kind, meta, b"", "probe", CONTROL))
        plan = QUICK.model_copy(update={"duration_s": 0.05, "ramp_s": 0.0, "pings": 1})
        assert a.node.measure("b", plan).goodput_mbps > 0
        assert b.endpoint.stats()["a"]["reconnects"] == 0


# ------------------------------------------------------------------ what arrived when


def test_the_ramp_does_not_count() -> None:
    log = ArrivalLog(ramp_s=1.0)
    for tenth in range(10):
        log.add(tenth / 10, 1000)  # slow start
    for hundredth in range(100, 301):
        log.add(hundredth / 100, 125_000)
    found = log.result()
    assert found is not None
    assert found.goodput_mbps == pytest.approx(100.0)
    assert found.goodput_mad_mbps == pytest.approx(0.0, abs=1e-6)
    assert found.seconds == pytest.approx(2.0) and found.size_bytes == 200 * 125_000
    assert log.got_bytes == 10_000 + 201 * 125_000


def test_a_link_slower_than_its_ramp_is_measured_with_the_available_data() -> None:
    log = ArrivalLog(ramp_s=1.0)
    assert log.result() is None
    log.add(5.0, 1000)
    assert log.result() is None
    log.add(5.5, 1000)
    found = log.result()
    assert found is not None and found.goodput_mbps == pytest.approx(1000 * 8e-6 / 0.5)
    log = ArrivalLog(0.0)
    log.add(1.0, 10)
    log.add(1.0, 10)
    assert log.result() is None  # no time has passed


def test_the_window_finds_the_rate_of_any_link() -> None:
    for rate_mbps, rtt_s in [(0.5, 0.05), (10.0, 0.3), (100.0, 0.1), (5000.0, 0.001)]:
        link = LinkModel(LinkSpec(rate_mbps=rate_mbps), 1)
        window = SendWindow(rtt_s)
        now_s, got_bytes, sent_bytes = 0.0, 0, 0
        under_way: list[tuple[float, int]] = []
        most = 0
        while now_s < 20 * rtt_s + 20:
            while window.has_capacity():
                size = window.chunk_bytes
                under_way.append((link.transfer(now_s, size) + rtt_s, size))
                window.sent(size)
                sent_bytes += size
            most = max(most, len(under_way))
            now_s, size = under_way.pop(0)
            got_bytes += size
            window.arrived(now_s, got_bytes)
        assert window.rate_mbps == pytest.approx(rate_mbps, rel=0.25)
        assert most <= 48
        # what is still under way at the end is soon through
        assert (sent_bytes - got_bytes) * 8e-6 / rate_mbps < 1.5 + 12 * rtt_s
        # and the link was busy all the time but for the beginning
        assert got_bytes * 8e-6 / rate_mbps > (now_s - 10 * rtt_s) * 0.8


def test_the_window_does_not_believe_nonsense() -> None:
    window = SendWindow(0.1)
    window.arrived(0.0, 10**12)
    assert window.rate_mbps is None and window.has_capacity()
    window.sent(1000)
    window.arrived(1.0, 1000)
    window.arrived(2.0, 500)
    window.arrived(1.0, 1000)
    assert window.rate_mbps is None


def test_simultaneous_reports_do_not_imply_a_fast_link() -> None:
    window = SendWindow(0.6)
    for _ in range(4):
        window.sent(16_384)
    window.arrived(1.0, 16_384)
    window.arrived(1.00001, 65_536)
    assert window.rate_mbps is not None and window.rate_mbps < 2.0
    window.sent(window.chunk_bytes)
    assert window.chunk_bytes < 40_000


def test_quantiles() -> None:
    assert quantile([5.0], 0.99) == 5.0
    assert quantile([float(n) for n in range(100, 0, -1)], 0.5) == 50.0
    assert quantile([float(n) for n in range(1, 101)], 0.99) == 99.0


# ------------------------------------------------------------------ UDP trains


def test_a_train_counts_the_datagrams_that_pass_a_relay() -> None:
    """A relay of real sockets drops packets that it chose by a seed."""
    random, packets, dropped = Random(7), 600, 0
    token = new_token()
    with (
        closing(UdpPort("127.0.0.1")) as sender,
        closing(UdpPort("127.0.0.1")) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as relay,
    ):
        relay.bind(("127.0.0.1", 0))
        relay.settimeout(WAIT_S)
        over = threading.Event()
        thread = threading.Thread(
            target=sender.send_train, args=(relay.getsockname(), token, packets, 0.6)
        )
        results: list[object] = []
        counter = threading.Thread(
            target=lambda: results.append(receiver.count_train(token, packets, WAIT_S, over.is_set))
        )
        counter.start()
        thread.start()
        for number in range(packets):
            data = relay.recv(2000)
            if random.random() < 0.1:
                dropped += 1
                continue
            relay.sendto(data, ("127.0.0.1", receiver.port))
            if number % 50 == 0:  # duplicates and strangers do not count
                relay.sendto(data, ("127.0.0.1", receiver.port))
                relay.sendto(b"x" * 16 + data[16:], ("127.0.0.1", receiver.port))
                relay.sendto(b"short", ("127.0.0.1", receiver.port))
        over.set()
        thread.join(WAIT_S)
        counter.join(WAIT_S)
    (found,) = results
    assert found is not None
    assert found.sent == packets and found.arrived == packets - dropped  # type: ignore[attr-defined]
    assert found.loss == pytest.approx(dropped / packets)  # type: ignore[attr-defined]
    assert 0 < found.loss_mad < 0.2  # type: ignore[attr-defined]


def test_blocked_udp_is_not_taken_for_loss() -> None:
    with closing(UdpPort("127.0.0.1")) as receiver:
        assert receiver.count_train(new_token(), 100, WAIT_S, lambda: True) is None
        assert receiver.wait_opened(new_token(), 0.01) is None


def test_a_taken_port_is_replaced_and_a_foreign_host_refused() -> None:
    with closing(UdpPort("127.0.0.1")) as first, closing(UdpPort("127.0.0.1", first.port)) as next_:
        assert next_.port != first.port
    with pytest.raises(TransportError, match="no UDP port"):
        UdpPort("192.0.2.1")


def test_trains_are_long_enough_and_not_too_long() -> None:
    assert packets_for(0.01, 1.0) == 20
    assert packets_for(10.0, 2.0) == 1041
    assert packets_for(1e6, 60.0) == 20_000
