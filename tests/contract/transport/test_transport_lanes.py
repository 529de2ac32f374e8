"""Lanes, order, back-pressure and news of peers, over real sockets; orders, never durations."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from geo_ray.transport.emulation import LinkModel, LinkSpec
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.frames import Frame, FrameKind, send_frame, send_plain
from geo_ray.transport.wire.handshake import Greeting, HandshakeSide, greet
from geo_ray.transport.wire.message import BACKGROUND, CONTROL, DATA, LANES, Message, to_meta
from tests.support.wan_support import (
    KEY,
    WAIT_S,
    Node,
    leaving_nothing_behind,
    numbers_of,
    running,
    until,
)

HEADS = 1.1  # bytes on the wire per byte of payload, at most


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


def void(_: object) -> None:
    """Drop a value."""


def _slow(rate_mbps: float) -> dict[str, LinkModel]:
    return {"us": LinkModel(LinkSpec(rate_mbps=rate_mbps, delay_s=0.005), 1)}


# ------------------------------------------------------------------ what goes first


def test_queued_messages_are_sent_by_lane() -> None:
    # One stream: over several, what left first may still arrive last on a busy machine.
    eu, us = (Node(name, shaping=_slow(40.0), max_streams=1) for name in ("eu", "us"))
    with running(eu, us):
        eu.endpoint.connect("us", ("127.0.0.1", 1))  # nobody there: everything is queued
        for n in range(3):
            eu.say("us", n, b"late", BACKGROUND)
        for n in range(8):
            eu.say("us", n, bytes(300_000), DATA)
        for n in range(3):
            eu.say("us", n, b"soon", CONTROL)
        eu.dial(us)
        lanes = [message.lane for message in us.wait_messages(14)]
        last_data = max(at for at, lane in enumerate(lanes) if lane == DATA)
        assert max(at for at, lane in enumerate(lanes) if lane == CONTROL) < last_data
        assert min(at for at, lane in enumerate(lanes) if lane == BACKGROUND) > lanes.index(DATA)
        assert lanes[-1] == BACKGROUND


def test_control_overtakes_a_message_that_is_under_way() -> None:
    eu, us = Node("eu", shaping=_slow(16.0)), Node("us")
    us.handler = lambda message: us.say("eu", 0) if message.payload == b"first" else None
    eu.handler = lambda _: eu.say("us", 2, b"quick", CONTROL)
    with running(eu, us):
        eu.dial(us)
        eu.say("us", 0, b"first")
        eu.say("us", 1, bytes(3_000_000))
        assert numbers_of(us.wait_messages(3)) == [0, 2, 1]


@pytest.mark.parametrize("seed", range(3))
def test_the_order_holds_within_each_lane_over_four_streams(seed: int) -> None:
    chance = random.Random(seed)
    eu, us = (Node(region, min_streams=4, chunk_bytes=16_384) for region in ("eu", "us"))
    sizes = [chance.choice((0, 1, 5000, 16_384, 100_000, 700_000)) for _ in range(150)]
    plan = [(chance.randrange(LANES), chance.randbytes(size)) for size in sizes]
    with running(eu, us):
        eu.dial(us)
        until(lambda: eu.about("us")["streams"] == 4)
        for n, (lane, payload) in enumerate(plan):
            eu.say("us", n, payload, lane)
            us.say("eu", n, payload, lane)
        for node in (us, eu):
            got = node.wait_messages(len(plan))
            for lane in range(LANES):
                mine = [message for message in got if message.lane == lane]
                numbers = [n for n, (planned, _) in enumerate(plan) if planned == lane]
                assert numbers_of(mine) == numbers
                assert all(m.payload == plan[n][1] for m, n in zip(mine, numbers, strict=True))
        assert eu.about("us")["reconnects"] == 0


# ------------------------------------------------------------------ readers


def test_buffers_of_a_slow_reader_are_bounded_and_heartbeats_continue() -> None:
    ahead_bytes, size_bytes, count = 1_000_000, 300_000, 12
    options = {"max_ahead_bytes": ahead_bytes, "min_streams": 2, "heartbeat_s": 0.02}
    eu, us = (Node(name, **options) for name in ("eu", "us"))
    allowed = threading.Semaphore(0)
    us.handler = lambda _: void(allowed.acquire(timeout=WAIT_S))

    def look() -> int:
        """Bytes that arrived and were not delivered; looked at in that order."""
        arrived = us.about("eu")["bytes_received"].get("update", 0)
        held = arrived - us.about("eu")["messages_in"] * size_bytes
        assert held <= ahead_bytes * HEADS + count * size_bytes * (HEADS - 1)
        return arrived

    with running(eu, us):
        eu.dial(us)
        for n in range(count):
            eu.say("us", n, bytes(size_bytes))
        # The first is being handled, and then as many as the bound lets through.
        until(lambda: look() >= (1 + ahead_bytes // size_bytes) * size_bytes)
        for done in range(1, count + 1):
            beats = [
                node.about(peer)["bytes_received"]["transport"] for node, peer in _both(eu, us)
            ]
            while any(
                node.about(peer)["bytes_received"]["transport"] < before + 250
                for (node, peer), before in zip(_both(eu, us), beats, strict=True)
            ):
                look()  # several heartbeats pass in both directions, and nothing more is held
            allowed.release()
            us.wait_messages(done)
        assert numbers_of(us.wait_messages(count)) == list(range(count))
        assert eu.about("us")["reconnects"] == 0 and us.peers == [("eu", 1, True)]
        assert "resend" not in eu.about("us")["bytes_sent"] or (
            eu.about("us")["bytes_sent"]["resend"] < count * size_bytes / 2
        )


def _both(eu: Node, us: Node) -> list[tuple[Node, str]]:
    return [(eu, "us"), (us, "eu")]


def test_a_blocked_reader_holds_up_its_own_messages_only() -> None:
    eu = Node("eu", max_ahead_bytes=100_000)
    us, asia = Node("us"), Node("asia")
    release = threading.Event()
    us.handler = lambda _: void(release.wait(WAIT_S))
    with running(eu, us, asia):
        eu.dial(us)
        eu.dial(asia)
        for n in range(30):
            eu.say("us", n, b"u" * 50_000)
            eu.say("asia", n, b"a" * 50_000)
        got = asia.wait_messages(30)
        assert numbers_of(got) == list(range(30))
        assert all(message.payload == b"a" * 50_000 for message in got)
        assert not us.got
        release.set()
        assert numbers_of(us.wait_messages(30)) == list(range(30))
        assert all(message.payload == b"u" * 50_000 for _, message in us.got)


def test_a_handler_of_one_lane_holds_up_the_others_but_not_their_arrival() -> None:
    """Callbacks of a peer never overlap, whatever the lane."""
    eu, us = Node("eu"), Node("us")
    inside, release, most = 0, threading.Event(), 0

    def handle(_: Message) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        release.wait(WAIT_S)
        inside -= 1

    us.handler = handle
    with running(eu, us):
        eu.dial(us)
        for n in range(4):
            for lane in range(LANES):
                eu.say("us", n, b"x", lane)
        until(lambda: us.about("eu")["bytes_received"].get("update", 0) >= 12)
        release.set()
        us.wait_messages(12)
        assert most == 1


# ------------------------------------------------------------------ news of peers

HELLO: dict[str, Any] = {
    "service": "wan", "run": "run", "region": "eu", "attempt": 1, "instance": "i", "to": "us",
    "stream": 0,
}  # fmt: skip


def _shake(sock: Any, **changes: Any) -> Greeting:
    """The dialer's handshake, by hand."""
    send = partial(send_plain, sock)
    nothing: dict[str, Any] = {"delivered": [0, 0, 0]}
    return greet(sock, HandshakeSide(KEY, HELLO | changes, lambda _: nothing, send, WAIT_S))


