"""Gradient coding: the exact sum of all gradients although a few workers are missing.

Idea: the data are split into as many partitions as there are workers. Each worker computes the
gradients of ``tolerate + 1`` partitions and sends one vector, their weighted sum. A weighted sum of
the vectors of any ``n - tolerate`` workers is the sum over all partitions: nothing is dropped or
approximated, at ``tolerate + 1`` times the computation and no more traffic.

Rule (cyclic weights): every worker has ``tolerate + 1`` neighbouring partitions. Its weights are
the coefficients of the polynomial whose roots are ``tolerate`` neighbouring n-th roots of 1, or of
-1 where real coefficients require it; the next worker has the same weights, shifted by one. Any
``n - tolerate`` workers are then independent and determine the sum. With roots of -1 the vector of
ones is not in the span; the nearest vector that is (`_flat`) has no zero, so the weights of
every partition are divided by its entry.

When: workers are lost or late so often that computing ``tolerate + 1`` times as much is cheaper.
Workers of one partition must draw the same rows from it, so rows are drawn by (epoch, step,
partition), and all of them may read it: they must be in one region. A partition's gradient is a sum
over rows, or a mean that is weighted outside.

Source: "Gradient Coding: Avoiding Stragglers in Distributed Learning" (Tandon et al., ICML
2017, PMLR 70); the abstract and a reference implementation were read, the constructions are
reconstructed; the weights from roots are derived here and lose far fewer digits than random
ones.

Shape legend: N = workers, and partitions; A = workers that are alive; P = parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geo_ray.base.errors import ConfigError

Floats = NDArray[np.float64]


def cyclic_weights(num_workers: int, tolerate: int) -> Floats:
    """Return in row i the weights of worker i's partitions, i to i + tolerate, at most 1 (N, N).

    Args:
        num_workers: N.
        tolerate: workers that may be missing, below N.
    """
    signed = (num_workers - tolerate) % 2 == 0
    coefficients = _coefficients(num_workers, tolerate)
    weights_NN = np.zeros((num_workers, num_workers))
    for worker in range(num_workers):
        for step, coefficient in enumerate(coefficients):
            wrapped, partition = divmod(worker + step, num_workers)
            weights_NN[worker, partition] = -coefficient if signed and wrapped else coefficient
    if signed:
        weights_NN /= _flat(num_workers, tolerate)
    return np.asarray(weights_NN / np.abs(weights_NN).max(axis=1, keepdims=True))


def _coefficients(num_workers: int, tolerate: int) -> Floats:
    """Return the coefficients of the polynomial with ``tolerate`` roots opposite to 1."""
    exponents = (num_workers + np.arange(1 - tolerate, tolerate, 2)) / 2
    roots = np.exp(2j * np.pi * exponents / num_workers)
    return np.atleast_1d(np.real(np.poly(roots)))  # no roots: the polynomial is 1


def _flat(num_workers: int, tolerate: int) -> Floats:
    """Return the combination of all workers' unscaled weights that is nearest to ones (N,).

    It is the Fourier series of a square wave without its ``tolerate`` highest terms.
    """
    angles = np.pi * np.arange(1, num_workers - tolerate, 2) / num_workers
    middles_N = np.arange(num_workers) + 0.5
    waves = np.sin(np.outer(middles_N, angles)) / np.sin(angles / 2)
    return np.asarray(2.0 / num_workers * waves.sum(axis=1))


_FIX: Final = "Number workers from 0; make codes with this module's functions."
_EXACT: Final = 1e-8  # relative; the rounding error of an exact combination is below


@dataclass(frozen=True, slots=True)
class GradientCode:
    """Assignment of partitions to workers, with weights.

    Attributes:
        encoding_NN: row i has worker i's weights; 0 where it does not have the partition.
        tolerate: workers that may be missing.
    """

    encoding_NN: tuple[tuple[float, ...], ...]
    tolerate: int

    def __post_init__(self) -> None:
        _check_counts(self.num_workers, self.tolerate)
        if any(len(row) != self.num_workers for row in self.encoding_NN):
            raise ConfigError("a gradient code has as many partitions as workers", fix=_FIX)
        if not all(math.isfinite(weight) for row in self.encoding_NN for weight in row):
            raise ConfigError("a gradient code's weights must be finite", fix=_FIX)
        for partition, column in enumerate(zip(*self.encoding_NN, strict=True)):
            holders = sum(weight != 0.0 for weight in column)
            if holders <= self.tolerate:
                raise ConfigError(
                    f"partition {partition} is with {holders} workers; that many can be missing",
                    fix="Give each partition to tolerate + 1 workers.",
                )

    @property
    def num_workers(self) -> int:
        """Number of workers, N."""
        return len(self.encoding_NN)

    def partitions_of(self, worker: int) -> tuple[int, ...]:
        """Return the partitions whose gradients this worker computes, ascending."""
        return tuple(partition for partition, weight in enumerate(self._row(worker)) if weight)

    def weights_of(self, worker: int) -> tuple[float, ...]:
        """Return the weights of these partitions, in the same order."""
        return tuple(weight for weight in self._row(worker) if weight)

    def encode(self, worker: int, grads: Sequence[Tensor]) -> Tensor:
        """Return a worker's message: the weighted sum of its gradients, a new (P,).

        Args:
            worker: its number.
            grads: of `partitions_of` this worker, in that order, (P,) each.

        Raises:
            ConfigError: another number of gradients, or they differ in shape.
        """
        weights = self.weights_of(worker)
        if len(grads) != len(weights):
            raise ConfigError(
                f"worker {worker} has {len(weights)} partitions, got {len(grads)} gradients",
                fix="Give the gradients of `partitions_of` this worker.",
            )
        return _weighted(weights, grads)

    def decode(self, alive: Sequence[int]) -> tuple[tuple[float, ...], float]:
        """Return weights with which the coded gradients sum to that of all partitions.

        They are the shortest among the best. Of workers that send the same vector, the first is
        used.

        Args:
            alive: numbers of the workers that have answered.

        Returns:
            A weight for each of them, in the order given, and how far the combination is from
            counting every partition once: the root of the mean squared difference, over
            partitions. It is 0 but for rounding with at most ``tolerate`` missing, 1 with none
            alive.

        Raises:
            ConfigError: a duplicate number, or one of no worker.
        """
        rows = [self._row(worker) for worker in alive]
        if len(set(alive)) < len(alive):
            raise ConfigError(f"a worker is named twice: {list(alive)}", fix=_FIX)
        places = list({row: rows.index(row) for row in rows}.values())
        rows_DN = np.array([rows[place] for place in places]).reshape(-1, self.num_workers)
        found_D = _combination(rows_DN)
        weights = [0.0] * len(rows)
        for place, weight in zip(places, found_D, strict=True):
            weights[place] = float(weight)
        missed_N = found_D @ rows_DN - 1.0
        return tuple(weights), float(np.linalg.norm(missed_N) / math.sqrt(self.num_workers))

    def can_decode(self, alive: Sequence[int]) -> bool:
        """Tell whether these workers' vectors give the exact sum."""
        return self.decode(alive)[1] < _EXACT

    def combine(self, coded: Mapping[int, Tensor]) -> tuple[Tensor, float]:
        """Return the sum of all partitions' gradients from the arrived messages, a new (P,).

        Args:
            coded: messages by worker, (P,) each; at least one.

        Returns:
            The sum, in the vectors' type, and `decode`'s measure of what is missing.

        Raises:
            ConfigError: nothing, not from workers of this code, or of different shapes.
        """
        weights, error = self.decode(tuple(coded))
        return _weighted(weights, list(coded.values())), error

    def _row(self, worker: int) -> tuple[float, ...]:
        if not 0 <= worker < self.num_workers:
            raise ConfigError(f"no worker {worker} of {self.num_workers}", fix=_FIX)
        return self.encoding_NN[worker]


