"""A Ray node as the program of a local machine, with the agent that hears of its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_ray.providers.base import LaunchRequest
from geo_ray.providers.local.provider import LocalMachinePlace
from geo_ray.runtime.cluster.labels import MACHINE_LABEL
from geo_ray.runtime.cluster.node_command import node_command
from geo_ray.runtime.cluster.settings import local_node_environment


@dataclass(frozen=True, slots=True)
class RayMachineProgram:
    """Joins a cluster.

    Attributes:
        address: host:port of its head.
        token_path: file with the cluster's token; its path is kept, never its content.
        object_store_bytes: shared memory of each node.
        agent: whether a notice is heard, and drains the node; it costs a process.
    """

    address: str
    token_path: Path
    object_store_bytes: int = 100_000_000
    agent: bool = True

    def processes(
        self, place: LocalMachinePlace, request: LaunchRequest
    ) -> Mapping[str, tuple[Sequence[str], Mapping[str, str]]]:
        """Return the node, and the agent beside it."""
        labels = {**request.labels, MACHINE_LABEL: place.id}
        flags = [
            f"--address={self.address}",
            f"--labels={','.join(f'{key}={value}' for key, value in sorted(labels.items()))}",
            f"--num-cpus={place.cpus}",
        ]
        node = node_command(
            flags,
            ip=place.address,
            home=place.scratch / "r",  # Ray opens its directory to all; the one above is private
            object_store_bytes=self.object_store_bytes,
        )
        environment = local_node_environment(self.token_path)
        found: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {"node": (node, environment)}
        if self.agent:
            heard = ("--cloud", "local", "--file", str(place.notice_path))
            whose = ("--machine", place.id, "--address", self.address)
            argv = (sys.executable, "-m", "geo_ray.providers.agent", *heard, *whose)
            found["agent"] = (argv, environment)
        return found
