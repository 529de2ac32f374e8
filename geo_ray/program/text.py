"""A program in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from geo_ray.observe.text import duration_text
from geo_ray.program.node import NodeEdge, NodeGroup
from geo_ray.transport.emulation.link_model import LinkSpec


def graph_text(
    name: str,
    groups: Sequence[NodeGroup],
    edges: Sequence[NodeEdge],
    links: Mapping[tuple[str, str], LinkSpec],
) -> str:
    """Regions with their nodes, then who calls whom; what crosses regions says so."""
    lines = [f"program {name}"]
    for region in dict.fromkeys(group.region for group in groups):
        lines.append(f"  {region}")
        for group in groups:
            if group.region == region:
                lines += [f"    {node.name}{_group_text(group)}" for node in group.nodes]
    for edge in edges:
        way = ""
        if edge.crosses:
            spec = links.get((edge.source_region, edge.target_region))
            way = f"   [{edge.source_region} => {edge.target_region}{_link_text(spec)}]"
        lines.append(f"  {edge.source} -> {edge.target}{way}")
    return "\n".join(lines)


def _group_text(group: NodeGroup) -> str:
    told = [f" x {group.replicas}"] if group.replicas > 1 else []
    told += [f" on {group.machine}"] if group.machine else []
    if group.restarts.most:
        within = group.restarts.window_s
        window = "" if within is None else f" in {duration_text(within)}"
        told.append(f", {group.restarts.most} restarts{window}")
    return "".join(told)


def _link_text(spec: LinkSpec | None) -> str:
    if spec is None:
        return ""
    rate = "" if spec.rate_mbps is None else f", {spec.rate_mbps:g} Mbit/s"
    return f"{rate}, {spec.delay_s * 1000:g} ms"
