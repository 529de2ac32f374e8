from __future__ import annotations

import logging
import socket
import threading
import time
from functools import partial
from typing import Any

import pytest

from geo_ray.base.errors import FrameError, LinkDownError, PeerRefusedError, TransportError
from geo_ray.base.output import RateLimitedLog
from geo_ray.base.threads import Workers
from geo_ray.transport.config import LanConfig, TransportConfig
from geo_ray.transport.flow import Heartbeat
from geo_ray.transport.session import Callbacks, Inbox, Incarnation
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.frames import FrameKind, send_plain
from geo_ray.transport.wire.handshake import Greeting, HandshakeSide, greet, welcome
from geo_ray.transport.wire.message import Message


def _side(sock: socket.socket, hello: dict[str, Any], key: bytes = b"k" * 32) -> HandshakeSide:
    return HandshakeSide(
        key, hello, lambda theirs: {"met": theirs["name"]}, partial(send_plain, sock), 30
    )


def test_handshake_identifies_both_ends_and_gives_a_key_per_direction() -> None:
    left, right = socket.socketpair()
    greetings: list[Greeting] = []
    with left, right:
        listener = threading.Thread(
            target=lambda: greetings.append(welcome(right, _side(right, {"name": "b"})))
        )
        listener.start()
        ours = greet(left, _side(left, {"name": "a"}))
        listener.join(30)
    theirs = greetings[0]
    assert ours.hello["name"] == "b" and theirs.hello["name"] == "a"
    assert ours.ready == {"met": "a"} and theirs.ready == {"met": "b"}
    assert (ours.send_key, ours.recv_key) == (theirs.recv_key, theirs.send_key)
    assert ours.send_key != ours.recv_key


def test_a_mirror_is_no_peer() -> None:
    left, right = socket.socketpair()
    with left, right:

        def reflect() -> None:
            while piece := right.recv(4096):
                right.sendall(piece)

        mirror = threading.Thread(target=reflect)
        mirror.start()
        with pytest.raises(PeerRefusedError, match="could not prove"):
            greet(left, _side(left, {"name": "a"}))
        sockets.hang_up(left)
        mirror.join(30)


def test_incarnations_only_go_forward() -> None:
    known = Incarnation("us")
    first = {"attempt": 3, "instance": "a"}
    assert not known.is_same(first)
    assert not known.replace(first)
    assert known.is_same(first)
    assert not known.is_same({"attempt": 4, "instance": "b"})
    for hello in ({"attempt": 3, "instance": "b"}, {"attempt": 2, "instance": "a"}):
        with pytest.raises(PeerRefusedError, match="region us"):
            known.is_same(hello)
    assert known.replace({"attempt": 4, "instance": "b"})
    assert known.attempt == 4


def test_heartbeats_are_due_at_intervals_and_answered_once() -> None:
    beat = Heartbeat(1.0)
    assert [(frame.kind, frame.meta) for frame in beat.frames(10.0)] == [
        (FrameKind.PING, {"at_s": 10.0})
    ]
    assert not beat.frames(10.9) and beat.due_s() == 11.0
    assert beat.due_s(0.1) == pytest.approx(10.1) and len(beat.frames(10.9, 0.1)) == 1
    beat.ping({"at_s": 5.0})
    beat.ping({"at_s": 6.0})
    assert [(frame.kind, frame.meta) for frame in beat.frames(11.0)] == [
        (FrameKind.PONG, {"at_s": 6.0})
    ]
    beat.pong({"at_s": 10.9}, 11.0)
    assert beat.pong({"at_s": 10.9}, 11.1) == pytest.approx(0.2)
    assert beat.rtt_s == pytest.approx(0.2) and beat.rtt_min_s == pytest.approx(0.1)
    with pytest.raises(FrameError):
        beat.ping({"at_s": "now"})


def test_an_inbox_ignores_voided_incarnations_and_survives_handlers_that_fail() -> None:
    got: list[object] = []

    def on_message(_: str, message: Message) -> None:
        got.append(message.meta["n"])
        if message.meta["n"] == 10:
            raise ValueError("the user's own")

    def message(n: int) -> Message:
        return Message("t", {"n": n}, b"", "update")

    callbacks = Callbacks(on_message, lambda *news: got.append(news))
    inbox = Inbox("us", callbacks, lambda *_: None, lambda _: None)
    inbox.restart(1)
    inbox.report_peer(1, is_up=True)
    inbox.add(1, [message(10), message(11)])
    worker = threading.Thread(target=inbox.run)
    worker.start()
    while inbox.delivered != [0, 2, 0]:
        time.sleep(0.001)
    inbox.restart(2)
    inbox.add(1, [message(12)])
    inbox.add(2, [message(20)])
    while inbox.delivered != [0, 1, 0]:
        time.sleep(0.001)
    inbox.close()
    worker.join()
    assert got == [("us", 1, True), 10, 11, 20]


def test_a_topic_is_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test")
    quiet = RateLimitedLog(logger)
    for n in range(100):
        quiet.warning("a", f"a {n}")
    quiet.warning("b", "b 0")
    assert [record.getMessage() for record in caplog.records] == ["a 0", "b 0"]
    caplog.clear()
    loud = RateLimitedLog(logger, interval_s=0.0)
    for n in range(1000):
        loud.warning(f"topic {n}", "x")  # strangers can invent topics: the memory is bounded
    assert len(loud._topics) <= 256


def test_workers_join_those_that_were_started_meanwhile() -> None:
    workers, done = Workers(), threading.Event()
    go = threading.Event()

    def first() -> None:
        go.wait(30)
        workers.start("second", done.set)

    workers.start("first", first)
    threading.Timer(0.05, go.set).start()
    workers.join(30)
    assert done.is_set()


def test_a_host_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(TransportError, match=r"192\.0\.2\.1"):
        sockets.listen("192.0.2.1", 0)
    with pytest.raises(OSError):
        sockets.dial(("127.0.0.1", 1), 1.0)


def test_sockets_are_tuned_where_the_kernel_can() -> None:
    with (
        sockets.listen("127.0.0.1", 0) as listener,
        sockets.dial(sockets.address_of(listener), 10.0) as sock,
    ):
        sockets.tune(sock, ack_timeout_s=5.0, congestion="no such thing")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.gettimeout() is None


def test_limits_come_from_the_configuration() -> None:
    assert not LanConfig(digest_payload=False).limits().payload_digest
    limits = TransportConfig(max_payload_bytes=5, max_meta_bytes=6).limits()
    assert (limits.max_payload_bytes, limits.max_meta_bytes) == (5, 6)
    assert limits.payload_digest
    assert LinkDownError("x").exit_code == 6
