"""Error feedback: the loss of an encoding is added to the next vector.

An `Encoder` is the sending end of one stream of vectors. The sum of all vectors passed to it equals
the sum of the receiver's decoded vectors plus the residual. A codec whose traits say that it
`feeds_back` stores its residual in its own memory; a lossless codec has none. A payload that was
sent but never accepted (refused, dropped, lost) is put back and sent with the next vector, also
without a codec.

The last message may be required to be exact to a given error. It is then coded with eight bits
per element in one or more passes, each of which codes what the passes before have left; two are
about as good as sixteen bits. Layout: i64 number of passes, then for each of them the bytes of
`int8`.

Source: error feedback as in 1-bit SGD (Seide et al., 2014) and "EF-SGD" (Karimireddy et al.,
2019); reconstructed.

Shape legend: P = elements of the vector.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from geo_ray.codecs.base import FP32_BITS, Codec, Coded, wrong
from geo_ray.codecs.buffers import Reader, as_fp32, check_num, header, joined
from geo_ray.codecs.int8 import Int8

PASSES_KIND: Final = "passes"
_MOST_PASSES: Final = 3  # with one more there would be no byte saved
_ERRORS: Final = (0.01, 3e-5)
"""Relative error of normal values after one pass, and after two, at most."""

_INT8: Final = Int8()
BITS_PER_PASS: Final = _INT8.traits.bits_per_value


def encode_passes(x_P: Tensor, error: float) -> Coded | None:
    """Encode a finite vector (P,) with an error of at most ``error`` of its 2-norm.

    Returns:
        None if full precision would need no more bytes than the passes.
    """
    x_P = as_fp32(x_P)
    limit = error * _norm(x_P)
    rest_P = x_P
    parts: list[Tensor] = []
    while not parts or _norm(rest_P) > limit:
        if len(parts) == _MOST_PASSES:
            return None
        coded = _INT8.encode(rest_P, {}, 0)
        rest_P = rest_P - _INT8.decode(coded).to(rest_P.device)
        parts.append(coded.data_B)
    return Coded(PASSES_KIND, x_P.numel(), joined(header(len(parts)), *parts))


def decode_passes(coded: Coded) -> Tensor:
    """Return the decoded vector: fp32 (P,) on the CPU, owned by the caller.

    Raises:
        FrameError: the bytes are invalid.
    """
    num = check_num(PASSES_KIND, coded.num)
    reader = Reader(PASSES_KIND, coded.data_B)
    (count,) = reader.header(1)
    size = reader.left // max(1, count)
    if not 1 <= count <= _MOST_PASSES or reader.left != count * size:
        raise wrong(PASSES_KIND, f"{count} passes in {reader.left} bytes")
    total_P = _INT8.decode(Coded(_INT8.kind, num, reader.take(size, torch.uint8)))
    for _ in range(count - 1):
        total_P += _INT8.decode(Coded(_INT8.kind, num, reader.take(size, torch.uint8)))
    return total_P


def bits_for_error(error: float) -> float:
    """Return the bits per element of normal values at this error; 32 in full precision."""
    for count, reached in enumerate(_ERRORS, 1):
        if error >= reached:
            return count * BITS_PER_PASS
    return 32.0


def _norm(x_P: Tensor) -> float:
    return float(torch.linalg.vector_norm(x_P, dtype=torch.float64))


_RESIDUAL = "residual"
_MEMORY = "memory/"
_MANY = 1 << 14  # number of values that measure how exact a codec is


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded vector and its decoded value.

    Attributes:
        coded: the encoded vector; None if it is sent unencoded.
        sent_P: fp32, the vector that the receiver will decode.
    """

    coded: Coded | None
    sent_P: Tensor


