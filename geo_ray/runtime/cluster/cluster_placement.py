"""Checks an existing cluster before a run is placed there, where need be on machines yet to come.

Where an autoscaler serves a region, nodes may be missing: what waits for a place is the demand
that machines are rented for. Nodes that came meanwhile are checked once they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.demand import RegionDemand
from geo_ray.runtime.cluster.labels import REGION_LABEL
from geo_ray.runtime.cluster.preflight import preflight
from geo_ray.runtime.cluster.served import ServedRegions, served_regions


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """A cluster that is fit, as far as it is there.

    Attributes:
        served: the regions for which machines come.
        waited: those of the run among them.
        nodes: that were there of these.
    """

    served: ServedRegions = field(default_factory=ServedRegions)
    waited: tuple[str, ...] = ()
    nodes: frozenset[str] = frozenset()

    @property
    def longest_s(self) -> float:
        """That machines may take until they are there; 0: all are."""
        return self.served.longest_s if self.waited else 0.0

    def check_newcomers(
        self, demands: Sequence[RegionDemand], status: Callable[[str], None]
    ) -> None:
        """Check nodes that came while the run was placed.

        Args:
            demands: one per region.
            status: told that they are checked.

        Raises:
            PreflightError: one is not fit.
        """
        if self.waited and _nodes(self.waited) - self.nodes:
            status("checking the machines that came")
            preflight(demands, ask_nodes=True, served=self.served.regions)


def check_cluster(demands: Sequence[RegionDemand], status: Callable[[str], None]) -> CheckedCluster:
    """Check what is there.

    Args:
        demands: one per region.
        status: told that machines are waited for.

    Raises:
        PreflightError: the cluster is not fit.
    """
    served = served_regions()
    preflight(demands, ask_nodes=True, served=served.regions)
    waited = tuple(sorted({demand.node_label for demand in demands} & set(served.regions)))
    if waited:
        status(
            f"placing processes; machines of {', '.join(waited)} are rented where there are none"
        )
    return CheckedCluster(served, waited, _nodes(waited))


def _nodes(regions: Sequence[str]) -> frozenset[str]:
    return frozenset(
        node["NodeID"]
        for node in ray_private.nodes()
        if node["Alive"] and node["Labels"].get(REGION_LABEL) in regions
    )
