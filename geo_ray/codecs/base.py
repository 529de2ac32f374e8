"""What a codec is: a rule that makes a vector small, and the vector again out of it.

A codec is a frozen configuration with two pure methods. What it must remember from call to call
(the last basis of PowerSGD, say) lies in the `memory` that the caller keeps and checkpoints. Error
feedback is not its business unless its traits say so: `geo_ray.codecs.common.feedback` adds what
the last encoding lost to the next vector, for every codec alike.

Shape legend: P = elements of the vector.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from geo_ray.codecs.coded import Coded, LossyBlocks
from geo_ray.codecs.traits import CodecTraits
from geo_ray.errors import FrameError

__all__ = ["Codec", "Coded", "LossyBlocks", "wrong"]


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
