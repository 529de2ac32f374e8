"""The library's models are counted without making them; a user's model is made on a real device."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from geo_ray.base.errors import TaskOutputError
from geo_ray.data.tasks.bytelm import ByteLM
from geo_ray.data.tasks.checked_calls import outlined_model
from geo_ray.runs.build import initial_parameters, model_outline, model_start, parameter_count
from geo_ray.runs.plan_inputs import model_size


class AnyTask:
    """A task of which only the model matters."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def model(self, seed: int) -> nn.Module:
        return self._make()


class LooksAtValues(nn.Module):
    """Its size depends on what its first layer was initialised with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 4 if self.first.weight.abs().max().item() < 100 else 5)


class OfTheLibrary(AnyTask):
    """A task as the library has them."""

    __module__ = "geo_ray.data.tasks.any"


def test_a_model_of_the_library_is_counted_however_large_it_is() -> None:
    options = ByteLM.Options(dim=16_384, layers=96, heads=64)
    assert parameter_count(ByteLM(options), 0) > 300e9
    assert model_outline(ByteLM(options), 0).num_params > 300e9


class Encoder(nn.Module):
    """A frozen part, made once in a process."""

    made: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x @ self.weight)

    @classmethod
    def cached(cls) -> Encoder:
        if cls.made is None:
            cls.made = cls().requires_grad_(False)
        return cls.made


class Cached(AnyTask):
    columns = {"x": "float32[2]"}  # noqa: RUF012

    def collate(self, columns: Any, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(columns["x"]).to(device)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch + 1.0).square().mean()


def test_a_frozen_part_that_a_task_keeps_stays_real_and_unchanged() -> None:
    Encoder.made = None
    task: Any = Cached(lambda: nn.Sequential(Encoder.cached(), nn.Linear(3, 1)))
    assert parameter_count(task, 0) == 4
    before = {name: value.clone() for name, value in Encoder.cached().state_dict().items()}
    size = model_size(task, 0)
    assert size.num_params == 4
    assert size.row_bytes
    for name, value in Encoder.cached().state_dict().items():
        assert torch.equal(value, before[name])
    assert model_start(task, 0).constants == model_outline(task, 0).constants


class DrawsNormal(nn.Module):
    """Normal numbers made in the usual ways, and some that are asked for on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.first = nn.Parameter(torch.randn(4, 3, generator=torch.default_generator))
        self.second = nn.Linear(3, 4)
        nn.init.xavier_normal_(self.second.weight)
        self.third = nn.Parameter(nn.init.trunc_normal_(torch.empty(2, 2)))
        self.fixed = nn.Parameter(torch.randn(2, device="cpu"), requires_grad=False)


def test_numbers_that_nobody_looks_at_are_not_drawn() -> None:
    """The first draw on the meta device would import PyTorch's compiler, which takes seconds."""
    code = (
        "import sys\nfrom geo_ray.runs.build import parameter_count\n"
        "from tests.unit.runs.test_parameter_count import DrawsNormal, OfTheLibrary\n"
        "assert parameter_count(OfTheLibrary(DrawsNormal), 0) == 15 + 12 + 16 + 4\n"
        "assert not {'torch._dynamo', 'sympy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers_that_are_asked_for_elsewhere_are_drawn() -> None:
    module = outlined_model(OfTheLibrary(DrawsNormal), 3)  # type: ignore[arg-type]
    torch.manual_seed(3)
    assert isinstance(module, DrawsNormal)
    assert module.first.is_meta
    assert torch.equal(module.fixed, torch.randn(2))


def test_a_shared_parameter_and_a_frozen_one() -> None:
    def make() -> nn.Module:
        first, second = nn.Linear(5, 5), nn.Linear(5, 5)
        second.weight = first.weight
        second.bias.requires_grad_(False)
        return nn.Sequential(first, second)

    task: Any = AnyTask(make)
    assert parameter_count(task, 0) == initial_parameters(task, 0).numel() == 30


def test_a_model_that_looks_at_values_is_counted() -> None:
    task: Any = AnyTask(LooksAtValues)
    assert parameter_count(task, 0) == initial_parameters(task, 0).numel() == 28


def test_the_generator_is_left_as_it_was() -> None:
    task: Any = AnyTask(lambda: nn.Linear(4, 4))
    before = torch.get_rng_state()
    parameter_count(task, 7)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_wrong_with_a_task_is_told() -> None:
    def broken() -> nn.Module:
        raise ValueError("no such size")

    task: Any = AnyTask(broken)
    with pytest.raises(TaskOutputError, match="no such size"):
        parameter_count(task, 0)


def test_the_outline_is_what_a_model_starts_from() -> None:
    def frozen() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        module[2].bias.requires_grad_(False)
        return module

    def computed() -> nn.Module:
        module = nn.Linear(3, 3)
        module.register_buffer("table", torch.arange(4.0), persistent=False)
        return module

    for make in (frozen, computed, LooksAtValues):
        task: Any = AnyTask(make)
        outline, start = model_outline(task, 0), model_start(task, 0)
        assert outline.num_params == start.params_P.numel()
        assert (outline.layout, outline.groups) == (start.layout, start.groups)
        assert outline.constants == start.constants
