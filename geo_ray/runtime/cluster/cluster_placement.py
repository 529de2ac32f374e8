"""Checks an existing cluster and places a run on it, where need be on machines yet to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.demand import RegionDemand
from geo_ray.runtime.cluster.labels import REGION_LABEL
from geo_ray.runtime.cluster.placement import PlacedRegion, place, remove
from geo_ray.runtime.cluster.preflight import preflight
from geo_ray.runtime.cluster.served import served_regions


def place_on_cluster(
    demands: Sequence[RegionDemand], timeout_s: float, status: Callable[[str], None]
) -> dict[str, PlacedRegion]:
    """Reserve what a run asks for.

    Where an autoscaler serves a region, nodes may be missing: what waits for a place is the demand
    that machines are rented for. Nodes that came meanwhile are checked once they are there.

    Args:
        demands: one per region.
        timeout_s: longest wait for places on nodes that are there.
        status: told that machines are waited for.

    Raises:
        PreflightError: the cluster, or a node that came, is not fit.
        PlacementError: a region cannot be placed in time.
    """
    served = served_regions()
    preflight(demands, ask_nodes=True, served=served.regions)
    waited = sorted({demand.node_label for demand in demands} & set(served.regions))
    if not waited:
        return place(demands, timeout_s)
    before = _nodes(waited)
    status(f"placing processes; machines of {', '.join(waited)} are rented where there are none")
    placed = place(demands, timeout_s + served.longest_s)
    try:
        if _nodes(waited) - before:
            status("checking the machines that came")
            preflight(demands, ask_nodes=True, served=served.regions)
    except BaseException:
        remove(placed)
        raise
    return placed


def _nodes(regions: Sequence[str]) -> set[str]:
    return {
        node["NodeID"]
        for node in ray_private.nodes()
        if node["Alive"] and node["Labels"].get(REGION_LABEL) in regions
    }
