"""Cuts and damage with and without TLS: what comes again, and what does not."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from geo_ray.transport.security.certs import issue_for_run
from geo_ray.transport.security.tls import TlsBytes
from tests.support.flaky_proxy import FlakyProxy
from tests.support.wan_support import (
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


@pytest.fixture(scope="module")
def certs() -> dict[str, TlsBytes]:
    return issue_for_run("run", ["eu", "us"])


@pytest.fixture(params=["off", "required"])
def pair(request: pytest.FixtureRequest, certs: dict[str, TlsBytes]) -> tuple[Node, Node]:
    eu, us = (
        Node(
            region,
            certificate=certs[region] if request.param == "required" else None,
            tls=request.param,
            max_ahead_bytes=2 * MB,
            handshake_timeout_s=1.0,
            peer_timeout_s=3.0,
        )
        for region in ("eu", "us")
    )
    return eu, us


def test_after_an_outage_only_unacknowledged_data_is_resent(pair: tuple[Node, Node]) -> None:
    eu, us = pair
    cuts, passed = 0, 0
    with running(eu, us), FlakyProxy(us.endpoint.listen()) as proxy:

        def cut_twice(index: int, direction: int, offset: int, piece: bytes) -> bytes:
            nonlocal cuts, passed
            passed += len(piece)
            if cuts < 2 and passed > (cuts + 1) * 12 * MB:
                cuts += 1
                proxy.cut()
            return piece

        proxy.alter = cut_twice
        eu.join(us, proxy.address)
        payloads = [random.Random(n).randbytes(MB) for n in range(40)]
        for n, payload in enumerate(payloads):
            eu.say("us", n, payload)
        messages = us.wait_messages(40)
        eu.endpoint.flush("us", WAIT_S)
        assert numbers_of(messages) == list(range(40))
        assert [bytes(message.payload) for message in messages] == payloads
        about = eu.about("us")
        assert about["reconnects"] >= 2 and about["messages_out"] == 40
        # At most `max_ahead_bytes` can be under way when it is cut, and some is late anyway.
        assert 0 < about["bytes_sent"]["resend"] < 10 * MB
        eu.endpoint.close(1.0)


def test_the_peer_goes_down_and_comes_back(pair: tuple[Node, Node]) -> None:
    eu, us = pair
    with running(eu, us), FlakyProxy(us.endpoint.listen()) as proxy:
        eu.join(us, proxy.address)
        for n in range(3):
            eu.say("us", n, bytes(100_000))
            us.say("eu", n, bytes(100_000))
            us.wait_messages(n + 1)
            eu.wait_messages(n + 1)
            proxy.cut()
            for node in pair:
                node.wait(lambda node=node, n=n: len(node.peers) == 2 * n + 3)  # type: ignore[misc]
        for node, peer in ((eu, "us"), (us, "eu")):
            assert [up for _, _, up in node.peers] == [True, False] * 3 + [True]
            assert numbers_of(node.wait_messages(3)) == [0, 1, 2]
            assert node.about(peer)["encrypted"] == eu.about("us")["encrypted"]
        eu.endpoint.close(1.0)


@pytest.mark.parametrize("seed", range(2))
def test_flipped_bits_are_noticed(pair: tuple[Node, Node], seed: int) -> None:
    eu, us = pair
    chance = random.Random(seed)
    num_damaged = 0

    def flip(index: int, direction: int, offset: int, piece: bytes) -> bytes:
        nonlocal num_damaged
        if chance.random() > 0.03 and (num_damaged or offset < 30_000):
            return piece
        num_damaged += 1
        damaged = bytearray(piece)
        damaged[chance.randrange(len(piece))] ^= 1 << chance.randrange(8)
        return bytes(damaged)

    with running(eu, us), FlakyProxy(us.endpoint.listen()) as proxy:
        eu.join(us, proxy.address)
        proxy.alter = flip
        payloads = [chance.randbytes(chance.choice((10, 5000, 150_000))) for _ in range(60)]
        for n, payload in enumerate(payloads):
            eu.say("us", n, payload)
        messages = us.wait_messages(60)
        assert numbers_of(messages) == list(range(60))
        assert [bytes(message.payload) for message in messages] == payloads
        until(lambda: eu.about("us")["outbox_messages"] == 0)
        assert num_damaged and (eu.about("us")["last_error"] or us.about("eu")["last_error"])
        proxy.alter = lambda *args: args[3]
        eu.endpoint.close(1.0)
