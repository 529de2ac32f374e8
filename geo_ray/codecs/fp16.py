"""IEEE half precision with one power-of-two scale for the vector.

Idea: 11 significant bits; the scale (`halves`) prevents overflow of large and underflow of small
values.

Layout: i64 exponent of the scale, P fp16. Ratio 2.

When: always a safe first step; error feedback is hardly needed.

Source: GeoMX casts to fp16 on the wire; the scale is ours.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import CodecTraits, Coded
from geo_ray.codecs.buffers import Reader, as_fp32, check_num, empty_cpu, halve, header, widen

_HEADER_BYTES = 8


class Fp16(StrictModel):
    """Configuration and rule of `fp16`."""

    kind: Literal["fp16"] = "fp16"

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        return CodecTraits(lossy=True, bits_per_value=16, expected_loss=0.0002)

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Scale and round to nearest."""
        x_P = as_fp32(x_P)
        data_B = empty_cpu(_HEADER_BYTES + 2 * x_P.numel())
        exponent = halve(x_P, data_B[_HEADER_BYTES:].view(torch.float16))
        data_B[:_HEADER_BYTES].view(torch.int64).copy_(header(exponent))
        return Coded(self.kind, x_P.numel(), data_B)

    def decode(self, coded: Coded) -> Tensor:
        """Widen and undo the scale."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        (exponent,) = reader.header(1)
        half_P = reader.take(num, torch.float16)
        reader.done()
        return widen(self.kind, half_P, exponent, empty_cpu(num, torch.float32))
