"""Runs a program in subprocesses of this machine, which end with it.

`ApartCrew` keeps the table of instances and starts one bridge per region; `LocalProcesses`
starts the processes.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from geo_ray.base.errors import GeoRayError, NodeFailedError, NodeLostError, TransportError
from geo_ray.base.restarts import Restarts
from geo_ray.program.clock import ProgramClock
from geo_ray.program.graph import NodeInstance, Program
from geo_ray.program.peers import FOREVER_S, NodeTable
from geo_ray.program.serialization import ShippedNode, pack, ship, unpack
from geo_ray.ray_cluster.child_processes import SupervisedProcesses
from geo_ray.transport.lan import LanClient
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


_PROGRAM: Final = "geo_ray.program.node_process"
_KEY_BYTES: Final = 32
_START_S: Final = 300.0
_LOOK_S: Final = 0.01
_LOG_BYTES: Final = 4000
_ASK_S: Final = 300.0  # that a process is gone is seen at once; a busy one is slow


class StartedProcess:
    """The near end of a process that `node_process` runs.

    Args:
        name: of what it is.
        told: by it.
        key: of its desk.
        made: whose process it is.
        process: its name there.
    """

    def __init__(
        self, name: str, told: Mapping[str, Any], key: bytes, made: LocalProcesses, process: str
    ) -> None:
        self._name, self._made, self._process = name, made, process
        desk: Address = (told["desk"][0], told["desk"][1])
        # Two from the start: on one that is open it is seen at once that the process has ended.
        self._client, self._waiting = (
            LanClient(desk, key, {"peer": "launcher"}, connect_timeout_s=_ASK_S) for _ in range(2)
        )

    def ask(self, what: str, given: Any = None, *, forever: bool = False) -> Any:
        """Ask it for something.

        Args:
            what: is asked.
            given: with it.
            forever: wait as long as the process goes on; one at a time, beside what else is asked.

        Raises:
            NodeFailedError: it has ended.
            GeoRayError: what it raised.
        """
        client, wait_s = (self._waiting, FOREVER_S) if forever else (self._client, _ASK_S)
        try:
            _, answer = client.request({"do": what}, pack(given), timeout_s=wait_s)
        except TransportError as error:
            raise NodeFailedError(self._made.ending(self._name, self._process)) from error
        return unpack(b"\xc0" if answer is None else answer)

    def end(self) -> None:
        """Kill it."""
        self._client.close()
        self._waiting.close()
        self._made.kill(self._process)


class ProcessNode:
    """See `RemoteNode`."""

    def __init__(self, process: StartedProcess, address: Address) -> None:
        self._process, self.address = process, address

    def use(self, table: NodeTable) -> None:
        """See `RemoteNode.use`."""
        self._process.ask("use", table.plain())

    def stand(self) -> bool:
        """See `RemoteNode.stand`."""
        return bool(self._process.ask("stand", forever=True))  # it is told of others meanwhile

    def run(self) -> bytes:
        """See `RemoteNode.run`."""
        return bytes(self._process.ask("run", forever=True))

    def attend(self) -> None:
        """See `RemoteNode.attend`."""
        self._process.ask("attend", forever=True)

    def counts(self) -> dict[str, list[int]]:
        """See `RemoteNode.counts`."""
        return dict(self._process.ask("counts"))

    def end(self) -> None:
        """See `RemoteNode.end`."""
        self._process.end()


class ProcessBridge:
    """See `RemoteBridge`."""

    def __init__(self, process: StartedProcess, addresses: tuple[Address, Address]) -> None:
        self._process, self.addresses = process, addresses

    def connect(self, region: str, address: Address) -> None:
        """See `RemoteBridge.connect`."""
        self._process.ask("connect", [region, *address])

    def expect(self, region: str) -> None:
        """See `RemoteBridge.expect`."""
        self._process.ask("expect", region)

    def use(self, table: NodeTable) -> None:
        """See `RemoteBridge.use`."""
        self._process.ask("use", table.plain())

    def attend(self) -> None:
        """See `RemoteBridge.attend`."""
        self._process.ask("attend", forever=True)

    def end(self) -> None:
        """See `RemoteBridge.end`."""
        self._process.end()


class LocalProcesses:
    """Makes them; see `NodeMaker`.

    Args:
        program: whose links the bridges emulate.
        logs: a directory that gets what the processes wrote; None: nobody does.
    """

    def __init__(self, program: Program, logs: Path | None = None) -> None:
        self._program, self._kept_logs = program, logs
        self._keys = {region: secrets.token_bytes(_KEY_BYTES) for region in program.regions}
        self._wan_key = secrets.token_bytes(_KEY_BYTES)
        self._run_id = secrets.token_hex(8)
        self._lock = threading.Lock()  # one at a time talks to the keeper
        self._kept: SupervisedProcesses | None = None
        self._logs: dict[str, Path] = {}
        self._names: dict[str, str] = {}
        self._count = 0

    def begin(self) -> None:
        """See `NodeMaker.begin`."""
        self._kept = SupervisedProcesses(Path(tempfile.gettempdir()))

    def node(self, shipped: ShippedNode, incarnation: int) -> ProcessNode:
        """See `NodeMaker.node`."""
        order = {"node": shipped.plain(), "key": self._keys[shipped.region]}
        process, told = self._started(shipped.name, order)
        host, port = told["address"]
        return ProcessNode(process, (host, port))

    def bridge(self, region: str, epoch: int) -> ProcessBridge:
        """See `NodeMaker.bridge`."""
        links = self._program.both_ways.items()
        order = {
            "region": region,
            "epoch": epoch,
            "run_id": self._run_id,
            "key": self._keys[region],
            "wan_key": self._wan_key,
            "links": [[a, b, spec.model_dump()] for (a, b), spec in links],
            "seed": self._program.seed,
        }
        process, told = self._started(f"bridge of {region}", order)
        (wan_host, wan_port), (host, port) = told["addresses"]
        return ProcessBridge(process, ((wan_host, wan_port), (host, port)))

    def end(self) -> None:
        """See `NodeMaker.end`."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is None:
            return
        try:
            self._keep_logs()
        finally:
            kept.close()

    def kill(self, process: str) -> None:
        """End one process."""
        with self._lock, suppress(GeoRayError):
            if self._kept is not None:
                self._kept.kill(process)

    def ending(self, name: str, process: str) -> str:
        """What is known of the end of a process."""
        code = self._exit_code(process, time.monotonic() + 1.0)
        how = "does not answer" if code is None else f"ended with exit code {code}"
        with suppress(OSError):
            tail = self._logs[process].read_bytes()[-_LOG_BYTES:].decode(errors="replace").rstrip()
            if tail:
                return f"the process of {name!r} {how}:\n{tail}"
        return f"the process of {name!r} {how}"

    def _started(self, name: str, order: dict[str, Any]) -> tuple[StartedProcess, dict[str, Any]]:
        key = secrets.token_bytes(_KEY_BYTES)
        with self._lock:
            if self._kept is None:
                raise NodeLostError(f"{name} is not started: the program ends")
            self._count += 1
            process = f"{self._count}"
            path = self._kept.root / f"{process}.order"
            path.write_bytes(pack({**order, "desk_key": key}))
            argv = [sys.executable, "-m", _PROGRAM, str(path)]
            self._names[process] = name
            self._logs[process] = self._kept.start(process, argv, _environment())
        told = path.with_suffix(".told")
        deadline_s = time.monotonic() + _START_S
        while not told.exists():
            code = self._exit_code(process, 0.0)
            if code is not None or time.monotonic() > deadline_s:
                self.kill(process)
                raise NodeFailedError(self.ending(name, process))
            time.sleep(_LOOK_S)
        said = unpack(told.read_bytes())
        return StartedProcess(name, said, key, self, process), said

    def _keep_logs(self) -> None:
        if self._kept_logs is None:
            return
        self._kept_logs.mkdir(parents=True, exist_ok=True)
        for process, path in self._logs.items():
            name = self._names[process].replace("/", "-").replace(" ", "-")
            with suppress(OSError):
                shutil.copyfile(path, self._kept_logs / f"{name}.{process}.log")

    def _exit_code(self, process: str, until_s: float) -> int | None:
        while True:
            with self._lock:
                if self._kept is None:
                    return None
                self._kept.poll()
                code = self._kept.exit_codes.get(process)
            if code is not None or time.monotonic() >= until_s:
                return code
            time.sleep(_LOOK_S)


def _environment() -> dict[str, str]:
    paths = [path or str(Path.cwd()) for path in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
