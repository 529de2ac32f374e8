"""Calls between the processes of a program: addresses, connections, and the server of one node.

Calls within a region are direct; calls to other regions go through the region's bridge.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from geo_ray.base.errors import (
    FrameError,
    LinkDownError,
    NodeEndedError,
    NodeLostError,
    TransportError,
)
from geo_ray.program.calls import RETURN_S, NodeHost, OutgoingCalls, TrafficCounter
from geo_ray.program.clock import NodeContext, RealClock
from geo_ray.program.serialization import SerializedNode
from geo_ray.transport.lan import LanClient, LanConnection, LanServer
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import Buffer
from geo_ray.transport.wire.sockets import Address


@dataclass(frozen=True, slots=True)
class NodeTable:
    """One version of the addresses.

    Attributes:
        number: a higher one is newer.
        regions: of all instances.
        nodes: addresses of ready nodes.
        bridges: addresses for the processes of their own region.
    """

    number: int = 0
    regions: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, Address] = field(default_factory=dict)
    bridges: Mapping[str, Address] = field(default_factory=dict)

    def plain(self) -> list[Any]:
        """Return plain values for `pack`."""
        return [self.number, dict(self.regions), dict(self.nodes), dict(self.bridges)]

    @classmethod
    def of_plain(cls, plain: Any) -> NodeTable:
        """The inverse of `plain`.

        Raises:
            FrameError: the value is invalid.
        """
        try:
            number, regions, nodes, bridges = plain
            return cls(int(number), dict(regions), _addresses(nodes), _addresses(bridges))
        except (TypeError, ValueError) as error:
            raise FrameError(f"not a table of nodes: {error}") from error


def _addresses(plain: Any) -> dict[str, Address]:
    return {str(name): (str(host), int(port)) for name, (host, port) in dict(plain).items()}


FOREVER_S: Final = 365 * 86400.0
"""No time limit: a node may answer at any time, and sockets detect the end of its process."""

_CONNECT_S: Final = (0.5, 10.0)  # first attempt, after which the table may change; last one
_RETRY_S: Final = 0.2


class NodeStubs:
    """Reused connections to the other processes.

    Args:
        name: of this process, as the others see it.
        region: of this process.
        key: of its region.
    """

    def __init__(self, name: str, region: str, key: bytes) -> None:
        self._name, self._region, self._key = name, region, key
        self._changed = threading.Condition()  # guards the attributes below
        self._table = NodeTable()
        self._idle: dict[Address, list[LanClient]] = defaultdict(list)
        self._is_closed = False

    def use(self, table: NodeTable) -> None:
        """Use a newer table; close connections to processes that are gone."""
        with self._changed:
            if table.number <= self._table.number:
                return
            self._table = table
            known = {*table.nodes.values(), *table.bridges.values()}
            gone = [a for a in self._idle if a not in known]
            closing = [client for address in gone for client in self._idle.pop(address)]
            self._changed.notify_all()
        for client in closing:
            client.close()

    def call(self, target: str, method: str, request: bytes) -> bytes | memoryview:
        """Send a call to an instance and return its result.

        Raises:
            NodeLostError: its process ended meanwhile, or does not return.
            NodeEndedError: this process ends.
            ProgramError: the error of the call.
        """
        region = self._table.regions.get(target)
        if region is None:
            raise NodeLostError(f"{target}: there is no such node")
        meta: Meta = {"do": "call", "target": target, "method": method}
        if region != self._region:
            meta["region"] = region
        client = self._client(target, region)
        try:
            _, answer = client.request(meta, request, timeout_s=FOREVER_S)
        except LinkDownError as error:
            raise NodeLostError(f"{target}.{method}: {error.message}") from error
        finally:
            self._keep(client)
        return b"" if answer is None else answer

    def close(self) -> None:
        """Close every connection that is not in use."""
        with self._changed:
            self._is_closed = True
            idle = [client for clients in self._idle.values() for client in clients]
            self._idle.clear()
            self._changed.notify_all()
        for client in idle:
            client.close()

    def _client(self, target: str, region: str) -> LanClient:
        deadline_s = time.monotonic() + RETURN_S
        patience_s, most_s = _CONNECT_S
        while True:
            number, address = self._await_address(target, region, deadline_s)
            with self._changed:
                clients = self._idle[address]
                if clients:
                    return clients.pop()
            try:
                return LanClient(
                    address, self._key, {"peer": self._name}, connect_timeout_s=patience_s
                )
            except TransportError as error:
                # A restart is announced by a newer table; a busy machine may only be slow to
                # answer.
                if time.monotonic() > deadline_s:
                    raise NodeLostError(f"{target}: {error.message}") from error
                patience_s = min(2 * patience_s, most_s)
                with self._changed:
                    self._changed.wait_for(partial(self._is_newer_than, number), _RETRY_S)

    def _is_newer_than(self, number: int) -> bool:
        return self._is_closed or self._table.number > number

    def _await_address(self, target: str, region: str, deadline_s: float) -> tuple[int, Address]:
        def address() -> Address | None:
            table = self._table
            return (
                table.nodes.get(target)
                if region == self._region
                else table.bridges.get(self._region)
            )

        with self._changed:
            left_s = max(0.0, deadline_s - time.monotonic())
            self._changed.wait_for(lambda: self._is_closed or address() is not None, left_s)
            if self._is_closed:
                raise NodeEndedError(f"{target} was called, but the program has ended")
            found = address()
            if found is None:
                raise NodeLostError(f"{target} did not come back within {RETURN_S:g} s")
            return self._table.number, found

    def _keep(self, client: LanClient) -> None:
        with self._changed:
            table = self._table
            known = client.address in table.nodes.values() or client.address in (
                table.bridges.values()
            )
            if not client.is_closed and not self._is_closed and known:
                self._idle[client.address].append(client)
                return
        client.close()


class NodeServer:
    """Hosts an instance, answers calls of its region over sockets, and runs it.

    Args:
        serialized: the instance.
        on: processes or ray.
        host: address of this machine to listen on.
        key: key of its region.
    """

    def __init__(self, serialized: SerializedNode, on: str, host: str, key: bytes) -> None:
        self._serialized, self._on = serialized, on
        self._clock = RealClock()
        self._counter = TrafficCounter()
        self._stubs = NodeStubs(serialized.name, serialized.region, key)
        self._host: NodeHost | None = None
        self._ended = threading.Event()
        self._lan = LanServer(host, key, self._answer)

    @property
    def address(self) -> Address:
        """Its address for calls."""
        return self._lan.address

    def use(self, table: NodeTable) -> None:
        """Use a newer table."""
        self._stubs.use(table)

    def stand(self) -> bool:
        """Make the node; return whether it has a ``run``.

        Raises:
            NodeUnshippableError: its function is not in this process.
            NodeFailedError: it raised.
        """
        serialized = self._serialized
        calls = OutgoingCalls(self._clock, self._stubs.call, self._counter)
        place = NodeContext(
            serialized.name, serialized.region, serialized.replica, self._on, self._clock
        )
        host = NodeHost(
            serialized.made_by(),
            serialized.given(),
            serialized.calls_at_once,
            place,
            calls,
            serialized.names,
        )
        host.stand()
        self._host = host
        return host.has_run

    def run(self) -> bytes:
        """Run its ``run`` and return the result.

        Raises:
            NodeFailedError: it raised.
        """
        return self._standing().run()

    def attend(self) -> None:
        """Return when the server is closed."""
        self._ended.wait()

    def counts(self) -> dict[str, list[int]]:
        """See `TrafficCounter.counts`."""
        return self._counter.counts()

    def close(self) -> None:
        """Stop answering calls."""
        self._ended.set()
        self._clock.close()
        self._stubs.close()
        self._lan.close(0.5)

    def answer(self, method: str, request: Any) -> bytes:
        """Answer a call that arrived over any path.

        Raises:
            NodeLostError: the node is not made yet.
            ProgramError: the error of the call.
        """
        return self._standing().answer(method, request)

    def _answer(
        self, connection: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, Buffer | None]:
        target = fields.text(meta, "target")
        if target != self._serialized.name:  # the caller has an outdated address
            raise NodeLostError(f"{target} is gone; {self._serialized.name} has its address")
        request = b"" if payload is None else payload
        return {}, self.answer(fields.text(meta, "method"), request)

    def _standing(self) -> NodeHost:
        if self._host is None:
            raise NodeLostError(f"node {self._serialized.name!r} is not created yet")
        return self._host
