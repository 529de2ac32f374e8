"""Whatever ends a thread of the transport, messages pass again afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from geo_ray.base.errors import LinkDownError
from geo_ray.transport.connection import Connection
from geo_ray.transport.dialer import Connector
from geo_ray.transport.flow import FlowControl
from tests.support.wan_support import Node, leaving_nothing_behind, numbers_of, running, until


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Lets the next thread with a certain name fail to start, as without memory."""

    def prepare(prefix: str) -> list[str]:
        start = threading.Thread.start
        failed: list[str] = []

        def fail_once(thread: threading.Thread) -> None:
            if thread.name.startswith(prefix) and not failed:
                failed.append(thread.name)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", fail_once)
        return failed

    return prepare


def _they_talk(eu: Node, us: Node) -> None:
    """Messages that are sent now arrive, both ways."""
    before = len(us.got), len(eu.got)
    eu.say("us", 1, bytes(300_000))
    us.say("eu", 2, bytes(300_000))
    assert numbers_of(us.wait_messages(before[0] + 1))[-1] == 1
    assert numbers_of(eu.wait_messages(before[1] + 1))[-1] == 2


@pytest.mark.parametrize("name", ["wan-dial-", "wan-receive", "wan-deliver-eu"])
def test_a_thread_that_cannot_start_ends_nothing(
    name: str, no_thread: Callable[[str], list[str]]
) -> None:
    eu, us = Node("eu"), Node("us")
    failed = no_thread(name)
    with running(eu, us):
        eu.dial(us)
        until(lambda: bool(failed))
        until(lambda: eu.about("us")["streams"] > 0)
        _they_talk(eu, us)


@pytest.mark.parametrize("name", ["wan-accept", "wan-deliver-us", "wan-us", "wan-watch"])
def test_a_thread_that_cannot_start_is_reported_and_retried(
    name: str, no_thread: Callable[[str], list[str]]
) -> None:
    eu, us = Node("eu"), Node("us")
    with running(eu, us):
        address = None if name == "wan-accept" else us.endpoint.listen()
        no_thread(name)
        with pytest.raises(RuntimeError, match="thread"):
            us.endpoint.listen() if address is None else eu.endpoint.connect("us", address)
        eu.join(us, address or us.endpoint.listen())
        _they_talk(eu, us)


def test_a_fault_in_the_loop_is_reported_and_the_peer_redialed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    eu, us = Node("eu"), Node("us")
    look = FlowControl.look
    failed: list[FlowControl] = []

    def fail_once(flow: FlowControl, *args: float, **flags: bool) -> None:
        if not failed and eu.endpoint.stats().get("us", {}).get("connected"):
            failed.append(flow)
            raise ValueError("a fault of this program")
        look(flow, *args, **flags)  # type: ignore[arg-type]

    monkeypatch.setattr(FlowControl, "look", fail_once)
    with running(eu, us):
        eu.dial(us)
        until(lambda: ("us", 1, False) in eu.peers)
        eu.wait(lambda: eu.peers[-1] == ("us", 1, True))
        _they_talk(eu, us)
        # The newest error is shown: a stream that came too late may have had one since.
        assert any(s["last_error"] for node in (eu, us) for s in node.endpoint.stats().values())
    assert "a fault of this program" in caplog.text


def test_a_fault_while_dialing_is_reported_and_the_peer_redialed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eu, us = Node("eu"), Node("us")
    dial = Connector.dial
    failed: list[object] = []

    def fail_twice(connector: Connector, *args: object) -> object:
        if len(failed) < 2:
            failed.append(args)
            raise ValueError("a fault of this program")
        return dial(connector, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Connector, "dial", fail_twice)
    with running(eu, us):
        address = us.endpoint.listen()
        eu.endpoint.connect("us", address)
        with pytest.raises(LinkDownError, match=r"a fault of this program|never heard of"):
            eu.endpoint.wait_connected(["us"], 0.0)
        eu.join(us, address)
        _they_talk(eu, us)


@pytest.mark.parametrize("stuck", ["the dialer", "the listener"])
def test_a_stuck_loop_is_replaced(stuck: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eu, us = (Node(region, peer_timeout_s=0.2) for region in ("eu", "us"))
    turn, go = Connection._turn, threading.Event()
    held: list[Connection] = []

    def stand_still(connection: Connection) -> None:
        is_meant = connection.dialed == (stuck == "the dialer")
        if is_meant and not held and connection.streams:
            held.append(connection)
            go.wait()
        turn(connection)

    monkeypatch.setattr(Connection, "_turn", stand_still)
    with running(eu, us):
        try:
            eu.dial(us)
            until(lambda: bool(held))
            for node, peer in ((eu, "us"), (us, "eu")):
                node.wait(lambda node=node, peer=peer: node.peers.count((peer, 1, True)) >= 2)
            _they_talk(eu, us)
        finally:
            go.set()
