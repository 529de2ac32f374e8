"""A custom codec: 16 bits per value, and one scale for the vector."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import CodecTraits, Coded, wrong
from geo_ray.codecs.buffers import Reader, as_fp32, check_num, joined


class Rounded(StrictModel):
    """Divide by the largest magnitude over ``levels`` and round to whole numbers."""

    kind: Literal["rounded"] = "rounded"
    levels: int = Field(32767, ge=1, le=32767, description="whole numbers to each side of 0")

    @property
    def traits(self) -> CodecTraits:
        """Properties that the rest of geo_ray reads."""
        return CodecTraits(lossy=True, bits_per_value=16)

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Write a fp32 scale, then P int16."""
        x_P = as_fp32(x_P)
        largest = float(x_P.abs().max()) if x_P.numel() else 0.0
        scale_1 = torch.tensor([largest / self.levels])
        codes_P = torch.zeros_like(x_P)
        if float(scale_1) > 0:
            codes_P = (x_P / float(scale_1)).round().clamp(-self.levels, self.levels)
        return Coded(self.kind, x_P.numel(), joined(scale_1, codes_P.to(torch.int16)))

    def decode(self, coded: Coded) -> Tensor:
        """Multiply the integers by the scale."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        scale = float(reader.take(1, torch.float32))
        codes_P = reader.take(num, torch.int16)
        reader.done()
        if not math.isfinite(scale):
            raise wrong(self.kind, f"a scale of {scale}")
        return codes_P.to(torch.float32).mul_(scale)
