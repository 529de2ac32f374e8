"""A worker trains in its buffers, whatever user code does to parameters and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from geo_ray.base.errors import TaskOutputError, TaskStateError
from geo_ray.base.types import Span
from geo_ray.data.tasks.base import Stats
from geo_ray.training.parameters import read_parameters
from geo_ray.training.state_guard import WATCHED_STEPS, StateChange
from geo_ray.training.worker import Worker

ROWS, RATE = 4, 0.01


class Plain:
    """Learns to sum up an image."""

    columns = {"x": "float32[48]"}  # noqa: RUF012
    label_column = None

    def model(self, seed: int) -> nn.Module:
        shape = nn.Unflatten(1, (3, 4, 4))
        return nn.Sequential(shape, nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 1))

    def collate(self, columns: Any, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.array(columns["x"])).to(device)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Stats:
        return {"loss": np.array([float(self.loss(model, batch))])}

    def metrics(self, stats: Stats) -> dict[str, float]:
        return {"loss": float(stats["loss"][0])}


class ZeroGrad(Plain):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        return super().loss(model, batch)


class ChannelsLast(Plain):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.to(memory_format=torch.channels_last)
        return super().loss(model, batch)


class DoubleInEvaluate(Plain):
    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Stats:
        model.double()
        found = super().evaluate(model, batch.double())
        model.float()
        return found


class HalfInEvaluate(Plain):
    """Leaves the model in another precision."""

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Stats:
        return super().evaluate(model.bfloat16(), batch.bfloat16())


class OwnAccumulation(Plain):
    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Stats:
        return {"loss": np.array([float(Plain.loss(self, model, batch))])}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        for part in batch[: ROWS // 2]:
            (super().loss(model, part[None]) / ROWS).backward()
        return super().loss(model, batch[ROWS // 2 :]) / 2


class HalfInLoss(Plain):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(model.bfloat16().float(), batch)


class Replaced(Plain):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model[1].weight = nn.Parameter(model[1].weight.detach().clone())
        return super().loss(model, batch)


class ReplacedInEvaluate(Plain):
    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Stats:
        model[3].bias = nn.Parameter(torch.zeros(1))
        return super().evaluate(model, batch)


class Scaled(Plain):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(super().loss(model, batch))


class NotScaled(Plain):
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(super().loss(model, batch))


class Scripted(Plain):
    def model(self, seed: int) -> nn.Module:
        scripted: nn.Module = torch.jit.script(super().model(seed))
        return scripted


class Traced(Plain):
    def model(self, seed: int) -> nn.Module:
        traced: nn.Module = torch.jit.trace(super().model(seed), torch.zeros(2, 48))
        return traced


class Sparse(Plain):
    """Rows look up an embedding whose gradients are sparse."""

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.EmbeddingBag(5, 3, sparse=self.is_sparse), nn.Linear(3, 1))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        words = batch.flatten(1).abs().long().clamp(max=4)
        loss: torch.Tensor = model(words).square().mean()
        return loss

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return {"loss": np.array([self.loss(model, batch).item()])}

    is_sparse = True


class Dense(Sparse):
    is_sparse = False


class BreaksBackward(Plain):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen = model(batch).exp()
        return seen.mul_(2).mean() + seen.square_().mean()


def worker_of(task: Any) -> Worker:
    params_P = read_parameters(task.model(0))
    return Worker(task, params_P, torch.zeros_like(params_P), region="a", seed=0)


def rows(number: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(number).normal(size=(ROWS, 48)).astype(np.float32)}


def trained(task: Any, steps: int = 6) -> torch.Tensor:
    """The parameters after some steps of SGD, an evaluation after each."""
    torch.manual_seed(0)
    worker = worker_of(task)
    for i in range(steps):
        worker.step(rows(i), Span(i * ROWS, ROWS))
        worker.params_P.sub_(worker.grad_P, alpha=RATE)
        worker.evaluate(rows(i))
    return worker.params_P.clone()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "kind", [ZeroGrad, DoubleInEvaluate, HalfInEvaluate, NotScaled, Scripted, Traced]
)
def test_code_that_moves_the_model_trains_it_to_the_bit(kind: Any) -> None:
    assert torch.equal(trained(kind()), trained(Plain()))


@pytest.mark.parametrize("kind", [ChannelsLast, OwnAccumulation])
def test_code_that_sums_in_another_order_trains_the_same(kind: Any) -> None:
    start = trained(Plain(), 0)
    assert not torch.allclose(trained(Plain()), start, atol=1e-2)
    assert torch.allclose(trained(kind()), trained(Plain()), atol=1e-4)


@pytest.mark.parametrize(("kind", "name"), [(HalfInLoss, "'1.weight'"), (Replaced, "'1.weight'")])
def test_a_loss_that_computes_with_other_parameters_is_refused_by_name(
    kind: Any, name: str
) -> None:
    with pytest.raises(TaskStateError, match=name):
        worker_of(kind()).step(rows(0), Span(0, ROWS))


def test_an_evaluation_that_replaces_a_parameter_is_refused_by_name() -> None:
    with pytest.raises(TaskStateError, match=r"'3\.bias'"):
        worker_of(ReplacedInEvaluate()).evaluate(rows(0))


def test_sparse_gradients_train_as_dense_ones_do() -> None:
    assert torch.allclose(trained(Sparse()), trained(Dense()), atol=1e-6)
    assert not torch.allclose(trained(Sparse()), trained(Sparse(), 0), atol=1e-3)


def test_a_scaled_loss_is_refused() -> None:
    with pytest.raises(TaskOutputError, match="GradScaler"):
        worker_of(Scaled()).step(rows(0), Span(0, ROWS))


def test_an_error_of_the_backward_pass_names_the_task() -> None:
    with pytest.raises(TaskOutputError, match=r"BreaksBackward\.loss \(in its backward pass\)"):
        worker_of(BreaksBackward()).step(rows(0), Span(0, ROWS))


class Switches(Plain):
    """Switches requires_grad of a layer after some steps."""

    def __init__(self, on: bool, after: int) -> None:
        self._on, self._after, self._steps = on, after, 0

    def model(self, seed: int) -> nn.Module:
        model = super().model(seed)
        model[1].requires_grad_(not self._on)
        return model

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self._steps += 1
        if self._steps > self._after:
            model[1].requires_grad_(self._on)
        return super().loss(model, batch)


@pytest.mark.parametrize(("on", "how"), [(True, "unfrozen"), (False, "frozen")])
def test_a_layer_that_is_switched_later_is_told_once_and_at_the_start_refused(
    on: bool, how: Any
) -> None:
    worker = worker_of(Switches(on, WATCHED_STEPS))
    for i in range(16):
        worker.step(rows(i), Span(i * ROWS, ROWS))
        told = worker.take_changed()
        expected = [StateChange(how, "'1.bias', '1.weight'")]
        assert told == (expected if i + 1 == WATCHED_STEPS + 1 else [])
    message = "needs gradients of '1.bias'" if on else "switches requires_grad of '1.bias'"
    with pytest.raises(TaskStateError, match=message):
        worker_of(Switches(on, 0)).step(rows(0), Span(0, ROWS))
