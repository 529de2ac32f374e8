"""Eight bits per element, one scale per block.

Idea: a block of elements is divided by its largest magnitude / 127 and rounded to nearest. The
error is at most half a step, so a block without a great outlier loses little.

Layout: i64 block length, a fp32 scale per block, P signed bytes. Ratio 4 / (1 + 4 / block).

When: the usual choice if the link is the bottleneck. Its errors are small enough without error
feedback, smaller with it.

Source: block-wise quantisation is widely used (for example bitsandbytes, hivemind); written from
the formula.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import FP32_BITS, CodecTraits, Coded
from geo_ray.codecs.blocks import (
    MAX_BLOCK,
    MIN_BLOCK,
    blocks_in,
    cut,
    quantised,
    read_block,
    read_scales,
    restore,
    rows_of,
)
from geo_ray.codecs.buffers import Reader, as_fp32, check_num, empty_cpu, header

_TOP = 127
_HEADER_BYTES = 8


class Int8(StrictModel):
    """Configuration and rule of `int8`."""

    kind: Literal["int8"] = "int8"
    block: int = Field(256, ge=MIN_BLOCK, le=MAX_BLOCK, description="elements that share a scale")

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        return CodecTraits(
            lossy=True, bits_per_value=8 + FP32_BITS / self.block, expected_loss=0.001
        )

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Divide by the block's scale and round to nearest."""
        x_P = as_fp32(x_P)
        codes_at = _HEADER_BYTES + 4 * blocks_in(x_P.numel(), self.block)
        data_B = empty_cpu(codes_at + x_P.numel())
        scales_S = torch.empty(blocks_in(x_P.numel(), self.block), device=x_P.device)
        whole, rows = x_P.numel() // self.block, rows_of(self.block, x_P.device)
        codes = cut(data_B[codes_at:].view(torch.int8), whole, self.block, rows)
        rounded = quantised(x_P, scales_S, self.block, _TOP)
        for codes_N, rounded_N in zip(codes, rounded, strict=True):
            codes_N.copy_(rounded_N if rounded_N.is_cpu else rounded_N.to(torch.int8))
        data_B[:_HEADER_BYTES].view(torch.int64).copy_(header(self.block))
        data_B[_HEADER_BYTES:codes_at].view(torch.float32).copy_(scales_S)
        return Coded(self.kind, x_P.numel(), data_B)

    def decode(self, coded: Coded) -> Tensor:
        """Multiply by the block's scale."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        block = read_block(self.kind, reader)
        scales_S = read_scales(self.kind, reader, blocks_in(num, block))
        codes_P = reader.take(num, torch.int8)
        reader.done()
        out_P = empty_cpu(num, torch.float32)
        whole, rows = num // block, rows_of(block, out_P.device)
        parts = [cut(part, whole, block, rows) for part in (codes_P, out_P)]
        for codes_N, out_N, scale_S in zip(*parts, cut(scales_S, whole, 1, rows), strict=True):
            restore(codes_N, scale_S, out_N)
        return out_P
