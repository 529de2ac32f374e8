"""Peers that have the key and ignore the rules: what they can make a host hold."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest

from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.frames import Frame, FrameKind, send_frame, send_plain
from geo_ray.transport.wire.handshake import HandshakeSide, greet
from geo_ray.transport.wire.message import DATA, LANES, Message, to_meta
from geo_ray.transport.wire.sockets import Address
from tests.support.wan_support import (
    KEY,
    WAIT_S,
    Node,
    leaving_nothing_behind,
    numbers_of,
    running,
    until,
)

MB = 1_000_000


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


class Rogue:
    """Region eu's end of a control stream, made by hand."""

    def __init__(self, stack: ExitStack, address: Address, region: str = "eu") -> None:
        self._sock: socket.socket = stack.enter_context(sockets.dial(address, WAIT_S))
        hello: dict[str, Any] = {
            "service": "wan", "run": "run", "region": region, "attempt": 1, "instance": "i",
            "to": "us", "stream": 0,
        }  # fmt: skip
        ready: dict[str, Any] = {"delivered": [0] * LANES}
        send = partial(send_plain, self._sock)
        self._key = greet(
            self._sock, HandshakeSide(KEY, hello, lambda _: ready, send, WAIT_S)
        ).send_key
        self._frames = 0

    def say(self, number: int, size_bytes: int, chunk: bytes, offset: int = 0) -> None:
        """Send a chunk of a message that is announced to have so many bytes."""
        message = Message("test", {"n": number}, b"", "update")
        meta = to_meta(DATA, number, offset, size_bytes, message)
        send_frame(self._sock, Frame(FrameKind.CHUNK, meta, chunk), self._key, number=self._frames)
        self._frames += 1


def test_messages_that_are_begun_and_never_end_are_bounded() -> None:
    us = Node("us", max_ahead_bytes=10 * MB)
    with running(us), ExitStack() as stack:
        rogue = Rogue(stack, us.endpoint.listen())
        for number in range(1, 5):
            rogue.say(number, 3 * MB, b"begun")
        us.wait(lambda: ("eu", 1, False) in us.peers)
        assert "12000000 bytes under way in lane 1" in str(us.about("eu")["last_error"])


def test_messages_whose_handler_is_slow_are_bounded() -> None:
    us, go = Node("us", max_ahead_bytes=10 * MB), threading.Event()

    def wait(_: Message) -> None:
        go.wait(WAIT_S)

    us.handler = wait
    with running(us), ExitStack() as stack:
        rogue = Rogue(stack, us.endpoint.listen())
        payload = bytes(MB // 2)
        for number in range(1, 23):  # the first one is with its handler
            rogue.say(number, len(payload), payload)
        until(lambda: us.about("eu")["last_error"] is not None)
        go.set()
        us.wait(lambda: ("eu", 1, False) in us.peers)
        assert "under way in lane 1; limit 10000000" in str(us.about("eu")["last_error"])
        assert len(us.got) <= 21


def test_a_copy_of_a_chunk_cannot_be_as_large_as_a_message() -> None:
    us = Node("us")
    with running(us), ExitStack() as stack:
        rogue = Rogue(stack, us.endpoint.listen())
        with suppress(OSError):  # it is refused before all was sent
            rogue.say(1, 2 * MB, bytes(2 * MB))
        us.wait(lambda: ("eu", 1, False) in us.peers)
        assert "payload has 2000000 bytes" in str(us.about("eu")["last_error"])


def test_all_peers_together_are_bounded_and_valid_ones_get_through() -> None:
    # Beside one of the rogues there is room for all that the peer sends, over all its streams.
    us, eu = Node("us", max_held_bytes=50 * MB), Node("eu")
    with running(us, eu), ExitStack() as stack:
        address = us.endpoint.listen()
        rogues = [Rogue(stack, address, region) for region in ("a", "b")]
        rogues[0].say(1, 30 * MB, b"begun")
        us.wait(lambda: ("a", 1, True) in us.peers)
        rogues[1].say(1, 30 * MB, b"begun")
        us.wait(lambda: any(news in us.peers for news in (("a", 1, False), ("b", 1, False))))
        errors = str([us.about(region)["last_error"] for region in ("a", "b")])
        assert "60000000 bytes would wait for their handlers; limit 50000000" in errors
        eu.join(us, address)
        for n in range(20):
            eu.say("us", n, bytes(MB))
        us.wait(lambda: sum(peer == "eu" for peer, _ in us.got) == 20)
        assert numbers_of([m for peer, m in us.got if peer == "eu"]) == list(range(20))
