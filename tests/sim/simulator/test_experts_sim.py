"""A mixture of experts in whole runs, against plain PyTorch, which skips unused experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geo_ray.data.tasks.load import TaskConfig, load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.training.parameters import read_parameters
from tests.support.world_support import Run, experiment

TASK = {"use": f"{Path(__file__).parents[2] / 'support' / 'buffer_tasks.py'}:Experts"}
STEPS = 12
ADAMW = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.5}
MOMENTUM = {"kind": "momentum", "lr": 0.05, "weight_decay": 0.1}
TRAIN = {"steps": STEPS, "eval_every": 0}


class Plain:
    """A model with torch's optimizer, and the rows of one region of a run."""

    def __init__(self, run: Run, config: Experiment, region: str) -> None:
        self.task = load_task(TaskConfig(**config.task.model_dump()), Path())
        self.model: nn.Module = self.task.model(config.seed)
        self._reader = run.world.regions[region]._train
        self._workers = next(r.workers for r in config.regions if r.name == region)
        ours: Any = config.optimizer
        params, every = self.model.parameters(), {"lr": ours.lr, "weight_decay": ours.weight_decay}
        self.optimizer: Any = (
            torch.optim.AdamW(params, fused=True, **every)
            if ours.kind == "adamw"
            else torch.optim.SGD(params, momentum=ours.momentum, **every)
        )
        self.gaps: list[int] = []

    def grads(self, number: int) -> list[Tensor | None]:
        """The mean over the workers that have a gradient; None if none has one."""
        found: list[list[Tensor | None]] = []
        for rank in range(self._workers):
            self.model.zero_grad()
            columns = self._reader.read(4 * (self._workers * number + rank), 4)
            batch = self.task.collate(columns, torch.device("cpu"))
            self.task.loss(self.model, batch).backward()
            found.append([p.grad for p in self.model.parameters()])
        return mean_of(found)

    def step(self, grads: Sequence[Tensor | None]) -> None:
        for p, grad in zip(self.model.parameters(), grads, strict=True):
            p.grad = None if grad is None else grad.clone()
        self.gaps.append(sum(grad is None for grad in grads))
        self.optimizer.step()