def fractional_repetition(num_workers: int, tolerate: int) -> GradientCode:
    """Make groups of ``tolerate + 1`` workers with equal work; one of each group suffices.

    All weights are 0 or 1, so that no precision is lost, and more than ``tolerate`` workers may be
    missing as long as each group has one left.

    Args:
        num_workers: N, a multiple of ``tolerate + 1``.
        tolerate: workers that may be missing.

    Raises:
        ConfigError: counts that do not fit.
    """
    _check_counts(num_workers, tolerate)
    size = tolerate + 1
    if num_workers % size:
        raise ConfigError(
            f"{num_workers} workers cannot be cut in groups of {size}",
            fix="Take a multiple of tolerate + 1 workers, or the cyclic code.",
        )
    rows = ((float(i // size == j // size) for j in range(num_workers)) for i in range(num_workers))
    return GradientCode(tuple(map(tuple, rows)), tolerate)


def cyclic(num_workers: int, tolerate: int) -> GradientCode:
    """Assign partitions i to i + tolerate, modulo N, to worker i.

    Any counts do up to some forty workers. Decoding subtracts large numbers from each other as
    ``tolerate`` grows; a code that would not be exact is refused.

    Args:
        num_workers: N.
        tolerate: workers that may be missing, below N.

    Raises:
        ConfigError: counts that do not fit, or too large ones.
    """
    _check_counts(num_workers, tolerate)
    rows = cyclic_weights(num_workers, tolerate).tolist()
    code = GradientCode(tuple(map(tuple, rows)), tolerate)
    if (
        code.decode(range(num_workers - tolerate))[1] > _EXACT / 10
    ):  # the loss of neighbours is the worst case
        raise ConfigError(
            f"a cyclic code for {tolerate} of {num_workers} workers is spoilt by rounding",
            fix="Tolerate fewer, or take the fractional repetition code.",
        )
    return code


def _check_counts(num_workers: int, tolerate: int) -> None:
    if not 0 <= tolerate < num_workers:
        raise ConfigError(
            f"{tolerate} of {num_workers} workers cannot be missing",
            fix="Tolerate at least 0 and fewer than there are workers.",
        )


def _combination(rows_DN: Floats) -> Floats:
    """Return the shortest weights of different workers whose sum is nearest to ones (D,)."""
    plain = np.isin(rows_DN, (0.0, 1.0)).all() and (rows_DN.sum(axis=0) <= 1.0).all()
    if plain or not len(rows_DN):  # no partitions overlap: each counts once, without rounding
        return np.ones(len(rows_DN))
    found_D, *_ = np.linalg.lstsq(rows_DN.T, np.ones(rows_DN.shape[1]), rcond=None)
    return np.asarray(found_D)


def _weighted(weights: Sequence[float], vectors: Sequence[Tensor]) -> Tensor:
    shapes = {(vector.shape, vector.dtype) for vector in vectors}
    if len(shapes) != 1 or not vectors[0].is_floating_point():
        raise ConfigError(
            "gradients to be combined are none, no floating point numbers, or differ in shape",
            fix="Give at least one, all flat and of one type.",
        )
    total_P = torch.zeros_like(vectors[0])
    for weight, vector_P in zip(weights, vectors, strict=True):
        if weight:
            total_P.add_(vector_P, alpha=weight)
    return total_P
