"""`train.accumulate`: the gradient of a step from micro-batches, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from geo_ray.base.errors import ConfigError, TaskStateError
from geo_ray.base.types import Span
from geo_ray.data.tasks.load import TaskConfig, load_task
from geo_ray.training.optimizers import Momentum
from geo_ray.training.parameters import read_parameters
from geo_ray.training.worker import LocalStepsWorker, Worker, micro_batches
from tests.support.world_support import Run, experiment

ROWS = 10


class Linear:
    def __init__(self, dropout: float = 0.0, *, drops: bool = False) -> None:
        self.dropout, self.drops, self.seen = dropout, drops, []

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(self.dropout), nn.Linear(8, 2))

    def collate(self, columns, device):
        self.seen.append(len(columns["y"]))
        return torch.from_numpy(columns["x"]), torch.from_numpy(columns["y"])

    def loss(self, model, batch):
        if self.drops:
            model.zero_grad()
        return cross_entropy(model(batch[0]), batch[1])


def rows(count: int = ROWS) -> dict[str, Any]:
    chance = np.random.default_rng(5)
    return {
        "x": chance.normal(size=(count, 3)).astype("f4"),
        "y": chance.integers(0, 2, count),
    }


def worker_of(task: Any, accumulate: int, **more: Any) -> Worker:
    params_P = read_parameters(task.model(0))
    grad_P = torch.zeros_like(params_P)
    return Worker(task, params_P, grad_P, region="a", seed=0, accumulate=accumulate, **more)


def plain(parts: int) -> tuple[float, Tensor]:
    """Accumulation as one writes it in a training loop; one part is the large batch."""
    model, x, y = Linear().model(0), *map(torch.from_numpy, rows().values())
    total = 0.0
    for part_x, part_y in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        loss = cross_entropy(model(part_x), part_y, reduction="sum") / ROWS
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 10])
def test_the_gradient_is_that_of_one_large_batch(parts: int) -> None:
    task = Linear()
    worker = worker_of(task, parts)
    result = worker.step(rows(), Span(0, ROWS))
    assert len(task.seen) == parts and sum(task.seen) == ROWS
    for wanted in (plain(1), plain(parts)):
        assert result.loss == pytest.approx(wanted[0], rel=1e-6)
        torch.testing.assert_close(worker.grad_P, wanted[1], rtol=1e-5, atol=1e-7)


def test_one_micro_batch_has_the_bits_of_a_plain_step() -> None:
    found = worker_of(Linear(), 1)
    found.step(rows(), Span(0, ROWS))
    assert torch.equal(found.grad_P, plain(1)[1])


def test_clipping_is_of_the_whole_step() -> None:
    worker = worker_of(Linear(), 5, clip_norm=0.01)
    worker.step(rows(), Span(0, ROWS))
    assert float(worker.grad_P.norm()) == pytest.approx(0.01, rel=1e-5)


def test_random_numbers_of_a_step_depend_on_its_rows_only() -> None:
    one, other = worker_of(Linear(0.5), 3), worker_of(Linear(0.5), 3)
    for worker, first in ((one, 0), (other, 40), (other, 0)):
        worker.step(rows(), Span(first, ROWS))
    assert torch.equal(one.grad_P, other.grad_P)


def test_a_loss_that_drops_gradients_is_refused_by_name() -> None:
    worker_of(Linear(drops=True), 1).step(rows(), Span(0, ROWS))
    with pytest.raises(TaskStateError, match="earlier micro-batches") as caught:
        worker_of(Linear(drops=True), 2).step(rows(), Span(0, ROWS))
    assert "train.accumulate" in str(caught.value.fix)


def test_local_steps_of_a_worker_accumulate_too() -> None:
    found = []
    for parts in (1, 2):
        task = Linear()
        local = LocalStepsWorker(worker_of(task, parts), Momentum(lr=0.1), 2)
        local.step(rows(), Span(0, ROWS))
        assert len(task.seen) == 2 * parts
        found.append(local.grad_P)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@given(count=st.integers(1, 40), parts=st.integers(1, 50))
def test_parts_are_nearly_equal_and_cover_the_rows(count: int, parts: int) -> None:
    split = micro_batches(rows(count), parts)
    sizes = [len(part["y"]) for part, _ in split]
    assert len(sizes) == min(parts, count) and max(sizes) - min(sizes) <= 1
    assert np.concatenate([part["y"] for part, _ in split]).tolist() == rows(count)["y"].tolist()
    assert [fraction * count for _, fraction in split] == pytest.approx(sizes)
    assert sum(fraction for _, fraction in split) == pytest.approx(1.0)


@pytest.mark.parametrize("shards", [1, 2])
def test_runs_are_those_of_large_batches_and_of_plain_accumulation(data_dir, shards: int) -> None:
    task = {"use": f"{Path(__file__).parents[2] / 'support' / 'buffer_tasks.py'}:Ungrouped"}
    regions = [{"name": "a", "workers": 2, "ps_shards": shards}, {"name": "b"}]

    def run_of(accumulate: int) -> Run:
        train = {"steps": 6, "eval_every": 0, "accumulate": accumulate}
        adamw = {"kind": "adamw", "lr": 0.01}
        config = experiment(
            task=task, regions=regions, strategy={"kind": "bsp"}, optimizer=adamw, train=train
        )
        return Run(config, data_dir).go()

    whole, split = run_of(1), run_of(4)
    assert whole.result.seconds == split.result.seconds
    for name, params_P in whole.result.params_P.items():
        torch.testing.assert_close(split.result.params_P[name], params_P, rtol=1e-4, atol=1e-5)
    here = load_task(TaskConfig(**task), Path())
    model = here.model(split.config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    places = [("a", lambda n: 8 * n), ("a", lambda n: 8 * n + 4), ("b", lambda n: 4 * n)]
    for number in range(6):
        optimizer.zero_grad()
        for region, start in places:
            reader = split.world.regions[region]._train
            for row in range(4):
                columns = reader.read(start(number) + row, 1)
                batch = here.collate(columns, torch.device("cpu"))
                (here.loss(model, batch) / 12).backward()
        optimizer.step()
    torch.testing.assert_close(
        split.result.params_P["a"], read_parameters(model), rtol=1e-5, atol=1e-6
    )


def test_more_micro_batches_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.accumulate") as caught:
        experiment(train={"steps": 4, "eval_every": 0, "accumulate": 5})
    assert "4 rows per step" in caught.value.message
