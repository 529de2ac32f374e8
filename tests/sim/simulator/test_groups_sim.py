"""Groups of parameters and clipping of the mean in whole runs, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from geo_ray.base.errors import ConfigError, TaskStateError
from geo_ray.data.tasks.load import TaskConfig, load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.model_file import module_with
from tests.support.world_support import Run, experiment

TASKS = Path(__file__).parents[2] / "support" / "buffer_tasks.py"
STEPS = 6
GROUPED = {"use": f"{TASKS}:Grouped"}
ONE = {
    "regions": [{"name": "a", "workers": 2}],
    "train": {"steps": STEPS, "eval_every": 0},
    "emulate": {"step_s": 0.5},
}


def by_hand(run: Run, config: Experiment, most_norm: float | None = None) -> nn.Module:
    """Two workers' mean gradient, clipped by torch's own function, with torch's own groups."""
    task = load_task(TaskConfig(**config.task.model_dump()), Path())
    model, reader = task.model(config.seed), run.world.regions["a"]._train
    named = dict(model.named_parameters())
    flat = [p for p in named.values() if p.ndim < 2]
    rest = [p for p in named.values() if p.ndim >= 2]
    optimizer: Any = torch.optim.SGD([{"params": rest}], lr=0.1)
    if config.optimizer.kind == "adamw":
        groups = [{"params": rest}, {"params": flat, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.5, fused=True)
    elif most_norm is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(STEPS):
        halves = []
        for rank in (0, 1):
            model.zero_grad()
            columns = reader.read(8 * i + 4 * rank, 4)
            task.loss(model, task.collate(columns, torch.device("cpu"))).backward()
            halves.append([p.grad.clone() for p in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *halves, strict=True):
            parameter.grad = torch.mul(one, 0.5).add_(other, alpha=0.5)
        if most_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), most_norm)
        optimizer.step()
    return model


def model_of(run: Run) -> nn.Module:
    task = load_task(TaskConfig(**run.config.task.model_dump()), Path())
    return module_with(task, run.config.seed, [run.result.params_P["a"]])


ADAMW = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.5}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_run_with_groups_has_the_bits_of_plain_training(data_dir, shards: int) -> None:
    region = {"name": "a", "workers": 2, "ps_shards": shards}
    config = experiment(task=GROUPED, optimizer=ADAMW, **ONE | {"regions": [region]})
    run = Run(config, data_dir).go()
    wanted = by_hand(run, config)
    for name, value in model_of(run).state_dict().items():
        assert torch.equal(value, wanted.state_dict()[name]), name
    plain = experiment(task={"use": f"{TASKS}:Ungrouped"}, optimizer=ADAMW, **ONE)
    assert Run(plain, data_dir).go().digests() != run.digests()


def test_local_steps_of_a_worker_have_groups_too(data_dir) -> None:
    sections = {
        "strategy": {"kind": "halos", "local_steps": 2, "interval": 2},
        "optimizer": ADAMW,
        "train": {"steps": 4, "eval_every": 0},
        "emulate": {"step_s": 0.5, "link": {"rate_mbps": 10, "delay_s": 0.03}},
    }
    grouped = Run(experiment(task=GROUPED, **sections), data_dir).go()
    plain = Run(experiment(task={"use": f"{TASKS}:Ungrouped"}, **sections), data_dir).go()
    assert grouped.digests() != plain.digests()


def test_where_the_averager_trains_groups_are_refused(data_dir) -> None:
    with pytest.raises(TaskStateError, match="dc_asgd"):
        Run(experiment(task=GROUPED, strategy={"kind": "dc_asgd"}), data_dir)


def test_the_mean_is_clipped_as_torch_clips_it_whatever_the_shards(data_dir) -> None:
    digests = set()
    for shards in (1, 2, 3):
        region = {"name": "a", "workers": 2, "ps_shards": shards}
        sections = ONE | {"regions": [region]}
        sections["train"] = {"steps": STEPS, "eval_every": 0, "clip_mean_norm": 0.05}
        config = experiment(task={"use": f"{TASKS}:Ungrouped"}, **sections)
        run = Run(config, data_dir).go()
        digests.add(run.digests()["a"])
        wanted = by_hand(run, config, 0.05).state_dict()
        for name, value in model_of(run).state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-7)
    assert len(digests) == 1
    loose = ONE | {"train": {"steps": STEPS, "eval_every": 0, "clip_mean_norm": 1e9}}
    free = [
        Run(experiment(task={"use": f"{TASKS}:Ungrouped"}, **sections), data_dir).go().digests()
        for sections in (ONE, loose)
    ]
    assert free[0] == free[1] and free[0]["a"] not in digests


def test_changes_of_several_steps_are_no_gradients_to_clip() -> None:
    with pytest.raises(ConfigError, match="clip_mean_norm"):
        experiment(
            strategy={"kind": "halos"}, train={"steps": 4, "eval_every": 0, "clip_mean_norm": 1.0}
        )
