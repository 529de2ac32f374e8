"""Steps of a task over sockets are those of the simulator, which are those of plain PyTorch.

See `tests/sim/simulator/test_task_steps.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.simulator.world import World
from geo_ray.training.parameters import digest
from tests.support.region_support import InProcess, experiment_of

OWN_STEPS = Path(__file__).parents[2] / "support" / "own_steps_tasks.py"


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["CalmHooks", "CalmSteps"])
def test_steps_of_the_task_are_those_of_the_simulator(
    tmp_path: Path, kind: str, shards: int, shared: bool
) -> None:
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
