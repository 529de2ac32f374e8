"""Four bits per element, one scale per block.

Idea: as `int8` with whole numbers of -7..7, two to a byte. Fifteen steps are coarse, so blocks are
short and error feedback matters.

Layout: i64 block length, a fp32 scale per block, then bytes of two codes each (value + 8; the
earlier element in the low four bits; an odd length ends with an unused code). Ratio
8 / (1 + 8 / block).

When: pseudo-gradients of many local steps, sent with error feedback; plain gradients if `int8` is
still too large for the link.

Source: Streaming DiLoCo reports 4-bit pseudo-gradients at no loss, with a floating-point code;
this integer code is the common one.
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

_TOP = 7
_ZERO = 8  # the code of 0
_HEADER_BYTES = 8


class Int4(StrictModel):
    """Configuration and rule of `int4`."""

    kind: Literal["int4"] = "int4"
    block: int = Field(
        64,
        ge=MIN_BLOCK,
        le=MAX_BLOCK,
        multiple_of=2,
        description="elements that share a scale",
    )

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        return CodecTraits(
            lossy=True, bits_per_value=4 + FP32_BITS / self.block, expected_loss=0.003
        )

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Divide by the block's scale, round to nearest, pack."""
        x_P = as_fp32(x_P)
        codes_at = _HEADER_BYTES + 4 * blocks_in(x_P.numel(), self.block)
        data_B = empty_cpu(codes_at + blocks_in(x_P.numel(), 2))
        scales_S = torch.empty(blocks_in(x_P.numel(), self.block), device=x_P.device)
        whole, rows = x_P.numel() // self.block, rows_of(self.block, x_P.device)
        packed = cut(data_B[codes_at:], whole, self.block // 2, rows)
        rounded = quantised(x_P, scales_S, self.block, _TOP)
        for packed_B, rounded_N in zip(packed, rounded, strict=True):
            packed_B.copy_(_pack(rounded_N))
        data_B[:_HEADER_BYTES].view(torch.int64).copy_(header(self.block))
        data_B[_HEADER_BYTES:codes_at].view(torch.float32).copy_(scales_S)
        return Coded(self.kind, x_P.numel(), data_B)

    def decode(self, coded: Coded) -> Tensor:
        """Unpack and multiply by the block's scale."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        block = read_block(self.kind, reader, multiple_of=2)
        scales_S = read_scales(self.kind, reader, blocks_in(num, block))
        packed_B = reader.take(blocks_in(num, 2), torch.uint8)
        reader.done()
        out_P = empty_cpu(num, torch.float32)
        whole, rows = num // block, rows_of(block, out_P.device)
        packed = cut(packed_B, whole, block // 2, rows)
        scales, outs = cut(scales_S, whole, 1, rows), cut(out_P, whole, block, rows)
        for part_B, scale_S, out_N in zip(packed, scales, outs, strict=True):
            restore(_unpack(part_B)[: out_N.numel()], scale_S, out_N)
        return out_P


def _pack(rounded_N: Tensor) -> Tensor:
    """Two codes to a byte: seen as 16 bits, ``high << 8 | low`` becomes ``high << 4 | low``."""
    num = rounded_N.numel()
    codes_N = torch.empty(num + num % 2, dtype=torch.int8, device=rounded_N.device)
    codes_N[:num].copy_(rounded_N)
    codes_N[num:] = 0
    pair_N = codes_N.add_(_ZERO).view(torch.int16)
    return (pair_N | (pair_N >> 4)).to(torch.uint8)


def _unpack(packed_B: Tensor) -> Tensor:
    """One whole number per byte again, int8."""
    pair_N = packed_B.to(torch.int16)
    return ((pair_N | (pair_N << 4)) & 0x0F0F).view(torch.int8).sub_(_ZERO)
