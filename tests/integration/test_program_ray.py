"""A program on Ray: the suite of tests/contract/test_program.py, at once on one cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from geo_ray.errors import NodeFailedError, ProgramRegionError
from geo_ray.program.graph import Program
from geo_ray.program.node import NodeGroup, ProgramNode
from geo_ray.program.run import run_program
from tests import program_support as toys

if TYPE_CHECKING:
    from geo_ray.runtime.cluster.connect import ConnectedCluster

REGIONS = {"us": "us-east", "eu": "eu-west"}


def moved(program: Program) -> Program:
    """The same in regions of the test's cluster."""
    groups = tuple(replace(g, region=REGIONS.get(g.region, "ap-south")) for g in program.groups)
    links = {(REGIONS[a], REGIONS[b]): s for (a, b), s in program.links.items() if a in REGIONS}
    return replace(program, groups=groups, links=links, places={})


def test_calls_of_every_kind_and_a_node_that_dies(connected: ConnectedCluster) -> None:
    battery, mortal = moved(toys.battery()), moved(toys.mortal(1))
    names = {"caller": "survivor"}
    second = tuple(
        replace(
            group,
            nodes=tuple(replace(n, name=names.get(n.name, n.name)) for n in group.nodes),
        )
        for group in mortal.groups
    )
    result = run_program(replace(battery, groups=battery.groups + second), "ray")
    seen = result.values["caller"]
    assert seen["turns"] == [("near/1", "us-east", 1), ("near/0", "us-east", 0)] * 2
    assert {**seen, "turns": toys.BATTERY["turns"]} == toys.BATTERY
    lost, back = result.values["survivor"]
    assert lost.startswith("NODE_LOST victim.die")
    assert back == "no error: 'back'"
    assert result.restarts == {"flaky": 1, "victim": 1}


def test_the_example_and_failures(connected: ConnectedCluster) -> None:
    assert run_program(moved(toys.example()), "ray").values == {"means": toys.MEANS}
    with pytest.raises(NodeFailedError, match=r"'unmade' failed while it was made.*no such luck"):
        run_program(moved(toys.alone(ProgramNode("unmade", toys.Unmade))), "ray")
    nowhere = Program("p", (NodeGroup("eu-wset", (ProgramNode("a", toys.Echo),)),))
    with pytest.raises(ProgramRegionError, match="'eu-wset'; did you mean 'eu-west'"):
        run_program(nowhere, "ray")
