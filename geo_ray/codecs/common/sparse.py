"""The bytes of a vector of which only some elements are sent.

Layout: the positions (`positions`), i64 number format, i64 exponent of the scale (0 for fp32), the
K values in order of their positions.

Shape legend: P = elements of the vector; K = those that are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import torch
from torch import Tensor

from geo_ray.codecs.base import Coded, wrong
from geo_ray.codecs.common.buffers import Reader, check_num, empty_cpu, header, joined, zeros
from geo_ray.codecs.common.halves import halve, widen
from geo_ray.codecs.common.positions import bits_per_position, read_positions, write_positions

Values = Literal["fp32", "fp16"]
_FORMATS = {"fp32": 0, "fp16": 1}
BITS: Final[Mapping[Values, int]] = {"fp32": 32, "fp16": 16}
"""Of a value."""


def sparse_bits(share: float, values: Values) -> float:
    """About what an element of a long vector takes, if so many of them are sent."""
    return share * (BITS[values] + bits_per_position(share))


def write_sparse(kind: str, x_P: Tensor, at_K: Tensor | None, values: Values) -> Coded:
    """Send the elements of ``x_P`` at rising positions, both on one device; None for all."""
    return Coded(kind, x_P.numel(), joined(*sparse_parts(x_P, at_K, values)))


def read_sparse(coded: Coded) -> Tensor:
    """The vector with zeros elsewhere: fp32 (P,).

    Raises:
        FrameError: the bytes make no sense.
    """
    num = check_num(coded.kind, coded.num)
    reader = Reader(coded.kind, coded.data_B)
    out_P = read_sparse_parts(coded.kind, reader, num)
    reader.done()
    return out_P


def sparse_parts(x_P: Tensor, at_K: Tensor | None, values: Values) -> list[Tensor]:
    """What `write_sparse` sends, to be joined with more."""
    x_K = x_P if at_K is None or at_K.numel() == x_P.numel() else x_P[at_K]
    positions_B = write_positions(None if at_K is None else at_K.cpu(), x_P.numel())
    return [positions_B, *write_values(x_K, values)]


def read_sparse_parts(kind: str, reader: Reader, num: int) -> Tensor:
    """Undo `sparse_parts`: fp32 (num,), owned by the caller.

    Raises:
        FrameError: the bytes make no sense.
    """
    at_K = read_positions(kind, reader, num)
    values_K = read_values(kind, reader, num if at_K is None else at_K.numel())
    if at_K is None:
        return values_K
    out_P = zeros(num)
    out_P.numpy()[at_K.numpy()] = values_K.numpy()
    return out_P


def write_values(x_K: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    """Header and bytes of values on any device."""
    exponent, sent_K = 0, x_K
    if values == "fp16":
        sent_K = empty_cpu(x_K.numel(), torch.float16)
        exponent = halve(x_K, sent_K)
    return header(_FORMATS[values], exponent), sent_K


def read_values(kind: str, reader: Reader, num: int) -> Tensor:
    """What `write_values` wrote: fp32 (num,), owned by the caller.

    Raises:
        FrameError: the bytes make no sense.
    """
    number_format, exponent = reader.header(2)
    if number_format == _FORMATS["fp16"]:
        half_K = reader.take(num, torch.float16)
        return widen(kind, half_K, exponent, empty_cpu(num, torch.float32))
    if number_format != _FORMATS["fp32"] or exponent:
        raise wrong(kind, f"numbers of format {number_format}, scale 2^{exponent}")
    return reader.take(num, torch.float32).clone()
