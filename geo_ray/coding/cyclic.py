"""Weights of the cyclic gradient code: every worker has ``tolerate + 1`` neighbouring partitions.

A worker's weights are the coefficients of the polynomial whose roots are ``tolerate`` neighbouring
n-th roots of 1, or of -1 where real coefficients ask for it; the next worker's are the same,
shifted by one. A combination of workers that gives zero has only as many neighbouring frequencies
as there are roots, so it is zero for fewer than that many workers: any ``n - tolerate`` workers are
independent, and whatever all of them together can give, they can give.

With roots of -1 the vector of ones is not among that. The nearest vector that is (`_flat`) has no
zero, so every partition's weights are divided by its entry.

Source: gradient coding (Tandon et al., ICML 2017, PMLR 70) asks for such weights; the construction
from roots is derived here. Weights from random draws, the usual other way, lose far more digits.

Shape legend: N = workers, and partitions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def cyclic_weights(num_workers: int, tolerate: int) -> Floats:
    """Row i: the weights of worker i's partitions, i to i + tolerate, the largest 1 (N, N).

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
    """Of the polynomial with roots opposite to 1, as many as ``tolerate``."""
    exponents = (num_workers + np.arange(1 - tolerate, tolerate, 2)) / 2
    roots = np.exp(2j * np.pi * exponents / num_workers)
    return np.atleast_1d(np.real(np.poly(roots)))  # no roots: a bare 1


def _flat(num_workers: int, tolerate: int) -> Floats:
    """The combination of all workers' unscaled weights that is nearest to ones (N,).

    It is the Fourier series of a square wave without its ``tolerate`` highest terms.
    """
    angles = np.pi * np.arange(1, num_workers - tolerate, 2) / num_workers
    middles_N = np.arange(num_workers) + 0.5
    waves = np.sin(np.outer(middles_N, angles)) / np.sin(angles / 2)
    return np.asarray(2.0 / num_workers * waves.sum(axis=1))
