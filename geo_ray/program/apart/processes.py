"""A program as processes of this machine, which end with the one that has started them."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from geo_ray.errors import (
    GeoRayError,
    NodeFailedError,
    NodeLostError,
    TransportError,
)
from geo_ray.program.apart.peers import FOREVER_S
from geo_ray.program.apart.shipped import ShippedNode
from geo_ray.program.apart.table import NodeTable
from geo_ray.program.graph import Program
from geo_ray.program.values import pack, unpack
from geo_ray.runtime.cluster.supervised import SupervisedProcesses
from geo_ray.transport.lan.client import LanClient
from geo_ray.transport.wire.sockets import Address

_PROGRAM: Final = "geo_ray.program.apart.node_process"
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
