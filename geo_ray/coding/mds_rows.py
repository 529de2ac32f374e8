"""The coded rows of an MDS code, such that any subset of answers can be solved for the rest.

A code is as well conditioned as the worst choice of k rows of its generator: the unit rows of the
matrix's own blocks, and the coded rows. Some candidates are judged by many choices, and the best is
taken:

- *points*: blocks are values of a curve, a sum of the k lowest waves, at n points evenly round a
  circle. Any k points fix the curve. The matrix's own blocks are at points spread over the circle.
  Best in codes of up to some twenty blocks.
- *draws* of normal numbers. In large codes, where many neighbours on the circle may be missing.

Source: the draws after what Lee et al. (arXiv 1512.02673) need, reconstructed; the points are
derived here.

Shape legend: N = blocks in all; K = blocks of the matrix; R = coded blocks; C = choices of K rows.
"""

from __future__ import annotations

import itertools
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_DRAWS: Final = 8
_MOST_CHOICES: Final = 500
_WORK: Final = 2_000_000  # choices judged per candidate, times K cubed


def coded_rows(k: int, n: int, seed: int) -> Floats:
    """Rows of length 1 that say how blocks are added up (R, K), with R = n - k.

    Args:
        k: blocks of the matrix, at least 1.
        n: blocks in all, at least k.
        seed: of the draws, and of the choices if there are too many to look at all.
    """
    generator = np.random.default_rng(seed)
    candidates = [_points(k, n), *generator.standard_normal((_DRAWS, n - k, k))]
    units = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in candidates]
    most = max(1, min(_MOST_CHOICES, _WORK // k**3))
    choices_CK = _choices(n, k, most, generator)
    return np.asarray(min(units, key=lambda rows_RK: _worst(rows_RK, choices_CK)))


def worst_condition(rows_RK: Floats) -> float:
    """The largest condition number over all choices of K of the K + R rows.

    There are many choices: for tests and benchmarks of small codes.
    """
    num_coded, k = rows_RK.shape
    every = itertools.combinations(range(k + num_coded), k)
    return _worst(rows_RK, np.array(list(every)))


def _points(k: int, n: int) -> Floats:
    """How the curve's values at the other points follow from those at k of them (R, K)."""
    frequencies = np.arange(k - 1, -1, -2) / 2  # halves if k is even
    angles = 2.0 * np.pi / n * np.outer(np.arange(n), frequencies)
    waves_NK = np.hstack([np.cos(angles), np.sin(angles[:, frequencies > 0])])
    own = [block * n // k for block in range(k)]
    others = sorted(set(range(n)) - set(own))
    return np.asarray(np.linalg.solve(waves_NK[own].T, waves_NK[others].T).T)


def _choices(n: int, k: int, most: int, generator: np.random.Generator) -> NDArray[np.intp]:
    """All ways to choose k of n rows, or ``most`` drawn ones if there are more (C, K)."""
    if math.comb(n, k) <= most:
        return np.array(list(itertools.combinations(range(n), k)))
    return np.array([generator.permutation(n)[:k] for _ in range(most)])


def _worst(rows_RK: Floats, choices_CK: NDArray[np.intp]) -> float:
    generator_NK = np.vstack([np.eye(rows_RK.shape[1]), rows_RK])
    values_CK = np.linalg.svd(generator_NK[choices_CK], compute_uv=False)
    with np.errstate(divide="ignore"):
        return float((values_CK[:, 0] / values_CK[:, -1]).max())
