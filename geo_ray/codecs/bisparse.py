"""Bi-Sparse, upwards: top-k of an accumulated, momentum-corrected gradient.

Idea: momentum of unsent elements must not be lost. Therefore momentum is applied here, before
sparsification, and accumulates until an element is sent. This is the codec's own error feedback.

Rule, with u and v (P,) in the memory:

    u <- momentum * u + x;  v <- v + u
    send v at the ratio * P largest |v|;  u <- 0 and v <- 0 there

Layout: `sparse`. Ratio as `topk`. Use `nonzeros` downwards.

When: gradients of plain SGD on slow links. The optimizer must have no momentum, because the codec
has it. To return what was refused, add the result of `decode` to the next vector.

Source: GeoMX's Bi-Sparse (read in its code), which follows Deep Gradient Compression. It sends the
first ratio * P elements in order of position that reach a sampled threshold; here they are exactly
the largest, found with a sampled threshold too (`topk_selection`), and positions are whole numbers.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import CodecTraits, Coded
from geo_ray.codecs.buffers import as_fp32, piece_of, split
from geo_ray.codecs.sparse import (
    Values,
    count_of,
    largest_positions,
    read_sparse,
    sparse_bits,
    write_sparse,
)


class BiSparse(StrictModel):
    """Configuration and rule of `bisparse`."""

    kind: Literal["bisparse"] = "bisparse"
    ratio: float = Field(0.01, gt=0.0, le=1.0, description="fraction of the elements that is sent")
    momentum: float = Field(
        0.9, ge=0.0, lt=1.0, description="momentum before sparsification; 0 is plain error feedback"
    )
    values: Values = Field("fp32", description="number format of the sent values")

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        return CodecTraits(
            lossy=True,
            bits_per_value=sparse_bits(self.ratio, self.values),
            sends=("change",),
            rounds_only=True,
            feeds_back=True,
            up_only=True,
            suits_answers=False,
        )

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Accumulate into ``memory["u"]`` and ``memory["v"]``, and write the largest of v."""
        x_P = as_fp32(x_P)
        for name in ("u", "v"):
            old_P = memory.get(name)
            if old_P is None or old_P.shape != x_P.shape or old_P.device != x_P.device:
                memory[name] = torch.zeros_like(x_P) if old_P is None else old_P.to(x_P.device)
        u_P, v_P = memory["u"], memory["v"]
        step = piece_of(x_P.device)
        for x_N, u_N, v_N in zip(split(x_P, step), split(u_P, step), split(v_P, step), strict=True):
            v_N.add_(u_N.mul_(self.momentum).add_(x_N))
        at_K = largest_positions(v_P, count_of(self.ratio, v_P.numel()))
        coded = write_sparse(self.kind, v_P, at_K, self.values)
        u_P[at_K] = 0.0
        if self.values == "fp32":
            v_P[at_K] = 0.0
        else:  # the rounding error is not sent
            v_P[at_K] -= self.decode(coded)[at_K.cpu()].to(v_P.device)
        return coded

    def decode(self, coded: Coded) -> Tensor:
        """Put the values at their positions."""
        return read_sparse(coded)
