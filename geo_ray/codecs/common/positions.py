"""Rising positions in a vector as few bytes: the smallest of five codes is taken.

| code | what is sent for K of P positions | smallest if |
|---|---|---|
| all | nothing | K = P |
| bitmap | a bit per element | more than an eighth are there |
| short gaps | a byte per position: how many elements lie between it and the one before; 255 stands for 255 elements without a position, and the count goes on | about 1 of 8 to 1 of 350 |
| long gaps | the same with 16 bits and 65535 | fewer |
| plain | 32 bits per position | hardly any |

Shape legend: P = elements of the vector; K = positions; G = gap words.
"""  # noqa: E501 (a table)

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geo_ray.codecs.base import wrong
from geo_ray.codecs.common.buffers import Reader, header, joined

_ALL, _BITMAP, _SHORT, _LONG, _PLAIN = range(5)
_PLAIN_BITS = 32
_WORDS: dict[int, tuple[torch.dtype, type[np.unsignedinteger]]] = {
    _SHORT: (torch.uint8, np.uint8),
    _LONG: (torch.uint16, np.uint16),
}

Ints = NDArray[np.int64]


def bits_per_position(share: float) -> float:
    """About what a position takes where a share of all elements, in (0, 1], is there."""
    if share >= 1:
        return 0.0
    gaps = [
        8 * dtype.itemsize / -math.expm1(-share * np.iinfo(word).max)
        for dtype, word in _WORDS.values()
    ]
    return min(1 / share, _PLAIN_BITS, *gaps)


def write_positions(at_K: Tensor | None, num: int) -> Tensor:
    """Code positions.

    Layout: three i64 (K, code, how many gap words), then the code's words.

    Args:
        at_K: int64, strictly rising, within ``range(num)``, on the CPU; None for all.
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
    """Positions again: int64 (K,), strictly rising, within ``range(num)``; None for all.

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
    """The code with the fewest bytes."""
    bitmap = -(-num // 8)
    if gap_K.size >= bitmap:
        return _BITMAP
    bytes_of = {_BITMAP: bitmap, _PLAIN: 4 * gap_K.size}
    for code, (dtype, word) in _WORDS.items():
        skips = int((gap_K[gap_K >= np.iinfo(word).max] // np.iinfo(word).max).sum())
        bytes_of[code] = dtype.itemsize * (gap_K.size + skips)
    return min(bytes_of, key=lambda code: (bytes_of[code], code))


def _to_gaps(gap_K: Ints, code: int) -> NDArray[np.unsignedinteger]:
    """Words of which the greatest value means: nothing for so many elements, read on."""
    word = _WORDS[code][1]
    skip = int(np.iinfo(word).max)
    skips_K, rest_K = np.divmod(gap_K, skip)
    words_G = np.full(gap_K.size + int(skips_K.sum()), skip, word)
    words_G[np.arange(gap_K.size) + np.cumsum(skips_K)] = rest_K
    return words_G


def _from_gaps(words_G: NDArray[np.unsignedinteger], skip: int) -> Ints:
    """Undo `_to_gaps`; whatever the words are, the result rises and is not negative."""
    last_G = words_G != skip
    reached_G = np.cumsum(words_G + last_G.astype(np.int64))
    return np.asarray(reached_G[last_G] - 1, np.int64)


def _from_bitmap(words: NDArray[np.uint8], num: int) -> Ints:
    return np.flatnonzero(np.unpackbits(words, count=num, bitorder="little").view(np.bool_))
