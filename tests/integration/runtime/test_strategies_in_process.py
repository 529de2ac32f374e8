"""Every strategy over real sockets: regions end equal, books balance, and the simulator agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geo_ray.experiment.experiment import Experiment
from geo_ray.simulator.world import World
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.training.parameters import digest
from tests.support.region_support import InProcess, experiment_of

REGIONS = [{"name": "us-east", "workers": 2}, {"name": "eu-west", "ps_shards": 2}]
TRAIN = {"steps": 10, "eval_every": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "bsp": {},
    "fedssgd": {"accumulate": 2},
    "esync": {"slowest_steps": 2},
    "nbsync": {},
    "asgd": {},
    "demo": {},
    "hfa": {"k1": 2, "k2": 2},
    "halos": {"local_steps": 2, "interval": 2},
    "diloco_streaming": {"interval": 4, "fragments": 2, "tau": 1},
    "cocodc": {"interval": 4, "fragments": 2, "tau": 1, "utilization": 0.7},
    "decoupled": {"interval": 4, "fragments": 2, "quorum": 2, "grace_s": 0.2},
    "fedgsync": {"interval": 2, "quorum": 1.0, "deadline_s": 5.0},
    "async_local_sgd": {"interval": 2, "staleness": {"bound": 2, "weight": "sqrt"}},
}


def of_kind(kind: str, **changes: Any) -> Experiment:
    cut = [region | {"ps_shards": 1} for region in REGIONS]
    whole = STRATEGIES[kind]().traits.region
    sections = {
        "strategy": {"kind": kind} | OPTIONS.get(kind, {"interval": 2}),
        "regions": cut if whole.whole_model or whole.needs_optimizer else REGIONS,
        "train": TRAIN,
        "emulate": {"step_s": 0.01},
    }
    if kind == "sparseloco":
        sections["codec"] = {"up": {"kind": "chunked_topk"}}
    if whole.needs_optimizer is not None:
        sections["optimizer"] = {"kind": whole.needs_optimizer}
    return experiment_of(**(sections | changes))


@pytest.mark.parametrize("kind", STRATEGIES)
def test_regions_train_over_sockets_and_end_equal(tmp_path: Path, kind: str) -> None:
    config = of_kind(kind)
    strategy = config.strategy
    with InProcess(config, tmp_path) as world:
        digests = world.run()
        applied = sum(site.server.ledger.applied for site in world.sites.values())
        for site in world.sites.values():
            site.server.ledger.check()
        params = [torch.cat([s.params_S for s in site.shards]) for site in world.sites.values()]
        torch.testing.assert_close(*params, rtol=1e-4, atol=1e-5)
        assert not torch.equal(params[0], world.params_P)
        assert applied >= config.rows
        traits = strategy.traits
        if not traits.in_rounds or traits.region.ends_by_total_rows:
            return  # what comes first depends on the time
        assert len(set(digests)) == 1
        simulated = World(config, world.task, world.manifest, ignore).run()
        assert digests == [digest(params_P) for params_P in simulated.params_P.values()]


@pytest.mark.parametrize("kind", ["bsp", "fedssgd", "diloco", "hfa"])
def test_unused_parameters_are_skipped_over_sockets_too(tmp_path: Path, kind: str) -> None:
    """The simulator does what plain PyTorch does: `tests/sim/simulator/test_experts_sim.py`."""
    task = {"use": f"{Path(__file__).parents[2] / 'support' / 'buffer_tasks.py'}:Experts"}
    adamw = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.5}
    config = of_kind(kind, task=task, optimizer=adamw)
    with InProcess(config, tmp_path) as world:
        digests = world.run()
        simulated = World(config, world.task, world.manifest, ignore).run()
        assert digests == [digest(params_P) for params_P in simulated.params_P.values()]


@pytest.mark.parametrize(
    ("kind", "evaluate"),
    [
        ("diloco", "outer"),
        ("diloco", "live"),
        ("sparseloco", "outer"),
        ("hfa", "outer"),
        ("diloco_streaming", "outer"),
        ("sma", "outer"),
    ],
)
def test_evaluations_within_a_round_match_the_simulator(
    tmp_path: Path, kind: str, evaluate: str
) -> None:
    """The outer parameters, if the strategy has any and the live ones were not requested."""
    config = of_kind(kind, train={"steps": 9, "eval_every": 3, "evaluate": evaluate})
    with InProcess(config, tmp_path) as world:
        world.run()
        found: dict[tuple[str, int], float] = {}
        for name, site in world.sites.items():
            for event in site.event_buffer.take(100_000):
                if event["kind"] == "stats":
                    sums = {k: np.asarray(v) for k, v in event["stats"].items()}
                    found[name, event["step"]] = world.task.metrics(sums)["loss"]
        events: list[dict[str, Any]] = []

        def emit(kind: str, t_s: float, **fields: Any) -> Any:
            events.append({"kind": kind, **fields})

        World(config, world.task, world.manifest, emit).run()
    expected = {
        (event["region"], event["step"]): event["metrics"]["loss"]
        for event in events
        if event["kind"] == "eval" and event["region"] is not None
    }
    assert found == pytest.approx(expected)
    assert len(found) >= 6


def ignore(kind: str, t_s: float, **fields: Any) -> Any:
    """Events are of no interest."""