def _chunk(number: int) -> Frame:
    message = Message("test", {"n": number}, b"payload", "update")
    return Frame(FrameKind.CHUNK, to_meta(1, number, 0, 7, message), b"payload")


def test_a_connection_that_is_replaced_goes_down_before_the_new_one_comes_up() -> None:
    """As when the peer noticed the loss of a connection first and dials again."""
    us = Node("us")
    with running(us):
        address = us.endpoint.listen()
        socks = []
        for number in range(1, 9):
            socks.append(sockets.dial(address, WAIT_S))
            send_frame(socks[-1], _chunk(number), _shake(socks[-1]).send_key)
            assert numbers_of(us.wait_messages(number))[-1] == number
        news = [("eu", 1, True), ("eu", 1, False)]
        us.wait(lambda: len(us.peers) >= 15)
        assert us.peers == (8 * news)[:-1]
        assert us.about("eu")["connected"] and us.about("eu")["reconnects"] == 7
        for sock in socks:
            sock.close()
        us.wait(lambda: len(us.peers) == 16)
        assert us.peers[-1] == ("eu", 1, False)


def test_a_peer_is_up_before_its_first_message_and_successors_come_in_order() -> None:
    us = Node("us")
    seen: list[tuple[str, int]] = []
    us.handler = lambda message: seen.append(("message", len(us.peers)))
    with running(us):
        address = us.endpoint.listen()
        socks = []
        for attempt in (1, 2, 5):
            socks.append(sockets.dial(address, WAIT_S))
            key = _shake(socks[-1], attempt=attempt, instance=f"i{attempt}").send_key
            send_frame(socks[-1], _chunk(1), key)
            us.wait_messages(len(socks))
        assert us.peers == [
            ("eu", 1, True), ("eu", 1, False), ("eu", 2, True), ("eu", 2, False), ("eu", 5, True)
        ]  # fmt: skip
        assert seen == [("message", 1), ("message", 3), ("message", 5)]
        for sock in socks:
            sock.close()
