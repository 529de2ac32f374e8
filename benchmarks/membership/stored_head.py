"""A cluster whose head keeps its state on disk, dies, and is started again, as systemd would."""

from __future__ import annotations

import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from geo_ray.ray_cluster.child_processes import SupervisedProcesses
from geo_ray.ray_cluster.connect import wait_for_ray
from geo_ray.ray_cluster.labels import label_flag
from geo_ray.ray_cluster.settings import local_node_environment, token_environment

_START_S = 90.0


class StoredHeadCluster:
    """A head with rocksdb below it, and a node for each region.

    Args:
        regions: names of the regions, one node each.
        patience_s: for how long nodes wait for a head that does not answer.
    """

    def __init__(self, regions: Sequence[str], patience_s: float) -> None:
        self._regions, self._patience_s = tuple(regions), patience_s
        self._processes = SupervisedProcesses(Path(tempfile.gettempdir()))
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))
            self.address = f"127.0.0.2:{probe.getsockname()[1]}"
        self._heads = 0

    def __enter__(self) -> Self:
        try:
            root = self._processes.root
            self._token = root / "token"
            self._token.write_text(secrets.token_hex(32))
            self._token.chmod(0o600)
            self.start_head()
            for index, region in enumerate(self._regions):
                flags = (f"--labels={label_flag(region)}", "--num-cpus=8")
                self._start(region, index + 3, f"--address={self.address}", *flags)
                self._wait_for(region)
        except BaseException:
            self._processes.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._processes.close()

    @property
    def environment(self) -> dict[str, str]:
        """What a driver needs to connect."""
        patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": f"{self._patience_s:g}"}
        return {"RAY_ADDRESS": self.address, **token_environment(self._token), **patience}

    def start_head(self) -> None:
        """Start a head, the first one or the next one on what the last one has left."""
        self._heads += 1
        port = self.address.rpartition(":")[2]
        self._start(
            f"head-{self._heads}",
            2,
            "--head",
            f"--port={port}",
            "--num-cpus=0",
            "--no-monitor",
            "--include-dashboard=false",
        )
        wait_for_ray(self.address, _START_S)

    def kill_head(self) -> None:
        """Kill every process of the head."""
        name = f"head-{self._heads}"
        self._processes.kill(name)
        deadline = time.monotonic() + _START_S
        while name not in self._processes.exit_codes:
            assert time.monotonic() < deadline
            self._processes.poll()
            time.sleep(0.02)

    def _start(self, name: str, address: int, *flags: str) -> None:
        home = self._processes.root / name
        home.mkdir()
        any_port = [
            f"--{what}-port=0"
            for what in ("min-worker", "max-worker", "node-manager", "object-manager")
        ]
        argv = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *flags, *any_port),
            *("--runtime-env-agent-port=0", "--metrics-export-port=0"),
            f"--node-ip-address=127.0.0.{address}",
            f"--temp-dir={home}",
            "--object-store-memory=80000000",
            "--dashboard-agent-listen-port=0",
            "--dashboard-agent-grpc-port=0",
            "--include-log-monitor=false",
            "--disable-usage-stats",
        ]
        environment = local_node_environment(self._token) | {
            "RAY_gcs_rpc_server_reconnect_timeout_s": f"{self._patience_s:g}",
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(self._processes.root / "state"),
        }
        self._processes.start(name, argv, environment)

    def _wait_for(self, name: str) -> None:
        deadline = time.monotonic() + _START_S
        while not (self._processes.root / name / "ray_current_cluster").is_file():
            self._processes.poll()
            assert name not in self._processes.exit_codes, (
                self._processes.root / f"{name}.log"
            ).read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
