"""Products with a matrix that is spread over n workers, from any k of their replies (MDS code).

Idea: the matrix is split by rows into k blocks. The first k workers hold one block each, the others
hold weighted sums of all. Products are linear, so any k answers determine the products of all
blocks.

Rule: a worker multiplies its block with a vector or a matrix. If the first k answers are present,
they are concatenated without computation; otherwise only the missing blocks are solved for. Storage
and work are n / k of the plain product's. All computation is in fp64: solving loses digits, and how
many follows from the generator (`worst_condition`).

When: linear maps with late or lost workers: least squares, logistic regression, power iterations, a
last layer. The gradient of a deep network is not linear; see `gradient_code`.

A code is as well conditioned as the worst choice of k rows of its generator. The coded rows are
chosen among two kinds of candidates: *points* (blocks are values of a curve, a sum of the k
lowest waves, at n points evenly round a circle; best up to about twenty blocks), and *draws* of
normal numbers (for large codes, where many neighbours on the circle may be missing).

Source: "Speeding Up Distributed Machine Learning Using Codes" (Lee et al., IEEE Trans. IT 2018,
arXiv 1512.02673), of which the abstract was read; the scheme and the draws are reconstructed,
the points are derived here.

Shape legend: M = rows of the matrix; N = its columns, or blocks in all; B = rows of a block; K
= blocks of the matrix; R = coded blocks; X = columns of the multiplied matrix; C = choices of
K rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geo_ray.base.errors import ConfigError

Floats = NDArray[np.float64]

_DRAWS: Final = 8
_MOST_CHOICES: Final = 500
_WORK: Final = 2_000_000  # choices judged per candidate, times K cubed


def coded_rows(k: int, n: int, seed: int) -> Floats:
    """Return rows of length 1 with the weights of the coded blocks (R, K), with R = n - k.

    Args:
        k: blocks of the matrix, at least 1.
        n: blocks in all, at least k.
        seed: seed of the draws, and of the choices if there are too many to check all.
    """
    generator = np.random.default_rng(seed)
    candidates = [_points(k, n), *generator.standard_normal((_DRAWS, n - k, k))]
    units = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in candidates]
    most = max(1, min(_MOST_CHOICES, _WORK // k**3))
    choices_CK = _choices(n, k, most, generator)
    return np.asarray(min(units, key=partial(_worst, choices_CK=choices_CK)))


def worst_condition(rows_RK: Floats) -> float:
    """Return the largest condition number over all choices of K of the K + R rows.

    There are many choices: for tests and benchmarks of small codes.
    """
    num_coded, k = rows_RK.shape
    every = itertools.combinations(range(k + num_coded), k)
    return _worst(rows_RK, np.array(list(every)))


def _points(k: int, n: int) -> Floats:
    """Return how the curve's values at the other points follow from those at k of them (R, K)."""
    frequencies = np.arange(k - 1, -1, -2) / 2  # halves if k is even
    angles = 2.0 * np.pi / n * np.outer(np.arange(n), frequencies)
    waves_NK = np.hstack([np.cos(angles), np.sin(angles[:, frequencies > 0])])
    own = [block * n // k for block in range(k)]
    others = sorted(set(range(n)) - set(own))
    return np.asarray(np.linalg.solve(waves_NK[own].T, waves_NK[others].T).T)


def _choices(n: int, k: int, most: int, generator: np.random.Generator) -> NDArray[np.intp]:
    """Return all ways to choose k of n rows, or ``most`` drawn ones if there are more (C, K)."""
    if math.comb(n, k) <= most:
        return np.array(list(itertools.combinations(range(n), k)))
    return np.array([generator.permutation(n)[:k] for _ in range(most)])


def _worst(rows_RK: Floats, choices_CK: NDArray[np.intp]) -> float:
    generator_NK = np.vstack([np.eye(rows_RK.shape[1]), rows_RK])
    values_CK = np.linalg.svd(generator_NK[choices_CK], compute_uv=False)
    with np.errstate(divide="ignore"):
        return float((values_CK[:, 0] / values_CK[:, -1]).max())


MOST_BLOCKS: Final = 256
"""Largest number of blocks; larger codes are neither well conditioned nor useful."""


@dataclass(frozen=True, slots=True)
class MdsCode:
    """A code of ``n`` blocks of which any ``k`` suffice.

    Attributes:
        k: blocks of the matrix.
        n: blocks in all, at least k.
        seed: seed of drawn weights; both ends need the same.
        weights_RK: weights of the coded blocks; follows from the other attributes.
    """

    k: int
    n: int
    seed: int = 0
    weights_RK: tuple[tuple[float, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.n <= MOST_BLOCKS or self.seed < 0:
            raise ConfigError(
                f"no code of k={self.k}, n={self.n}, seed={self.seed}",
                fix=f"Take 1 <= k <= n <= {MOST_BLOCKS} and a seed of at least 0.",
            )
        rows = coded_rows(self.k, self.n, self.seed).tolist()
        object.__setattr__(self, "weights_RK", tuple(map(tuple, rows)))

    def encode(self, matrix_MN: Tensor) -> list[Tensor]:
        """Return the blocks of the n workers, fp64 (B, N) each, with B = M / k rounded up.

        Rows of zeros fill the last blocks. The first k are views of one copy of the matrix, or of
        the matrix itself if it is fp64 and needs no filling.

        Args:
            matrix_MN: at least one row and one column.

        Raises:
            ConfigError: no matrix, or an empty one.
        """
        if matrix_MN.dim() != 2 or not matrix_MN.numel():
            raise ConfigError(
                f"a matrix is coded, not a tensor of shape {tuple(matrix_MN.shape)}",
                fix="Give two dimensions, neither of them empty.",
            )
        rows, columns = matrix_MN.shape
        block = self._block_rows(rows)
        whole = matrix_MN.to(torch.float64)
        if rows < self.k * block:
            whole = torch.cat([whole, whole.new_zeros(self.k * block - rows, columns)])
        parts = whole.reshape(self.k, block * columns)
        coded = self._weights(whole).matmul(parts)
        return [part.view(block, columns) for part in (*parts, *coded)]

    def decode(self, results: Mapping[int, Tensor], rows: int) -> Tensor:
        """Return the whole product from the arrived answers.

        Args:
            results: by worker, its block times the same vector, (B,), or matrix, (B, X); at least
                k. Answers of the first k workers are preferred; of the others the first by number.
            rows: of the matrix that was encoded, M.

        Returns:
            fp64 (M,) or (M, X).

        Raises:
            ConfigError: too few answers, from workers that do not exist, or of the wrong shape.
        """
        used = self._usable(results, rows)
        answers = [results[worker].to(torch.float64) for worker in used]
        missing = sorted(set(range(self.k)) - set(used))
        there = self.k - len(missing)
        blocks = dict(zip(used, answers, strict=True))
        if missing:
            flat = torch.stack([answer.reshape(-1) for answer in answers])
            weights = self._weights(flat)[[worker - self.k for worker in used[there:]]]
            wanted = flat[there:] - weights[:, used[:there]].matmul(flat[:there])
            solved = torch.linalg.solve(weights[:, missing], wanted)
            blocks |= dict(zip(missing, solved.view(-1, *answers[0].shape), strict=True))
        return torch.cat([blocks[worker] for worker in range(self.k)])[:rows]

    def _usable(self, results: Mapping[int, Tensor], rows: int) -> list[int]:
        """Return the k workers whose answers are used, ascending."""
        if len(results) < self.k or not set(results) <= set(range(self.n)):
            raise ConfigError(
                f"answers of workers {sorted(results)}; {self.k} of {self.n} are needed",
                fix="Wait for k answers; workers are numbered from 0.",
            )
        used = sorted(results)[: self.k]
        shape = results[used[0]].shape
        if (
            rows < 1
            or len(shape) not in (1, 2)
            or shape[0] != self._block_rows(rows)
            or any(results[worker].shape != shape for worker in used)
        ):
            raise ConfigError(
                f"answers of shapes {[tuple(results[worker].shape) for worker in used]} "
                f"are not products of the blocks of {rows} rows",
                fix=f"Each has {self._block_rows(rows)} rows and as many columns as the others.",
            )
        return used

    def _block_rows(self, rows: int) -> int:
        return -(-rows // self.k)

    def _weights(self, like: Tensor) -> Tensor:
        rows = self.n - self.k  # a code without redundancy has none
        return torch.tensor(self.weights_RK, dtype=torch.float64, device=like.device).view(
            rows, self.k
        )
