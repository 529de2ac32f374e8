"""No coding: the fp32 bits themselves.

Layout: P fp32. Ratio 1. When: fast links, and as the reference for all others. A sender with this
codec may as well send the vector itself; `encode` copies, so that the message does not change
with the model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import FP32_BITS, CodecTraits, Coded
from geo_ray.codecs.buffers import Reader, as_fp32, check_num, empty_cpu


class Identity(StrictModel):
    """Configuration and rule of `identity`."""

    kind: Literal["identity"] = "identity"

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        return CodecTraits(lossy=False, bits_per_value=FP32_BITS)

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Copy the bits."""
        x_P = as_fp32(x_P)
        data_P = empty_cpu(x_P.numel(), torch.float32)
        data_P.copy_(x_P)
        return Coded(self.kind, x_P.numel(), data_P.view(torch.uint8))

    def decode(self, coded: Coded) -> Tensor:
        """Copy them back."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        data_P = reader.take(num, torch.float32)
        reader.done()
        out_P = empty_cpu(num, torch.float32)
        return out_P.copy_(data_P)
