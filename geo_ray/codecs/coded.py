"""What a codec makes of a vector: bytes, and blocks that may be lost on the way.

Shape legend: P = elements of the vector; B = bytes; L = lossy blocks; K = bytes of one block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
