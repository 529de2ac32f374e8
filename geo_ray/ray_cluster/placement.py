"""Reserves each region's processes on the nodes that carry the region's label."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from geo_ray.base.errors import PlacementError
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.calls import check_not_closing
from geo_ray.ray_cluster.connect import head_answers
from geo_ray.ray_cluster.demand import Bundle, RegionDemand, Role, describe_amounts
from geo_ray.ray_cluster.labels import REGION_LABEL, TYPE_LABEL, Selector, in_region, of_type

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlacedRegion:
    """A region whose processes have places.

    Attributes:
        region: name of the region.
        pg: its placement group.
        workers_pg: placement group of its workers; a separate one if they have separate machines.
        bundle_index: bundle indices of each role, in the order of the demand.
    """

    region: str
    pg: PlacementGroup
    workers_pg: PlacementGroup
    bundle_index: Mapping[Role, tuple[int, ...]]

    @property
    def groups(self) -> tuple[PlacementGroup, ...]:
        """All its placement groups."""
        return tuple({pg.id: pg for pg in (self.pg, self.workers_pg)}.values())

    def strategy(self, role: Role, rank: int = 0) -> PlacementGroupSchedulingStrategy:
        """Return the ``scheduling_strategy`` of process ``rank`` of ``role``."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.workers_pg if role == "worker" else self.pg,
            placement_group_bundle_index=self.bundle_index[role][rank],
            placement_group_capture_child_tasks=False,
        )


def place(demands: Sequence[RegionDemand], timeout_s: float) -> dict[str, PlacedRegion]:
    """Reserve all of ``demands``, or nothing.

    All groups are requested at once, so that an autoscaler sees the whole demand, and share one
    deadline.

    Args:
        demands: one per region.
        timeout_s: longest wait for all regions together.

    Raises:
        PlacementError: a region cannot be placed in time; nothing is reserved.
        RegionLostError: the run ends, in a thread of a `RayThreads`.
    """
    deadline = time.monotonic() + timeout_s
    placed: dict[str, PlacedRegion] = {}
    try:
        for demand in demands:
            groups = [_ask(demand, bundles) for bundles in demand.groups()]
            placed[demand.region] = PlacedRegion(
                demand.region, groups[0], groups[-1], demand.indices()
            )
        for demand in demands:
            for group in placed[demand.region].groups:
                # Ray waits whole seconds, so this may take up to one second longer.
                while not group.wait(timeout_seconds=1):
                    check_not_closing()
                    if time.monotonic() >= deadline:
                        raise _failure(demands, placed, timeout_s)
    except RayError as error:
        remove(placed)
        raise PlacementError(f"Ray refuses the placement: {error}") from error
    except BaseException:
        remove(placed)
        raise
    return placed


def bundles_of(
    demands: Sequence[RegionDemand],
) -> list[tuple[dict[str, float], Selector]]:
    """Return the bundles of demands for one group that the caller creates; see `placed_in`.

    Raises:
        PlacementError: workers need separate machines, which one group cannot provide.
    """
    found = []
    for demand in demands:
        if demand.spreads:
            raise PlacementError(
                f"region '{demand.region}' names machines for its workers, which need separate "
                "placement groups",
                fix="Leave out `regions.*.nodes`, or run it by itself.",
            )
        found += [
            (bundle.resources(), _selector(demand.node_label, bundle)) for bundle in demand.bundles
        ]
    return found


def placed_in(
    group: PlacementGroup, demands: Sequence[RegionDemand], first: int
) -> dict[str, PlacedRegion]:
    """Return the places of demands in a ready group that has their `bundles_of`.

    Args:
        group: created, and later removed, by the caller.
        demands: one per region.
        first: index of the first of their bundles.
    """
    placed = {}
    for demand in demands:
        indices: dict[Role, tuple[int, ...]] = {
            role: tuple(first + index for index in own) for role, own in demand.indices().items()
        }
        placed[demand.region] = PlacedRegion(demand.region, group, group, indices)
        first += len(demand.bundles)
    return placed


def server_nodes(placed: PlacedRegion) -> set[str]:
    """Return the ids of the nodes on which a region's servers and bridge are placed."""
    nodes: Mapping[int, str] = placement_group_table(placed.pg)["bundles_to_node_id"]
    indices = [i for role, each in placed.bundle_index.items() if role != "worker" for i in each]
    return {nodes[index] for index in indices if nodes.get(index)}


def remove(placed: Mapping[str, PlacedRegion]) -> bool:
    """Release all reservations; processes in them end. Missing groups are ignored.

    An unresponsive head is not waited for: when it returns, it ends everything without a run actor.

    Returns:
        Whether the head was available.
    """
    if placed and not head_answers():
        log.warning("the run's reservations are not released: the Ray head does not answer")
        return False
    for region in placed.values():
        for group in region.groups:
            try:
                remove_placement_group(group)
            except Exception as error:  # of any class: the other groups must be removed, too
                log.warning("placement group of region %s not removed: %s", region.region, error)
    return True


def _ask(demand: RegionDemand, bundles: Sequence[Bundle]) -> PlacementGroup:
    spread = demand.spreads and all(bundle.role == "worker" for bundle in bundles)
    group: PlacementGroup = placement_group(
        [bundle.resources() for bundle in bundles],
        strategy="STRICT_SPREAD" if spread else "SPREAD" if demand.apart else "PACK",
        name=f"geo-ray-{demand.region}-{secrets.token_hex(4)}",  # a taken name is an error
        bundle_label_selector=[_selector(demand.node_label, bundle) for bundle in bundles],
    )
    return group


def _selector(region: str, bundle: Bundle) -> Selector:
    return of_type(region, bundle.node_type) if bundle.node_type else in_region(region)


def _failure(
    demands: Sequence[RegionDemand], placed: Mapping[str, PlacedRegion], timeout_s: float
) -> PlacementError:
    free = ray_internals.free_resources()
    alive = [node for node in ray_internals.nodes() if node["Alive"]]
    lines = []
    for demand in demands:
        tables: list[dict[str, Any]] = [
            placement_group_table(group) for group in placed[demand.region].groups
        ]
        missing = [table for table in tables if table.get("state") != "CREATED"]
        if not missing:
            continue
        scheduling = (missing[0].get("stats") or {}).get("scheduling_state", "unknown")
        lines.append(
            f"region '{demand.region}' asks for {demand}; scheduling state {scheduling}; "
            + _describe_nodes(demand.node_label, alive, free)
        )
    return PlacementError(f"not placed within {timeout_s:g} s:\n  " + "\n  ".join(lines))


def _describe_nodes(
    region: str, alive: Sequence[dict[str, Any]], free: Mapping[str, dict[str, float]]
) -> str:
    mine = [node for node in alive if node["Labels"].get(REGION_LABEL) == region]
    if not mine:
        others = sorted({node["Labels"].get(REGION_LABEL, "") for node in alive} - {""})
        return f"no node has the label {REGION_LABEL}={region}; labelled regions are {others}"
    text = [
        f"{node['NodeManagerAddress']}{_kind(node)} has "
        f"{describe_amounts(free.get(node['NodeID'], {}))} free of "
        f"{describe_amounts(node['Resources'])}"
        for node in mine
    ]
    return "its nodes: " + "; ".join(text)


def _kind(node: dict[str, Any]) -> str:
    kind = node["Labels"].get(TYPE_LABEL)
    return f" ({kind})" if kind else ""
