"""IEEE half precision with one power-of-two scale for the vector.

Idea: 11 significant bits. Plain fp16 turns what is above 65504 into infinity and what is below 6e-8
into zero, and gradients know both. So the vector is multiplied by the power of two that brings its
largest magnitude to between 2^14 and 2^15, which loses nothing by itself and is undone by the
receiver: nothing overflows, nothing is cut off at the top, and values down to 2^-29 of the largest
keep all 11 bits.

Layout: i32 exponent e of the scale 2^e, then P fp16. Ratio 2.

When: always a safe first step; error feedback is hardly needed.

Source: GeoMX casts on the wire; the scale is ours.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from geo_ray.config.base import Model
from geo_ray.sync.codecs.base import Coded, wrong
from geo_ray.sync.codecs.buffers import Reader, check_num, pieces, plain, room

_HEADER_BYTES = 4
_TOP = 15  # the largest magnitude becomes less than 2^_TOP; fp16 ends at 2^16
_EXPONENTS = range(_TOP - 128, 127)  # both 2^e and 2^-e are normal fp32 numbers


class Fp16(Model):
    """Configuration and rule of `fp16`."""

    lossless: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False

    kind: Literal["fp16"] = "fp16"

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Scale and round to nearest."""
        x_P = plain(x_P)
        exponent = _exponent(x_P)
        data_B = room(_HEADER_BYTES + 2 * x_P.numel())
        data_B[:_HEADER_BYTES].view(torch.int32).fill_(exponent)
        half_P = data_B[_HEADER_BYTES:].view(torch.float16)
        for start, end in pieces(x_P.numel(), x_P.device):
            half_P[start:end].copy_(x_P[start:end] * 2.0**exponent)
        return Coded(self.kind, x_P.numel(), data_B)

    def decode(self, coded: Coded) -> Tensor:
        """Widen and undo the scale."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        (exponent,) = reader.ints(1)
        half_P = reader.take(num, torch.float16)
        reader.done()
        if exponent not in _EXPONENTS:
            raise wrong(self.kind, f"a scale of 2^{exponent}")
        out_P = room(num, torch.float32)
        for start, end in pieces(num, out_P.device):
            out_P[start:end].copy_(half_P[start:end]).mul_(2.0**-exponent)
        return out_P


def _exponent(x_P: Tensor) -> int:
    """The scale's exponent; 0 for a vector without a largest magnitude."""
    if not x_P.numel():
        return 0
    low, high = torch.aminmax(x_P)
    largest = max(-float(low), float(high))
    if largest == 0.0 or not math.isfinite(largest):
        return 0
    return min(_TOP - math.frexp(largest)[1], _EXPONENTS[-1])
