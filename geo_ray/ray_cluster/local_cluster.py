"""A real Ray cluster on this machine: a head and one node per region, gone when its owner is.

Every node has its own loopback address (127.0.0.2 is the head) and its own directory, so that all
can start at the same time and changes of the machine's network do not affect them. The system
chooses all of Ray's ports, the head runs no work, and a new token protects the cluster.
"""

from __future__ import annotations

import math
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from geo_ray.base.errors import ClusterStartError, PortInUseError
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster.child_processes import SupervisedProcesses
from geo_ray.ray_cluster.labels import label_flag
from geo_ray.ray_cluster.process_supervisor import descendants
from geo_ray.ray_cluster.settings import local_node_environment, node_command, token_environment

_HEAD = "head"
_HEAD_IP = "127.0.0.2"
_MAX_REGIONS = 200
_MAX_SOCKET_PATH = 107  # sockaddr_un
_BELOW_BASE = (
    "/geo-ray-xxxxxxxx/199/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
)
_TAIL_LINES = 15
_NATIVE_FRAME = re.compile(r"^\s*$|^\s*/\S+\(.*\+0x[0-9a-f]+\) \[0x[0-9a-f]+\]")
_SYSTEMS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _TRIES = 10_000, 100
_SLOW_S = 20.0  # a node that ends sooner was not too slow


