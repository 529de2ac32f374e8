from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from geo_ray.base.errors import ConfigError
from geo_ray.strategies.gradient_code import (
    GradientCode,
    cyclic,
    cyclic_weights,
    fractional_repetition,
)


def counted(code: GradientCode, alive: list[int]) -> np.ndarray:
    """How often each partition is in what the alive workers' weights give (N,)."""
    weights, _ = code.decode(alive)
    return np.array(weights) @ np.array([code.encoding_NN[worker] for worker in alive])


def test_groups_of_a_repetition_do_the_same() -> None:
    code = fractional_repetition(6, 2)
    assert [code.partitions_of(worker) for worker in range(6)] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
    assert {code.weights_of(worker) for worker in range(6)} == {(1.0, 1.0, 1.0)}
    assert (code.num_workers, code.tolerate) == (6, 2)


def test_a_repetition_takes_the_first_of_each_group_without_rounding() -> None:
    code = fractional_repetition(6, 2)
    assert code.decode([5, 1, 0, 3]) == ((1.0, 1.0, 0.0, 0.0), 0.0)
    assert code.decode([2, 4]) == ((1.0, 1.0), 0.0)  # four are missing; each group has one
    assert code.can_decode([2, 4])


def test_a_lost_group_is_told_as_the_error() -> None:
    code = fractional_repetition(8, 1)
    alive = [0, 1, 2, 3, 4]
    weights, error = code.decode(alive)
    assert weights == (1.0, 0.0, 1.0, 0.0, 1.0)
    assert error == pytest.approx((2 / 8) ** 0.5)
    assert not code.can_decode(alive)


def test_nobody_alive_is_an_error_of_one() -> None:
    for code in (fractional_repetition(4, 1), cyclic(5, 2)):
        assert code.decode([]) == ((), 1.0)
        assert not code.can_decode([])


@pytest.mark.parametrize(("num_workers", "tolerate"), [(4, 1), (5, 1), (7, 2), (8, 2), (6, 5)])
def test_cyclic_partitions_are_neighbours(num_workers: int, tolerate: int) -> None:
    code = cyclic(num_workers, tolerate)
    for worker in range(num_workers):
        expected = {(worker + step) % num_workers for step in range(tolerate + 1)}
        assert set(code.partitions_of(worker)) == expected
        assert max(map(abs, code.weights_of(worker))) == pytest.approx(1.0)


@pytest.mark.parametrize("num_workers", range(1, 10))
def test_every_loss_that_is_tolerated_is_made_good_exactly(num_workers: int) -> None:
    for tolerate in range(num_workers):
        code = cyclic(num_workers, tolerate)
        for alive in itertools.combinations(range(num_workers), num_workers - tolerate):
            assert np.abs(counted(code, list(alive)) - 1.0).max() < 1e-11
            assert code.can_decode(alive)


def test_large_codes_are_exact_or_refused() -> None:
    draw = np.random.default_rng(0)
    for num_workers, tolerate in ((20, 6), (32, 12), (33, 4), (64, 6)):
        code = cyclic(num_workers, tolerate)
        for _ in range(5):
            alive = draw.permutation(num_workers)[: num_workers - tolerate].tolist()
            assert np.abs(counted(code, alive) - 1.0).max() < 1e-6
            assert code.can_decode(alive)
    for num_workers, tolerate in ((64, 12), (100, 10)):
        with pytest.raises(ConfigError, match="rounding"):
            cyclic(num_workers, tolerate)


def test_one_loss_more_cannot_be_made_good() -> None:
    for code in (cyclic(7, 2), cyclic(8, 2), cyclic(5, 1)):
        alive = list(range(code.num_workers - code.tolerate - 1))  # neighbours are missing
        weights, error = code.decode(alive)
        missed_N = counted(code, alive) - 1.0
        assert not code.can_decode(alive)
        assert error == pytest.approx(np.linalg.norm(missed_N) / code.num_workers**0.5)
        assert 0.01 < error < 1.0
        # Least squares: what is missed is orthogonal to all that the alive workers can give.
        rows_AN = np.array([code.encoding_NN[worker] for worker in alive])
        assert np.abs(rows_AN @ missed_N).max() < 1e-10
        assert len(weights) == len(alive)


