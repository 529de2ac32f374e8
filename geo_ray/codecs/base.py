"""What a codec is: a rule that makes a vector small, and the vector again out of it.

A codec is a frozen configuration with two pure methods. What it must remember from call to call
(the last basis of PowerSGD, say) lies in the `memory` that the caller keeps and checkpoints. Error
feedback is not its business unless its traits say so: `geo_ray.codecs.common.feedback` adds what
the last encoding lost to the next vector, for every codec alike.

Shape legend: P = elements of the vector; B = bytes; L = lossy blocks; K = bytes of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from geo_ray.codecs.traits import CodecTraits
from geo_ray.errors import FrameError


@dataclass(frozen=True, slots=True)
class LossyBlocks:
    """Blocks of a vector that may be lost on the way, most important first.

    Attributes:
        ids_L: int32, number of each block within the vector.
        blocks_LK: uint8, their bytes.
        bands: how many rank bands they are sent in, one after the other.
    """

    ids_L: Tensor
    blocks_LK: Tensor
    bands: int = 1


@dataclass(frozen=True, slots=True)
class Coded:
    """A vector made small.

    Attributes:
        kind: the codec's name.
        num: P.
        data_B: uint8 on the CPU; all that `Codec.decode` needs beside the configuration.
        lossy: what may get lost; only differential transmission has it.
    """

    kind: str
    num: int
    data_B: Tensor
    lossy: LossyBlocks | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire, without headers."""
        lossy = 0 if self.lossy is None else self.lossy.blocks_LK.numel()
        return self.data_B.numel() + lossy


class Codec(Protocol):
    """The methods of a codec; pure in the sense of the module's docstring."""

    @property
    def kind(self) -> str:
        """The codec's name in configurations and on the wire."""

    @property
    def traits(self) -> CodecTraits:
        """All that others must know of the codec."""

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Make a fp32 vector (P,) on any device small; ``x_P`` stays as it is.

        Args:
            x_P: what to encode; finite.
            memory: the codec's tensors, of any shape; changed in place.
            seed: of random choices; the same gives the same bytes.
        """

    def decode(self, coded: Coded) -> Tensor:
        """The vector again: fp32 (P,) on the CPU, owned by the caller.

        Raises:
            FrameError: the bytes make no sense. They come from another process: sizes and indices
                are checked before they are used.
        """


def wrong(kind: str, why: str) -> FrameError:
    """The error for bytes that a codec cannot read."""
    return FrameError(f"a payload coded as {kind!r} makes no sense: {why}")