@dataclass(slots=True)
class Encoder:
    """The sending end of one stream of vectors; see the module's docstring.

    Attributes:
        codec: None sends every vector unencoded.
        stream: names the stream; random choices are seeded by it and a vector's number.
        residual_P: the residual that the receiver lacks; None for zero. Changed in place.
        memory: the codec's tensors.
    """

    codec: Codec | None
    stream: str
    residual_P: Tensor | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)

    def encode(self, payload_P: Tensor, number: int) -> Encoded:
        """Encode the next vector of the stream plus the residual.

        A vector that is not finite is sent unencoded, for the receiver to refuse, and changes
        nothing here; so is one that the codec cannot represent (its decoding is not finite).

        Args:
            payload_P: fp32, on any device; does not change.
            number: of the vector within the stream.
        """
        codec = self.codec
        if codec is None or not all_finite(payload_P):
            return Encoded(None, payload_P if codec else self.in_full(payload_P))
        owed_P, self.residual_P = self._owed(payload_P), None
        # In place: new memory for a large model costs more than the sum.
        vector_P = payload_P if owed_P is None else owed_P.add_(payload_P)
        coded = codec.encode(vector_P, self.memory, seed_of(self.stream, number))
        if not codec.traits.lossy:
            return Encoded(coded, vector_P)
        sent_P = codec.decode(coded).to(vector_P.device)
        if not all_finite(sent_P):
            return Encoded(None, vector_P)
        if not codec.traits.feeds_back:
            self.residual_P = payload_P - sent_P if owed_P is None else owed_P.sub_(sent_P)
        return Encoded(coded, sent_P)

    def last(self, payload_P: Tensor, number: int, error: float) -> Encoded:
        """Encode the last vector of the stream plus the residual, to the given error.

        The remaining error stays in the residual, in case another vector follows.

        Args:
            payload_P: fp32, on any device; does not change.
            number: of the vector within the stream.
            error: relative, of the 2-norm; 0 for full precision.
        """
        whole_P = self.in_full(payload_P)
        if error == 0.0 or not all_finite(whole_P):
            return Encoded(None, whole_P)
        coded, sent_P = self._as_usual(whole_P, number, error)
        if coded is None:
            coded = encode_passes(whole_P, error)
            if coded is None:
                return Encoded(None, whole_P)
            sent_P = decode_passes(coded).to(whole_P.device)
        if not all_finite(sent_P):
            return Encoded(None, whole_P)
        self.residual_P = whole_P - sent_P
        return Encoded(coded, sent_P)

    def _as_usual(self, whole_P: Tensor, number: int, error: float) -> tuple[Coded | None, Tensor]:
        """Encode with the stream's codec, if that is precise enough and has no memory."""
        codec = self.codec
        if codec is None or self.memory or codec.traits.feeds_back or codec.traits.differential:
            return None, whole_P
        memory: dict[str, Tensor] = {}
        coded = codec.encode(whole_P, memory, seed_of(self.stream, number))
        sent_P = codec.decode(coded).to(whole_P.device)
        off = torch.linalg.vector_norm(whole_P - sent_P)
        if memory or not off <= error * torch.linalg.vector_norm(whole_P):
            return None, whole_P
        return coded, sent_P

    def in_full(self, payload_P: Tensor) -> Tensor:
        """Return the vector plus the residual, to be sent unencoded; clears the residual."""
        owed_P, self.residual_P = self._owed(payload_P), None
        return payload_P if owed_P is None else payload_P + owed_P

    def put_back(self, vector_P: Tensor) -> None:
        """Add ``vector_P`` (P,), which was sent and did not arrive, to the residual."""
        owed_P = self._owed(vector_P)
        self.residual_P = vector_P.clone() if owed_P is None else owed_P + vector_P

    def export(self) -> dict[str, Tensor]:
        """Return copies of all tensors, for a checkpoint."""
        found = {_MEMORY + name: value.clone() for name, value in self.memory.items()}
        if self.residual_P is not None:
            found[_RESIDUAL] = self.residual_P.clone()
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `export` saved."""
        residual_P = tensors.get(_RESIDUAL)
        self.residual_P = None if residual_P is None else residual_P.clone()
        self.memory = {
            name.removeprefix(_MEMORY): value.clone()
            for name, value in tensors.items()
            if name.startswith(_MEMORY)
        }

    def _owed(self, like_P: Tensor) -> Tensor | None:
        return None if self.residual_P is None else self.residual_P.to(like_P.device)


def open_coded(codec: Codec | None, coded: Coded, num: int) -> Tensor:
    """Decode what another process has sent.

    Args:
        codec: the receiver's; both ends have the same configuration. The last message of a lossy
            one may be coded in `passes` instead.
        coded: the received encoding.
        num: the required P.

    Returns:
        fp32 (P,) on the CPU, owned by the caller.

    Raises:
        FrameError: it has another codec or size, or is invalid.
    """
    is_last = coded.kind == PASSES_KIND and codec is not None and codec.traits.lossy
    if codec is None or (coded.kind != codec.kind and not is_last):
        expected = "no codec" if codec is None else repr(codec.kind)
        raise wrong(coded.kind, f"{expected} was expected")
    if coded.num != num:
        raise wrong(coded.kind, f"it has {coded.num} elements, {num} were expected")
    return decode_passes(coded) if is_last else codec.decode(coded)


def bits_of_last(codec: Codec, error: float) -> float:
    """Return the bits per value of the last vector of a stream, for normal values."""
    normal_P = torch.randn(_MANY, generator=torch.Generator().manual_seed(0))
    coded = Encoder(codec, "").last(normal_P, 1, error).coded
    if coded is None:
        return FP32_BITS
    return codec.traits.bits_per_value if coded.kind == codec.kind else bits_for_error(error)


def seed_of(stream: str, number: int) -> int:
    """Return the seed of the random choices for one vector of a stream."""
    return int.from_bytes(hashlib.blake2b(f"{stream}/{number}".encode(), digest_size=7).digest())


def all_finite(vector_P: Tensor) -> bool:
    """Return whether no element is NaN or infinite; one pass without allocation."""
    if not vector_P.numel():
        return True
    low, high = torch.aminmax(vector_P)
    return math.isfinite(float(low)) and math.isfinite(float(high))
