"""The straggler model of the benchmark against what is known of it, and against the codes."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from benchmarks.coding import coding_model
from geo_ray.strategies.gradient_code import GradientCode, cyclic, fractional_repetition


@pytest.fixture
def model() -> ModuleType:
    return coding_model


def harmonic(number: int) -> float:
    return sum(1.0 / i for i in range(1, number + 1))


@pytest.mark.parametrize(("kind", "growth"), [("delay", 0), ("rate", 1)])
def test_means_are_those_of_order_statistics(model: ModuleType, kind: str, growth: int) -> None:
    tail, n = 2.0, 8
    found = model.step_times(kind, tail, n, 40_000, seed=0)

    def expected(work: float, waited_for: int) -> float:
        return work + work**growth * tail * (harmonic(n) - harmonic(n - waited_for))

    assert found["wait_all"] == pytest.approx(expected(1, n), rel=0.02)
    assert found["drop_1"] == pytest.approx(expected(1, n - 1), rel=0.02)
    assert found["drop_2"] == pytest.approx(expected(1, n - 2), rel=0.02)
    assert found["cyclic_1"] == pytest.approx(expected(2, n - 1), rel=0.02)
    assert found["cyclic_2"] == pytest.approx(expected(3, n - 2), rel=0.02)
    assert found["mds_6"] == pytest.approx(expected(8 / 6, 6), rel=0.02)
    pairs = 2 + 2**growth * tail / 2 * harmonic(n // 2)  # the largest of n / 2 minima of two
    assert found["repetition_1"] == pytest.approx(pairs, rel=0.02)


def arrived(code: GradientCode, times_N: np.ndarray) -> float:
    """When the sum can be decoded."""
    order = np.argsort(times_N).tolist()
    enough = next(i for i in range(len(order) + 1) if code.can_decode(order[:i]))
    return float(times_N[order[enough - 1]])


def test_steps_end_when_the_codes_can_decode(model: ModuleType) -> None:
    n, tail, steps = 8, 1.0, 50
    found = model.step_times("delay", tail, n, steps, seed=3)
    times_TN = 2.0 + np.random.default_rng(3).exponential(tail, (steps, n))
    repetition = [arrived(fractional_repetition(n, 1), times_N) for times_N in times_TN]
    circle = [arrived(cyclic(n, 1), times_N) for times_N in times_TN]
    assert found["repetition_1"] == pytest.approx(float(np.mean(repetition)))
    assert found["cyclic_1"] >= float(np.mean(circle))  # it waits for any n - 1, never for luck


def test_shuffles_are_of_what_is_not_cached(model: ModuleType) -> None:
    few, many = (model.shuffles(4, cached, epochs=2, seed=0) for cached in (0.25, 0.75))
    whole = 4 * model.BLOCKS_PER_WORKER * model.BLOCK_BYTES
    for epoch in (*few, *many):
        assert epoch.unicast_bytes == epoch.multicast_bytes == epoch.coded_unicast_bytes
        assert 0 < epoch.coded_bytes < epoch.unicast_bytes < whole
    assert sum(e.coded_bytes for e in many) < sum(e.coded_bytes for e in few)
    assert model.shuffles(4, 0.25, epochs=2, seed=0) == few
