"""Strangers that hold connections for as long as they can, and a peer that wants to get in."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.strangers_support import TALK, strangers, true_hello
from tests.support.wan_support import Node, leaving_nothing_behind, numbers_of, running

FOR_EVER_S = 1000.0  # longer than the test
PLACES = 4
STRANGERS = 100


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


WAN_HELLO = true_hello(
    "wan", run="run", region="ap", attempt=1, instance="i", to="us", stream=0, link=""
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
@pytest.mark.parametrize("talk", [*TALK, "a true hello"])
def test_strangers_that_never_go_keep_no_peer_out(talk: str, host: str) -> None:
    options = {"max_handshakes": PLACES, "handshake_timeout_s": FOR_EVER_S}
    eu, us = Node("eu"), Node("us", **options)
    with running(eu, us):
        address = us.endpoint.listen()
        before = threading.active_count()
        # Those who know a peer's hello take a place each, for half a second at least.
        count = STRANGERS if talk in TALK else 4 * PLACES
        with strangers(address, TALK.get(talk, WAN_HELLO), host, count):
            assert threading.active_count() <= before + PLACES
            eu.join(us, address)
            eu.say("us", 1, bytes(300_000))
            assert numbers_of(us.wait_messages(1)) == [1]


def test_more_connections_than_can_wait_make_room_for_each_other() -> None:
    eu, us = Node("eu"), Node("us", handshake_timeout_s=FOR_EVER_S)
    with running(eu, us):
        address = us.endpoint.listen()
        with strangers(address, b"", "127.0.0.1", 700):
            eu.join(us, address)
