"""What runs on machines of the local cloud that are a cluster: on one the head, on others nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_ray.autoscale.target import ROLE_LABEL
from geo_ray.clusters.head import find_head, head_address
from geo_ray.clusters.record import ClusterRecord
from geo_ray.errors import ProviderRefusedError
from geo_ray.providers.base import LaunchRequest
from geo_ray.providers.local.node import RayMachineProgram
from geo_ray.providers.local.provider import LocalMachinePlace, LocalProvider
from geo_ray.providers.user_data import HEAD_ENVIRONMENT, HEAD_ROLE
from geo_ray.runtime.cluster.labels import MACHINE_LABEL
from geo_ray.runtime.cluster.node_command import node_command
from geo_ray.runtime.cluster.settings import local_node_environment


@dataclass(frozen=True, slots=True)
class LocalClusterProgram:
    """See `LocalMachineProgram`.

    Attributes:
        cloud: directory of the local cloud.
        state: directory of the cluster.
        record: what it is.
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
        """Return the processes of a machine by its role."""
        if request.labels.get(ROLE_LABEL) == HEAD_ROLE:
            return self._head(place)
        machines = LocalProvider(self.cloud).list_machines(self.record.name)
        address = head_address(find_head(machines, self.record), self.record)
        if address is None:
            raise ProviderRefusedError(
                f"the cluster {self.record.name} has no head that a machine could join",
                fix="Make it again with `geo-ray up`.",
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
        serve = (sys.executable, "-m", "geo_ray.clusters.serve", str(self.state))
        return {"node": (node, environment), "cluster": (serve, environment)}