def mean_of(parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    return [
        None
        if all(grad is None for grad in grads)
        else sum(grad for grad in grads if grad is not None) / len(parts)
        for grads in zip(*parts, strict=True)
    ]


def near(run: Run, params_P: Tensor) -> None:
    for found_P in run.result.params_P.values():
        torch.testing.assert_close(found_P, params_P, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=lambda each: each["kind"])
def test_one_region(data_dir, optimizer: dict[str, Any], workers: int, shards: int) -> None:
    regions = [{"name": "a", "workers": workers, "ps_shards": shards}]
    config = experiment(task=TASK, regions=regions, optimizer=optimizer, train=TRAIN)
    run = Run(config, data_dir).go()
    plain = Plain(run, config, "a")
    for number in range(STEPS):
        plain.step(plain.grads(number))
    wanted_P = read_parameters(plain.model)
    if workers == 1:
        assert torch.equal(run.result.params_P["a"], wanted_P)
    near(run, wanted_P)
    assert len(set(plain.gaps)) > 1 or workers == 1


@pytest.mark.parametrize("shards", [1, 2])
def test_sma_averages_regions_that_skipped_different_experts(data_dir, shards: int) -> None:
    regions = [{"name": name, "ps_shards": shards} for name in "ab"]
    strategy = {"kind": "sma", "interval": 3}
    config = experiment(task=TASK, regions=regions, optimizer=ADAMW, strategy=strategy, train=TRAIN)
    run = Run(config, data_dir).go()
    plain = [Plain(run, config, name) for name in "ab"]
    for number in range(STEPS):
        for each in plain:
            each.step(each.grads(number))
        if (number + 1) % 3 == 0:
            mean_P = (read_parameters(plain[0].model) + read_parameters(plain[1].model)) / 2
            for each in plain:
                nn.utils.vector_to_parameters(mean_P.clone(), each.model.parameters())
    near(run, read_parameters(plain[0].model))


@pytest.mark.parametrize("accumulate", [0, 1, 3])
@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_of_all_regions_skip_what_no_region_uses(
    data_dir, shards: int, accumulate: int
) -> None:
    regions = [{"name": name, "ps_shards": shards} for name in "ab"]
    strategy: dict[str, Any] = {"kind": "bsp"}
    if accumulate:
        strategy = {"kind": "fedssgd", "accumulate": accumulate}
    config = experiment(task=TASK, regions=regions, optimizer=ADAMW, strategy=strategy, train=TRAIN)
    run = Run(config, data_dir).go()
    plain = [Plain(run, config, name) for name in "ab"]
    each = max(1, accumulate)
    for first in range(0, STEPS, each):
        parts = [p.grads(number) for number in range(first, first + each) for p in plain]
        for p in plain:
            p.step(mean_of(parts))
    near(run, read_parameters(plain[0].model))
    assert max(plain[0].gaps) > 2 and len(set(run.digests().values())) == 1


def test_workers_with_local_steps_skip_too(data_dir) -> None:
    strategy = {"kind": "hfa", "k1": 2, "k2": 2}
    config = experiment(task=TASK, optimizer=ADAMW, strategy=strategy, train=TRAIN)
    run = Run(config, data_dir).go()
    zeros = Run(config, data_dir)
    for region in zeros.world.regions.values():
        for worker in region._workers:
            worker._worker._flat.unused = tuple
    assert run.digests() != zeros.go().digests()


@pytest.mark.parametrize("kind", ["sma", "bsp"])
def test_a_resumed_run_has_the_same_bits(data_dir, kind: str) -> None:
    regions = [{"name": name, "ps_shards": 2, "workers": 2} for name in "ab"]
    sections = {"task": TASK, "optimizer": ADAMW, "regions": regions, "strategy": {"kind": kind}}
    config = experiment(**sections, train=TRAIN, checkpoint={"every_s": None})
    whole = Run(config, data_dir).go()
    killed = Run(config, data_dir)
    killed.world.checkpoint_at(0.5 * whole.result.seconds, 1)
    assert killed.go().digests() == whole.digests()
    resumed = Run(config, data_dir)
    resumed.world.restore(killed.world.checkpoints[1])
    assert resumed.go().digests() == whole.digests()


def test_batched_gradients_are_not_taken_where_parameters_are_unused(data_dir) -> None:
    """`vmap` gives zeros; and a parameter without a gradient is not decayed."""
    task = {"use": TASK["use"].replace(":Experts", ":Spare")}
    regions = [{"name": "hub"}, {"name": "s", "copies": 15}]
    train = {"steps": 4, "eval_every": 0}
    config = experiment(task=task, regions=regions, optimizer=ADAMW, train=train)
    run = Run(config, data_dir)
    before_P = run.world.regions["hub"].params_P
    run.go()
    size = sum(p.numel() for p in nn.Linear(12, 10).parameters())
    after_P = run.result.params_P["hub"]
    torch.testing.assert_close(after_P[-size:], before_P[-size:], rtol=1e-6, atol=1e-7)
    assert float((after_P[:-size] - before_P[:-size]).abs().max()) > 1e-3


def test_an_overlay_sums_gradients_and_skips_the_same(data_dir) -> None:
    regions = [{"name": name} for name in "abc"]
    sections = {"task": TASK, "optimizer": ADAMW, "regions": regions, "train": TRAIN}
    star = Run(experiment(**sections, strategy={"kind": "bsp"}), data_dir).go()
    ring = experiment(**sections, strategy={"kind": "bsp"}, overlay={"kind": "ring"})
    near(Run(ring, data_dir).go(), star.result.params_P["a"])
