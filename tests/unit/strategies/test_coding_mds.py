from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from geo_ray.base.errors import ConfigError
from geo_ray.strategies.mds_code import MdsCode, coded_rows, worst_condition

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 3), (2, 3), (3, 3), (3, 5), (4, 6), (2, 6)])
def test_any_k_answers_give_the_product(k: int, n: int) -> None:
    matrix_MN, vector_N = normal(13, 7), normal(7)
    code = MdsCode(k, n)
    answers = [block.matmul(vector_N) for block in code.encode(matrix_MN)]
    assert len(answers) == n
    for chosen in itertools.combinations(range(n), k):
        product_M = code.decode({worker: answers[worker] for worker in chosen}, 13)
        torch.testing.assert_close(product_M, matrix_MN @ vector_N, rtol=1e-9, atol=1e-9)


def test_products_with_a_matrix() -> None:
    matrix_MN, other_NX = normal(10, 4), normal(4, 3)
    code = MdsCode(4, 6)
    answers = [block @ other_NX for block in code.encode(matrix_MN)]
    product_MX = code.decode({5: answers[5], 1: answers[1], 4: answers[4], 2: answers[2]}, 10)
    assert product_MX.shape == (10, 3)
    torch.testing.assert_close(product_MX, matrix_MN @ other_NX, rtol=1e-9, atol=1e-9)


def test_the_first_k_answers_are_only_put_together() -> None:
    """To the bit: nothing is computed with them, whatever else has come."""
    matrix_MN, vector_N = normal(9, 5), normal(5)
    code = MdsCode(3, 5)
    answers = [block.matmul(vector_N) for block in code.encode(matrix_MN)]
    nonsense = torch.full_like(answers[0], float("nan"))
    product_M = code.decode({4: nonsense, 2: answers[2], 0: answers[0], 1: answers[1]}, 9)
    assert torch.equal(product_M, torch.cat(answers[:3]))


def test_blocks_that_are_there_are_taken_as_they_are() -> None:
    matrix_MN, vector_N = normal(8, 3), normal(3)
    code = MdsCode(4, 6)
    answers = [block.matmul(vector_N) for block in code.encode(matrix_MN)]
    product_M = code.decode({w: answers[w] for w in (0, 2, 3, 5)}, 8)
    for worker in (0, 2, 3):
        assert torch.equal(product_M[2 * worker : 2 * worker + 2], answers[worker])


def test_the_first_blocks_are_the_matrix_itself() -> None:
    matrix_MN = normal(6, 4)
    blocks = MdsCode(3, 4).encode(matrix_MN)
    assert [block.shape for block in blocks] == [(2, 4)] * 4
    assert [block.data_ptr() for block in blocks[:3]] == [
        matrix_MN[row:].data_ptr() for row in (0, 2, 4)
    ]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
def test_rows_that_do_not_divide_are_filled_with_zeros(rows: int) -> None:
    matrix_MN = normal(rows, 2)
    blocks = MdsCode(4, 5).encode(matrix_MN)
    whole = torch.cat(blocks[:4])
    assert {block.shape for block in blocks} == {(-(-rows // 4), 2)}
    assert torch.equal(whole[:rows], matrix_MN)
    assert not whole[rows:].any()


def test_everything_is_double() -> None:
    matrix_MN = normal(6, 4).float()
    code = MdsCode(2, 4)
    blocks = code.encode(matrix_MN)
    assert {block.dtype for block in blocks} == {torch.float64}
    vector_N = torch.ones(4)
    answers = {worker: blocks[worker].float() @ vector_N for worker in (2, 3)}
    assert code.decode(answers, 6).dtype == torch.float64


def test_the_seed_fixes_weights_that_are_drawn() -> None:
    large = [MdsCode(40, 60, seed) for seed in (1, 1, 2)]
    assert large[0].weights_RK == large[1].weights_RK
    assert large[0].weights_RK != large[2].weights_RK
    assert large[0] == large[1] != large[2]


@pytest.mark.parametrize(
    ("k", "n", "most"),
    [(1, 4, 1.01), (3, 4, 3.2), (2, 4, 3.5), (6, 8, 13.0), (5, 10, 43.0), (12, 16, 350.0)],
)
def test_the_worst_choice_is_well_conditioned(k: int, n: int, most: float) -> None:
    for seed in range(2):
        rows_RK = coded_rows(k, n, seed)
        assert 1.0 - 1e-9 <= worst_condition(rows_RK) < most
        assert np.linalg.norm(rows_RK, axis=1) == pytest.approx(1.0)


def test_the_condition_is_that_of_the_rows_which_are_solved() -> None:
    """Of the rows (1, 0), (0, 1), (3, 4) / 5 the second and third are the closest."""
    pairs = [np.array([[1.0, 0.0], [0.6, 0.8]]), np.array([[0.0, 1.0], [0.6, 0.8]])]
    expected = max(float(np.linalg.cond(pair)) for pair in pairs)
    assert worst_condition(np.array([[0.6, 0.8]])) == pytest.approx(expected)
    assert worst_condition(np.array([[1.0, 0.0]])) > 1e15


def test_draws_are_taken_where_points_are_worse() -> None:
    rows_RK = coded_rows(40, 60, 0)
    assert rows_RK.shape == (20, 40)
    assert np.linalg.norm(rows_RK, axis=1) == pytest.approx(1.0)
    generator_NK = np.vstack([np.eye(40), rows_RK])
    draw = np.random.default_rng(99)
    conditions = [np.linalg.cond(generator_NK[draw.permutation(60)[:40]]) for _ in range(99)]
    assert np.median(conditions) < 300  # points would have thousands


def ones(*workers: int, shape: tuple[int, ...] = (2,)) -> dict[int, Tensor]:
    return {worker: torch.ones(shape) for worker in workers}


@pytest.mark.parametrize(
    "call",
    [
        lambda: MdsCode(0, 2),
        lambda: MdsCode(3, 2),
        lambda: MdsCode(3, 1000),
        lambda: MdsCode(2, 3, -1),
        lambda: MdsCode(2, 3).encode(torch.ones(4)),
        lambda: MdsCode(2, 3).encode(torch.ones(0, 4)),
        lambda: MdsCode(2, 3).decode(ones(0), 4),
        lambda: MdsCode(2, 3).decode(ones(0, 3), 4),
        lambda: MdsCode(2, 3).decode(ones(0, -1), 4),
        lambda: MdsCode(2, 3).decode(ones(0, 1), 0),
        lambda: MdsCode(2, 3).decode(ones(0, 1, shape=(0,)), 0),
        lambda: MdsCode(2, 3).decode(ones(0, 1), 2),
        lambda: MdsCode(2, 3).decode(ones(0, 1), 5),
        lambda: MdsCode(2, 3).decode(ones(0, 1, shape=(2, 1, 1)), 4),
        lambda: MdsCode(2, 3).decode(ones(0) | ones(2, shape=(2, 1)), 4),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        call()
