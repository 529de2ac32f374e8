"""Strangers that connect inside a region, and a worker that wants to get in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from geo_ray.transport.lan import LanClient, LanServer
from tests.support.strangers_support import TALK, strangers, true_hello
from tests.support.wan_support import KEY, WAIT_S, leaving_nothing_behind, until

STRANGERS = 400


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


def _answer(*_: object) -> tuple[dict[str, int], None]:
    return {"ok": 1}, None


@pytest.mark.parametrize("talk", [*TALK, "a true hello"])
def test_strangers_take_no_threads_of_a_server_inside_a_region(talk: str) -> None:
    said = TALK.get(talk, true_hello("lan", peer="w"))
    with LanServer("127.0.0.1", KEY, _answer) as server:
        before = threading.active_count()
        with strangers(server.address, said, "127.0.0.1", STRANGERS if talk in TALK else 40):
            assert threading.active_count() <= before + 32
            with LanClient(server.address, KEY, {"peer": "w"}) as client:
                assert client.request({})[0] == {"ok": 1}


def test_a_server_inside_a_region_outlives_a_thread_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    failed: list[str] = []

    def fail_once(thread: threading.Thread) -> None:
        if thread.name.startswith("lan-") and thread.name != "lan-accept" and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with LanServer("127.0.0.1", KEY, _answer) as server:
        with socket.create_connection(server.address, WAIT_S) as sock:
            with suppress(OSError):
                sock.sendall(true_hello("lan", peer="w"))
            until(lambda: bool(failed))
        with LanClient(server.address, KEY, {"peer": "w"}) as client:
            assert client.request({})[0] == {"ok": 1}
