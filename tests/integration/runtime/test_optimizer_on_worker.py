"""A worker that keeps parameters and optimizer: the results are those of the parameter server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_ray.simulator.world import World
from geo_ray.training.parameters import digest
from tests.support.region_support import InProcess, experiment_of

ONE_WORKER = [{"name": "us-east"}, {"name": "eu-west"}]
ADAMW = {
    "kind": "adamw",
    "lr": 0.01,
    "schedule": {"kind": "cosine", "warmup_steps": 2},
}


def digests(directory: Path, on: str, *, shared: bool = True, **changes: Any) -> list[str]:
    train = {"steps": 7, "eval_every": 3, "optimizer_on": on} | changes.pop("train", {})
    sections = {"regions": ONE_WORKER, "optimizer": ADAMW, "train": train} | changes
    directory = directory / on
    directory.mkdir()
    with InProcess(experiment_of(**sections), directory) as run:
        found = run.run(shared=shared)
        run.check_books()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared": False},
        {"strategy": {"kind": "diloco", "interval": 3}},
        {"train": {"clip_norm": 0.5, "clip_mean_norm": 0.3}},
        {"regions": [{"name": "us-east", "ps_shards": 3}, {"name": "eu-west", "ps_shards": 3}]},
        {"regions": [{"name": "us-east"}, {"name": "eu-west", "workers": 2}]},
        {"optimizer": {"kind": "muon", "lr": 0.01}},
        {"optimizer": {"kind": "adafactor", "lr": 0.01}},
        {"regions": [{"name": "us-east"}]},
        {"train": {"state_every": 1}},
    ],
)
def test_the_results_are_those_of_the_server(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert digests(tmp_path, "worker", **changes) == digests(tmp_path, "server", **changes)


OWN_STEPS = Path(__file__).parents[2] / "support" / "own_steps_tasks.py"


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["Hooks", "Steps", "Adversaries"])
def test_steps_of_the_task_are_those_of_the_simulator(
    tmp_path: Path, kind: str, shards: int, shared: bool
) -> None:
    """Which are those of plain PyTorch: `tests/sim/simulator/test_task_steps.py`."""
    config = experiment_of(
        task={"use": f"{OWN_STEPS}:{kind}"},
        optimizer={"kind": "task"},
        strategy={"kind": "diloco", "interval": 3},
        regions=[{"name": name, "ps_shards": shards} for name in ("us-east", "eu-west")],
        train={"steps": 7, "eval_every": 3},
    )
    with InProcess(config, tmp_path) as run:
        found = run.run(shared=shared)
        run.check_books()
        simulated = World(config, run.task, run.manifest, lambda *_, **__: None).run()
    assert found == [digest(params_P) for params_P in simulated.params_P.values()]
