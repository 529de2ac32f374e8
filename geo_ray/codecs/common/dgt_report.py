"""What an averager tells of lossy blocks beside its reply: which of them it has taken in.

Blocks are named by rank, in the order of their sending. Most of those that are missing are the last
ones, so a compressed bit per rank is a few hundred bytes for a model of millions of blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from geo_ray.errors import FrameError

_LARGEST: Final = 1 << 24  # ranks

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LossyReport:
    """The fate of lossy blocks, as far as it is sealed.

    Attributes:
        now: ranks of the answered update that were taken in with it, packed.
        late_seq: the update before, whose books are closed by this one; None if there is none.
        late: its ranks that were taken in with the answered update, packed. What is neither here
            nor in an earlier report was not taken in, and never will be.
    """

    now: bytes = b""
    late_seq: int | None = None
    late: bytes = b""


def pack_ranks(ranks: Iterable[int]) -> bytes:
    """A compressed bit per rank."""
    found = np.fromiter(ranks, dtype=np.int64)
    if not found.size:
        return b""
    marks = np.zeros(int(found.max()) + 1, dtype=bool)
    marks[found] = True
    return zlib.compress(np.packbits(marks).tobytes(), 6)


def unpack_ranks(packed: bytes, limit: int) -> Ranks:
    """The ranks of `pack_ranks`, ascending.

    Args:
        packed: as it came.
        limit: all are below this.

    Raises:
        FrameError: it is not what `pack_ranks` makes, or a rank is too high.
    """
    if not packed:
        return np.empty(0, dtype=np.int64)
    most = -(-min(limit, _LARGEST) // 8)
    unpacker = zlib.decompressobj()
    try:
        bits = unpacker.decompress(packed, most + 1)
    except zlib.error as error:
        raise FrameError(f"a report on lossy blocks cannot be read: {error}") from error
    ranks = np.flatnonzero(np.unpackbits(np.frombuffer(bits, dtype=np.uint8)))
    if not unpacker.eof or (ranks.size and int(ranks[-1]) >= limit):
        raise FrameError(f"a report on lossy blocks goes beyond the {limit} that were sent")
    return ranks.astype(np.int64)
