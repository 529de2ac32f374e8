"""The nodes of the connected Ray cluster, as the autoscaler sees them.

A machine's node is that whose label names the machine, or, without such a label, that with its
address. What comes up with the label of another region than the machine was rented for is not its
node: nothing of the run could be placed there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from geo_ray.autoscale.demand.pending import GroupWay, LabelWanted, PendingBundle, PendingGroup
from geo_ray.autoscale.observed import NodeSeen
from geo_ray.errors import ClusterError
from geo_ray.providers.base import Machine
from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.labels import MACHINE_LABEL, NODE_LABEL, REGION_LABEL

_WAYS: Final[Mapping[str, GroupWay]] = {
    "PACK": "PACK",
    "SPREAD": "SPREAD",
    "STRICT_PACK": "STRICT_PACK",
    "STRICT_SPREAD": "STRICT_SPREAD",
}
_GIVEN: Final = {MACHINE_LABEL, NODE_LABEL}


class RayNodes:
    """See `ClusterNodes`."""

    def seen(self, machines: Sequence[Machine]) -> dict[str, NodeSeen]:
        """See `ClusterNodes.seen`."""
        try:
            living = _living()
            uses = ray_private.node_uses()
            leaves_ms = ray_private.draining_nodes()
        except Exception as error:  # whatever Ray says: without it nothing is decided
            raise ClusterError(f"Ray does not tell of its nodes: {error}") from error
        found = {}
        for machine in machines:
            for node_id in _of(machine, living):
                leaves_s = None
                if node_id in leaves_ms:  # 0: nobody said when
                    leaves_s = leaves_ms[node_id] / 1000 or math.inf
                use = uses.get(node_id)
                found[machine.id] = (
                    NodeSeen(is_ready=True, leaves_unix_s=leaves_s)
                    if use is None
                    else NodeSeen(True, use.is_busy, leaves_s, use.resources)
                )
        return found

    def drain(self, machine: Machine, reason: str, until_unix_s: float) -> None:
        """See `ClusterNodes.drain`."""
        try:
            for node_id in _of(machine, _living()):
                ray_private.drain_node(node_id, reason, int(until_unix_s * 1000))
        except Exception as error:  # as above
            raise ClusterError(f"Ray does not drain {machine.id}: {error}") from error

    def end_idle(self, machine: Machine, reason: str) -> bool:
        """See `ClusterNodes.end_idle`."""
        try:
            mine = _of(machine, _living())
            return all(ray_private.drain_node(one, reason, 0, only_idle=True) for one in mine)
        except Exception as error:  # as above
            raise ClusterError(f"Ray does not end {machine.id}: {error}") from error

    def pending(self) -> tuple[PendingGroup, ...]:
        """See `ClusterNodes.pending`; what wants one given node is left out."""
        try:
            waiting = ray_private.pending_bundles()
        except Exception as error:  # as above
            raise ClusterError(f"Ray does not tell what waits for a place: {error}") from error
        found = []
        for strategy, wanted in waiting:
            bundles = tuple(
                PendingBundle(resources, tuple(LabelWanted(*each) for each in labels), count)
                for resources, labels, count in wanted
            )
            if not any(each.key in _GIVEN for bundle in bundles for each in bundle.labels):
                found.append(PendingGroup(bundles, _WAYS.get(strategy, "alone")))
        return tuple(found)


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
