"""A program on Ray: the suite of tests/contract/program/test_program.py, at once on one cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from geo_ray.api.program import training_program
from geo_ray.base.errors import ProgramRegionError
from geo_ray.program.graph import NodeGroup, Program, ProgramNode
from geo_ray.program.run import run_program
from tests.support import program_support as toys

if TYPE_CHECKING:
    from geo_ray.ray_cluster.connect import ConnectedCluster

REGIONS = {"us": "us-east", "eu": "eu-west", "us-west": "ap-south"}


def moved(program: Program) -> Program:
    """The same in regions of the test's cluster."""
    groups = tuple(replace(g, region=REGIONS.get(g.region, g.region)) for g in program.groups)
    ways = {(REGIONS.get(a, a), REGIONS.get(b, b)): s for (a, b), s in program.links.items()}
    return replace(program, groups=groups, links=ways, places={})


def test_calls_of_every_kind_and_a_node_that_dies(connected: ConnectedCluster) -> None:
    # What fails in its `run` is made anew by the same code everywhere: the suite has it.
    groups = tuple(group for group in toys.battery().groups if group.nodes[0].name != "flaky")
    other = tuple(
        replace(group, nodes=tuple(named(node) for node in group.nodes))
        for group in toys.mortal(1).groups
    )
    program = replace(toys.battery(), groups=groups + other)
    result = run_program(moved(program), "ray")
    seen = result.values["caller"]
    assert seen["turns"] == [("near/1", "us-east", 1), ("near/0", "us-east", 0)] * 2
    assert {**seen, "turns": toys.BATTERY["turns"]} == toys.BATTERY
    lost, back = result.values["survivor"]
    assert lost.startswith("NODE_LOST victim.die")
    assert back == "no error: 'back'"
    assert result.restarts == {"victim": 1}


def named(node: ProgramNode) -> ProgramNode:
    """Names that go with those of the other program."""
    return replace(node, name="survivor") if node.name == "caller" else node


def test_the_example(connected: ConnectedCluster) -> None:
    assert run_program(moved(toys.example()), "ray").values == {"means": toys.MEANS}


def test_a_region_that_the_cluster_does_not_have(connected: ConnectedCluster) -> None:
    nowhere = Program("p", (NodeGroup("eu-wset", (ProgramNode("a", toys.Echo),)),))
    with pytest.raises(ProgramRegionError, match="'eu-wset'; did you mean 'eu-west'"):
        run_program(nowhere, "ray")


@pytest.mark.slow  # a whole run; its parts: the node on the virtual clock, and training on Ray
def test_the_training_that_geo_ray_ships(connected: ConnectedCluster, tmp_path: Path) -> None:
    config = {
        "name": "shipped",
        "task": {"use": "digits", "options": {"width": 2}},
        "data": {"generate": {"rows_per_shard": 256}, "batch_size": 16},
        "regions": [{"name": "us-east"}, {"name": "eu-west"}],
        "strategy": {"kind": "sma", "interval": 4},
        "optimizer": {"kind": "momentum", "lr": 0.05},
        "train": {"steps": 8, "eval_every": 8},
        "run": {"dir": str(tmp_path / "runs")},
    }
    program = training_program(config)
    told = run_program(program, "ray").values["train"]
    simulated = run_program(program, "virtual").values["train"]
    assert told["samples"] == simulated["samples"] > 0
    assert told["eval"] == simulated["eval"]  # the same bits
    assert (Path(told["run"]) / "summary.json").is_file()
