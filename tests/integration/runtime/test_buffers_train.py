"""Models that change in the forward pass, on real actors: saved, resumed, evaluated, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from geo_ray.api.run import open_run
from geo_ray.base.errors import TaskStateError
from geo_ray.data.tasks.load import load_task
from geo_ray.runs import directory
from geo_ray.runs.data import open_readers, prepare_manifest
from geo_ray.telemetry.events import Event
from tests.support.train_support import experiment_of, simulate, train

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.timeout(900),  # actors take long to start beside other work
]

TASKS = Path(__file__).parents[2] / "support" / "buffer_tasks.py"
STATEFUL: dict[str, Any] = {"use": f"{TASKS}:Stateful", "options": {}}


class CutOffError(Exception):
    """Ends a run as a lost run actor does: without a checkpoint."""


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_the_simulated_and_the_metrics_of_its_file(
    tmp_path: Path,
) -> None:
    config = experiment_of(
        tmp_path,
        task=STATEFUL,
        regions=[{"name": "us-east", "workers": 2, "ps_shards": 2}, {"name": "eu-west"}],
        strategy={"kind": "bsp"},
        train={"steps": 14, "eval_every": 7, "step_timeout_s": 60},
        emulate={"link": {"rate_mbps": 100, "delay_s": 0.005}, "step_s": 0.1},
        checkpoint={"every_s": 0.3},
    )
    wanted = simulate(config, tmp_path)
    run = directory.create(config, tmp_path)

    def cut(event: Event) -> None:
        if event.kind == "checkpoint" and event["step"] > 2:
            raise CutOffError

    with pytest.raises(CutOffError):
        train(config, tmp_path, begun=run, sink=cut)
    done = train(config, tmp_path, begun=run, resume=True)
    assert done.summary.digest == wanted.summary.digest
    ours, theirs = load_file(run.model), load_file(wanted.run.model)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    start = load_task(config.task, tmp_path).model(config.seed).state_dict()
    for name in ("teacher.weight", "norm.running_mean", "queue", "place"):
        assert not torch.equal(ours[name], start[name]), f"{name} is as it was at the start"
    assert torch.equal(ours["scale"], start["scale"])
    assert int(ours["place"]) == 14
    # What was evaluated at the end is what the file holds.
    opened = open_run(run.path)
    task, module = load_task(config.task, tmp_path), opened.model().eval()
    manifest, _ = prepare_manifest(config, task, run.path, run.path / "data")
    total: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for name in config.region_names:
            _, heldout = open_readers(config, manifest, name)
            for columns in heldout.scan(256):
                batch = task.collate(columns, torch.device("cpu"))
                for key, value in task.evaluate(module, batch).items():
                    total[key] = total.get(key, 0.0) + value
    assert task.metrics(total) == pytest.approx(done.summary.eval, rel=1e-6)
    # And a model can be taken from a checkpoint.
    (newest, *_) = opened.checkpoints[::-1]
    taken = opened.model(newest.manifest.id).state_dict()
    assert int(taken["place"]) == newest.manifest.step
    assert not torch.equal(taken["teacher.weight"], start["teacher.weight"])


@pytest.mark.slow
def test_undeclared_state_ends_the_run_and_is_named(tmp_path: Path) -> None:
    task = STATEFUL | {"options": {"declares": False}}
    with pytest.raises(TaskStateError, match=r"'teacher\.bias'"):
        train(experiment_of(tmp_path, task=task), tmp_path)


@pytest.mark.slow  # two starts; test_buffers_in_process.py
def test_frozen_values_that_differ_between_processes_are_named(tmp_path: Path) -> None:
    """A file that is read by model(seed) differs from one process to the next."""
    (tmp_path / "differs.py").write_text(
        "import os\n"
        "import torch\n"
        "from torch import nn\n"
        "from geo_ray.data.tasks.digits import Digits\n"
        "class Differs(Digits):\n"
        "    def model(self, seed):\n"
        "        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10))\n"
        "        model[1].requires_grad_(False)\n"
        "        model[1].bias.fill_(os.getpid())\n"
        "        return model\n"
    )
    with pytest.raises(TaskStateError, match=r"'1\.bias'"):
        train(experiment_of(tmp_path, task={"use": "differs.py:Differs"}), tmp_path)
