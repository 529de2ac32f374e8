"""Programs of the machines of a local cluster: a Ray head with its services, or a node with agent.

Separate from `providers`, which loads it only for local clusters, because it imports Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_ray.base.errors import ProviderRefusedError
from geo_ray.cloud.autoscaler.target import ROLE_LABEL
from geo_ray.cloud.boot_script import HEAD_ENVIRONMENT
from geo_ray.cloud.cluster.head import find_head, head_address
from geo_ray.cloud.cluster.state import ClusterRecord
from geo_ray.cloud.local import LocalMachinePlace, LocalProvider
from geo_ray.cloud.provider import HEAD_ROLE, LaunchRequest
from geo_ray.ray_cluster.labels import MACHINE_LABEL
from geo_ray.ray_cluster.settings import local_node_environment, node_command


@dataclass(frozen=True, slots=True)
class RayMachineProgram:
    """Runs a Ray node that joins a cluster.

    Attributes:
        address: address of the head, host:port.
        token_path: file with the cluster's token; only its path is stored.
        object_store_bytes: shared memory of each node.
        agent: whether a notice agent runs, which costs one process.
    """

    address: str
    token_path: Path
    object_store_bytes: int = 100_000_000
    agent: bool = True

    def processes(
        self, place: LocalMachinePlace, request: LaunchRequest
    ) -> Mapping[str, tuple[Sequence[str], Mapping[str, str]]]:
        """Return the processes of the node and its agent."""
        labels = {**request.labels, MACHINE_LABEL: place.id}
        flags = [
            f"--address={self.address}",
            f"--labels={','.join(f'{key}={value}' for key, value in sorted(labels.items()))}",
            f"--num-cpus={place.cpus}",
        ]
        node = node_command(
            flags,
            ip=place.address,
            home=place.scratch
            / "r",  # Ray makes its directory readable to all; the parent is private
            object_store_bytes=self.object_store_bytes,
        )
        environment = local_node_environment(self.token_path)
        found: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {"node": (node, environment)}
        if self.agent:
            notice_args = ("--cloud", "local", "--file", str(place.notice_path))
            whose = ("--machine", place.id, "--address", self.address)
            argv = (sys.executable, "-m", "geo_ray.cloud.agent", *notice_args, *whose)
            found["agent"] = (argv, environment)
        return found


@dataclass(frozen=True, slots=True)
class LocalClusterProgram:
    """Runs the machines of a local cluster; see `LocalMachineProgram`.

    Attributes:
        cloud: directory of the local cloud.
        state: folder of the cluster.
        record: record of the cluster.
        token_path: file with its token.
        object_store_bytes: shared memory of each node.
    """

    cloud: Path
    state: Path
    record: ClusterRecord
    token_path: Path
    object_store_bytes: int = 100_000_000

    def processes(
        self, place: LocalMachinePlace, request: LaunchRequest
    ) -> Mapping[str, tuple[Sequence[str], Mapping[str, str]]]:
        """Return the processes of a machine, by role."""
        if request.labels.get(ROLE_LABEL) == HEAD_ROLE:
            return self._head(place)
        machines = LocalProvider(self.cloud).list_machines(self.record.name)
        address = head_address(find_head(machines, self.record), self.record)
        if address is None:
            raise ProviderRefusedError(
                f"the cluster {self.record.name} has no head to join",
                fix="Create it again with `geo-ray up`.",
            )
        program = RayMachineProgram(address, self.token_path, self.object_store_bytes)
        return program.processes(place, request)

    def _head(
        self, place: LocalMachinePlace
    ) -> Mapping[str, tuple[Sequence[str], Mapping[str, str]]]:
        head = self.record.head
        flags = [
            "--head",
            f"--port={head.port}",
            "--num-cpus=0",
            "--num-gpus=0",
            "--no-monitor",
            f"--ray-client-server-port={head.port + 1}",
            "--include-dashboard=true",
            f"--dashboard-host={place.address}",
            f"--dashboard-port={head.dashboard_port}",
            f"--labels={MACHINE_LABEL}={place.id},{ROLE_LABEL}={HEAD_ROLE}",
        ]
        node = node_command(
            flags,
            ip=place.address,
            home=place.scratch / "r",  # as for other nodes
            object_store_bytes=self.object_store_bytes,
        )
        environment = local_node_environment(self.token_path) | HEAD_ENVIRONMENT
        environment["RAY_gcs_storage_path"] = str(place.scratch / "gcs")
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        serve = (sys.executable, "-m", "geo_ray.cloud.cluster.serve", str(self.state))
        return {"node": (node, environment), "cluster": (serve, environment)}
