"""Whether a run has diverged, held against the rule as the documents state it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_ray.runtime.control.health import LossHealth

LOSSES = st.floats(-1e6, 1e6)


def judged(*windows: list[float | None]) -> list[bool]:
    health, found = LossHealth(), []
    for window in windows:
        for loss in window:
            health.on_step(loss)
        found.append(health.judge())
    return found


@given(st.lists(st.lists(LOSSES, min_size=1, max_size=4), min_size=1, max_size=6))
def test_it_is_the_documented_rule(windows: list[list[float]]) -> None:
    means = [sum(window) / len(window) for window in windows]
    expected = [True]
    for number in range(1, len(means)):
        best = min(means[:number])
        expected.append(means[number] <= best + (means[0] - best) / 2 + abs(means[0]) / 4)
    assert judged(*windows) == expected


def test_noise_of_the_first_steps_does_not_count_and_a_dead_model_does() -> None:
    assert judged([2.30], [2.28], [2.34], [0.4], [2.30]) == [True, True, True, True, False]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_not_healthy(loss: float) -> None:
    assert judged([1.0], [loss], [0.9]) == [True, False, True]


def test_without_steps_nothing_is_known() -> None:
    assert judged([], [None], [1.0]) == [True, True, True]


def test_a_resumed_run_goes_on_with_what_it_knew() -> None:
    health = LossHealth()
    for loss in (2.0, 0.5):
        health.on_step(loss)
        health.judge()
    again = LossHealth.restore(health.export())
    again.on_step(1.9)
    assert not again.judge()
    assert LossHealth.restore(None) == LossHealth()
