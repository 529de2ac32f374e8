"""A program is a value: groups of nodes, and links between their regions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from geo_ray.program.node import (
    NodeEdge,
    NodeGroup,
    NodeInstance,
    ProgramNode,
    edges_of,
    instance_names,
)
from geo_ray.program.rules import check_groups, check_regions
from geo_ray.program.text import graph_text
from geo_ray.transport.emulation.link_model import LinkSpec


@dataclass(frozen=True, slots=True)
class Program:
    """A whole job. Checked when it is made.

    Attributes:
        name: of the program.
        groups: its nodes.
        links: between regions, by source and destination; one direction counts for both unless the
            other is given. What is not given takes no time.
        places: of regions, as ``cloud:region`` in the price book; needed for prices alone.
        seed: of the links' chances.

    Raises:
        ProgramInvalidError: it contradicts itself.
        ProgramRegionError: a link or a group names a region that is not there.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    links: Mapping[tuple[str, str], LinkSpec] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        check_groups(self.name, self.groups)
        check_regions(self.groups, self.links, self.places)

    @property
    def nodes(self) -> dict[str, tuple[ProgramNode, NodeGroup]]:
        """Every node with its group, by name."""
        return {node.name: (node, group) for group in self.groups for node in group.nodes}

    @property
    def regions(self) -> tuple[str, ...]:
        """Where its nodes are, in the order of the groups."""
        return tuple(dict.fromkeys(group.region for group in self.groups))

    @property
    def instances(self) -> tuple[NodeInstance, ...]:
        """Every replica of every node that is started."""
        return tuple(
            NodeInstance(name, node, group, replica)
            for node, group in self.nodes.values()
            if node.make is not None
            for replica, name in enumerate(instance_names(node, group))
        )

    @property
    def edges(self) -> tuple[NodeEdge, ...]:
        """Who may call whom."""
        regions = {node.name: group.region for node, group in self.nodes.values()}
        return tuple(
            NodeEdge(source, target, regions[source], regions[target])
            for source, target in edges_of(self.groups)
        )

    @property
    def both_ways(self) -> dict[tuple[str, str], LinkSpec]:
        """The links of both directions."""
        back = {(b, a): spec for (a, b), spec in self.links.items()}
        return back | dict(self.links)

    def __str__(self) -> str:
        return graph_text(self.name, self.groups, self.edges, self.both_ways)
