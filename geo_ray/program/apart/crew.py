"""Instances in processes of their own: one table of who is where, and a bridge per region."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

from geo_ray.errors import GeoRayError, NodeFailedError
from geo_ray.program.apart.shipped import ShippedNode, ship
from geo_ray.program.apart.table import NodeTable
from geo_ray.program.clock import ProgramClock
from geo_ray.program.graph import Program
from geo_ray.program.node import NodeInstance
from geo_ray.runtime.control.restarts import Restarts
from geo_ray.transport.wire.sockets import Address

_LOGGER = logging.getLogger(__name__)
_BRIDGE_RESTARTS = (3, 60.0)


class RemoteNode(Protocol):
    """The near end of an instance; what it does is that of `NodeServer`."""

    address: Address

    def use(self, table: NodeTable) -> None:
        """Tell it a newer table."""

    def stand(self) -> bool:
        """Have the node made; whether it has a ``run``."""

    def run(self) -> bytes:
        """What its ``run`` returns."""

    def attend(self) -> None:
        """Return, or raise, once its process has ended."""

    def counts(self) -> dict[str, list[int]]:
        """Its calls."""

    def end(self) -> None:
        """End its process, which may be gone."""


class RemoteBridge(Protocol):
    """The near end of a bridge; what it does is that of `NodeBridge`."""

    addresses: tuple[Address, Address]

    def connect(self, region: str, address: Address) -> None:
        """Have it keep a link."""

    def expect(self, region: str) -> None:
        """Tell it that another bridge will connect."""

    def use(self, table: NodeTable) -> None:
        """Tell it a newer table."""

    def attend(self) -> None:
        """Return, or raise, once its process has ended."""

    def end(self) -> None:
        """End its process, which may be gone."""


class NodeMaker(Protocol):
    """Makes processes, by whatever means."""

    def begin(self) -> None:
        """Bring up what is there before all processes."""

    def node(self, shipped: ShippedNode, incarnation: int) -> RemoteNode:
        """A process for an instance."""

    def bridge(self, region: str, epoch: int) -> RemoteBridge:
        """A process for a region's bridge."""

    def end(self) -> None:
        """End all that it has made."""


