"""What an endpoint promises, over real sockets."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from geo_ray.base.clock import SystemClock
from geo_ray.base.errors import (
    DeadlineExceededError,
    FrameError,
    LinkDownError,
    PeerRefusedError,
    PortInUseError,
    TransportError,
)
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.emulation import LinkModel, LinkSpec
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.wire import frames, handshake, sockets
from geo_ray.transport.wire.frames import (
    Frame,
    FrameKind,
    FrameLimits,
    recv_frame,
    send_frame,
    send_plain,
)
from geo_ray.transport.wire.handshake import Greeting, HandshakeSide, greet
from geo_ray.transport.wire.message import EndpointIdentity, Message, to_meta
from geo_ray.transport.wire.sockets import Address
from tests.support.train_support import eventually
from tests.support.wan_support import leaving_nothing_behind

KEY = b"k" * 32
WAIT_S = 240.0  # never reached when all is well


class Node:
    """An endpoint that records its callbacks."""

    def __init__(self, region: str, attempt: int = 1, **options: Any) -> None:
        identity = {"run_id": "run", "key": KEY} | {
            name: options.pop(name) for name in ("run_id", "key") if name in options
        }
        own = {name: options.pop(name) for name in ("shaping", "run_start_s") if name in options}
        self.handler: Callable[[Message], None] = lambda _: None
        self.got: list[tuple[str, Message]] = []
        self.peers: list[tuple[str, int, bool]] = []
        self._changed = threading.Condition()
        quick = {"heartbeat_s": 0.05, "reconnect_max_s": 0.1} | options
        self.endpoint = Endpoint(
            EndpointIdentity(region=region, attempt=attempt, **identity),
            self._on_message,
            TransportConfig(**quick),
            on_peer=self._on_peer,
            **own,
        )

    def _on_message(self, peer: str, message: Message) -> None:
        self.handler(message)
        with self._changed:
            self.got.append((peer, message))
            self._changed.notify_all()

    def _on_peer(self, region: str, attempt: int, up: bool) -> None:
        with self._changed:
            self.peers.append((region, attempt, up))
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S)

    def wait_messages(self, count: int) -> list[Message]:
        self.wait(lambda: len(self.got) >= count)
        return [message for _, message in self.got]

    def say(self, peer: str, n: int, payload: bytes = b"", **options: float) -> None:
        self.endpoint.send(peer, Message("test", {"n": n}, payload, "update"), **options)


@contextmanager
def running(*nodes: Node) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            node.endpoint.close(drain_s=1.0)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


def join(dialer: Node, listener: Node) -> Address:
    address = listener.endpoint.listen()
    region = listener.endpoint.identity.region
    dialer.endpoint.connect(region, address)
    dialer.endpoint.wait_connected([region], WAIT_S)
    listener.endpoint.wait_connected([dialer.endpoint.identity.region], WAIT_S)
    return address


# ------------------------------------------------------------------ messages


def test_messages_pass_both_ways_in_order_and_are_accounted() -> None:
    eu, us = Node("eu"), Node("us")
    with running(eu, us):
        join(eu, us)
        payload = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
        for n in range(50):
            eu.say("us", n, payload if n % 10 == 0 else b"")
            us.say("eu", n)
        assert [message.meta["n"] for message in us.wait_messages(50)] == list(range(50))
        assert [message.meta["n"] for message in eu.wait_messages(50)] == list(range(50))
        assert bytes(us.got[10][1].payload) == payload
        assert us.got[0][0] == "eu" and us.got[0][1].kind == "test"
        eu.endpoint.flush("us", WAIT_S)
        us.endpoint.flush("eu", WAIT_S)
        sent, received = eu.endpoint.stats()["us"], us.endpoint.stats()["eu"]
        assert sent["bytes_sent"]["update"] == received["bytes_received"]["update"] > 5 * 300_000
        assert sent["messages_out"] == received["messages_in"] == 50
        # On a busy machine acknowledgements may be late enough for a chunk to go out once more.
        assert set(sent["bytes_sent"]) - {"resend"} == {"update", "transport"}
        assert sent["outbox_messages"] == sent["outbox_bytes"] == sent["reconnects"] == 0
        assert sent["rtt_s"] is None or sent["rtt_s"] > 0
        assert sent["connected"] and sent["attempt"] == 1
    assert eu.peers == [("us", 1, True), ("us", 1, False)]


def test_a_handler_that_fails_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    eu, us = Node("eu"), Node("us")

    def fail_once(message: Message) -> None:
        if message.meta["n"] == 0:
            raise ValueError("surprise")

    us.handler = fail_once
    with running(eu, us):
        join(eu, us)
        eu.say("us", 0)
        eu.say("us", 1)
        assert us.wait_messages(1)[0].meta["n"] == 1
        assert eu.endpoint.stats()["us"]["reconnects"] == 0
    assert "surprise" in caplog.text


def test_a_handler_may_answer() -> None:
    eu, us = Node("eu"), Node("us")
    us.handler = lambda message: us.say("eu", -int(str(message.meta["n"])))
    with running(eu, us):
        join(eu, us)
        for n in range(20):
            eu.say("us", n)
        assert [message.meta["n"] for message in eu.wait_messages(20)] == [-n for n in range(20)]


def test_a_slow_reader_pushes_back_and_is_not_taken_for_dead() -> None:
    eu = Node("eu", max_outbox_messages=4, peer_timeout_s=1.5)
    us = Node("us", peer_timeout_s=1.5)
    release = threading.Event()
    us.handler = lambda _: void(release.wait(WAIT_S))
    with running(eu, us):
        join(eu, us)
        accepted = 0
        # Big enough for the kernel's buffers to fill up behind the one that is being handled.
        payload = bytes(8_000_000)
        with pytest.raises(DeadlineExceededError, match="send_deadline_s") as full:
            while True:
                eu.say("us", accepted, payload, deadline_s=2.5)  # longer than the timeout
                accepted += 1
        assert "region us" in full.value.message
        assert 4 <= accepted <= 6
        assert eu.endpoint.stats()["us"]["outbox_messages"] == 4
        release.set()
        eu.say("us", accepted, payload)
        got = us.wait_messages(accepted + 1)
        assert [message.meta["n"] for message in got] == list(range(accepted + 1))
        assert eu.endpoint.stats()["us"]["reconnects"] == 0


def void(_: object) -> None:
    """Drop a value."""


def test_unsendable_messages_fail_at_once_and_harm_nothing() -> None:
    eu, us = Node("eu", max_payload_bytes=1000), Node("us", max_payload_bytes=1000)
    with running(eu, us):
        join(eu, us)
        with pytest.raises(FrameError, match="limit 1000"):
            eu.say("us", 1, bytes(1001))
        for meta in ({"_n": 1}, {"x": object()}, {"x": "y" * 70_000}):
            with pytest.raises(FrameError):
                eu.endpoint.send("us", Message("test", meta, b"", "update"))  # type: ignore[arg-type]
        with pytest.raises(LinkDownError, match="known are: us"):
            eu.say("mars", 1)
        eu.say("us", 2)
        assert us.wait_messages(1)[0].meta["n"] == 2


# ------------------------------------------------------------------ who belongs together


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"run_id": "old"}, ("run", "'old'", "'run'")),
        ({"key": b"x" * 32}, ("key", "this side's")),
        ({"region": "asia"}, ("region", "'asia'", "'us'")),
    ],
)
def test_strangers_are_refused_with_both_values(other: dict[str, Any], words: tuple[str]) -> None:
    eu, us = Node("eu"), Node(**{"region": "us"} | other)
    with running(eu, us):
        eu.endpoint.connect("us", us.endpoint.listen())
        with pytest.raises(LinkDownError, match="us") as refused:
            eu.endpoint.wait_connected(["us"], 0.5)
        assert "PEER_REFUSED" in refused.value.message
        for word in words:
            assert word in refused.value.message
        assert not us.got and not us.peers and not eu.peers


def test_a_peer_with_the_key_id_but_not_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_key_id", lambda _: "same")
    eu, us = Node("eu"), Node("us", key=b"x" * 32)
    with running(eu, us):
        eu.endpoint.connect("us", us.endpoint.listen())
        with pytest.raises(LinkDownError, match="could not prove that it has the run's key"):
            eu.endpoint.wait_connected(["us"], 0.5)
        assert not us.peers and not eu.peers


def test_another_protocol_version_is_refused() -> None:
    us = Node("us")
    with running(us), sockets.dial(us.endpoint.listen(), WAIT_S) as sock:
        hello = b"".join(frames.encode(Frame(FrameKind.HELLO, {}), b"any"))
        sock.sendall(hello[:4] + b"\x09" + hello[5:])
        refused = recv_frame(sock, b"geo_ray hello", FrameLimits(), timeout_s=WAIT_S)
        assert refused.kind is FrameKind.REFUSED
        assert "version 9" in str(refused.meta["reason"])
        assert f"version {frames.PROTOCOL_VERSION}" in str(refused.meta["reason"])


def test_refusals_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    eu, us = Node("eu", reconnect_max_s=0.06), Node("us", run_id="old")
    with caplog.at_level(logging.WARNING), running(eu, us):
        eu.endpoint.connect("us", us.endpoint.listen())
        with pytest.raises(LinkDownError):
            eu.endpoint.wait_connected(["us"], 1.0)
    assert sum("PEER_REFUSED" in record.getMessage() for record in caplog.records) == 2


def test_two_hundred_garbage_connections_harm_nothing() -> None:
    eu, us = Node("eu"), Node("us", handshake_timeout_s=0.5)
    generator = np.random.default_rng(7)
    with running(eu, us):
        address = join(eu, us)
        for n in range(200):
            with socket.create_connection(address) as sock:
                junk = generator.bytes(int(generator.integers(0, 200)))
                with suppress(OSError):  # it may be refused before all was sent
                    sock.sendall(junk if n % 2 else b"GEOR\x01\x01" + junk)
        idle = [socket.create_connection(address) for _ in range(5)]
        eu.say("us", 1)
        assert us.wait_messages(1)[0].meta["n"] == 1
        for sock in idle:
            sock.settimeout(WAIT_S)
            assert sock.recv(1) == b""  # closed by the handshake's timeout
            sock.close()
        assert eu.endpoint.stats()["us"]["reconnects"] == 0


# ------------------------------------------------------------------ a peer made by hand


HELLO: dict[str, Any] = {
    "service": "wan", "run": "run", "region": "eu", "attempt": 1, "instance": "i", "to": "us",
    "stream": 0,
}  # fmt: skip
NOTHING: dict[str, Any] = {"delivered": [0, 0, 0]}


def _shake(sock: socket.socket, **changes: Any) -> Greeting:
    send = partial(send_plain, sock)
    greeting = greet(sock, HandshakeSide(KEY, HELLO | changes, lambda _: NOTHING, send, WAIT_S))
    sock.settimeout(WAIT_S)
    return greeting


def _message(number: int) -> Frame:
    message = Message("test", {"n": number}, b"payload", "update")
    return Frame(FrameKind.CHUNK, to_meta(1, number, 0, 7, message), b"payload")


def test_repeated_chunks_are_delivered_once_and_gaps_are_waited_for_within_bounds() -> None:
    us = Node("us")
    with running(us), sockets.dial(us.endpoint.listen(), WAIT_S) as sock:
        key = _shake(sock).send_key
        for count, number in enumerate((1, 1, 3, 1, 3, 2)):
            send_frame(sock, _message(number), key, number=count)
        assert [message.meta["n"] for message in us.wait_messages(3)] == [1, 2, 3]
        us.wait(lambda: us.endpoint.stats()["eu"]["duplicates_in"] == 3)
        send_frame(sock, _message(5), key, number=6)
        send_frame(sock, _message(99), key, number=7)
        us.wait(lambda: ("eu", 1, False) in us.peers)
        assert "message 99 of lane 1 follows 3" in str(us.endpoint.stats()["eu"]["last_error"])
        assert len(us.got) == 3
        assert us.endpoint.stats()["eu"]["bytes_received"]["resend"] > 0


@pytest.mark.parametrize("second", [0, 2])
def test_a_frame_that_comes_twice_or_whose_predecessor_is_lost_ends_the_connection(
    second: int,
) -> None:
    us = Node("us")
    with running(us), sockets.dial(us.endpoint.listen(), WAIT_S) as sock:
        key = _shake(sock).send_key
        send_frame(sock, _message(1), key, number=0)
        send_frame(sock, _message(second), key, number=second)
        us.wait(lambda: ("eu", 1, False) in us.peers)
        assert "lost on the way" in str(us.endpoint.stats()["eu"]["last_error"])
        assert [message.meta["n"] for _, message in us.got] == [1]


def test_a_recorded_connection_cannot_be_replayed() -> None:
    us = Node("us")
    with running(us):
        address = us.endpoint.listen()
        recorded = b""
        with sockets.dial(address, WAIT_S) as sock:
            send = partial(send_plain, sock)

            def record(frame: Frame, key: bytes) -> None:
                nonlocal recorded
                recorded += b"".join(frames.encode(frame, key))
                send(frame, key)

            greeting = greet(sock, HandshakeSide(KEY, HELLO, lambda _: NOTHING, record, WAIT_S))
            record(_message(1), greeting.send_key)
            us.wait_messages(1)
        us.wait(lambda: ("eu", 1, False) in us.peers)
        with sockets.dial(address, WAIT_S) as sock:
            sock.settimeout(WAIT_S)
            sock.sendall(recorded)
            while sock.recv(4096):
                pass  # until it is closed
        assert len(us.got) == 1 and us.peers == [("eu", 1, True), ("eu", 1, False)]


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameKind.ACK, {"delivered": [0, 7, 0], "chunks": []}),  # was never sent
        Frame(FrameKind.ACK, {"delivered": [0, 0, 0], "chunks": [1, 2]}),
        Frame(FrameKind.ACK, {}),
        Frame(FrameKind.CHUNK, {"_l": 1, "_n": "one"}),
        Frame(FrameKind.CHUNK, {**_message(1).meta, "_l": 9}, b"payload"),
        Frame(FrameKind.CHUNK, {**_message(1).meta, "_size": 3}, b"payload"),
        Frame(FrameKind.CHUNK, {**_message(1).meta, "_size": 2**60}, b"payload"),
        Frame(FrameKind.BYE, {}),
        Frame(FrameKind.PING, {}, b"payload"),
        Frame(FrameKind.PING, {"at_s": "now"}),
        Frame(FrameKind.REQUEST, {}),
    ],
)
def test_an_authenticated_peer_that_talks_nonsense_loses_its_connection(frame: Frame) -> None:
    us = Node("us")
    with running(us), sockets.dial(us.endpoint.listen(), WAIT_S) as sock:
        send_frame(sock, frame, _shake(sock).send_key)
        us.wait(lambda: us.peers == [("eu", 1, True), ("eu", 1, False)])
        assert "FRAME_INVALID" in str(us.endpoint.stats()["eu"]["last_error"])


@pytest.mark.parametrize(
    "changes",
    [{"attempt": -1}, {"attempt": "x"}, {"instance": None}, {"region": 3}, {"region": "us"}],
)
def test_malformed_hellos_are_refused(changes: dict[str, Any]) -> None:
    us = Node("us")
    with running(us), sockets.dial(us.endpoint.listen(), WAIT_S) as sock:
        with pytest.raises((PeerRefusedError, OSError)):
            _shake(sock, **changes)
        assert not us.peers


def test_a_duplicate_and_a_predecessor_are_refused() -> None:
    us = Node("us")
    with running(us):
        address = us.endpoint.listen()
        with sockets.dial(address, WAIT_S) as sock:
            _shake(sock, attempt=3, instance="first")
            us.wait(lambda: us.peers == [("eu", 3, True)])
        for changes, words in (
            ({"attempt": 3, "instance": "twin"}, "two endpoints claim"),
            ({"attempt": 2, "instance": "first"}, "attempt 2, but its attempt 3"),
        ):
            with (
                sockets.dial(address, WAIT_S) as sock,
                pytest.raises(PeerRefusedError, match=words),
            ):
                _shake(sock, **changes)


# ------------------------------------------------------------------ life


def test_a_peer_with_a_higher_attempt_starts_over() -> None:
    eu, us = Node("eu"), Node("us")
    with running(eu):
        address = join(eu, us)
        for n in range(3):
            eu.say("us", n)
            us.say("eu", n)
        us.wait_messages(3)
        eu.wait_messages(3)
        eu.endpoint.flush("us", WAIT_S)
        us.endpoint.close()
        eu.wait(lambda: ("us", 1, False) in eu.peers)
        eu.say("us", 99)  # meant for the predecessor
        successor = Node("us", attempt=2)
        with running(successor):
            successor.endpoint.listen(port=address[1])
            eu.wait(lambda: ("us", 2, True) in eu.peers)
            eu.say("us", 100)
            successor.endpoint.wait_connected(["eu"], WAIT_S)  # the dialer knows a moment earlier
            successor.endpoint.send("eu", Message("test", {"n": 200}, b"", "update"))
            assert successor.wait_messages(1)[0].meta["n"] == 100
            assert eu.wait_messages(4)[3].meta["n"] == 200
            assert eu.endpoint.stats()["us"]["dropped_out"] == 1
            assert eu.endpoint.stats()["us"]["attempt"] == 2
            assert len(successor.got) == 1
    assert [peer for peer in eu.peers if peer[2]] == [("us", 1, True), ("us", 2, True)]


def test_a_late_listener_receives_the_queued_messages() -> None:
    eu, us = Node("eu"), Node("us")
    with running(eu, us):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = free.getsockname()
        eu.endpoint.connect("us", address)
        eu.say("us", 1)
        with pytest.raises(LinkDownError, match=r"us \(.*refused"):
            eu.endpoint.wait_connected(["us"], 0.3)
        us.endpoint.listen(port=address[1])
        eu.endpoint.wait_connected(["us"], WAIT_S)
        assert us.wait_messages(1)[0].meta["n"] == 1


def test_an_expected_peer_receives_queued_messages_after_dialing() -> None:
    eu, us = Node("eu"), Node("us")
    with running(eu, us):
        address = eu.endpoint.listen()
        with pytest.raises(LinkDownError, match="no link to region us; known are: none"):
            eu.say("us", 0)
        eu.endpoint.expect("us")
        eu.say("us", 1)
        us.endpoint.connect("eu", address)
        assert us.wait_messages(1)[0].meta["n"] == 1
        with pytest.raises(TransportError, match="itself"):
            eu.endpoint.expect("eu")


def test_a_peer_that_moved_is_found_at_its_new_address() -> None:
    eu, us = Node("eu"), Node("us")
    with running(eu, us):
        eu.endpoint.connect("us", ("127.0.0.1", 1))
        address = us.endpoint.listen()
        eu.endpoint.connect("us", address)
        eu.endpoint.wait_connected(["us"], WAIT_S)


def test_two_that_dial_each_other_end_up_with_one_connection() -> None:
    eu, us = Node("eu"), Node("us")
    with running(eu, us):
        addresses = eu.endpoint.listen(), us.endpoint.listen()
        eu.endpoint.connect("us", addresses[1])
        us.endpoint.connect("eu", addresses[0])
        for n in range(200):
            eu.say("us", n)
            us.say("eu", n)
        for node in (eu, us):
            got = [message.meta["n"] for message in node.wait_messages(200)]
            assert got == list(range(200))
        eu.endpoint.wait_connected(["us"], WAIT_S)


def test_close_delivers_what_is_queued_first() -> None:
    eu, us = Node("eu"), Node("us")
    with running(us):
        join(eu, us)
        for n in range(30):
            eu.say("us", n, bytes(100_000))
        eu.endpoint.close()
        assert len(us.got) == 30
        with pytest.raises(LinkDownError, match="closed"):
            eu.say("us", 31)
        eu.endpoint.close()


def test_close_while_strangers_and_dials_are_pending() -> None:
    eu, us = Node("eu"), Node("us")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with running(eu, us):
            eu.endpoint.connect("silent", silent.getsockname())
            address = us.endpoint.listen()
            idle = [socket.create_connection(address) for _ in range(3)]
            connection, _ = silent.accept()
            connection.recv(1)  # the dialer waits for an answer to its hello by now
        for sock in (connection, *idle):
            sock.close()


def test_addresses() -> None:
    eu, us = Node("eu", advertise_host="eu.example.org"), Node("us")
    with running(eu, us):
        with pytest.raises(TransportError, match="does not listen"):
            _ = us.endpoint.advertised
        host, port = us.endpoint.listen("0.0.0.0")
        with pytest.raises(TransportError, match="no address"):
            _ = us.endpoint.advertised
        with pytest.raises(PortInUseError):
            eu.endpoint.listen("0.0.0.0", port)
        _, port = eu.endpoint.listen()
        with pytest.raises(TransportError, match="already"):
            eu.endpoint.listen()
        assert eu.endpoint.advertised == ("eu.example.org", port)
        with pytest.raises(TransportError, match="itself"):
            us.endpoint.connect("us", (host, port))


def test_peers_beyond_the_most_are_refused_and_known_ones_may_return() -> None:
    us, eu, asia, africa = Node("us", max_peers=2), Node("eu"), Node("asia"), Node("africa")
    with running(us, asia, africa):
        with running(eu):
            address = join(eu, us)
            asia.endpoint.connect("us", address)
            asia.endpoint.wait_connected(["us"], WAIT_S)
            us.endpoint.wait_connected(["asia"], WAIT_S)
            africa.endpoint.connect("us", address)
            eventually(
                lambda: "2 other peers" in (africa.endpoint.stats()["us"]["last_error"] or ""),
                "it is refused",
            )
        again = Node("eu", attempt=2)
        with running(again):
            again.endpoint.connect("us", address)
            again.endpoint.wait_connected(["us"], WAIT_S)
        assert sorted(us.endpoint.stats()) == ["asia", "eu"]


# ------------------------------------------------------------------ emulated links


def test_shaped_messages_come_in_order_and_never_early() -> None:
    spec = LinkSpec(rate_mbps=80.0, delay_s=0.03, jitter_s=0.002, loss=0.001)
    size_bytes = 250_000
    clock, arrivals = SystemClock(), []
    eu, us = Node("eu", shaping={"us": LinkModel(spec, 1)}), Node("us")
    us.handler = lambda _: arrivals.append(clock.now_s())
    with running(eu, us):
        join(eu, us)
        began_s = clock.now_s()
        for n in range(5):
            eu.say("us", n, bytes([n]) * size_bytes)
        got = us.wait_messages(5)
        assert [bytes(message.payload[:1]) for message in got] == [bytes([n]) for n in range(5)]
        for n, arrival_s in enumerate(arrivals):
            work_s = (n + 1) * size_bytes * 8 / 80e6
            assert arrival_s - began_s >= work_s + spec.delay_s - 5 * spec.jitter_s
        eu.endpoint.flush("us", WAIT_S)
        assert eu.endpoint.stats()["us"]["bytes_sent"]["update"] > 5 * size_bytes


def test_regions_connect_over_a_link_that_is_slower_than_a_listener_is_patient() -> None:
    """The delay comes before the connection, as on a real link: its first frame is not late."""
    spec, patient = LinkSpec(delay_s=2.5), {"handshake_timeout_s": 60.0, "peer_timeout_s": 60.0}
    eu, us = Node("eu", shaping={"us": LinkModel(spec, 1)}, **patient), Node("us", **patient)
    with running(eu, us):
        clock = SystemClock()
        began_s = clock.now_s()
        us_address = us.endpoint.listen()
        eu.endpoint.connect("us", us_address)
        eu.endpoint.wait_connected(["us"], 60.0)
        assert clock.now_s() - began_s >= 2 * spec.delay_s  # the request and the proof of the key


def test_an_emulated_outage_holds_bytes_back_without_ending_the_connection() -> None:
    spec = LinkSpec(delay_s=0.01, outages=((0.3, 0.8),))
    clock = SystemClock()
    arrivals: list[float] = []
    began_s = clock.now_s()
    common = {"peer_timeout_s": 1.0, "run_start_s": began_s}
    eu = Node("eu", shaping={"us": LinkModel(spec, 1)}, **common)
    us = Node("us", shaping={"eu": LinkModel(spec, 2)}, **common)
    us.handler = lambda _: arrivals.append(clock.now_s())
    with running(eu, us):
        join(eu, us)
        while clock.now_s() < began_s + 0.4:
            clock.sleep_s(0.02)
        eu.say("us", 1)
        us.wait_messages(1)
        assert arrivals[0] - began_s >= 0.8
        assert us.peers == [("eu", 1, True)] and eu.peers == [("us", 1, True)]
        assert eu.endpoint.stats()["us"]["reconnects"] == 0
