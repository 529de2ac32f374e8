"""The k largest magnitudes, at their positions.

Idea: most of a gradient's norm lies in few of its elements. Exactly k = ratio * P are sent (fewer
if there are fewer non-zeros); error feedback sends the others later.

Layout: `sparse`. Ratio about 4 / (ratio * 5.1) with fp32 values, 4 / (ratio * 3.1) with fp16, at a
ratio of 0.01: a position costs little more than a byte then (`positions`).

When: slow links, always with error feedback.

Source: top-k sparsification as in Deep Gradient Compression (Lin et al., 2018); reconstructed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import CodecTraits, Coded
from geo_ray.codecs.buffers import as_fp32
from geo_ray.codecs.sparse import (
    Values,
    count_of,
    largest_positions,
    read_sparse,
    sparse_bits,
    write_sparse,
)


class TopK(StrictModel):
    """Configuration and rule of `topk`."""

    kind: Literal["topk"] = "topk"
    ratio: float = Field(0.01, gt=0.0, le=1.0, description="fraction of the elements that is sent")
    values: Values = Field("fp32", description="number format of the sent values")

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        return CodecTraits(lossy=True, bits_per_value=sparse_bits(self.ratio, self.values))

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Pick the largest and write them with positions."""
        x_P = as_fp32(x_P)
        at_K = largest_positions(x_P, count_of(self.ratio, x_P.numel()))
        return write_sparse(self.kind, x_P, at_K, self.values)

    def decode(self, coded: Coded) -> Tensor:
        """Put the values at their positions."""
        return read_sparse(coded)
