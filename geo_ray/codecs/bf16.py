"""The upper half of fp32: its whole range, 8 significant bits.

Idea: round to nearest, to 8 significant bits; values that would round up to infinity become the
largest finite bf16 number. No scale is needed.

Layout: P bf16. Ratio 2.

When: as `fp16`, if the receiver computes in bf16; otherwise `fp16` is 8 times as precise at the
same size.

Source: the number format.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import CodecTraits, Coded
from geo_ray.codecs.buffers import Reader, as_fp32, check_num, empty_cpu, piece_of, split

_MAX = torch.finfo(torch.bfloat16).max


class Bf16(StrictModel):
    """Configuration and rule of `bf16`."""

    kind: Literal["bf16"] = "bf16"

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        return CodecTraits(lossy=True, bits_per_value=16)

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Round to nearest, within the finite range."""
        x_P = as_fp32(x_P)
        data_P = empty_cpu(x_P.numel(), torch.bfloat16)
        step = piece_of(x_P.device)
        for x_N, data_N in zip(split(x_P, step), split(data_P, step), strict=True):
            data_N.copy_(x_N.clamp(-_MAX, _MAX).to(torch.bfloat16))
        return Coded(self.kind, x_P.numel(), data_P.view(torch.uint8))

    def decode(self, coded: Coded) -> Tensor:
        """Widen."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        data_P = reader.take(num, torch.bfloat16)
        reader.done()
        out_P = empty_cpu(num, torch.float32)
        return out_P.copy_(data_P)
