"""Half-precision numbers with one power-of-two scale, so that none overflows.

Plain fp16 turns what is above 65504 into infinity and what is below 6e-8 into zero, and gradients
know both. Here the numbers are multiplied by the power of two that brings the largest magnitude to
between 2^14 and 2^15, which by itself loses nothing: what is down to 2^-29 of the largest keeps all
11 significant bits.

Shape legend: N = numbers; K = numbers of a piece.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geo_ray.codecs.base import wrong
from geo_ray.codecs.common.buffers import PIECE, piece_of, split

_TOP = 15  # the largest magnitude becomes less than 2^_TOP; fp16 ends just below 2^16
_MAX = torch.finfo(torch.float32).max
_EXPONENTS = range(_TOP - 128, 127)  # 2^e and 2^-e are normal fp32 numbers, as is their use


def largest(x_N: Tensor) -> float:
    """The largest magnitude, 0 of none."""
    if not x_N.numel():
        return 0.0
    low, high = torch.aminmax(x_N)
    return max(-float(low), float(high))


def halve(x_N: Tensor, half_N: Tensor) -> int:
    """Scale and round to nearest.

    Args:
        x_N: contiguous fp32, any device.
        half_N: fp16 on the CPU; written.

    Returns:
        The exponent e of the scale 2^e.
    """
    exponent = exponent_of(largest(x_N))
    step = piece_of(x_N.device)
    for x_K, half_K in zip(split(x_N, step), split(half_N, step), strict=True):
        half_K.copy_((x_K * 2.0**exponent).to(torch.float16))
    return exponent


def widen(kind: str, half_N: Tensor, exponent: int, out_N: Tensor) -> Tensor:
    """Undo `halve`, into fp32 ``out_N`` on the CPU.

    Raises:
        FrameError: no encoder uses this exponent.
    """
    if exponent not in _EXPONENTS:
        raise wrong(kind, f"a scale of 2^{exponent}")
    for half_K, out_K in zip(split(half_N, PIECE), split(out_N, PIECE), strict=True):
        out_K.copy_(half_K).mul_(2.0**-exponent)
    if exponent == _EXPONENTS[0]:  # the largest fp32 numbers round up to what is none any more
        out_N.clamp_(-_MAX, _MAX)
    return out_N


def exponent_of(magnitude: float) -> int:
    """The scale's exponent for this largest magnitude; 0 if nothing can be scaled."""
    if magnitude == 0.0 or not math.isfinite(magnitude):
        return 0
    return min(_TOP - math.frexp(magnitude)[1], _EXPONENTS[-1])
