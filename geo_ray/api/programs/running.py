"""`geo_ray.run_program` and `geo_ray.price_program`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from geo_ray.api.inputs import FilePath
from geo_ray.api.programs.training import PlannedTraining, TrainingNode
from geo_ray.clouds.price_book import known_book
from geo_ray.config.cluster import ClusterConfig
from geo_ray.program.cost import ProgramCost, cost_of
from geo_ray.program.graph import Program
from geo_ray.program.node import NodeGroup, ProgramNode
from geo_ray.program.result import ProgramResult
from geo_ray.program.run import On, run


def run_program(
    program: Program, on: On = "threads", *, cluster: ClusterConfig | None = None
) -> ProgramResult:
    """Run a program to its end; nothing of it is left afterwards, however it ends.

    Args:
        program: the whole.
        on: ``threads`` of this process, ``processes`` of this machine, ``ray``, or ``virtual``: in
            this process on a virtual clock, on which only links and what nodes say take time.
        cluster: for ``ray``; None: the cluster that this process is connected to or runs in, else
            one that is made on this machine.

    Raises:
        NodeFailedError: a node failed more often than its group allows.
        NodeUnshippableError: a node cannot be sent to another process.
        GeoRayError: whatever else keeps it from running.
    """
    return run(program, on, cluster=cluster)


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
    result = run(replace(program, groups=groups), "virtual")
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
