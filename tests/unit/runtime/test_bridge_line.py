"""A region's way to its bridge: the next one is awaited, and what earlier ones held is freed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from geo_ray.errors import LinkDownError
from geo_ray.runtime.actors.bridge_line import BridgeLine
from geo_ray.transport.lan.client import LanClient
from geo_ray.transport.lan.server import LanServer

KEY = b"k" * 32
SIZE_BYTES = 4000


@pytest.fixture
def dial() -> Iterator[Callable[[], LanClient]]:
    with ExitStack() as stack:

        def made() -> LanClient:
            server = LanServer("127.0.0.1", KEY, lambda conn, meta, payload: ({}, None))
            stack.callback(server.close)
            hello = {"peer": "eu/lead", "role": "lead"}
            return stack.enter_context(
                LanClient(server.address, KEY, hello, shared_bytes=SIZE_BYTES)
            )

        yield made


def test_memory_of_an_earlier_bridge_is_freed_though_nobody_had_asked_it(
    dial: Callable[[], LanClient],
) -> None:
    first, second = dial(), dial()
    line = BridgeLine("eu", first)
    room_P = line.uplink.room(SIZE_BYTES // 4)
    assert room_P is not None
    room_P.fill_(3.0)
    line.use(second)
    assert not first.is_closed and line.uplink.room(1) is not None
    line.drop_old()
    assert first.is_closed and first.shared is None
    assert room_P.sum() == 3.0 * SIZE_BYTES / 4, "who has it still may read it"
    line.drop_old()
    assert not second.is_closed and line.await_next() is line.uplink


def test_the_next_bridge_is_awaited(dial: Callable[[], LanClient]) -> None:
    first, second = dial(), dial()
    line = BridgeLine("eu", first)
    first.close()
    threading.Timer(0.05, line.use, (second,)).start()
    assert line.await_next() is line.uplink and not line.uplink.is_lost


def test_who_waits_is_told_of_the_end(dial: Callable[[], LanClient]) -> None:
    first = dial()
    line = BridgeLine("eu", first)
    first.close()
    threading.Timer(0.05, line.end, (LinkDownError("closing"),)).start()
    with pytest.raises(LinkDownError, match="closing"):
        line.await_next()
