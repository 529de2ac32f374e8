"""Sparse vectors: selection of the largest magnitudes, encoding of positions and values.

Selection does not sort. On a CPU the k-th largest magnitude is estimated from a sample, a
little too low; one pass keeps what is above the estimate, and an exact selection among those
few leaves k. If the estimate was too high, a lower one is tried. The result does not depend on
the sample.

Layout: the positions, i64 number format, i64 exponent of the scale (0 for fp32), the K values
in order of their positions. Positions are ascending and use the smallest of five codes:

- all: nothing is sent; if K = P
- bitmap: a bit per element; if more than an eighth are sent
- short gaps: a byte per position, the number of elements since the one before; 255 stands for 255
  elements without a position, and the count continues; for about 1 of 8 to 1 of 350
- long gaps: the same with 16 bits and 65535; for fewer
- plain: 32 bits per position; for hardly any

Shape legend: P = elements of the vector; K = elements that are sent; G = gap words; N =
elements of a piece; C = candidates; M = sampled elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geo_ray.codecs.base import Coded, wrong
from geo_ray.codecs.buffers import (
    PIECE,
    Reader,
    check_num,
    empty_cpu,
    halve,
    header,
    joined,
    widen,
    zeros,
)

_SAMPLE = 1 << 16
_SMALL = 1 << 18  # up to this size an exact selection costs no more than a sample
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def count_of(ratio: float, num: int) -> int:
    """Return the number of elements of a ratio: at least one, unless ``num`` is 0."""
    return min(max(round(ratio * num), 1), num)


def largest_positions(x_P: Tensor, count: int) -> Tensor:
    """Return the positions of the ``count`` largest magnitudes; of equal ones the earliest.

    Args:
        x_P: contiguous fp32, finite, any device.
        count: K, at most P.

    Returns:
        int64 (<= K,), ascending, on the device of x. Zeros are not picked, so there may be fewer.
    """
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=x_P.device)
    if not x_P.is_cpu:
        return largest_elsewhere(x_P, count)
    x = x_P.numpy()
    threshold = _SMALLEST if count == x.size else _estimate(x, count)
    while True:
        at_C, magnitude_C = _candidates(x, threshold)
        if at_C.size >= count or threshold == _SMALLEST:
            return torch.from_numpy(at_C[_keep(magnitude_C, count)])
        threshold = _lower(x, threshold)


def largest_elsewhere(x_P: Tensor, count: int) -> Tensor:
    """Compute `largest_positions` on an accelerator, where sorting is cheap; ``count`` is not 0."""
    magnitude_P = x_P.abs()
    kth = float(magnitude_P.topk(count).values[-1])
    found_C = torch.nonzero(magnitude_P >= max(kth, _SMALLEST)).view(-1)
    keep_C = torch.from_numpy(_keep(magnitude_P[found_C].cpu().numpy(), count))
    return found_C[keep_C.to(x_P.device)]


def _estimate(x_P: Floats, count: int) -> float:
    """Estimate a magnitude that slightly more than ``count`` elements reach."""
    if x_P.size <= _SMALL:
        return max(_kth(np.abs(x_P), count), _SMALLEST)
    fraction = count / x_P.size * _SAMPLE
    rank = int(fraction + 4 * fraction**0.5 + 4)  # four standard deviations on the safe side
    if rank >= _SAMPLE // 2:
        return max(_kth(np.abs(x_P), count), _SMALLEST)
    return max(_kth(_sample(x_P), rank), _SMALLEST)


def _lower(x_P: Floats, threshold: float) -> float:
    """Return the next threshold: one that eight times as many of the sample reach."""
    sample_M = _sample(x_P)
    rank = 8 * max(int(np.count_nonzero(sample_M >= np.float32(threshold))), 1)
    if rank >= sample_M.size:
        return _SMALLEST
    return max(min(_kth(sample_M, rank), threshold / 2), _SMALLEST)


def _sample(x_P: Floats) -> Floats:
    """Return magnitudes at random positions, one from each of ``_SAMPLE`` equal runs."""
    starts_M = np.linspace(0, x_P.size, _SAMPLE, endpoint=False)
    at_M = starts_M + np.random.default_rng(0).random(_SAMPLE) * (x_P.size / _SAMPLE)
    return np.abs(x_P[np.minimum(at_M.astype(np.int64), x_P.size - 1)])


def _candidates(x_P: Floats, threshold: float) -> tuple[Ints, Floats]:
    """Return positions and magnitudes of the elements that reach a threshold."""
    scratch_N, reaches_N = np.empty(PIECE, np.float32), np.empty(PIECE, np.bool_)
    bound = np.float32(threshold)
    positions: list[Ints] = []
    magnitudes: list[Floats] = []
    for start in range(0, x_P.size, PIECE):
        x_N = x_P[start : start + PIECE]
        magnitude_N = np.abs(x_N, out=scratch_N[: x_N.size])
        at = np.flatnonzero(np.greater_equal(magnitude_N, bound, out=reaches_N[: x_N.size]))
        magnitudes.append(magnitude_N[at])
        positions.append(at + start)
    return np.concatenate(positions), np.concatenate(magnitudes)


def _keep(magnitude_C: Floats, count: int) -> NDArray[np.bool_]:
    """Mark the ``count`` largest, of equal ones the earliest."""
    if magnitude_C.size <= count:
        return np.ones(magnitude_C.size, np.bool_)
    kth = np.float32(_kth(magnitude_C, count))
    keep_C = magnitude_C > kth
    equal = np.flatnonzero(magnitude_C == kth)
    keep_C[equal[: count - int(np.count_nonzero(keep_C))]] = True
    return keep_C


def _kth(magnitude_N: Floats, rank: int) -> float:
    """Return the rank-th largest of non-negative numbers, whose bits order like whole numbers."""
    bits_N = np.partition(magnitude_N.view(np.int32), magnitude_N.size - rank)
    return float(bits_N[magnitude_N.size - rank].view(np.float32))


_ALL, _BITMAP, _SHORT, _LONG, _PLAIN = range(5)
_PLAIN_BITS = 32
_WORDS: dict[int, tuple[torch.dtype, type[np.unsignedinteger]]] = {
    _SHORT: (torch.uint8, np.uint8),
    _LONG: (torch.uint16, np.uint16),
}


def bits_per_position(fraction: float) -> float:
    """Return about the bits of a position if this fraction of all elements, in (0, 1], is sent."""
    if fraction >= 1:
        return 0.0
    gaps = [
        8 * dtype.itemsize / -math.expm1(-fraction * np.iinfo(word).max)
        for dtype, word in _WORDS.values()
    ]
    return min(1 / fraction, _PLAIN_BITS, *gaps)


def write_positions(at_K: Tensor | None, num: int) -> Tensor:
    """Encode positions.

    Layout: three i64 (K, code, how many gap words), then the code's words.

    Args:
        at_K: int64, strictly ascending, within ``range(num)``, on the CPU; None for all.
        num: P.

    Returns:
        uint8 (B,).
    """
    if at_K is None or at_K.numel() == num:
        return joined(header(num, _ALL, 0))
    at = at_K.numpy()
    gap_K = np.diff(at, prepend=-1) - 1
    code = _smallest(gap_K, num)
    if code == _BITMAP:
        there_P = np.zeros(num, np.bool_)
        there_P[at] = True
        words = np.packbits(there_P, bitorder="little")
        return joined(header(at.size, code, 0), torch.from_numpy(words))
    if code == _PLAIN:
        return joined(header(at.size, code, 0), at_K.to(torch.int32))
    words_G = _to_gaps(gap_K, code)
    return joined(header(at.size, code, words_G.size), torch.from_numpy(words_G.view(np.uint8)))


def read_positions(kind: str, reader: Reader, num: int) -> Tensor | None:
    """Decode positions: int64 (K,), strictly ascending, within ``range(num)``; None for all.

    Raises:
        FrameError: they are not.
    """
    count, code, num_words = reader.header(3)
    if not 0 <= count <= num or (code == _ALL and count != num):
        raise wrong(kind, f"{count} positions among {num} elements")
    if code not in _WORDS and num_words:
        raise wrong(kind, f"{num_words} gap words for code {code}")
    if code == _ALL:
        return None
    if code == _BITMAP:
        at = _from_bitmap(reader.take(-(-num // 8), torch.uint8).numpy(), num)
    elif code == _PLAIN:
        at = reader.take(count, torch.int32).numpy().astype(np.int64)
    elif code in _WORDS:
        dtype, word = _WORDS[code]
        at = _from_gaps(reader.take(num_words, dtype).numpy(), int(np.iinfo(word).max))
    else:
        raise wrong(kind, f"no code {code} for positions")
    if at.size != count:
        raise wrong(kind, f"{at.size} positions instead of {count}")
    if count and (at[0] < 0 or at[-1] >= num or bool((at[1:] <= at[:-1]).any())):
        raise wrong(kind, "positions are out of range or do not rise")
    return torch.from_numpy(at)


def _smallest(gap_K: Ints, num: int) -> int:
    """Return the code with the fewest bytes."""
    bitmap = -(-num // 8)
    if gap_K.size >= bitmap:
        return _BITMAP
    bytes_of = {_BITMAP: bitmap, _PLAIN: 4 * gap_K.size}
    for code, (dtype, word) in _WORDS.items():
        skips = int((gap_K[gap_K >= np.iinfo(word).max] // np.iinfo(word).max).sum())
        bytes_of[code] = dtype.itemsize * (gap_K.size + skips)
    return min(sorted(bytes_of), key=bytes_of.__getitem__)


def _to_gaps(gap_K: Ints, code: int) -> NDArray[np.unsignedinteger]:
    """Encode gaps; the greatest word means that many elements without a position."""
    word = _WORDS[code][1]
    skip = int(np.iinfo(word).max)
    skips_K, rest_K = np.divmod(gap_K, skip)
    words_G = np.full(gap_K.size + int(skips_K.sum()), skip, word)
    words_G[np.arange(gap_K.size) + np.cumsum(skips_K)] = rest_K
    return words_G


def _from_gaps(words_G: NDArray[np.unsignedinteger], skip: int) -> Ints:
    """Undo `_to_gaps`; for any words the result is ascending and not negative."""
    last_G = words_G != skip
    reached_G = np.cumsum(words_G + last_G.astype(np.int64))
    return np.asarray(reached_G[last_G] - 1, np.int64)


def _from_bitmap(words: NDArray[np.uint8], num: int) -> Ints:
    return np.flatnonzero(np.unpackbits(words, count=num, bitorder="little").view(np.bool_))


Values = Literal["fp32", "fp16"]
_FORMATS = {"fp32": 0, "fp16": 1}
BITS: Final[Mapping[Values, int]] = {"fp32": 32, "fp16": 16}
"""Bits of a value."""


def sparse_bits(fraction: float, values: Values) -> float:
    """Return about the bits per element of a long vector at this ratio."""
    return fraction * (BITS[values] + bits_per_position(fraction))


def write_sparse(kind: str, x_P: Tensor, at_K: Tensor | None, values: Values) -> Coded:
    """Encode the elements of ``x_P`` at ascending positions, both on one device; None for all."""
    return Coded(kind, x_P.numel(), joined(*sparse_parts(x_P, at_K, values)))


def read_sparse(coded: Coded) -> Tensor:
    """Decode the vector, with zeros elsewhere: fp32 (P,).

    Raises:
        FrameError: the bytes are invalid.
    """
    num = check_num(coded.kind, coded.num)
    reader = Reader(coded.kind, coded.data_B)
    out_P = read_sparse_parts(coded.kind, reader, num)
    reader.done()
    return out_P


def sparse_parts(x_P: Tensor, at_K: Tensor | None, values: Values) -> list[Tensor]:
    """Return the parts of `write_sparse`, to be joined with more."""
    x_K = x_P if at_K is None or at_K.numel() == x_P.numel() else x_P[at_K]
    positions_B = write_positions(None if at_K is None else at_K.cpu(), x_P.numel())
    return [positions_B, *write_values(x_K, values)]


def read_sparse_parts(kind: str, reader: Reader, num: int) -> Tensor:
    """Undo `sparse_parts`: fp32 (num,), owned by the caller.

    Raises:
        FrameError: the bytes are invalid.
    """
    at_K = read_positions(kind, reader, num)
    values_K = read_values(kind, reader, num if at_K is None else at_K.numel())
    if at_K is None:
        return values_K
    out_P = zeros(num)
    out_P.numpy()[at_K.numpy()] = values_K.numpy()
    return out_P


def write_values(x_K: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    """Return header and bytes of values on any device."""
    exponent, sent_K = 0, x_K
    if values == "fp16":
        sent_K = empty_cpu(x_K.numel(), torch.float16)
        exponent = halve(x_K, sent_K)
    return header(_FORMATS[values], exponent), sent_K


def read_values(kind: str, reader: Reader, num: int) -> Tensor:
    """Decode the bytes of `write_values`: fp32 (num,), owned by the caller.

    Raises:
        FrameError: the bytes are invalid.
    """
    number_format, exponent = reader.header(2)
    if number_format == _FORMATS["fp16"]:
        half_K = reader.take(num, torch.float16)
        return widen(kind, half_K, exponent, empty_cpu(num, torch.float32))
    if number_format != _FORMATS["fp32"] or exponent:
        raise wrong(kind, f"numbers of format {number_format}, scale 2^{exponent}")
    return reader.take(num, torch.float32).clone()
