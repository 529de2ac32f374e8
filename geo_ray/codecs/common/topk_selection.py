"""Finds the k largest magnitudes of a vector without sorting it.

On a CPU the k-th largest is estimated from a sample, a little too low; one pass through the cache
keeps what is above the estimate, and an exact selection among those few leaves k. If the estimate
was too high after all, a lower one is tried. The result does not depend on the sample.

Shape legend: P = elements of the vector; N = of a piece; C = candidates; K = picked; M = sampled.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geo_ray.codecs.common.buffers import PIECE

_SAMPLE = 1 << 16
_SMALL = 1 << 18  # up to here an exact selection costs no more than a sample
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def count_of(ratio: float, num: int) -> int:
    """How many of ``num`` elements a ratio means: at least one, unless there are none."""
    return min(max(round(ratio * num), 1), num)


def largest_positions(x_P: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` largest magnitudes; of equal ones the earliest.

    Args:
        x_P: contiguous fp32, finite, any device.
        count: K, at most P.

    Returns:
        int64 (<= K,), ascending, on the device of x. Zeros are not picked, so there may be fewer.
    """
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=x_P.device)
    if not x_P.is_cpu:
        return largest_elsewhere(x_P, count)
    x = x_P.numpy()
    threshold = _SMALLEST if count == x.size else _estimate(x, count)
    while True:
        at_C, magnitude_C = _candidates(x, threshold)
        if at_C.size >= count or threshold == _SMALLEST:
            return torch.from_numpy(at_C[_keep(magnitude_C, count)])
        threshold = _lower(x, threshold)


def largest_elsewhere(x_P: Tensor, count: int) -> Tensor:
    """`largest_positions` on an accelerator, where sorting is cheap; ``count`` is not 0."""
    magnitude_P = x_P.abs()
    kth = float(magnitude_P.topk(count).values[-1])
    found_C = torch.nonzero(magnitude_P >= max(kth, _SMALLEST)).view(-1)
    keep_C = torch.from_numpy(_keep(magnitude_P[found_C].cpu().numpy(), count))
    return found_C[keep_C.to(x_P.device)]


def _estimate(x_P: Floats, count: int) -> float:
    """A magnitude that probably somewhat more than ``count`` elements reach."""
    if x_P.size <= _SMALL:
        return max(_kth(np.abs(x_P), count), _SMALLEST)
    share = count / x_P.size * _SAMPLE
    rank = int(share + 4 * share**0.5 + 4)  # four standard deviations on the safe side
    if rank >= _SAMPLE // 2:
        return max(_kth(np.abs(x_P), count), _SMALLEST)
    return max(_kth(_sample(x_P), rank), _SMALLEST)


def _lower(x_P: Floats, threshold: float) -> float:
    """The next threshold to try: one that eight times as many of the sample reach."""
    sample_M = _sample(x_P)
    rank = 8 * max(int(np.count_nonzero(sample_M >= np.float32(threshold))), 1)
    if rank >= sample_M.size:
        return _SMALLEST
    return max(min(_kth(sample_M, rank), threshold / 2), _SMALLEST)


def _sample(x_P: Floats) -> Floats:
    """Magnitudes at random positions, one from each of ``_SAMPLE`` equal runs."""
    starts_M = np.linspace(0, x_P.size, _SAMPLE, endpoint=False)
    at_M = starts_M + np.random.default_rng(0).random(_SAMPLE) * (x_P.size / _SAMPLE)
    return np.abs(x_P[np.minimum(at_M.astype(np.int64), x_P.size - 1)])


def _candidates(x_P: Floats, threshold: float) -> tuple[Ints, Floats]:
    """Positions and magnitudes of the elements that reach a threshold."""
    scratch_N, reaches_N = np.empty(PIECE, np.float32), np.empty(PIECE, np.bool_)
    bound = np.float32(threshold)
    positions: list[Ints] = []
    magnitudes: list[Floats] = []
    for start in range(0, x_P.size, PIECE):
        x_N = x_P[start : start + PIECE]
        magnitude_N = np.abs(x_N, out=scratch_N[: x_N.size])
        at = np.flatnonzero(np.greater_equal(magnitude_N, bound, out=reaches_N[: x_N.size]))
        magnitudes.append(magnitude_N[at])
        positions.append(at + start)
    return np.concatenate(positions), np.concatenate(magnitudes)


def _keep(magnitude_C: Floats, count: int) -> NDArray[np.bool_]:
    """Marks the ``count`` largest, of equal ones the earliest."""
    if magnitude_C.size <= count:
        return np.ones(magnitude_C.size, np.bool_)
    kth = np.float32(_kth(magnitude_C, count))
    keep_C = magnitude_C > kth
    equal = np.flatnonzero(magnitude_C == kth)
    keep_C[equal[: count - int(np.count_nonzero(keep_C))]] = True
    return keep_C


def _kth(magnitude_N: Floats, rank: int) -> float:
    """The rank-th largest of non-negative numbers; as whole numbers their bits order alike."""
    bits_N = np.partition(magnitude_N.view(np.int32), magnitude_N.size - rank)
    return float(bits_N[magnitude_N.size - rank].view(np.float32))
