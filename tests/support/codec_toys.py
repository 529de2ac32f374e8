"""Small codecs, each with one property that the machinery around codecs must get right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from geo_ray.codecs.base import CodecTraits, Coded, wrong


def _pack(kind: str, num: int, *parts: Tensor) -> Coded:
    return Coded(kind, num, torch.cat([part.reshape(-1).view(torch.uint8) for part in parts]))


def _floats(coded: Coded, skip_bytes: int, num: int) -> Tensor:
    if coded.data_B.numel() != skip_bytes + 4 * num:
        raise wrong(coded.kind, f"{coded.data_B.numel()} bytes")
    return coded.data_B[skip_bytes:].clone().view(torch.float32)


@dataclass(frozen=True)
class Exact:
    """Loses nothing."""

    traits: ClassVar[CodecTraits] = CodecTraits(lossy=False, bits_per_value=32)
    kind: str = "exact"

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        return _pack(self.kind, x_P.numel(), x_P.clone())

    def decode(self, coded: Coded) -> Tensor:
        return _floats(coded, 0, coded.num)


@dataclass(frozen=True)
class TopOne:
    """Sends the largest element alone: most is owed."""

    traits: ClassVar[CodecTraits] = CodecTraits(lossy=True, bits_per_value=32)
    kind: str = "top_one"

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        at = torch.argmax(x_P.abs()).to(torch.int32).reshape(1)
        return _pack(self.kind, x_P.numel(), at, x_P[at.long()])

    def decode(self, coded: Coded) -> Tensor:
        value_1 = _floats(coded, 4, 1)
        at = int(coded.data_B[:4].clone().view(torch.int32))
        if not 0 <= at < coded.num:
            raise wrong(self.kind, f"element {at}")
        x_P = torch.zeros(coded.num)
        x_P[at] = value_1[0]
        return x_P


@dataclass(frozen=True)
class Dice:
    """Rounds up or down by chance: the seed decides the bits."""

    traits: ClassVar[CodecTraits] = CodecTraits(lossy=True, bits_per_value=32)
    kind: str = "dice"

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        chance_P = torch.rand(x_P.numel(), generator=torch.Generator().manual_seed(seed))
        return _pack(self.kind, x_P.numel(), torch.floor(x_P * 8 + chance_P) / 8)

    def decode(self, coded: Coded) -> Tensor:
        return _floats(coded, 0, coded.num)


@dataclass(frozen=True)
class Habit:
    """Sends a part of the sum of all vectors so far: its memory decides the bits."""

    traits: ClassVar[CodecTraits] = CodecTraits(lossy=True, bits_per_value=32)
    kind: str = "habit"

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        memory["mean"] = 0.5 * memory.get("mean", torch.zeros_like(x_P)) + 0.5 * x_P
        return _pack(self.kind, x_P.numel(), memory["mean"].clone())

    def decode(self, coded: Coded) -> Tensor:
        return _floats(coded, 0, coded.num)


TOYS = (None, Exact(), TopOne(), Dice(), Habit())
