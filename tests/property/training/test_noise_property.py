"""Laws of gradient noise: unbiased, free of units, and one number in three forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.planner.progress import Noise
from geo_ray.training.noise import NoiseMeter, estimate

BATCHES = st.lists(st.integers(1, 200), min_size=2, max_size=6)
SQUARES = st.floats(0, 1e6)
MEASUREMENTS = st.lists(st.tuples(st.integers(1, 64), SQUARES), min_size=2, max_size=5)
POSITIVE = st.floats(1e-3, 1e6)


@settings(max_examples=30)
@given(BATCHES, st.floats(0, 2), st.floats(0.1, 3), st.integers(0, 2**16))
def test_unbiased(batches: list[int], true: float, sigma: float, seed: int) -> None:
    """The mean of many single values is right within six of its own standard errors."""
    draws, num_params, rows = 3000, 8, sum(batches)
    random = torch.Generator().manual_seed(seed)
    noise_NKP = torch.randn(draws, len(batches), num_params, generator=random, dtype=torch.float64)
    sizes_K = torch.tensor(batches, dtype=torch.float64)
    grad_NKP = true + noise_NKP * sigma / sizes_K.sqrt()[:, None]
    own_NK = grad_NKP.square().sum(2)
    mean_N = ((grad_NKP * sizes_K[:, None]).sum(1) / rows).square().sum(1)
    pairs = zip(own_NK.tolist(), mean_N.tolist(), strict=True)
    singles = [estimate(list(zip(batches, own, strict=True)), mean) for own, mean in pairs]
    for column, right in zip(
        torch.tensor(singles, dtype=torch.float64).T,
        (num_params * true**2, num_params * sigma**2),
        strict=True,
    ):
        error = float(column.std()) / math.sqrt(draws)
        assert abs(float(column.mean()) - right) < 6 * error + 1e-9


@given(MEASUREMENTS, SQUARES, st.floats(0.01, 100))
def test_longer_gradients_have_more_of_both(
    norms: list[tuple[int, float]], mean_sq: float, factor: float
) -> None:
    base = estimate(norms, mean_sq)
    scaled = estimate([(rows, factor * sq) for rows, sq in norms], factor * mean_sq)
    size = sum(rows for rows, _ in norms) * (mean_sq + max(sq for _, sq in norms)) * factor
    assert scaled == pytest.approx([factor * value for value in base], abs=1e-9 * (1 + size))


@given(st.lists(st.tuples(MEASUREMENTS, SQUARES), min_size=1, max_size=8), st.integers(0, 8))
def test_a_meter_that_was_saved_goes_on_the_same(
    fed: list[tuple[list[tuple[int, float]], float]], at: int
) -> None:
    meter, saved = NoiseMeter(), NoiseMeter()
    for index, (norms, mean_sq) in enumerate(fed):
        if index == at:
            saved.restore(meter.export())
            meter = saved
        meter.feed(norms, mean_sq)
    whole = NoiseMeter()
    for norms, mean_sq in fed:
        whole.feed(norms, mean_sq)
    assert meter == whole and whole.count == len(fed)


@given(POSITIVE, POSITIVE, st.integers(1, 10**5), st.integers(1, 10**5), st.integers(2, 64))
def test_gamma_efficiency_and_gain_are_b_simple(
    grad_sq: float, trace: float, batch: int, base: int, workers: int
) -> None:
    noise = Noise(grad_sq, trace, batch, workers, 1)
    gamma = noise.gamma(batch, workers)
    assert 1 <= gamma <= workers
    if 1.001 < gamma < workers - 0.001:  # elsewhere the inverse is only rounding
        assert batch * (gamma - 1) / (workers - gamma) == pytest.approx(noise.b_simple, rel=1e-6)
    efficiency = noise.efficiency(batch, base)
    assert efficiency == pytest.approx(noise.gain(batch, base) * base / batch)
    assert noise.efficiency(base, base) == noise.gain(base, base) == 1
    assert (efficiency <= 1) == (batch >= base) or efficiency == pytest.approx(1)


@given(MEASUREMENTS, SQUARES)
def test_gamma_is_what_was_measured(norms: list[tuple[int, float]], mean_sq: float) -> None:
    """Of one step: gamma is the workers' mean square over that of their mean."""
    rows = sum(count for count, _ in norms)
    own_sq = sum(count * sq for count, sq in norms) / rows
    grad_sq, trace = estimate(norms, mean_sq)
    if mean_sq < 1e-3 or grad_sq < 1e-3 * mean_sq or trace <= 0:
        return
    gamma = Noise(grad_sq, trace, rows, len(norms), 1).gamma(rows, len(norms))
    assert gamma == pytest.approx(own_sq / mean_sq, rel=1e-6)
