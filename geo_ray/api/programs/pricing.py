"""`geo_ray.price_program`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from geo_ray.api.inputs import FilePath
from geo_ray.api.programs.training import PlannedTraining, TrainingNode
from geo_ray.clouds.price_book import known_book
from geo_ray.program.cost import ProgramCost, cost_of
from geo_ray.program.graph import Program
from geo_ray.program.node import NodeGroup, ProgramNode
from geo_ray.program.run import run_program


def price_program(program: Program, *, prices: Sequence[FilePath] = ()) -> ProgramCost:
    """What a program costs: it is run on the virtual clock, and seconds and bytes are priced.

    A node that trains is not run but planned (`geo_ray.plan`), which needs ``plan:`` in its
    configuration.

    Args:
        program: the whole, with ``places`` and ``machine`` of groups.
        prices: files of your prices; of several the later count more.

    Raises:
        PriceUnknownError: a price is not known.
        GeoRayError: whatever keeps it from running or being planned.
    """
    files = [str(Path(path)) for path in prices]
    groups = tuple(_planned(group, files) for group in program.groups)
    result = run_program(replace(program, groups=groups), "virtual")
    planned = {
        node.name: float(result.values[node.name]["usd"])
        for group in groups
        for node in group.nodes
        if node.make is PlannedTraining
    }
    return cost_of(result, known_book(Path(path) for path in files), planned)


def _planned(group: NodeGroup, prices: list[str]) -> NodeGroup:
    nodes = []
    for node in group.nodes:
        if node.make is TrainingNode:
            config, base_dir, *after = node.args
            given = (config, base_dir, prices, *after)
            node = ProgramNode(node.name, PlannedTraining, given)
        nodes.append(node)
    return replace(group, nodes=tuple(nodes))
