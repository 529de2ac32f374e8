"""All non-zero elements, exactly: the downward codec of Bi-Sparse.

Idea: the sum of a few sparse updates is sparse. Every element whose bits are not all zero is sent
unchanged, so nothing is lost, not even the sign of a negative zero. If there are more negative
zeros than others (a sparse update times a negative number has them), all signs are flipped for the
transfer.

Layout: i64 1 if signs are flipped, 0 if not; `sparse` with fp32 values. If positions would take
more than the zeros do, the zeros are sent as well: 48 bytes more than `identity`.

When: down, if `bisparse` or `topk` go up and the answer is their sum; not for whole models.

Source: GeoMX sends the aggregated sparse gradient down as its non-zeros (Bi-Sparse); the layout is
ours. GeoMX's positions are fp32 numbers, exact up to 2^24 only; these are whole numbers.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import FP32_BITS, CodecTraits, Coded, wrong
from geo_ray.codecs.buffers import (
    PIECE,
    Reader,
    as_fp32,
    check_num,
    header,
    joined,
    piece_of,
    split,
)
from geo_ray.codecs.sparse import read_sparse_parts, sparse_parts


class NonZeros(StrictModel):
    """Configuration and rule of `nonzeros`."""

    kind: Literal["nonzeros"] = "nonzeros"

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        return CodecTraits(lossy=False, bits_per_value=FP32_BITS)

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Find the non-zero elements and write them with positions."""
        x_P = as_fp32(x_P)
        turned = _mostly_negative(x_P)
        if turned:
            x_P = -x_P
        parts = sparse_parts(x_P, _positions(x_P), "fp32")
        return Coded(self.kind, x_P.numel(), joined(header(turned), *parts))

    def decode(self, coded: Coded) -> Tensor:
        """Put the values at their positions."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        (turned,) = reader.header(1)
        if turned not in (0, 1):
            raise wrong(self.kind, f"signs turned {turned} times")
        out_P = read_sparse_parts(self.kind, reader, num)
        reader.done()
        return out_P.neg_() if turned else out_P


def _mostly_negative(x_P: Tensor) -> bool:
    """Return whether most zeros are negative."""
    bits_P = x_P.view(torch.int32)
    minus = torch.iinfo(torch.int32).min
    excess = 0
    for bits_N in split(bits_P, piece_of(x_P.device)):
        zeros = bits_N.numel() - int(torch.count_nonzero(bits_N))
        excess += int(torch.count_nonzero(bits_N == minus)) - zeros
    return excess > 0


def _positions(x_P: Tensor) -> Tensor | None:
    """Return ascending positions of non-zero bits, int64; None if sending all is cheaper."""
    bits_P = x_P.view(torch.int32)
    if not x_P.is_cpu:
        at_K = torch.nonzero(bits_P).view(-1)
        return None if _dense(at_K.numel(), x_P.numel()) else at_K
    there = [np.not_equal(bits_N.numpy(), 0) for bits_N in split(bits_P, PIECE)]
    if _dense(sum(int(np.count_nonzero(there_N)) for there_N in there), x_P.numel()):
        return None
    found = [np.flatnonzero(there_N) + i * PIECE for i, there_N in enumerate(there)]
    return torch.from_numpy(np.concatenate(found))


def _dense(count: int, num: int) -> bool:
    """Return whether a bit per element is more than 32 bits per zero."""
    return num >= 32 * (num - count)
