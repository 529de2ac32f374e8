"""The nodes of the connected Ray cluster, as the autoscaler sees them.

A machine's node is that whose label names the machine, or, without such a label, that with its
address. What comes up with the label of another region than the machine was rented for is not its
node: nothing of the run could be placed there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from geo_ray.autoscale.demand import PendingBundle, machines_needed
from geo_ray.autoscale.observed import NodeSeen
from geo_ray.autoscale.target import ClusterTarget
from geo_ray.errors import ClusterError
from geo_ray.providers.base import Machine
from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.labels import MACHINE_LABEL, REGION_LABEL


@dataclass(slots=True)
class RayNodes:
    """See `ClusterNodes`.

    Attributes:
        resources: by type of machine, what Ray finds there.
        target: what should run; says which type a region's demand is counted in.
    """

    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    target: ClusterTarget | None = None

    def seen(self, machines: Sequence[Machine]) -> dict[str, NodeSeen]:
        """See `ClusterNodes.seen`."""
        try:
            living = _living()
            busy = ray_private.busy_nodes()
            leaves_ms = ray_private.draining_nodes()
        except Exception as error:  # whatever Ray says: without it nothing is decided
            raise ClusterError(f"Ray does not tell of its nodes: {error}") from error
        found = {}
        for machine in machines:
            for node_id in _of(machine, living):
                leaves_s = None
                if node_id in leaves_ms:  # 0: nobody said when
                    leaves_s = leaves_ms[node_id] / 1000 or math.inf
                found[machine.id] = NodeSeen(True, busy.get(node_id, True), leaves_s)
        return found

    def drain(self, machine: Machine, reason: str, until_unix_s: float) -> None:
        """See `ClusterNodes.drain`."""
        try:
            for node_id in _of(machine, _living()):
                ray_private.drain_node(node_id, reason, int(until_unix_s * 1000))
        except Exception as error:  # as above
            raise ClusterError(f"Ray does not drain {machine.id}: {error}") from error

    def pending(self) -> dict[str, int]:
        """See `ClusterNodes.pending`."""
        machine = self._machines()
        if not machine:
            return {}
        try:
            waiting = ray_private.pending_bundles()
        except Exception as error:  # as above
            raise ClusterError(f"Ray does not tell what waits for a place: {error}") from error
        bundles = [
            PendingBundle(labels.get(REGION_LABEL), wanted, apart)
            for wanted, labels, apart in waiting
        ]
        return machines_needed(bundles, machine)

    def _machines(self) -> dict[str, Mapping[str, float]]:
        """Return by region what its smallest machine that is known has."""
        found = {}
        for region in self.target.regions if self.target else ():
            known = [self.resources[k.type] for k in region.kinds if k.type in self.resources]
            if known:
                found[region.name] = min(known, key=lambda has: sum(has.values()))
        return found


def _living() -> list[tuple[str, str, Mapping[str, str]]]:
    """Return living nodes: id in hexadecimal, address, labels."""
    return [
        (node["NodeID"], node["NodeManagerAddress"], node.get("Labels", {}))
        for node in ray_private.nodes()
        if node.get("Alive")
    ]


def _of(machine: Machine, living: Sequence[tuple[str, str, Mapping[str, str]]]) -> list[str]:
    return [
        node_id
        for node_id, address, labels in living
        if labels.get(REGION_LABEL) == machine.labels.get(REGION_LABEL)
        and (
            labels[MACHINE_LABEL] == machine.id
            if MACHINE_LABEL in labels
            else address == machine.address
        )
    ]