class LocalCluster:
    """A context manager that starts the cluster and ends it; it also ends if its owner is killed.

    A node that was too slow for Ray is restarted within `cluster.start_timeout_s`.

    Args:
        config: the ``cluster`` section.
        regions: names of the regions, one node each.
        cpus_per_region: logical CPUs of each node, unless configured. They are only a count: a
            machine with 2 cores may offer 12.

    Raises:
        ClusterStartError: on entry, if a node does not start.
        PortInUseError: on entry, if the configured port is taken.
    """

    def __init__(
        self, config: LocalClusterConfig, regions: Sequence[str], cpus_per_region: float = 1.0
    ) -> None:
        self._config = config
        self._cpus = math.ceil(config.cpus_per_region or cpus_per_region)
        self._processes: SupervisedProcesses | None = None
        self.regions = tuple(regions)
        self.address = ""

    def __enter__(self) -> Self:
        base = _base(self._config)
        _check_platform(base, len(self.regions))
        if self._config.port:
            _check_port_free(self._config.port)
        deadline = time.monotonic() + self._config.start_timeout_s
        while True:
            started = time.monotonic()
            self._processes = SupervisedProcesses(base)
            try:
                self._start(deadline)
                return self
            except BaseException as error:
                has_ended = isinstance(error, ClusterStartError) and self._processes.exit_codes
                self.close()
                # Ray ends a node that is not up after 30 s, which happens on a busy machine.
                was_slow = time.monotonic() - started >= _SLOW_S and time.monotonic() < deadline
                if not (has_ended and was_slow):
                    raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def root(self) -> Path:
        """The private directory of this cluster."""
        return self._supervised.root

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a process that connects to it, including RAY_ADDRESS."""
        return {"RAY_ADDRESS": self.address, **token_environment(self._token_path)}

    def kill_region(self, region: str) -> None:
        """Kill a region's node and all its processes, as a power cut would.

        It is not restarted, unlike one that ends by itself.
        """
        self._supervised.kill(_node_name(self.regions.index(region)))

    def actor_pids(self, region: str | None, *classes: str) -> list[int]:
        """Return the process ids of running actors of some classes, in a region or on the head."""
        node = _HEAD if region is None else _node_name(self.regions.index(region))
        self._supervised.poll()
        titles = tuple(f"ray::{name}" for name in classes)
        return [
            pid
            for pid in sorted(descendants(self._supervised.pids[node]))
            if _command_line(pid).startswith(titles)
        ]

    def close(self) -> None:
        """End everything; may be called again."""
        if self._processes is not None:
            self._processes.close()

    # ------------------------------------------------------------------ starting

    @property
    def _supervised(self) -> SupervisedProcesses:
        if self._processes is None:
            raise ClusterStartError("the local cluster is not started", fix="Use `with`.")
        return self._processes

    @property
    def _token_path(self) -> Path:
        return self.root / "token"

    def _start(self, deadline: float) -> None:
        self._token_path.touch(mode=0o600)
        self._token_path.write_text(secrets.token_hex(32))
        self._start_node(_HEAD, _HEAD_IP, self._head_flags())
        # Region nodes may start as soon as the head's port is open, before it is complete.
        self._wait(self._head_port, _HEAD, deadline)
        self.address = f"{_HEAD_IP}:{self._head_port()}"
        for index, region in enumerate(self.regions):
            self._start_node(
                _node_name(index),
                f"127.0.0.{index + 3}",
                [
                    f"--address={self.address}",
                    f"--labels={label_flag(region)}",
                    f"--num-cpus={self._cpus}",
                ],
            )
        for name in [_HEAD, *map(_node_name, range(len(self.regions)))]:
            self._wait((self._directory(name) / "ray_current_cluster").is_file, name, deadline)
        for index in range(len(self.regions)):  # not the head, whose state is lost with it
            self._supervised.keep(_node_name(index))

    def _head_flags(self) -> list[str]:
        flags = [
            "--head",
            f"--port={self._config.port}",
            "--num-cpus=0",
            "--num-gpus=0",
            "--no-monitor",  # no autoscaler
            f"--ray-client-server-port={_free_port()}",  # 0 is refused, 10001 may be taken
            f"--include-dashboard={'true' if self._config.dashboard else 'false'}",
            "--dashboard-host=127.0.0.1",
        ]
        if self._config.dashboard:
            flags.append(f"--dashboard-port={_free_port()}")
        return flags

    def _start_node(self, name: str, ip: str, flags: Sequence[str]) -> None:
        self._directory(name).mkdir()
        argv = node_command(
            flags,
            ip=ip,
            home=self._directory(name),
            object_store_bytes=self._config.object_store_bytes,
        )
        self._supervised.start(name, argv, local_node_environment(self._token_path))

    def _directory(self, name: str) -> Path:
        return self.root / name

    def _head_port(self) -> int | None:
        if self._config.port:
            return self._config.port if _answers(_HEAD_IP, self._config.port) else None
        for path in self._directory(_HEAD).glob("session_2*/gcs_server_port_*"):
            try:
                text = path.read_text().strip()
            except FileNotFoundError:  # Ray writes the port to another file and renames it
                continue
            if text.isdigit():
                return int(text)
        return None

    def _wait(self, done: Callable[[], object], name: str, deadline: float) -> None:
        while not done():
            self._supervised.poll()
            if name in self._supervised.exit_codes:
                raise ClusterStartError(
                    f"node '{name}' of the local cluster ended while it started:\n"
                    + self._log_tail(name)
                )
            if time.monotonic() > deadline:
                raise ClusterStartError(
                    f"node '{name}' of the local cluster was not up after "
                    f"{self._config.start_timeout_s:g} s (cluster.start_timeout_s):\n"
                    + self._log_tail(name),
                    fix="If the machine is busy, wait longer: `--set cluster.kind=local --set "
                    "cluster.start_timeout_s=300`. Else read the log above.",
                )
            time.sleep(0.02)

    def _log_tail(self, name: str) -> str:
        logs = [self.root / f"{name}.log", *self._directory(name).glob("session_2*/logs/*.err")]
        found = []
        for log in logs:
            text = log.read_text(errors="replace") if log.is_file() else ""
            lines = [line for line in text.splitlines() if not _NATIVE_FRAME.search(line)]
            found += [f"  {log.name}: {line}" for line in lines[-_TAIL_LINES:]]
        return "\n".join(found) or "  (its log is empty)"


def _node_name(index: int) -> str:
    return str(index)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:  # it has just ended
        return ""


def _base(config: LocalClusterConfig) -> Path:
    if config.temp_dir is not None:
        return Path(config.temp_dir)
    system = Path(tempfile.gettempdir())
    return system if len(str(system) + _BELOW_BASE) <= _MAX_SOCKET_PATH else Path("/tmp")  # noqa: S108


def _check_platform(base: Path, num_regions: int) -> None:
    if not sys.platform.startswith("linux"):
        raise ClusterStartError(
            "the local cluster needs Linux",
            fix="Run in a Linux container, or use `geo-ray simulate`, which needs no cluster.",
        )
    if num_regions > _MAX_REGIONS:
        raise ClusterStartError(
            f"the local cluster holds at most {_MAX_REGIONS} regions",
            fix="Put several sites into one region's nodes with `at`, or name an existing cluster.",
        )
    if len(str(base) + _BELOW_BASE) > _MAX_SOCKET_PATH:
        raise ClusterStartError(
            f"cluster.temp_dir is too long for sockets: {base}",
            fix=f"Use a path of at most {_MAX_SOCKET_PATH - len(_BELOW_BASE)} characters.",
        )


def _check_port_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))  # Ray listens on every address
        except OSError as error:
            raise PortInUseError(f"cluster.port {port}: {error.strerror}") from error


def _free_port() -> int:
    """Return a port that stays free until Ray takes it.

    Ports that the system assigns are not used: other processes of the cluster, which start before
    Ray takes this one, would be assigned them.
    """
    with suppress(OSError, ValueError):
        first = int(_SYSTEMS_PORTS.read_text().split()[0])
        for _ in range(_TRIES):
            port = _FIRST_PORT + secrets.randbelow(first - _FIRST_PORT)
            with socket.socket() as probe, suppress(OSError):
                probe.bind((_HEAD_IP, port))
                return port
    with socket.socket() as probe:
        probe.bind((_HEAD_IP, 0))
        return int(probe.getsockname()[1])


def _answers(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
