"""A region's way to its bridge: the next one is awaited, and what earlier ones held is freed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from geo_ray.base.errors import LinkDownError
from geo_ray.runtime import bridge
from geo_ray.runtime.bridge import ReconnectingBridgeClient
from geo_ray.transport.lan import LanClient, LanServer

KEY = b"k" * 32
SIZE_BYTES = 4000
servers: list[LanServer] = []


@pytest.fixture
def dial() -> Iterator[Callable[[], LanClient]]:
    servers.clear()
    with ExitStack() as stack:

        def made() -> LanClient:
            server = LanServer("127.0.0.1", KEY, lambda conn, meta, payload: ({}, None))
            servers.append(server)
            stack.callback(server.close)
            hello = {"peer": "eu/primary", "role": "primary"}
            return stack.enter_context(
                LanClient(server.address, KEY, hello, shared_bytes=SIZE_BYTES)
            )

        yield made


def test_memory_of_an_idle_earlier_bridge_is_freed(
    dial: Callable[[], LanClient],
) -> None:
    first, second = dial(), dial()
    line = ReconnectingBridgeClient("eu", first)
    room_P = line.client.buffer(SIZE_BYTES // 4)
    assert room_P is not None
    room_P.fill_(3.0)
    line.use(second)
    assert not first.is_closed and line.client.buffer(1) is not None
    line.drop_old()
    assert first.is_closed and first.shared is None
    assert room_P.sum() == 3.0 * SIZE_BYTES / 4, "who has it still may read it"
    line.drop_old()
    assert not second.is_closed and line.await_next() is line.client


def test_the_next_bridge_is_awaited(dial: Callable[[], LanClient]) -> None:
    first, second = dial(), dial()
    line = ReconnectingBridgeClient("eu", first)
    servers[0].close()
    first.close()
    threading.Timer(0.05, line.use, (second,)).start()
    assert line.await_next() is line.client and not line.client.is_lost


def test_waiting_calls_receive_the_end(dial: Callable[[], LanClient]) -> None:
    first = dial()
    line = ReconnectingBridgeClient("eu", first)
    servers[0].close()
    first.close()
    threading.Timer(0.05, line.end, (LinkDownError("closing"),)).start()
    with pytest.raises(LinkDownError, match="closing"):
        line.await_next()


def test_a_running_bridge_is_dialed_again(dial: Callable[[], LanClient]) -> None:
    first = dial()
    line = ReconnectingBridgeClient("eu", first)
    room_P = line.client.buffer(10)
    assert room_P is not None
    room_P.fill_(3.0)
    first.close()
    again = line.await_next()
    assert again is line.client and not again.is_lost and line.away_s is None
    assert again.request({"op": "x"}, 5.0) == ({}, None)
    assert again.buffer(10) is not None and not again.is_shared(room_P)
    line.drop_old()
    assert room_P.sum() == 30.0, "an open request lies there until it is placed anew"
    line.end(LinkDownError("closing"))
    assert again.is_lost, "what it dialled itself it closes itself"


def test_it_reports_how_long_the_bridge_is_unreachable(dial: Callable[[], LanClient]) -> None:
    first, second = dial(), dial()
    line = ReconnectingBridgeClient("eu", first)
    servers[0].close()
    first.close()
    assert line.away_s is None, "nobody has tried"
    waiting = threading.Thread(target=line.await_next)
    waiting.start()
    while line.away_s is None:
        time.sleep(0.01)
    before_s = line.away_s
    time.sleep(0.1)
    later_s = line.away_s
    assert later_s is not None and later_s > before_s
    line.use(second)
    waiting.join(10.0)
    assert not waiting.is_alive() and line.away_s is None


def test_a_connection_that_breaks_again_and_again_was_never_mended(
    dial: Callable[[], LanClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "_DIAL_S", 0.05)
    line = ReconnectingBridgeClient("eu", dial())
    seen = []
    for _ in range(3):
        line.client.close()
        seen.append(line.away_s)
        line.await_next()
    told = [each for each in seen if each is not None]
    assert len(told) == 2 and told == sorted(told), "counted from the first time on"
    line.end(LinkDownError("closing"))
