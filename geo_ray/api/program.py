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
    """A node that trains with a configuration, with `geo_ray.train` or `geo_ray.simulate`.

    Args:
        config: tree of the configuration.
        base_dir: base of its relative paths.
        after: handle of a node whose ``ready`` it waits for.
    """

    def __init__(self, config: dict[str, Any], base_dir: str, after: Any = None) -> None:
        self._config, self._base_dir, self._after = config, base_dir, after
        self._ended: Future[dict[str, Any]] = Future()

    def run(self) -> dict[str, Any]:
        """Train; return the summary, with the run's directory as ``run``."""
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
        """Wait for the end of the training, and return the result of ``run``."""
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
    """Replaces a `TrainingNode` when a program is priced; takes the time of its plan.

    Args:
        config: tree of the configuration.
        base_dir: base of its relative paths.
        prices: price files.
        after: as for `TrainingNode`.
    """

    def __init__(
        self, config: dict[str, Any], base_dir: str, prices: list[str], after: Any = None
    ) -> None:
        inputs = PlanInputs(prices=[Path(path) for path in prices])
        self._plan = plan_of(config, inputs=inputs, base_dir=base_dir)
        self._after = after

    def run(self) -> dict[str, Any]:
        """Sleep for the planned time; return the cost."""
        if self._after is not None:
            self._after.ready()
        here().takes_s(self._plan.seconds)
        return self.outcome()

    def outcome(self) -> dict[str, Any]:
        """Return the cost."""
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
    """Return the program of `geo_ray.train`, which shows the processes of a run.

    The program starts its node ``train``; the others are the processes that ``train`` starts.
    Additional nodes go into ``beside``, and may hold ``NodeHandle("train")``, whose ``outcome()``
    waits for the end of the training.

    Args:
        config: a file, a mapping, or a result of `load_config`.
        overrides: changed values by dotted key.
        beside: groups of additional nodes; their regions may differ from those of the training.
        after: name of an additional node whose ``ready()`` the training waits for.
        name: name of the training node; must differ between several trainings.
        base_dir: as for `geo_ray.train`.

    Raises:
        ConfigError: the configuration is invalid.
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
    """Return the groups of a run's processes, which its run actor starts."""
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
    """Return the cost of a program: run it on the virtual clock, and price seconds and bytes.

    A training node is planned with `geo_ray.plan` instead of run, which needs ``plan:`` in its
    configuration.

    Args:
        program: the program, with ``places`` and ``machine`` of its groups.
        prices: your price files; later files override earlier ones.

    Raises:
        PriceUnknownError: a price is unknown.
        GeoRayError: the program cannot be run or planned.
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
