"""Training as a program: what it shows, and that it is the training that geo_ray has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import geo_ray
from geo_ray.api.program import TrainingNode, price_program, training_program
from geo_ray.base.errors import ConfigError, NodeFailedError
from geo_ray.program.clock import here
from geo_ray.program.graph import NodeGroup, NodeHandle, NodeRestarts, Program, ProgramNode
from geo_ray.program.run import run_program

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "small",
        "task": {"use": "digits", "options": {"width": 2}},
        "data": {"generate": {"rows_per_shard": 256}, "batch_size": 16},
        "regions": [{"name": "us", "workers": 2}, {"name": "eu", "ps_shards": 2}],
        "strategy": {"kind": "sma", "interval": 4},
        "optimizer": {"kind": "momentum", "lr": 0.05},
        "train": {"steps": 8, "eval_every": 8},
        "averager": {"region": "eu"},
        "emulate": {"link": {"rate_mbps": 20, "delay_s": 0.05}, "step_s": 0.05},
        "run": {"dir": str(tmp_path / "runs")},
    }


def test_it_shows_who_takes_part(config: dict[str, Any]) -> None:
    assert str(training_program(config)) == (
        "program small\n"
        "  eu\n"
        "    train\n"
        "    averager\n"
        "    bridge-eu\n"
        "    server-eu x 2\n"
        "    worker-eu\n"
        "  us\n"
        "    bridge-us\n"
        "    server-us\n"
        "    worker-us x 2\n"
        "  bridge-us -> averager   [us => eu, 20 Mbit/s, 50 ms]\n"
        "  server-us -> bridge-us\n"
        "  worker-us -> server-us\n"
        "  bridge-eu -> averager\n"
        "  server-eu -> bridge-eu\n"
        "  worker-eu -> server-eu"
    )


class Evaluator:
    """Waits for a training, and looks at what it left."""

    def __init__(self, train: Any, filtered: Any) -> None:
        self._train, self._filtered = train, filtered

    def run(self) -> Any:
        told = self._train.outcome()
        there = Path(told["run"]).is_dir()
        return told["samples"], there, self._filtered.calls(), here().clock.now_s()


class Filter:
    """Is ready after a while."""

    def __init__(self) -> None:
        self._calls = 0

    def ready(self) -> None:
        here().clock.sleep_s(100.0)
        self._calls += 1

    def calls(self) -> int:
        return self._calls


def test_on_the_virtual_clock_it_is_the_simulation_with_own_nodes_beside(
    config: dict[str, Any],
) -> None:
    simulated = geo_ray.simulate(config).summary
    keep = ProgramNode("filter", Filter)
    look = ProgramNode("evaluator", Evaluator, (NodeHandle("train"), keep.handle))
    beside = [NodeGroup("us", (keep, look))]
    program = training_program(config, beside=beside, after=keep.handle)
    result = run_program(program, on="virtual")
    told = dict(result.values["train"])
    told.pop("run")
    assert told == simulated.model_dump(mode="json")
    samples, there, calls, now_s = result.values["evaluator"]
    assert (samples, there, calls) == (simulated.samples, True, 1)
    assert now_s > 100.0 + simulated.seconds
    assert result.seconds == now_s


def test_two_trainings_beside_each_other(config: dict[str, Any]) -> None:
    two = training_program(config, {"name": "other"}, name="second")
    both = training_program(config, beside=two.groups)
    result = run_program(both, on="virtual")
    assert set(result.values) == {"train", "second"}
    assert result.values["train"]["eval"] == result.values["second"]["eval"]


def test_a_training_that_fails_says_so_and_may_be_started_again(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        training_program(config, {"nonsense": 1})
    program = training_program(config)
    bad = program.nodes["train"][0].args[0] | {"regions": []}  # type: ignore[operator]
    node = ProgramNode("train", TrainingNode, (bad, str(ROOT)))
    group = NodeGroup("eu", (node,), restarts=NodeRestarts(1))
    with pytest.raises(NodeFailedError, match=r"(?s)failed in run: ConfigError.*most = 1"):
        run_program(Program("bad", (group,)), on="virtual")


def test_it_is_priced_by_the_planner() -> None:
    path = ROOT / "configs" / "planned.yaml"
    planned = geo_ray.plan(path)
    cost = price_program(training_program(path))
    assert cost.planned_usd == {"train": planned.usd}
    assert cost.usd == planned.usd
    assert cost.seconds == planned.seconds
