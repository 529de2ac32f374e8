"""Effect of gradient noise on batch sizes."""

from __future__ import annotations

import math

import pytest

from geo_ray.planner.progress import Noise


def noise(grad_sq: float = 2.0, trace: float = 1000.0) -> Noise:
    return Noise(grad_sq, trace, rows=64, workers=4, count=100)


def test_noise_and_gradient_balance_at_b_simple() -> None:
    assert noise().b_simple == 500
    assert noise().efficiency(500, 1) == pytest.approx(501 / 1000)
    assert noise(trace=-1.0).b_simple == 0


def test_gamma_lies_between_one_and_the_number_of_workers() -> None:
    assert noise().gamma(500, 4) == pytest.approx(5 / 2)
    assert noise(trace=0.0).gamma(64, 4) == 1
    assert noise(trace=1e12).gamma(64, 4) == pytest.approx(4)


def test_without_noise_larger_batches_are_wasted() -> None:
    quiet = noise(trace=0.0)
    assert quiet.efficiency(256, 64) == pytest.approx(64 / 256)
    assert quiet.gain(256, 64) == 1


@pytest.mark.parametrize("grad_sq", [0.0, -1.0])
def test_with_pure_noise_a_larger_batch_is_fully_efficient(grad_sq: float) -> None:
    loud = noise(grad_sq)
    assert math.isinf(loud.b_simple)
    assert loud.gamma(64, 4) == 4
    assert loud.efficiency(256, 64) == 1
    assert loud.gain(256, 64) == 4
