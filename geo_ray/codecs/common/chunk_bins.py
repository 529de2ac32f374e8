"""Values in two bits with a table per chunk, and small whole numbers in 12 or 2 bits.

Shape legend: C = chunks; K = picks of a chunk; B = bytes; W = whole numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS = 4
_BIN_SIGMAS = 1.5  # four of them cover three standard deviations to both sides

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def without_zeros(at_CK: Ints, x_CK: Floats) -> tuple[Ints, Floats]:
    """Put each chunk's first non-zero in the place of its zeros.

    A bin's mean is no zero, so zeros had better not be sent; a value that is said twice does no
    harm. Of a chunk of zeros the first is repeated.
    """
    zero_CK = x_CK == 0.0
    if not zero_CK.any():
        return at_CK, x_CK
    first_C1 = np.argmin(zero_CK, axis=1)[:, None]
    return (
        np.where(zero_CK, np.take_along_axis(at_CK, first_C1, 1), at_CK),
        np.where(zero_CK, np.take_along_axis(x_CK, first_C1, 1), x_CK),
    )


def bins_and_table(x_CK: Floats) -> tuple[Bytes, Floats]:
    """The bin (C, K) of each value, and the mean (C, 4) of the values in each bin.

    Bins are uniform over three standard deviations to both sides of the mean; what is outside goes
    to the outermost. An empty bin's mean is 0.
    """
    wide_CK = x_CK.astype(np.float64)  # squares of fp32 overflow fp32
    centred_CK = wide_CK - wide_CK.mean(1, keepdims=True)
    width_C1 = _BIN_SIGMAS * np.sqrt(np.square(centred_CK).mean(1, keepdims=True))
    np.divide(centred_CK, width_C1, out=centred_CK, where=width_C1 > 0.0)
    bins_CK = np.clip(np.floor(centred_CK) + BINS / 2, 0, BINS - 1).astype(np.uint8)
    table_C4 = np.zeros((len(x_CK), BINS), np.float32)
    for number in range(BINS):
        there_CK = bins_CK == number
        sum_C = np.where(there_CK, wide_CK, 0.0).sum(1)
        table_C4[:, number] = sum_C / np.maximum(np.count_nonzero(there_CK, axis=1), 1)
    return bins_CK, table_C4


def pack_12(numbers_W: Ints) -> Bytes:
    """An even count of numbers below 4096, two in three bytes."""
    low_W, high_W = numbers_W.reshape(-1, 2).astype(np.uint16).T
    packed = np.empty((low_W.size, 3), np.uint8)
    packed[:, 0] = low_W & 0xFF
    packed[:, 1] = low_W >> 8 | (high_W & 0xF) << 4
    packed[:, 2] = high_W >> 4
    return packed.reshape(-1)


def unpack_12(packed_B: Bytes) -> Ints:
    """Undo `pack_12`; every result is below 4096."""
    first, middle, last = packed_B.reshape(-1, 3).T.astype(np.int64)
    return np.stack([first | (middle & 0xF) << 8, middle >> 4 | last << 4], axis=1).reshape(-1)


def pack_2(numbers_W: Bytes) -> Bytes:
    """A multiple of four numbers below 4, four in a byte."""
    a, b, c, d = numbers_W.reshape(-1, 4).T
    return np.asarray(a | b << 2 | c << 4 | d << 6, np.uint8)


def unpack_2(packed_B: Bytes) -> Bytes:
    """Undo `pack_2`; every result is below 4."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    return (packed_B[:, None] >> shifts & np.uint8(3)).reshape(-1)
