"""All that is not zero, exactly: the way down of Bi-Sparse.

Idea: the sum of a few sparse updates is sparse itself. Every element whose bits are not all zero is
sent as it is, so nothing is lost, not even the sign of a negative zero.

Layout: `sparse` with fp32 values; for a vector without zeros that is 40 bytes more than `identity`.

When: down, if `bisparse` or `topk` go up and what comes back is their sum; not for whole models.

Source: GeoMX sends the aggregated sparse gradient down as its non-zeros (Bi-Sparse); the layout is
ours. GeoMX's positions are fp32 numbers, exact up to 2^24 only; these are whole numbers.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from geo_ray.config.base import Model
from geo_ray.sync.codecs.base import Coded
from geo_ray.sync.codecs.buffers import PIECE, plain, split
from geo_ray.sync.codecs.sparse import read_sparse, write_sparse


class NonZeros(Model):
    """Configuration and rule of `nonzeros`."""

    lossless: ClassVar[bool] = True
    feeds_back: ClassVar[bool] = False

    kind: Literal["nonzeros"] = "nonzeros"

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Find what is not zero, and send it with positions."""
        x_P = plain(x_P)
        return write_sparse(self.kind, x_P, _positions(x_P), "fp32")

    def decode(self, coded: Coded) -> Tensor:
        """Put the values at their positions."""
        return read_sparse(coded)


def _positions(x_P: Tensor) -> Tensor:
    """Where the bits are not all zero: int64, rising."""
    bits_P = x_P.view(torch.int32)
    if not x_P.is_cpu:
        return torch.nonzero(bits_P).view(-1)
    there = [np.not_equal(bits_N.numpy(), 0) for bits_N in split(bits_P, PIECE)]
    if all(bool(there_N.all()) for there_N in there):
        return torch.arange(x_P.numel())
    found = [np.flatnonzero(there_N) + i * PIECE for i, there_N in enumerate(there)]
    return torch.from_numpy(np.concatenate(found))
