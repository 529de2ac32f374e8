"""An instance in a process of its own."""

from __future__ import annotations

import threading
from typing import Any

from geo_ray.errors import NodeLostError
from geo_ray.program.apart.peers import NodePeers
from geo_ray.program.apart.shipped import ShippedNode
from geo_ray.program.apart.table import NodeTable
from geo_ray.program.caller import OutgoingCalls
from geo_ray.program.clock import RealClock
from geo_ray.program.host import NodeHost
from geo_ray.program.surroundings import NodeSurroundings
from geo_ray.program.traffic import TrafficCounter
from geo_ray.transport.lan.server import LanConnection, LanServer
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.frames import Buffer
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address


class NodeServer:
    """Holds an instance, answers calls of its region over sockets, and runs it.

    Args:
        shipped: the instance.
        on: processes or ray.
        host: address of this machine to listen on.
        key: of its region.
    """

    def __init__(self, shipped: ShippedNode, on: str, host: str, key: bytes) -> None:
        self._shipped, self._on = shipped, on
        self._clock = RealClock()
        self._counter = TrafficCounter()
        self._peers = NodePeers(shipped.name, shipped.region, key)
        self._host: NodeHost | None = None
        self._ended = threading.Event()
        self._lan = LanServer(host, key, self._answer)

    @property
    def address(self) -> Address:
        """Where it answers calls."""
        return self._lan.address

    def use(self, table: NodeTable) -> None:
        """Take a newer table."""
        self._peers.use(table)

    def stand(self) -> bool:
        """Make the node; whether it has a ``run``.

        Raises:
            NodeUnshippableError: its function is not here.
            NodeFailedError: it raised.
        """
        shipped = self._shipped
        calls = OutgoingCalls(self._clock, self._peers.call, self._counter)
        place = NodeSurroundings(
            shipped.name, shipped.region, shipped.replica, self._on, self._clock
        )
        host = NodeHost(
            shipped.made_by(), shipped.given(), shipped.calls_at_once, place, calls, shipped.names
        )
        host.stand()
        self._host = host
        return host.has_run

    def run(self) -> bytes:
        """What its ``run`` returns.

        Raises:
            NodeFailedError: it raised.
        """
        return self._standing().run()

    def attend(self) -> None:
        """Return at the end."""
        self._ended.wait()

    def counts(self) -> dict[str, list[int]]:
        """See `TrafficCounter.counts`."""
        return self._counter.counts()

    def close(self) -> None:
        """Answer nothing any more."""
        self._ended.set()
        self._clock.close()
        self._peers.close()
        self._lan.close(0.5)

    def answer(self, method: str, request: Any) -> bytes:
        """Answer a call that came here by whatever way.

        Raises:
            NodeLostError: the node is not made yet.
            ProgramError: what came of it.
        """
        return self._standing().answer(method, request)

    def _answer(
        self, connection: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, Buffer | None]:
        target = fields.text(meta, "target")
        if target != self._shipped.name:  # that one had this address before, and is gone
            raise NodeLostError(f"{target} is not there any more; {self._shipped.name} is")
        request = b"" if payload is None else payload
        return {}, self.answer(fields.text(meta, "method"), request)

    def _standing(self) -> NodeHost:
        if self._host is None:
            raise NodeLostError(f"node {self._shipped.name!r} does not stand yet")
        return self._host
