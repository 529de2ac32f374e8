"""`training_program` and `price_program`: the training job as a program."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from geo_ray.api.auto import load_experiment
from geo_ray.api.config import Config, FilePath, Overrides, preserving_threads, source_of
from geo_ray.api.plan import PlanInputs
from geo_ray.api.plan import plan as plan_of
from geo_ray.api.train import simulate, train
from geo_ray.base.load import override_items
from geo_ray.base.overrides import apply_overrides
from geo_ray.base.yaml import parse_yaml, read_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.prices.price_book import known_book
from geo_ray.program.clock import here
from geo_ray.program.graph import NodeGroup, NodeHandle, Program, ProgramNode
from geo_ray.program.result import ProgramCost, cost_of
from geo_ray.program.run import run_program

EXISTING = {"cluster": {"kind": "existing"}}


class TrainingNode:
    """Trains as a configuration says, wherever it runs: by `geo_ray.train`, or `geo_ray.simulate`.

    Args:
        config: a configuration's tree.
        base_dir: where its relative paths start.
        after: a caller of a node whose ``ready`` it waits for before it begins.
    """

    def __init__(self, config: dict[str, Any], base_dir: str, after: Any = None) -> None:
        self._config, self._base_dir, self._after = config, base_dir, after
        self._ended: Future[dict[str, Any]] = Future()

    def run(self) -> dict[str, Any]:
        """Train; returns the summary, with the run's directory as ``run``."""
        if self._after is not None:
            self._after.ready()
        try:
            final = self._trained()
        except BaseException as error:
            self._ended.set_exception(error)
            raise
        self._ended.set_result(final)
        return final

    def outcome(self) -> dict[str, Any]:
        """Wait for the training's end, and return what ``run`` returns."""
        here().clock.wait(self._ended)
        return self._ended.result()

    def _trained(self) -> dict[str, Any]:
        if here().on == "virtual":
            run = simulate(self._config, base_dir=self._base_dir)
            here().takes_s(run.summary.seconds)
        else:
            changes = EXISTING if here().on == "ray" else {}
            run = train(self._config, changes, base_dir=self._base_dir)
        return {**run.summary.model_dump(mode="json"), "run": str(run.path)}


class PlannedTraining:
    """Stands for a `TrainingNode` where a program is priced: takes as long as its plan says.

    Args:
        config: a configuration's tree.
        base_dir: where its relative paths start.
        prices: files of prices.
        after: as for `TrainingNode`.
    """

    def __init__(
        self, config: dict[str, Any], base_dir: str, prices: list[str], after: Any = None
    ) -> None:
        inputs = PlanInputs(prices=[Path(path) for path in prices])
        self._plan = plan_of(config, inputs=inputs, base_dir=base_dir)
        self._after = after

    def run(self) -> dict[str, Any]:
        """Let the time pass; returns what it costs."""
        if self._after is not None:
            self._after.ready()
        here().takes_s(self._plan.seconds)
        return self.outcome()

    def outcome(self) -> dict[str, Any]:
        """What it costs."""
        return {"usd": self._plan.usd, "seconds": self._plan.seconds}


def training_program(
    config: Config,
    overrides: Overrides = (),
    *,
    beside: Sequence[NodeGroup] = (),
    after: NodeHandle | None = None,
    name: str = "train",
    base_dir: FilePath | None = None,
) -> Program:
    """The program that geo_ray ships: it does what `geo_ray.train` does, and shows who takes part.

    Its node ``train`` is started by the program; the others are what that brings up. Nodes of your
    own go ``beside`` them, and may hold ``NodeHandle("train")``, whose ``outcome()`` waits for the
    end of the training.

    Args:
        config: a file, a mapping, or what `load_config` gave.
        overrides: changes of single keys, by dotted key.
        beside: groups of your nodes; their regions may be others than the training's.
        after: of a node of yours, whose ``ready()`` is waited for before the training begins.
        name: of the node that trains; another one if several trainings are put together.
        base_dir: as for `geo_ray.train`.

    Raises:
        ConfigError: the configuration is wrong.
    """
    source = source_of(config, base_dir)
    changes = override_items(overrides)
    with preserving_threads():
        experiment, _ = load_experiment(source, changes)
    tree = apply_overrides(parse_yaml(read_text(source), str(source)), changes).value
    given: tuple[object, ...] = (tree, str(source.parent.absolute()), after)
    run_actor = ProgramNode(name, TrainingNode, given if after is not None else given[:2])
    leader = NodeGroup(experiment.averager_region, (run_actor,), cpus=0.01, calls_at_once=16)
    links = {pair: spec for pair, spec in experiment.links().items() if spec is not None}
    prefix = "" if name == "train" else f"{name}-"
    groups = (leader, *_shown(experiment, prefix), *beside)
    return Program(experiment.name, groups, links=links, seed=experiment.seed)


def _shown(experiment: Experiment, prefix: str) -> list[NodeGroup]:
    """Groups of what a run consists of, which its run actor brings up."""
    leader = experiment.averager_region
    averager = ProgramNode(f"{prefix}averager", None)
    groups = [NodeGroup(leader, (averager,), cpus=0.0)]
    for region in experiment.present:
        bridge = ProgramNode(f"{prefix}bridge-{region.name}", None, (averager.handle,))
        server = ProgramNode(f"{prefix}server-{region.name}", None, (bridge.handle,))
        worker = ProgramNode(f"{prefix}worker-{region.name}", None, (server.handle,))
        groups += [
            NodeGroup(region.name, (bridge,), cpus=0.0),
            NodeGroup(region.name, (server,), region.ps_shards, region.cpus_per_server),
            NodeGroup(
                region.name,
                (worker,),
                region.workers,
                region.cpus_per_worker,
                region.gpus_per_worker,
            ),
        ]
    return groups


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
