"""Tokens and operations of a row, as a task states them or as they are estimated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from geo_ray.base.errors import TaskOutputError
from geo_ray.data.tasks.checked_calls import RowWork
from geo_ray.runs.build import model_outline
from tests.support.job_support import digits


class Mlp(type(digits())):  # type: ignore[misc]
    """Linear layers without biases, of which the first may be frozen; a row has 3 tokens."""

    tokens_per_row: Any = 3
    frozen = False

    def model(self, seed: int) -> nn.Module:
        first, second = nn.Linear(64, 32, bias=False), nn.Linear(32, 16, bias=False)
        model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(16, 8, bias=False))
        second.requires_grad_(not self.frozen)
        return model


def made(**attributes: Any) -> Mlp:
    task = Mlp(digits().Options())
    for name, value in attributes.items():
        setattr(task, name, value)
    return task


def counted(task: Mlp) -> int:
    """Operations of a training step over the 3 tokens of a row, counted by torch.

    The input needs a gradient, as the output of an embedding does.
    """
    model, x = task.model(0), torch.zeros(3, 64, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        model(x).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_estimate_is_what_torch_counts_in_linear_layers(frozen: bool) -> None:
    task = made(frozen=frozen)
    outline = model_outline(task, 0)
    work = RowWork.of(task, outline.num_params, outline.num_frozen)
    assert work.tokens == 3 and work.estimated
    assert work.flops == counted(task)


def test_what_a_task_states_is_not_estimated() -> None:
    assert RowWork.of(made(flops_per_row=5e6), 100) == RowWork(3, 5e6)
    assert RowWork.of(made(tokens_per_row=None, flops_per_row=5e6), 100) == RowWork(None, 5e6)
    assert RowWork.of(made()) == RowWork(3)
    assert RowWork.of(digits(), 100).fields() == {}
    assert RowWork.of(made(), 10).fields() == {
        "tokens_per_row": 3,
        "flops_per_row": 180,
        "flops_estimated": True,
    }


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "many", True, lambda: 3])
def test_what_is_no_positive_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TaskOutputError, match=r"Mlp\.tokens_per_row is .*, not a positive number"):
        RowWork.of(made(tokens_per_row=value), 100)


def test_an_exception_of_a_property_names_the_task() -> None:
    class Broken(Mlp):
        @property
        def tokens_per_row(self) -> int:  # type: ignore[override]
            raise KeyError("context")

    with pytest.raises(TaskOutputError, match=r"Broken\.tokens_per_row raised KeyError"):
        RowWork.of(Broken(digits().Options()), 100)
