"""Bridges of a program in this process, with real sockets between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import pytest

from geo_ray.base.errors import NodeLostError
from geo_ray.program.bridge import NodeBridge
from geo_ray.program.rpc import NodeStubs, NodeTable
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.emulation import LinkModel, LinkSpec
from geo_ray.transport.lan import LanConnection, LanServer
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import EndpointIdentity

HOST: Final = "127.0.0.1"
KEYS: Final = {"eu": b"e" * 32, "us": b"u" * 32}


class CrossRegion:
    """A node in us, a caller in eu, and what is between them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._pool = stack.enter_context(ThreadPoolExecutor())  # ends after what it waits for
        self.asked = {"first": threading.Event(), "second": threading.Event()}
        self.go_on = {"first": threading.Event(), "second": threading.Event()}
        for event in self.go_on.values():
            stack.callback(event.set)
        self._node = stack.enter_context(LanServer(HOST, KEYS["us"], self._answer))
        # Half a second on the way, and room for a single answer, which is waited for shorter.
        slow = {"eu": LinkModel(LinkSpec(delay_s=0.5), 0)}
        config = TransportConfig(max_outbox_messages=1, send_deadline_s=0.05)
        self._there = self._bridge("us", 1, slow, config)
        self._stubs = NodeStubs("caller", "eu", KEYS["eu"])
        stack.callback(self._stubs.close)
        self._tables = 0

    def with_bridge(self, attempt: int) -> NodeBridge:
        """Another bridge of eu takes the place of the one before."""
        here = self._bridge("eu", attempt)
        self._there.expect("eu")
        here.connect("us", self._there.addresses[0])
        self._tables += 1
        table = NodeTable(
            self._tables,
            {"node": "us"},
            {"node": self._node.address},
            {"eu": here.addresses[1], "us": self._there.addresses[1]},
        )
        for each in (here, self._there, self._stubs):
            each.use(table)
        return here

    def call(self, method: str) -> Future[bytes]:
        return self._pool.submit(lambda: bytes(self._stubs.call("node", method, b"")))

    def _bridge(
        self,
        region: str,
        attempt: int,
        shaping: Mapping[str, LinkModel] | None = None,
        config: TransportConfig | None = None,
    ) -> NodeBridge:
        identity = EndpointIdentity("run", region, attempt, b"w" * 32)
        bridge = NodeBridge(identity, HOST, KEYS[region], shaping or {}, config=config)
        self._stack.callback(bridge.close)
        return bridge

    def _answer(
        self, connection: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, bytes]:
        method = str(meta["method"])
        self.asked[method].set()
        assert self.go_on[method].wait(60.0)
        return {}, method.encode()


@pytest.fixture
def cross_region() -> Iterator[CrossRegion]:
    with ExitStack() as stack:
        yield CrossRegion(stack)


def test_an_answer_to_an_earlier_bridge_is_no_answer_to_a_call_of_the_next(
    cross_region: CrossRegion,
) -> None:
    before = cross_region.with_bridge(1)
    first = cross_region.call("first")
    assert cross_region.asked["first"].wait(60.0)
    before.close()
    with pytest.raises(NodeLostError):
        first.result(60.0)
    cross_region.with_bridge(2)
    second = cross_region.call("second")
    assert cross_region.asked["second"].wait(60.0)
    cross_region.go_on["first"].set()  # what comes of it goes to the new bridge, before the other
    threading.Timer(1.0, cross_region.go_on["second"].set).start()
    assert second.result(60.0) == b"second"


def test_answers_that_find_no_room_on_the_link_wait_for_it(cross_region: CrossRegion) -> None:
    cross_region.with_bridge(1)
    cross_region.go_on["first"].set()
    calls = [cross_region.call("first") for _ in range(4)]
    assert [call.result(60.0) for call in calls] == [b"first"] * 4
