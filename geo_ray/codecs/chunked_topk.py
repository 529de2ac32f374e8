"""The largest of every chunk of 4096 elements, their values in two bits: SparseLoCo's layout.

Idea: a position within a chunk needs 12 bits, and of the values little more than sign and "large or
very large" is left: four bins, uniform over three standard deviations to both sides of the mean of
the chunk's picked values, and the mean of each bin in a table. Error feedback makes up for the
rest.

Layout: i64 picks per chunk, i64 exponent of the tables' scale; then for all chunks: the positions,
two in three bytes (the earlier in the lower bits); the bins, four in a byte (the earlier in the
lower bits); four fp16 table entries. With 64 picks that is 96 + 16 + 8 bytes for 16384: ratio 136.
The last chunk may be shorter. Where a chunk has fewer non-zeros than picks, its first non-zero is
said again; a chunk of zeros says 0 at its first position.

When: pseudo-gradients of many local steps over very slow links.

Source: SparseLoCo's code as our notes describe it (64 x 64 chunks, top 64, 12-bit positions, 2-bit
bins over 6 sigma with a mean per bin). Reconstructed or ours: chunks are runs of the flat vector,
not tiles of its matrices; a table per chunk; fp16 tables.

Shape legend: P = elements of the vector; C = chunks; K = picks of a chunk; W = picks of all chunks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from geo_ray.codecs.base import Coded, wrong
from geo_ray.codecs.common.buffers import Reader, as_fp32, check_num, header, joined, zeros
from geo_ray.codecs.common.chunk_bins import (
    BINS,
    bins_and_table,
    pack_2,
    pack_12,
    unpack_2,
    unpack_12,
    without_zeros,
)
from geo_ray.codecs.common.chunk_selection import CHUNK, chunk_picks
from geo_ray.codecs.common.halves import halve, widen
from geo_ray.codecs.traits import CodecTraits
from geo_ray.config.base import StrictModel

_MIN_KEEP, _MAX_KEEP, _KEEP_STEP = 4, 1024, 4


class ChunkedTopK(StrictModel):
    """Configuration and rule of `chunked_topk`."""

    kind: Literal["chunked_topk"] = "chunked_topk"
    keep: int = Field(
        64,
        ge=_MIN_KEEP,
        le=_MAX_KEEP,
        multiple_of=_KEEP_STEP,
        description="how many of 4096 elements are sent",
    )

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.traits`."""
        return CodecTraits(
            lossy=True,
            bits_per_value=(14 * self.keep + 64) / CHUNK,
            suits_answers=False,
            expected_loss=0.015,
        )

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Pick, bin, pack."""
        x_P = as_fp32(x_P)
        at_CK, x_CK = without_zeros(*chunk_picks(x_P, self.keep))
        bins_CK, table_C4 = bins_and_table(x_CK)
        half_W = torch.empty(table_C4.size, dtype=torch.float16)
        exponent = halve(torch.from_numpy(table_C4.reshape(-1)), half_W)
        packed = torch.from_numpy(pack_12(at_CK)), torch.from_numpy(pack_2(bins_CK)), half_W
        return Coded(self.kind, x_P.numel(), joined(header(self.keep, exponent), *packed))

    def decode(self, coded: Coded) -> Tensor:
        """Put each bin's mean at the positions."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        keep, exponent = reader.header(2)
        if not _MIN_KEEP <= keep <= _MAX_KEEP or keep % _KEEP_STEP:
            raise wrong(self.kind, f"{keep} picks per chunk")
        chunks = -(-num // CHUNK)
        at_B = reader.take(chunks * keep // 2 * 3, torch.uint8)
        bins_B = reader.take(chunks * keep // 4, torch.uint8)
        half_W = reader.take(chunks * BINS, torch.float16)
        reader.done()
        table_W = widen(self.kind, half_W, exponent, torch.empty(half_W.numel()))
        at_CK = unpack_12(at_B.numpy()).reshape(chunks, keep)
        at_CK += np.arange(0, chunks * CHUNK, CHUNK)[:, None]
        if chunks and at_CK[-1].max() >= num:
            raise wrong(self.kind, "a position is beyond the end")
        bins_CK = unpack_2(bins_B.numpy()).reshape(chunks, keep).astype(np.int64)
        out_P = zeros(num)
        table_C4 = table_W.numpy().reshape(chunks, BINS)
        out_P.numpy()[at_CK] = np.take_along_axis(table_C4, bins_CK, 1)
        return out_P
