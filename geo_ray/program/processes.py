"""Runs a program in subprocesses of this machine, which end with it.

`ProcessBackend` keeps the table of instances and starts one bridge per region; `LocalProcesses`
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
from geo_ray.program.rpc import FOREVER_S, NodeTable
from geo_ray.program.serialization import pack, serialize_nodes, unpack
from geo_ray.ray_cluster.child_processes import SupervisedProcesses
from geo_ray.transport.lan import LanClient
from geo_ray.transport.wire.sockets import Address

_LOGGER = logging.getLogger(__name__)
_BRIDGE_RESTARTS = (3, 60.0)


class NodeProcess(Protocol):
    """A process of a program, as its launcher sees it.

    Attributes:
        addresses: of a node: for calls; of a bridge: for other regions' bridges, and for the
            processes of its region.
    """

    addresses: tuple[Address, ...]

    def ask(self, what: str, *given: Any, forever: bool = False) -> Any:
        """Call a method of `NodeServer` or `NodeBridge`.

        Args:
            what: the method.
            given: its arguments.
            forever: wait as long as the process lives; one such call at a time.

        Raises:
            NodeFailedError: the process has ended.
            GeoRayError: the error that the method raised.
        """

    def end(self) -> None:
        """End the process, which may have ended already."""


class Launcher(Protocol):
    """Starts the processes of a program: on this machine, or as actors of Ray."""

    def begin(self) -> None:
        """Start everything that the processes need."""

    def start(self, name: str, region: str, order: dict[str, Any]) -> NodeProcess:
        """Start a process that hosts the part of ``order``; see `HeldPart`.

        Raises:
            GeoRayError: it cannot be started.
        """

    def end(self) -> None:
        """End all processes."""


class ProcessBackend:
    """A `NodeBackend` whose instances run in other processes.

    Args:
        program: the program.
        launcher: of the processes.
        clock: for threads.

    Raises:
        NodeUnshippableError: a node cannot be sent to another process.
    """

    def __init__(self, program: Program, launcher: Launcher, clock: ProgramClock) -> None:
        self._serialized = serialize_nodes(program)
        self._program, self._launcher, self._clock = program, launcher, clock
        self._nodes: dict[str, NodeProcess] = {}
        self._bridges: dict[str, NodeProcess] = {}
        self._counts: dict[str, list[dict[str, list[int]]]] = defaultdict(list)
        self._lock = threading.RLock()  # guards the table and all attributes above
        self._table = NodeTable(1, {name: each.region for name, each in self._serialized.items()})
        self._bridged_regions = sorted(
            {r for e in program.edges if e.crosses for r in (e.source_region, e.target_region)}
            & {each.region for each in self._serialized.values()}
        )
        self._is_ending = False

    def begin(self, alarm: Callable[[BaseException], None]) -> None:
        """See `NodeBackend.begin`."""
        self._launcher.begin()
        made: dict[str, Future[NodeProcess]] = {
            region: Future() for region in self._bridged_regions
        }
        for region, future in made.items():  # concurrently: each starts a process
            self._clock.start(partial(_settle, future, partial(self._bridge, region, 1)))
        for region, future in made.items():
            self._clock.wait(future)
            self._bridges[region] = future.result()
        for region in self._bridged_regions:
            self._link(region, [other for other in self._bridged_regions if other < region])
        self._tell(bridges={r: b.addresses[1] for r, b in self._bridges.items()})
        for region in self._bridged_regions:
            self._clock.start(partial(self._watch_bridge, region, alarm))

    def start(self, instance: NodeInstance, incarnation: int) -> bool:
        """See `NodeBackend.start`."""
        name = instance.name
        self._drop(name)
        serialized = self._serialized[name]
        node = self._launcher.start(name, serialized.region, {"node": serialized.plain()})
        with self._lock:
            self._nodes[name] = node
            table = self._table
        with self._dropped_if_lost(name):
            node.ask("use", table.plain())
            runs = bool(node.ask("stand", forever=True))  # it receives newer tables meanwhile
        self._tell(nodes={name: node.addresses[0]})
        return runs

    def run(self, name: str) -> bytes:
        """See `NodeBackend.run`."""
        with self._dropped_if_lost(name):
            return bytes(self._nodes[name].ask("run", forever=True))

    def attend(self, name: str) -> None:
        """See `NodeBackend.attend`."""
        with self._dropped_if_lost(name):
            self._nodes[name].ask("attend", forever=True)

    def counts(self) -> Mapping[str, list[dict[str, list[int]]]]:
        """See `NodeBackend.counts`. Counts of a killed instance are lost."""
        with self._lock:
            nodes = dict(self._nodes)
        found = {name: list(counts) for name, counts in self._counts.items()}
        for name, node in nodes.items():
            with suppress(GeoRayError):
                found.setdefault(name.partition("/")[0], []).append(node.ask("counts"))
        return found

    def end(self) -> None:
        """See `NodeBackend.end`."""
        self._is_ending = True
        self._launcher.end()

    # ------------------------------------------------------------------ the table

    @contextmanager
    def _dropped_if_lost(self, name: str) -> Iterator[None]:
        try:
            yield
        except GeoRayError:
            self._drop(name)
            raise

    def _drop(self, name: str) -> None:
        """Remove an ended attempt: calls wait for the next one."""
        with self._lock:
            node = self._nodes.pop(name, None)
        if node is None or self._is_ending:
            return
        with suppress(GeoRayError):
            self._counts[name.partition("/")[0]].append(node.ask("counts"))
        node.end()
        self._tell(gone=name)

    def _tell(
        self,
        nodes: Mapping[str, Address] | None = None,
        bridges: Mapping[str, Address] | None = None,
        gone: str | None = None,
    ) -> None:
        """Change the table and notify all processes; unreachable ones are failing already."""
        with self._lock:
            table = self._table
            others = {name: each for name, each in table.nodes.items() if name != gone}
            self._table = NodeTable(
                table.number + 1,
                table.regions,
                others | dict(nodes or {}),
                dict(table.bridges) | dict(bridges or {}),
            )
            table = self._table
            hearers = [*self._nodes.values(), *self._bridges.values()]
        for each in hearers:
            with suppress(GeoRayError):
                each.ask("use", table.plain())

    # ------------------------------------------------------------------ bridges

    def _bridge(self, region: str, attempt: int) -> NodeProcess:
        links = [[a, b, spec.model_dump()] for (a, b), spec in self._program.both_ways.items()]
        order = {"region": region, "attempt": attempt, "links": links, "seed": self._program.seed}
        return self._launcher.start(f"bridge of {region}", region, order)

    def _link(self, region: str, others: Iterable[str]) -> None:
        """Connect two bridges: one dials, the other waits."""
        for other in others:
            self._bridges[other].ask("expect", region)
            self._bridges[region].ask("connect", other, self._bridges[other].addresses[0])

    def _watch_bridge(self, region: str, alarm: Callable[[BaseException], None]) -> None:
        attempt, restarts, cause = 1, Restarts(*_BRIDGE_RESTARTS, "its restarts"), ""
        while not self._is_ending:
            try:
                self._bridges[region].ask("attend", forever=True)
            except GeoRayError as error:
                cause = error.message
            if self._has_ended():
                return
            if not restarts.take(self._clock.now_s()):
                # Calls to its region would wait forever.
                alarm(NodeFailedError(f"the bridge of {region} ended: {cause}\n({restarts})"))
                return
            _LOGGER.warning("the bridge of %s has ended; restarting it", region)
            attempt += 1
            try:
                with suppress(GeoRayError):
                    self._bridges[region].end()
                bridge = self._bridge(region, attempt)
                with self._lock:
                    self._bridges[region] = bridge
                self._relink(region)
                self._tell(bridges={region: bridge.addresses[1]})
            except GeoRayError as error:
                _LOGGER.warning("the bridge of %s could not be started: %s", region, error)

    def _has_ended(self) -> bool:
        return self._is_ending

    def _relink(self, region: str) -> None:
        """Connect a restarted bridge: others dial it if they did before, and it dials the rest."""
        bridge = self._bridges[region]
        bridge.ask("use", self._table.plain())
        self._link(region, [other for other in self._bridged_regions if other < region])
        for other in self._bridged_regions:
            if other > region:
                bridge.ask("expect", other)
                self._bridges[other].ask("connect", region, bridge.addresses[0])


def _settle(future: Future[NodeProcess], make: Callable[[], NodeProcess]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:  # raised by the waiting thread
        future.set_exception(error)


_PROGRAM: Final = "geo_ray.program.node_process"
_KEY_BYTES: Final = 32
_START_S: Final = 300.0
_LOOK_S: Final = 0.01
_LOG_BYTES: Final = 4000
_ASK_S: Final = 300.0  # for a busy process; a lost one is detected at once


class StartedProcess:
    """A `NodeProcess` on this machine.

    Args:
        name: name of the node or bridge.
        control: address of its control server.
        addresses: see `NodeProcess`.
        key: key of the control server.
        made: its launcher.
        process: its name at the process supervisor.
    """

    def __init__(
        self,
        name: str,
        control: Address,
        addresses: tuple[Address, ...],
        key: bytes,
        made: LocalProcesses,
        process: str,
    ) -> None:
        self.addresses = addresses
        self._name, self._made, self._process = name, made, process
        # Both are opened now: an open connection shows at once that the process has ended.
        self._client, self._waiting = (
            LanClient(control, key, {"peer": "launcher"}, connect_timeout_s=_ASK_S)
            for _ in range(2)
        )

    def ask(self, what: str, *given: Any, forever: bool = False) -> Any:
        """See `NodeProcess.ask`."""
        client, wait_s = (self._waiting, FOREVER_S) if forever else (self._client, _ASK_S)
        try:
            _, answer = client.request({"do": what}, pack(list(given)), timeout_s=wait_s)
        except TransportError as error:
            raise NodeFailedError(self._made.ending(self._name, self._process)) from error
        return unpack(b"\xc0" if answer is None else answer)

    def end(self) -> None:
        """See `NodeProcess.end`."""
        self._client.close()
        self._waiting.close()
        self._made.kill(self._process)


class LocalProcesses:
    """A `Launcher` of processes of this machine.

    Args:
        program: the program.
        logs: a directory that gets the output of the processes; None: it is discarded.
    """

    def __init__(self, program: Program, logs: Path | None = None) -> None:
        self._logs_dir = logs
        self._keys = {region: secrets.token_bytes(_KEY_BYTES) for region in program.regions}
        self._wan_key = secrets.token_bytes(_KEY_BYTES)
        self._run_id = secrets.token_hex(8)
        self._lock = threading.Lock()  # serializes requests to the process supervisor
        self._supervised: SupervisedProcesses | None = None
        self._logs: dict[str, Path] = {}
        self._names: dict[str, str] = {}
        self._count = 0

    def begin(self) -> None:
        """See `Launcher.begin`."""
        self._supervised = SupervisedProcesses(Path(tempfile.gettempdir()))

    def start(self, name: str, region: str, order: dict[str, Any]) -> StartedProcess:
        """See `Launcher.start`."""
        control_key = secrets.token_bytes(_KEY_BYTES)
        secret = {"key": self._keys[region], "control_key": control_key}
        if "node" not in order:
            secret |= {"wan_key": self._wan_key}
        with self._lock:
            if self._supervised is None:
                raise NodeLostError(f"{name} is not started: the program has ended")
            self._count += 1
            process = f"{self._count}"
            path = self._supervised.root / f"{process}.order"
            path.write_bytes(pack({**order, **secret, "run_id": self._run_id}))
            argv = [sys.executable, "-m", _PROGRAM, str(path)]
            self._names[process] = name
            self._logs[process] = self._supervised.start(process, argv, _environment())
        ready = path.with_suffix(".ready")
        deadline_s = time.monotonic() + _START_S
        while not ready.exists():
            code = self._exit_code(process, 0.0)
            if code is not None or time.monotonic() > deadline_s:
                self.kill(process)
                raise NodeFailedError(self.ending(name, process))
            time.sleep(_LOOK_S)
        control, *addresses = unpack(ready.read_bytes())
        return StartedProcess(name, control, tuple(addresses), control_key, self, process)

    def end(self) -> None:
        """See `Launcher.end`."""
        with self._lock:
            supervised, self._supervised = self._supervised, None
        if supervised is None:
            return
        try:
            self._keep_logs()
        finally:
            supervised.close()

    def kill(self, process: str) -> None:
        """End one process."""
        with self._lock, suppress(GeoRayError):
            if self._supervised is not None:
                self._supervised.kill(process)

    def ending(self, name: str, process: str) -> str:
        """Return the known cause of a process's end."""
        code = self._exit_code(process, time.monotonic() + 1.0)
        how = "does not answer" if code is None else f"ended with exit code {code}"
        with suppress(OSError):
            tail = self._logs[process].read_bytes()[-_LOG_BYTES:].decode(errors="replace").rstrip()
            if tail:
                return f"the process of {name!r} {how}:\n{tail}"
        return f"the process of {name!r} {how}"

    def _keep_logs(self) -> None:
        if self._logs_dir is None:
            return
        self._logs_dir.mkdir(parents=True, exist_ok=True)
        for process, path in self._logs.items():
            name = self._names[process].replace("/", "-").replace(" ", "-")
            with suppress(OSError):
                shutil.copyfile(path, self._logs_dir / f"{name}.{process}.log")

    def _exit_code(self, process: str, until_s: float) -> int | None:
        while True:
            with self._lock:
                if self._supervised is None:
                    return None
                self._supervised.poll()
                code = self._supervised.exit_codes.get(process)
            if code is not None or time.monotonic() >= until_s:
                return code
            time.sleep(_LOOK_S)


def _environment() -> dict[str, str]:
    paths = [path or str(Path.cwd()) for path in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