class ApartCrew:
    """See `NodeCrew`.

    Args:
        program: the whole.
        maker: of processes.
        clock: for threads.

    Raises:
        NodeUnshippableError: a node cannot be sent to another process.
    """

    def __init__(self, program: Program, maker: NodeMaker, clock: ProgramClock) -> None:
        self._shipped = ship(program)
        self._maker, self._clock = maker, clock
        self._nodes: dict[str, RemoteNode] = {}
        self._bridges: dict[str, RemoteBridge] = {}
        self._counts: dict[str, list[dict[str, list[int]]]] = defaultdict(list)
        self._lock = threading.RLock()  # guards the table and all above
        self._table = NodeTable(1, {name: each.region for name, each in self._shipped.items()})
        self._crossing = sorted(
            {r for e in program.edges if e.crosses for r in (e.source_region, e.target_region)}
            & {each.region for each in self._shipped.values()}
        )
        self._is_ending = False

    def begin(self, alarm: Callable[[BaseException], None]) -> None:
        """See `NodeCrew.begin`."""
        self._maker.begin()
        made: dict[str, Future[RemoteBridge]] = {region: Future() for region in self._crossing}
        for region, future in made.items():  # at the same time: each is a process to be started
            self._clock.start(partial(_settle, future, partial(self._maker.bridge, region, 1)))
        for region, future in made.items():
            self._clock.wait(future)
            self._bridges[region] = future.result()
        for region in self._crossing:
            self._link(region, [other for other in self._crossing if other < region])
        self._tell(bridges={r: b.addresses[1] for r, b in self._bridges.items()})
        for region in self._crossing:
            self._clock.start(partial(self._watch_bridge, region, alarm))

    def start(self, instance: NodeInstance, incarnation: int) -> bool:
        """See `NodeCrew.start`."""
        name = instance.name
        self._drop(name)
        node = self._maker.node(self._shipped[name], incarnation)
        with self._lock:
            self._nodes[name] = node
            table = self._table
        with self._dropped_if_lost(name):
            node.use(table)
            runs = node.stand()
        self._tell(nodes={name: node.address})
        return runs

    def run(self, name: str) -> bytes:
        """See `NodeCrew.run`."""
        with self._dropped_if_lost(name):
            return self._nodes[name].run()

    def attend(self, name: str) -> None:
        """See `NodeCrew.attend`."""
        with self._dropped_if_lost(name):
            self._nodes[name].attend()

    def counts(self) -> Mapping[str, list[dict[str, list[int]]]]:
        """See `NodeCrew.counts`. What an instance counted that was killed is lost with it."""
        with self._lock:
            nodes = dict(self._nodes)
        found = {name: list(counts) for name, counts in self._counts.items()}
        for name, node in nodes.items():
            with suppress(GeoRayError):
                found.setdefault(name.partition("/")[0], []).append(node.counts())
        return found

    def end(self) -> None:
        """See `NodeCrew.end`."""
        self._is_ending = True
        self._maker.end()

    # ------------------------------------------------------------------ the table

    @contextmanager
    def _dropped_if_lost(self, name: str) -> Iterator[None]:
        try:
            yield
        except GeoRayError:
            self._drop(name)
            raise

    def _drop(self, name: str) -> None:
        """Forget an incarnation: calls wait for the next one."""
        with self._lock:
            node = self._nodes.pop(name, None)
        if node is None or self._is_ending:
            return
        with suppress(GeoRayError):
            self._counts[name.partition("/")[0]].append(node.counts())
        node.end()
        self._tell(gone=name)

    def _tell(
        self,
        nodes: Mapping[str, Address] | None = None,
        bridges: Mapping[str, Address] | None = None,
        gone: str | None = None,
    ) -> None:
        """Change the table and tell everybody. Who does not hear it is failing itself."""
        with self._lock:
            table = self._table
            kept = {name: each for name, each in table.nodes.items() if name != gone}
            self._table = NodeTable(
                table.number + 1,
                table.regions,
                kept | dict(nodes or {}),
                dict(table.bridges) | dict(bridges or {}),
            )
            table = self._table
            hearers = [each.use for each in self._nodes.values()]
            hearers += [each.use for each in self._bridges.values()]
        for use in hearers:
            with suppress(GeoRayError):
                use(table)

    # ------------------------------------------------------------------ bridges

    def _link(self, region: str, others: Iterable[str]) -> None:
        """One of two bridges dials, and the other waits for it."""
        for other in others:
            self._bridges[other].expect(region)
            self._bridges[region].connect(other, self._bridges[other].addresses[0])

    def _watch_bridge(self, region: str, alarm: Callable[[BaseException], None]) -> None:
        epoch, restarts, cause = 1, Restarts(*_BRIDGE_RESTARTS, "its restarts"), ""
        while not self._is_ending:
            try:
                self._bridges[region].attend()
            except GeoRayError as error:
                cause = error.message
            if self._has_ended():
                return
            if not restarts.take(self._clock.now_s()):
                # Calls to its region would wait for ever.
                alarm(NodeFailedError(f"the bridge of {region} ended: {cause}\n({restarts})"))
                return
            _LOGGER.warning("the bridge of %s has ended; another one is started", region)
            epoch += 1
            try:
                with suppress(GeoRayError):
                    self._bridges[region].end()
                bridge = self._maker.bridge(region, epoch)
                with self._lock:
                    self._bridges[region] = bridge
                self._link_anew(region)
                self._tell(bridges={region: bridge.addresses[1]})
            except GeoRayError as error:
                _LOGGER.warning("the bridge of %s could not be started: %s", region, error)

    def _has_ended(self) -> bool:
        return self._is_ending

    def _link_anew(self, region: str) -> None:
        """Let the others dial a new bridge if they did before, and let it dial the rest."""
        bridge = self._bridges[region]
        bridge.use(self._table)
        self._link(region, [other for other in self._crossing if other < region])
        for other in self._crossing:
            if other > region:
                bridge.expect(other)
                self._bridges[other].connect(region, bridge.addresses[0])


def _settle(future: Future[RemoteBridge], make: Callable[[], RemoteBridge]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:  # it belongs to who waits
        future.set_exception(error)
