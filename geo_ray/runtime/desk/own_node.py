"""Where this process is: its node's address and region."""

from __future__ import annotations

import ray

from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.labels import REGION_LABEL


def address_here() -> str:
    """The address at which the other nodes reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def region_here() -> str | None:
    """The region of this process's node; None for a node of none."""
    own = ray.get_runtime_context().get_node_id()
    labels = [node["Labels"] for node in ray_private.nodes() if node["NodeID"] == own]
    return labels[0].get(REGION_LABEL) if labels else None
