"""The defaults of `halos` move as far per push as the released recipe, computed here by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from geo_ray.strategies.halos import Halos
from geo_ray.strategies.state import AveragerState, RegionState, Update

LOCAL = (0.2, 0.9, 16)  # the recipe's rate, momentum, N
GLOBAL = (0.15, 0.5, 2)
PUSHES = 320


def recipe(rate: float, momentum: float, delay: int, pushes: list[float]) -> Iterator[float]:
    """Where the recipe's optimizer stands after every push, from 0, in double precision.

    The scripts multiply the rate by the delay; the optimizer divides each push by it.
    """
    handed_over = rate * delay
    at, moment, collected = 0.0, 0.0, 0.0
    for number, push in enumerate(pushes, 1):
        collected += push
        step = push / delay
        if number % delay == 0:
            moment = momentum * moment + collected / delay
            step += momentum * moment
            collected = 0.0
        at -= handed_over * step
        yield at


def local_positions(pushes: list[float]) -> list[float]:
    region, rule, found = RegionState(torch.zeros(1), lambda grad_P: None), Halos(), []
    for push in pushes:
        rule.on_gradient(region, torch.tensor([push]))
        found.append(float(region.params_P))
    return found


def global_positions(pushes: list[float]) -> list[float]:
    averager, rule, at, found = AveragerState(("a",)), Halos(), 0.0, []
    for push in pushes:
        (reply,) = rule.on_update(averager, Update("a", torch.tensor([push]), 8))
        at -= float(reply.payload_P)
        found.append(at)
    return found


@pytest.mark.parametrize("level", ["local", "global"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_defaults_are_the_recipes_after_every_push(level: str, seed: int | None) -> None:
    pushes = [1.0] * PUSHES
    if seed is not None:
        pushes = torch.randn(PUSHES, generator=torch.Generator().manual_seed(seed)).tolist()
    ours = local_positions(pushes) if level == "local" else global_positions(pushes)
    theirs = list(recipe(*(LOCAL if level == "local" else GLOBAL), pushes))
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)


def test_what_a_unit_push_comes_to() -> None:
    """The figures of the docstring: 1.29 on the way, 2 and 0.3 in the long run."""
    local = local_positions([1.0] * 3200)
    assert -local[PUSHES - 1] / PUSHES == pytest.approx(1.29, abs=0.005)
    assert (local[-17] - local[-1]) / 16 == pytest.approx(2.0, rel=1e-3)
    far = global_positions([1.0] * 200)
    assert (far[-3] - far[-1]) / 2 == pytest.approx(0.3, rel=1e-3)


def test_the_other_defaults_are_the_recipes_too() -> None:
    rule = Halos()
    assert (rule.local_steps, rule.interval, rule.alpha) == (8, 32, 0.25)
