"""Ten thousand connections that lead nowhere, beside a peer that talks all the time."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from geo_ray.transport.security.certs import issue_for_run
from geo_ray.transport.wire.frames import Frame, FrameKind, encode
from geo_ray.transport.wire.sockets import Address
from tests.support.wan_support import (
    WAIT_S,
    Node,
    leaving_nothing_behind,
    numbers_of,
    running,
    until,
)

CONNECTIONS = 10_000
WAVE = 500  # open at the same time
MAX_HANDSHAKES = 32
MAX_GROWTH_BYTES = 64 * 1024**2

HELLO = b"".join(encode(Frame(FrameKind.HELLO, {"service": "wan", "run": "x"}), b"any"))
TALK: list[tuple[str, bytes]] = [
    ("silence", b""),
    ("garbage", bytes(range(256)) * 4),
    ("half a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60)),
    ("half a frame", HELLO[:-5]),
    ("a whole wrong hello", HELLO),
]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextmanager
def _talking(eu: Node, us: Node) -> Iterator[Callable[[], int]]:
    """Messages both ways without end; says how many each side has sent."""
    stop, said = threading.Event(), 0

    def talk() -> None:
        nonlocal said
        while not stop.wait(0.005):
            eu.say("us", said, b"e" * 2000)
            us.say("eu", said, b"u" * 2000)
            said += 1

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield lambda: said
    finally:
        stop.set()
        thread.join()


def _wave(address: Address, talk: list[bytes]) -> None:
    socks: list[socket.socket] = []
    try:
        for said in talk:
            sock = socket.create_connection(address, WAIT_S)
            socks.append(sock)
            with suppress(OSError):  # it may be refused already
                sock.sendall(said)
    finally:
        for sock in socks:
            sock.close()


def test_ten_thousand_connections_cause_no_harm() -> None:
    certs = issue_for_run("run", ["eu", "us"])
    options = {"max_handshakes": MAX_HANDSHAKES, "handshake_timeout_s": 0.5}
    eu, us = (Node(name, certificate=certs[name], **options) for name in ("eu", "us"))
    asia = Node("asia")
    with running(eu, us, asia):
        address = eu.dial(us)
        with _talking(eu, us) as said:
            until(lambda: said() >= 20)
            threads, before_bytes, most_bytes, most_threads = threading.active_count(), 0, 0, 0
            for wave in range(CONNECTIONS // WAVE):
                heard = said()
                talk = [TALK[n % len(TALK)][1] for n in range(wave, wave + WAVE)]
                _wave(address, talk)
                if not wave:
                    before_bytes = _rss_bytes()  # with what the first ones made Python load
                most_bytes = max(most_bytes, _rss_bytes())
                most_threads = max(most_threads, threading.active_count())
                until(lambda heard=heard: said() > heard)  # type: ignore[misc]
        assert most_threads <= threads + MAX_HANDSHAKES
        assert most_bytes - before_bytes < MAX_GROWTH_BYTES
        for node in (eu, us):
            assert numbers_of(node.wait_messages(said())) == list(range(said()))
        assert eu.about("us")["reconnects"] == us.about("eu")["reconnects"] == 0
        assert eu.peers == [("us", 1, True)] and us.peers == [("eu", 1, True)]
        assert set(us.endpoint.stats()) == {"eu"}
        asia.join(us, address)  # newcomers are welcome again
        asia.say("us", 1)
        us.wait(lambda: any(peer == "asia" for peer, _ in us.got))


def test_connections_that_fill_all_places_lose_them_at_the_timeout() -> None:
    eu, us = Node("eu"), Node("us", max_handshakes=4, handshake_timeout_s=0.5)
    with running(eu, us):
        address = us.endpoint.listen()
        socks = [socket.create_connection(address, WAIT_S) for _ in range(12)]
        for n, sock in enumerate(socks):
            with suppress(OSError):
                sock.sendall(TALK[n % 4][1][:20])
        eu.join(us, address)
        for sock in socks:
            sock.settimeout(WAIT_S)
            with suppress(ConnectionError):
                while sock.recv(4096):
                    pass  # until it is closed
            sock.close()
        eu.say("us", 1)
        assert numbers_of(us.wait_messages(1)) == [1]
