"""A last message that is as exact as is wanted: eight bits per element, in one pass or several.

Each pass codes what those before have left, so two are about as good as sixteen bits. Few elements
at a time, or few bits, would need more bytes to come as near.

Layout: i64 number of passes, then for each of them the bytes of `int8`.

Shape legend: P = elements of the vector.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from geo_ray.codecs.base import Coded, wrong
from geo_ray.codecs.common.buffers import Reader, as_fp32, check_num, header, joined
from geo_ray.codecs.int8 import Int8

KIND: Final = "passes"
_MOST: Final = 3  # with one more there would be no byte saved
_ERRORS: Final = (0.01, 3e-5)
"""Relative error of normal values after one pass, and after two, at most."""

_INT8: Final = Int8()
BITS_PER_PASS: Final = _INT8.traits.bits_per_value


def encode(x_P: Tensor, error: float) -> Coded | None:
    """A finite vector (P,), off by no more than ``error`` of its 2-norm.

    Returns:
        None if so many passes would be needed that it goes as well in full precision.
    """
    x_P = as_fp32(x_P)
    limit = error * _norm(x_P)
    rest_P = x_P
    parts: list[Tensor] = []
    while not parts or _norm(rest_P) > limit:
        if len(parts) == _MOST:
            return None
        coded = _INT8.encode(rest_P, {}, 0)
        rest_P = rest_P - _INT8.decode(coded).to(rest_P.device)
        parts.append(coded.data_B)
    return Coded(KIND, x_P.numel(), joined(header(len(parts)), *parts))


def decode(coded: Coded) -> Tensor:
    """The vector again: fp32 (P,) on the CPU, owned by the caller.

    Raises:
        FrameError: the bytes make no sense.
    """
    num = check_num(KIND, coded.num)
    reader = Reader(KIND, coded.data_B)
    (count,) = reader.header(1)
    size = reader.left // max(1, count)
    if not 1 <= count <= _MOST or reader.left != count * size:
        raise wrong(KIND, f"{count} passes in {reader.left} bytes")
    total_P = _INT8.decode(Coded(_INT8.kind, num, reader.take(size, torch.uint8)))
    for _ in range(count - 1):
        total_P += _INT8.decode(Coded(_INT8.kind, num, reader.take(size, torch.uint8)))
    return total_P


def bits_for(error: float) -> float:
    """Bits per element of normal values that are to be so exact; 32 in full precision."""
    for count, reached in enumerate(_ERRORS, 1):
        if error >= reached:
            return count * BITS_PER_PASS
    return 32.0


def _norm(x_P: Tensor) -> float:
    return float(torch.linalg.vector_norm(x_P, dtype=torch.float64))
