"""The codec interface: `Codec` encodes a vector as `Coded` and decodes it again.

A codec is a frozen configuration with two pure methods. State between calls, such as the last basis
of PowerSGD, is in the `memory` that the caller stores and checkpoints. Error feedback is not part
of a codec unless its traits say so: `geo_ray.codecs.feedback` adds the loss of the last encoding to
the next vector, for every codec alike.

`CodecTraits` describes a codec to the rest of the system, so custom codecs are equal to those of
this library. `DifferentialCodec` is the interface of codecs whose blocks may be lost in transit; a
`LossyReport` tells the sender which of these blocks the averager has received, as a compressed bit
per rank in sending order.

Shape legend: P = elements of the vector; B = bytes; L = lossy blocks; K = bytes of one block.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from geo_ray.base.errors import FrameError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossyBlocks:
    """Blocks of a vector that may be lost in transit, most important first.

    Attributes:
        ids_L: int32, number of each block within the vector.
        blocks_LK: uint8, their bytes.
        bands: number of rank bands, which are sent one after the other.
    """

    ids_L: Tensor
    blocks_LK: Tensor
    bands: int = 1


@dataclass(frozen=True, slots=True)
class Coded:
    """An encoded vector.

    Attributes:
        kind: the codec's name.
        num: P.
        data_B: uint8 on the CPU; everything that `Codec.decode` needs.
        lossy: blocks that may be lost; only in differential transmission.
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


_LARGEST: Final = 1 << 24  # ranks

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LossyReport:
    """Final state of lossy blocks.

    Attributes:
        now: ranks of the answered update that were applied with it, packed.
        late_seq: the previous update, whose accounting this one closes; None if there is none.
        late: its ranks that were applied with the answered update, packed. Ranks that are neither
            here nor in an earlier report were not applied and never will be.
    """

    now: bytes = b""
    late_seq: int | None = None
    late: bytes = b""


def pack_ranks(ranks: Iterable[int]) -> bytes:
    """Return a compressed bit per rank."""
    found = np.fromiter(ranks, dtype=np.int64)
    if not found.size:
        return b""
    marks = np.zeros(int(found.max()) + 1, dtype=bool)
    marks[found] = True
    return zlib.compress(np.packbits(marks).tobytes(), 6)


def unpack_ranks(packed: bytes, limit: int) -> Ranks:
    """Return the ranks that `pack_ranks` packed, ascending.

    Args:
        packed: the received bytes.
        limit: all are below this.

    Raises:
        FrameError: the bytes are not those of `pack_ranks`, or a rank is too high.
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


BlockFormat = Literal["fp32", "fp16", "int4"]


class DifferentialCodec(Protocol):
    """A codec whose encodings have lossy blocks; `geo_ray.codecs.dgt.Dgt` describes the options."""

    @property
    def kind(self) -> str:
        """The codec's name in configurations and on the wire."""

    @property
    def elements(self) -> int:
        """Elements of a block."""

    @property
    def loose(self) -> Literal["udp", "drop", "reliable"]:
        """Transport of lossy blocks."""

    @property
    def loose_values(self) -> BlockFormat:
        """Number format of lossy blocks."""

    @property
    def late(self) -> Literal["put_back", "merge"]:
        """Treatment of blocks that arrive late or never."""

    @property
    def late_max(self) -> int:
        """Number of updates by which a block may be late with ``late: merge``."""

    @property
    def late_scaled(self) -> bool:
        """Whether late blocks have a smaller weight."""

    @property
    def grace_s(self) -> float:
        """Seconds for which a complete update waits for its lossy blocks."""

    @property
    def rate_mbps(self) -> float | None:
        """Upper bound of the rate of datagrams, in 10^6 bit/s; None for no bound."""

    @property
    def dscp(self) -> bool:
        """Whether datagrams are marked by band."""

    def decode(self, coded: Coded) -> Tensor:
        """See `geo_ray.codecs.base.Codec.decode`; blocks that are missing count as zeros."""

    def subset(self, coded: Coded, places: Tensor) -> Coded:
        """Return an encoding that holds only the lossy blocks at ``places``."""

    def observe(self, memory: dict[str, Tensor], loss: float) -> None:
        """Use the training loss in the next `encode`."""

    def set_reliable_fraction(self, memory: dict[str, Tensor], fraction: float) -> None:
        """Use the averager's ``reliable_fraction`` from the next vector on."""


Sends = Literal["change", "model"]
"""Kind of a strategy's payloads; codecs encode differences of models, and changes directly."""

FP32_BITS: Final = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTraits:
    """Description of a codec for the rest of the system; every codec provides `Codec.traits`.

    All parts of the system that depend on a run's codec read it here, as with strategies.

    Attributes:
        lossy: whether decoding does not restore the exact bits.
        bits_per_value: about what a value takes on the wire, as configured: of a long vector of
            normal values, or of a million where it depends on the length.
        sends: payloads that it suits.
        rounds_only: whether all regions must apply the payload at the same time.
        feeds_back: whether the codec stores its residual in its own memory, or needs no feedback.
            If not, the sender adds the residual to the next vector.
        forgets: whether blocks that are lost in transit are never sent again.
        up_only: whether it encodes updates only.
        suits_answers: whether one codec for both directions includes answers.
        expected_loss: expected relative training loss with error feedback; None: unknown, so the
            planner does not propose it.
        differential: the codec itself, if parts of its encodings may be lost in transit.
        with_shapes: returns the same codec with the shapes of the model's tensors in the order of
            the vector; raises ValueError if it already has others. None: shapes are not used.
    """

    lossy: bool
    bits_per_value: float
    sends: tuple[Sends, ...] = ("change", "model")
    rounds_only: bool = False
    feeds_back: bool = False
    forgets: bool = False
    up_only: bool = False
    suits_answers: bool = True
    expected_loss: float | None = None
    differential: DifferentialCodec | None = None
    # A codec of the same class; naming `Codec` here would make a circle of imports.
    with_shapes: Callable[[Sequence[tuple[int, ...]]], Any] | None = None


__all__ = ["Codec", "Coded", "LossyBlocks", "wrong"]


class Codec(Protocol):
    """The methods of a codec; pure in the sense of the module's docstring."""

    @property
    def kind(self) -> str:
        """The codec's name in configurations and on the wire."""

    @property
    def traits(self) -> CodecTraits:
        """Properties of the codec for the rest of the system."""

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Encode a fp32 vector (P,) on any device; ``x_P`` does not change.

        Args:
            x_P: the vector; finite.
            memory: the codec's tensors, of any shape; changed in place.
            seed: of random choices; the same gives the same bytes.
        """

    def decode(self, coded: Coded) -> Tensor:
        """Return the decoded vector: fp32 (P,) on the CPU, owned by the caller.

        Raises:
            FrameError: the bytes are invalid. They come from another process: sizes and indices
                are checked before they are used.
        """


def wrong(kind: str, why: str) -> FrameError:
    """Return the error for bytes that a codec cannot read."""
    return FrameError(f"a payload coded as {kind!r} is invalid: {why}")
