"""Exactly once and in order, whatever the wire does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from geo_ray.transport.config import TransportConfig
from geo_ray.transport.emulation import LinkModel, LinkSpec
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.lan import LanClient, LanConnection, LanServer
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import EndpointIdentity, Message
from tests.support.flaky_proxy import FlakyProxy
from tests.support.wan_support import leaving_nothing_behind

KEY = b"k" * 32
WAIT_S = 240.0  # never reached when all is well


class Node:
    """An endpoint that records its callbacks, and checks that no call overlaps another."""

    def __init__(self, region: str, attempt: int = 1, **options: Any) -> None:
        self.got: list[tuple[int, int]] = []  # number, payload's checksum
        self.peers: list[tuple[int, bool]] = []
        self.inside = 0
        self.changed = threading.Condition()
        self.handler: Callable[[], None] = lambda: None
        shaping = options.pop("shaping", None)
        quick = {"heartbeat_s": 0.05, "reconnect_min_s": 0.01, "reconnect_max_s": 0.05} | options
        self.endpoint = Endpoint(
            EndpointIdentity("run", region, attempt, KEY),
            self._on_message,
            TransportConfig(**quick),
            shaping=shaping,
            on_peer=self._on_peer,
        )

    def _on_message(self, _: str, message: Message) -> None:
        self.inside += 1
        assert self.inside == 1
        self.handler()
        with self.changed:
            self.got.append((int(str(message.meta["n"])), _sum(message.payload)))
            self.changed.notify_all()
        self.inside -= 1

    def _on_peer(self, _: str, attempt: int, up: bool) -> None:
        with self.changed:
            self.peers.append((attempt, up))
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), (self.got[-3:], self.peers[-3:])

    def say(self, peer: str, n: int, payload: bytes = b"") -> None:
        self.endpoint.send(peer, Message("test", {"n": n}, payload, "update"), WAIT_S)

    def reconnects(self) -> int:
        return next(iter(self.endpoint.stats().values()))["reconnects"]


def _sum(payload: bytes | bytearray | memoryview) -> int:
    return hash(bytes(payload))


class Harm:
    """Does something to a share of the pieces, and to one in the middle of a stream for certain."""

    def __init__(
        self, chance: random.Random, share: float, do: Callable[[bytes], bytes | None]
    ) -> None:
        self.count = 0
        self._chance, self._share, self._do = chance, share, do

    def __call__(self, index: int, direction: int, offset: int, piece: bytes) -> bytes | None:
        if self._chance.random() > self._share and (self.count or offset < 30_000):
            return piece
        self.count += 1
        return self._do(piece)


def errors(*nodes: Node) -> list[str]:
    """Why streams and connections ended; which of them were hit is chance."""
    return [
        str(stats["last_error"])
        for node in nodes
        for stats in node.endpoint.stats().values()
        if stats["last_error"]
    ]


@contextmanager
def linked(eu: Node, us: Node) -> Iterator[FlakyProxy]:
    """Both endpoints, eu dialing us through a proxy."""
    try:
        with FlakyProxy(us.endpoint.listen()) as proxy:
            eu.endpoint.connect("us", proxy.address)
            eu.endpoint.wait_connected(["us"], WAIT_S)
            us.endpoint.wait_connected(["eu"], WAIT_S)
            try:
                yield proxy
            finally:
                proxy.alter = lambda *args: args[3]
                proxy.resume()
                eu.endpoint.close(1.0)
    finally:
        eu.endpoint.close(0.0)
        us.endpoint.close(1.0)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


def _converse(eu: Node, us: Node, count: int, sizes: random.Random) -> None:
    """Both send ``count`` messages of random sizes; everything must arrive once and in order."""
    payloads = {
        node: [sizes.randbytes(sizes.choice((0, 10, 1000, 30_000, 100_000))) for _ in range(count)]
        for node in (eu, us)
    }

    def speak(node: Node, peer: str) -> None:
        for n, payload in enumerate(payloads[node]):
            node.say(peer, n, payload)

    speakers = [threading.Thread(target=speak, args=args) for args in ((eu, "us"), (us, "eu"))]
    for speaker in speakers:
        speaker.start()
    for speaker in speakers:
        speaker.join()
    for node, other in ((eu, us), (us, eu)):
        node.wait(lambda node=node: len(node.got) >= count)  # type: ignore[misc]
        assert node.got == [(n, _sum(payload)) for n, payload in enumerate(payloads[other])]


def test_cut_in_the_middle_of_a_transfer_resumes_and_delivers_once() -> None:
    eu, us = Node("eu"), Node("us")
    with linked(eu, us) as proxy:
        passed = cuts = 0

        def cut_three_times(index: int, direction: int, offset: int, piece: bytes) -> bytes | None:
            nonlocal passed, cuts
            passed += len(piece)
            if cuts < 3 and passed > 3_000_000 * (cuts + 1):
                cuts += 1
                proxy.cut()
            return piece

        proxy.alter = cut_three_times
        big = random.Random(0).randbytes(5_000_000)
        for n in range(3):
            eu.say("us", n, big)
        us.wait(lambda: len(us.got) >= 3)
        assert us.got == [(n, _sum(big)) for n in range(3)]
        assert eu.reconnects() >= 3
        eu.endpoint.flush("us", WAIT_S)
        books = eu.endpoint.stats()["us"]
        assert books["bytes_sent"]["resend"] > 0 and books["messages_out"] == 3
        assert us.peers[0] == (1, True) and us.peers.count((1, False)) >= 3


def test_a_broken_data_stream_keeps_the_connection_and_its_data_is_resent() -> None:
    eu, us = Node("eu"), Node("us")
    with linked(eu, us) as proxy:
        eu.say("us", 0)
        us.wait(lambda: len(us.got) >= 1)
        while not eu.endpoint.stats()["us"]["streams"]:
            time.sleep(0.001)
        cut = 0

        def cut_data_streams(index: int, direction: int, offset: int, piece: bytes) -> bytes | None:
            nonlocal cut
            if index > 0 and direction == 0 and offset > 100_000 and cut < 3:
                cut += 1
                return None
            return piece

        proxy.alter = cut_data_streams
        big = random.Random(0).randbytes(5_000_000)
        for n in range(1, 4):
            eu.say("us", n, big)
        us.wait(lambda: len(us.got) >= 4)
        assert us.got[1:] == [(n, _sum(big)) for n in range(1, 4)]
        assert cut and eu.reconnects() == 0 and us.peers == [(1, True)]


@pytest.mark.parametrize("seed", range(3))
def test_cuts_at_random_in_both_directions(seed: int) -> None:
    chance = random.Random(seed)
    eu, us = Node("eu"), Node("us")
    with linked(eu, us) as proxy:
        proxy.alter = harm = Harm(chance, 0.04, lambda _: None)
        _converse(eu, us, 60, random.Random(seed))
        assert harm.count and errors(eu, us)


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_are_noticed_and_nothing_wrong_is_delivered(seed: int) -> None:
    chance = random.Random(seed)

    def flip(piece: bytes) -> bytes:
        damaged = bytearray(piece)
        damaged[chance.randrange(len(piece))] ^= 1 << chance.randrange(8)
        return bytes(damaged)

    eu, us = (Node(region, peer_timeout_s=0.5, handshake_timeout_s=0.5) for region in ("eu", "us"))
    with linked(eu, us) as proxy:
        proxy.alter = harm = Harm(chance, 0.05, flip)
        _converse(eu, us, 60, random.Random(seed))
        assert harm.count and errors(eu, us)


def test_repeated_and_lost_pieces_of_the_stream_are_noticed() -> None:
    chance = random.Random(1)

    def spoil(piece: bytes) -> bytes:
        return chance.choice((piece * 2, b""))

    eu, us = (Node(region, peer_timeout_s=0.5, handshake_timeout_s=0.5) for region in ("eu", "us"))
    with linked(eu, us) as proxy:
        proxy.alter = harm = Harm(chance, 0.06, spoil)
        _converse(eu, us, 60, random.Random(1))
        assert harm.count and errors(eu, us)


def test_an_unresponsive_peer_counts_as_down_and_is_found_again() -> None:
    eu, us = Node("eu", peer_timeout_s=0.3), Node("us", peer_timeout_s=0.3)
    with linked(eu, us) as proxy:
        proxy.stall()
        proxy.refusing = True
        eu.say("us", 0, b"kept")
        eu.wait(lambda: (1, False) in eu.peers)
        us.wait(lambda: (1, False) in us.peers)
        assert "sent nothing" in str(us.endpoint.stats()["eu"]["last_error"])
        proxy.resume()
        proxy.refusing = False
        us.wait(lambda: len(us.got) == 1)
        assert us.got == [(0, _sum(b"kept"))]
        assert us.peers[-1] == (1, True)


def test_a_long_transfer_over_a_slow_link_is_not_a_timeout() -> None:
    eu, us = Node("eu", peer_timeout_s=0.5), Node("us", peer_timeout_s=0.5)
    with linked(eu, us) as proxy:

        def crawl(index: int, direction: int, offset: int, piece: bytes) -> bytes:
            time.sleep(0.05 if direction == 0 and len(piece) > 10_000 else 0)
            return piece

        proxy.alter = crawl
        big = bytes(2_000_000)
        eu.say("us", 0, big)
        us.wait(lambda: len(us.got) == 1)
        assert eu.reconnects() == 0


def test_a_chunk_that_takes_longer_than_the_limit_arrives_in_the_end() -> None:
    """The wire takes 1.6 seconds for the chunk, the streams are given up after 0.6 at first."""
    eu, us = (Node(region, peer_timeout_s=0.5) for region in ("eu", "us"))
    with linked(eu, us) as proxy:

        def crawl(index: int, direction: int, offset: int, piece: bytes) -> bytes:
            if direction == 0 and len(piece) > 1000:
                time.sleep(0.05)
            return piece

        proxy.piece_bytes, proxy.alter = 2000, crawl
        eu.say("us", 0, bytes(64_000))
        us.wait(lambda: len(us.got) == 1)
        assert us.got == [(0, _sum(bytes(64_000)))]


def test_the_order_holds_when_a_handler_is_slow_over_a_reconnect() -> None:
    eu, us = Node("eu"), Node("us")
    entered, release = threading.Event(), threading.Event()

    def block_once() -> None:
        entered.set()
        release.wait(WAIT_S)

    us.handler = block_once
    with linked(eu, us) as proxy:
        for n in range(5):
            eu.say("us", n)
        assert entered.wait(WAIT_S)
        before = proxy.accepted
        proxy.cut()
        while proxy.accepted == before:
            time.sleep(0.01)
        eu.endpoint.wait_connected(["us"], WAIT_S)
        assert not us.got
        release.set()
        us.wait(lambda: len(us.got) == 5)
        assert [n for n, _ in us.got] == list(range(5))
        us.wait(lambda: us.peers == [(1, True), (1, False), (1, True)])


def test_cuts_on_an_emulated_link() -> None:
    spec = LinkSpec(rate_mbps=400.0, delay_s=0.005, jitter_s=0.001, loss=0.001)
    eu = Node("eu", shaping={"us": LinkModel(spec, 1)})
    us = Node("us", shaping={"eu": LinkModel(spec, 2)})
    chance = random.Random(4)
    with linked(eu, us) as proxy:
        proxy.alter = lambda *args: None if chance.random() < 0.03 else args[3]
        _converse(eu, us, 40, random.Random(4))


_CHILD = """
import sys, time
from geo_ray.transport.endpoint import Endpoint, EndpointIdentity, Message, TransportConfig
attempt, port = int(sys.argv[1]), int(sys.argv[2])
endpoint = Endpoint(
    EndpointIdentity("run", "us", attempt, b"k" * 32),
    lambda peer, m: endpoint.send(peer, Message("echo", m.meta, m.payload, "reply")),
    TransportConfig(heartbeat_s=0.05),
)
print(endpoint.listen(port=port)[1], flush=True)
sys.stdin.read()
endpoint.close()
"""


def test_a_killed_process_is_replaced_by_one_with_a_higher_attempt() -> None:
    def start(attempt: int, port: int) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-c", _CHILD, str(attempt), str(port)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        return child, int(child.stdout.readline())

    eu = Node("eu")
    first, port = start(1, 0)
    with first:
        eu.endpoint.connect("us", ("127.0.0.1", port))
        eu.endpoint.wait_connected(["us"], WAIT_S)
        eu.say("us", 1)
        eu.wait(lambda: len(eu.got) == 1)
        os.kill(first.pid, signal.SIGSTOP)
        eu.say("us", 2, bytes(3_000_000))
        os.kill(first.pid, signal.SIGKILL)
    eu.wait(lambda: (1, False) in eu.peers)
    second, _ = start(2, port)
    with second:
        eu.wait(lambda: (2, True) in eu.peers)
        eu.say("us", 3)
        eu.wait(lambda: len(eu.got) == 2)
        assert [n for n, _ in eu.got] == [1, 3]
        eu.endpoint.close()
        second.communicate("", WAIT_S)
        assert second.returncode == 0


def test_a_killed_lan_client_is_noticed_and_its_memory_is_gone() -> None:
    closed = threading.Event()
    seen: list[Meta] = []

    def handler(connection: LanConnection, meta: Meta, _: object) -> tuple[Meta, None]:
        assert connection.shared is not None
        seen.append(meta)
        return {}, None

    script = (
        "import sys, os, signal\n"
        "from geo_ray.transport.lan import LanClient\n"
        "address = '127.0.0.1', int(sys.argv[1])\n"
        "c = LanClient(address, b'k' * 32, {'peer': 'w'}, shared_bytes=10**6)\n"
        "c.request({'n': 1})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    shm = set(Path("/dev/shm").glob("geo_ray-*"))
    with LanServer("127.0.0.1", KEY, handler, on_close=lambda _: closed.set()) as server:
        subprocess.run([sys.executable, "-c", script, str(server.address[1])], check=False)
        assert closed.wait(WAIT_S)
        assert seen == [{"n": 1}]
        with LanClient(server.address, KEY, {"peer": "next"}, shared_bytes=100) as client:
            client.request({"n": 2})
    assert set(Path("/dev/shm").glob("geo_ray-*")) <= shm
