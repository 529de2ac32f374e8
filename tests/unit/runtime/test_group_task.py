"""Rows, units and optimizer of a rank that trains a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from geo_ray.base.errors import TaskLoadError
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.groups import ParameterGroup, parameter_runs
from geo_ray.runtime.group_task import HeldOptimizer, distributed, own_batches, span_of
from geo_ray.training.assignment import Ledger
from geo_ray.training.optimizers import Adafactor, AdamW, Momentum, OneOptimizer, RateSchedule, Sgd
from geo_ray.training.parameters import units_of


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 6))
def test_ranks_read_the_rows_of_workers(world_size: int, rows: int, steps: int) -> None:
    ledger = Ledger()
    for step in range(steps):
        spans = [ledger.assign(worker, rows) for worker in range(world_size)]
        assert spans == [span_of(step, rank, world_size, rows) for rank in range(world_size)]
        for worker in range(world_size):
            ledger.settle(worker, None)


@given(st.integers(0, 20), st.integers(1, 5))
def test_each_batch_counts_once_and_all_ranks_compute_equally_many(
    count: int, world_size: int
) -> None:
    batches = [{"x": np.array([i])} for i in range(count)]
    found = [list(own_batches(iter(batches), rank, world_size)) for rank in range(world_size)]
    assert {len(each) for each in found} == {-(-count // world_size)}
    counted = [int(b["x"][0]) for each in found for b, counts in each if counts]
    assert sorted(counted) == list(range(count))


class Transformer(nn.Module):
    def __init__(self, blocks: int, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


BLOCKS = [f"blocks.{i}" for i in range(12)]


@pytest.mark.parametrize(
    ("model", "units"),
    [
        (lambda: Transformer(12, tied=False), ["embed", *BLOCKS, "head"]),
        (lambda: Transformer(12, tied=True), BLOCKS),
        (lambda: nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)), ["0", "2"]),
        (lambda: nn.Linear(3, 3), []),
        (
            lambda: nn.Sequential(nn.MultiheadAttention(16, 2), nn.LayerNorm(2), nn.Linear(16, 16)),
            ["0", "2"],
        ),
    ],
)
def test_units(model: Callable[[], nn.Module], units: list[str]) -> None:
    assert units_of(model()) == units


@pytest.mark.parametrize("depth", [1, 9])
def test_units_do_not_overlap(depth: int) -> None:
    model = Transformer(depth, tied=False)
    units = units_of(model)
    assert not [a for a in units for b in units if a != b and a.startswith(f"{b}.")]


class Parallel:
    def __init__(self, result: object) -> None:
        self.result = result

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> object:
        assert mesh.size() == 2
        return self.result or nn.Sequential(model)


@pytest.fixture
def rank() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield SimpleNamespace(device=torch.device("cpu"), world_size=2)
    dist.destroy_process_group()


def test_the_model_is_distributed_as_configured(rank: Any) -> None:
    sharded = distributed(cast(Task, object()), Transformer(12, tied=True), rank, "fsdp")
    assert all(isinstance(param, DTensor) for param in sharded.parameters())
    assert {name for name, each in sharded.named_modules() if isinstance(each, FSDPModule)} == {
        "",
        *BLOCKS,
    }
    copied = distributed(cast(Task, object()), nn.Linear(2, 2), rank, "ddp")
    assert isinstance(copied, nn.parallel.DistributedDataParallel)


def test_a_task_distributes_its_model(rank: Any) -> None:
    found = distributed(cast(Task, Parallel(None)), nn.Linear(2, 2), rank, "fsdp")
    assert isinstance(found, nn.Sequential)
    with pytest.raises(TaskLoadError, match="parallelize returned int, not a module"):
        distributed(cast(Task, Parallel(3)), nn.Linear(2, 2), rank, "fsdp")


class Grouped:
    def groups(self, model: nn.Module) -> list[ParameterGroup]:
        return [ParameterGroup("*.bias", rate=2.0, decay=0.0)]


@pytest.mark.parametrize(
    ("config", "other"),
    [
        (Sgd(lr=0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
        (
            Momentum(lr=0.1, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        ),
        (AdamW(lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
        (Adafactor(lr=0.01), lambda p: torch.optim.Adafactor(p, lr=0.01)),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_optimizer_is_that_of_pytorch(
    config: OneOptimizer, other: Callable[[Any], torch.optim.Optimizer], *, grouped: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Linear(2, 2))
    schedule = RateSchedule(kind="linear", warmup_steps=2, steps=6)
    config = config.model_copy(update={"schedule": schedule})
    plain = deepcopy(model)
    names = dict(plain.named_parameters())
    reference = other(
        [
            {"params": [p for n, p in names.items() if n.endswith("bias")]},
            {"params": [p for n, p in names.items() if not n.endswith("bias")]},
        ]
    )
    runs = parameter_runs(Grouped() if grouped else object(), model)
    held = HeldOptimizer(config, dict(model.named_parameters()), runs)
    for step in range(6):
        if step == 3:  # another optimizer continues from its state
            saved = deepcopy(held.state_dict())
            held = HeldOptimizer(config, dict(model.named_parameters()), runs)
            held.load_state_dict(saved)
        x = torch.randn(5, 4)
        for each in (model, plain):
            each.zero_grad(set_to_none=True)
            unused = step % 2  # a layer that a step does not use is not stepped
            each[:3](x).square().mean().backward() if unused else each(x).square().mean().backward()
        factor = (step + 1) / 2 if step < 2 else 1 - 0.9 * (step - 2) / 4
        biases, others = reference.param_groups
        biases["lr"] = config.lr * factor * (2.0 if grouped else 1.0)
        others["lr"] = config.lr * factor
        if grouped:
            biases["weight_decay"] = 0.0
        reference.step()
        held.step(step)
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-7)