def test_the_weights_are_the_shortest() -> None:
    code, alive = cyclic(6, 1), [0, 1, 2, 3, 4, 5]
    weights_A = np.array(code.decode(alive)[0])
    rows_AN = np.array(code.encoding_NN)
    ways_to_get_nothing = np.linalg.svd(rows_AN.T)[2][np.linalg.matrix_rank(rows_AN) :]
    assert len(ways_to_get_nothing) == 1
    assert np.abs(ways_to_get_nothing @ weights_A).max() < 1e-12


def test_weights_from_roots_lose_few_digits() -> None:
    """The most that any partition's gradient is weighted in all, over single and paired losses."""
    for num_workers, tolerate, most in ((8, 1, 1.001), (7, 1, 6.0), (16, 1, 1.001), (12, 2, 20.0)):
        code, worst = cyclic(num_workers, tolerate), 0.0
        for alive in itertools.combinations(range(num_workers), num_workers - tolerate):
            weights_A = np.abs(code.decode(alive)[0])
            rows_AN = np.abs([code.encoding_NN[worker] for worker in alive])
            worst = max(worst, float((weights_A @ rows_AN).max()))
        assert 1.0 - 1e-9 <= worst < most


@pytest.mark.parametrize("num_workers", [15, 16, 40])
def test_column_scales_of_even_codes_stay_near_one(num_workers: int) -> None:
    for tolerate in (2 - num_workers % 2, 4 - num_workers % 2):
        weights_NN = cyclic_weights(num_workers, tolerate)
        in_all_N = np.linalg.lstsq(weights_NN.T, np.ones(num_workers), rcond=None)[0] @ weights_NN
        assert np.abs(in_all_N - 1.0).max() < 1e-10
        assert np.abs(weights_NN).max(axis=1) == pytest.approx(1.0)


def test_encoded_and_combined_tensors_give_the_sum() -> None:
    grads_NP = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    for code in (cyclic(6, 2), fractional_repetition(6, 2)):
        coded = {
            worker: code.encode(worker, [grads_NP[part] for part in code.partitions_of(worker)])
            for worker in (5, 0, 2, 3)
        }
        total_P, error = code.combine(coded)
        assert total_P.dtype == torch.float32
        assert error < 1e-12
        torch.testing.assert_close(total_P, grads_NP.sum(0), rtol=1e-4, atol=1e-4)


def test_encoding_leaves_its_inputs_alone() -> None:
    code = fractional_repetition(2, 0)
    grad_P = torch.ones(3)
    coded_P = code.encode(1, [grad_P])
    coded_P.zero_()
    assert grad_P.tolist() == [1.0, 1.0, 1.0]


def test_half_precision_goes_through() -> None:
    code = fractional_repetition(4, 1)
    grads_P = [torch.full((4,), value, dtype=torch.bfloat16) for value in (1.0, 2.0, 3.0, 4.0)]
    coded = {worker: code.encode(worker, grads_P[worker // 2 * 2 :][:2]) for worker in (1, 2)}
    assert code.combine(coded)[0].tolist() == [10.0] * 4


def test_codes_are_values() -> None:
    assert cyclic(6, 2) == cyclic(6, 2)
    assert len({cyclic(6, 2), cyclic(6, 2), cyclic(6, 1)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        cyclic(3, 1).tolerate = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "call",
    [
        lambda: fractional_repetition(6, 3),
        lambda: fractional_repetition(4, -1),
        lambda: fractional_repetition(0, 0),
        lambda: cyclic(4, 4),
        lambda: cyclic(4, -1),
        lambda: cyclic(4, 1).partitions_of(4),
        lambda: cyclic(4, 1).weights_of(-1),
        lambda: cyclic(4, 1).decode([0, 1, 1]),
        lambda: cyclic(4, 1).decode([0, 9]),
        lambda: cyclic(4, 1).can_decode([-1]),
        lambda: cyclic(4, 1).encode(0, [torch.ones(3)]),
        lambda: cyclic(4, 1).encode(0, [torch.ones(3), torch.ones(4)]),
        lambda: cyclic(4, 1).encode(0, [torch.ones(3), torch.ones(3).double()]),
        lambda: cyclic(4, 1).encode(0, [torch.ones(3).int(), torch.ones(3).int()]),
        lambda: cyclic(4, 1).combine({}),
        lambda: cyclic(4, 1).combine({7: torch.ones(3)}),
        lambda: GradientCode((), 0),
        lambda: GradientCode(((1.0,), (1.0,)), 0),
        lambda: GradientCode(((1.0, float("nan")), (1.0, 1.0)), 0),
        lambda: GradientCode(((1.0, 0.0), (0.0, 1.0)), 1),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        call()
