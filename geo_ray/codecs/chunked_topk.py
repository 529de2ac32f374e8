"""The largest of every chunk of 4096 elements, their values in two bits: SparseLoCo's layout.

Idea: a position within a chunk needs 12 bits. The values are reduced to four bins, uniform over
three standard deviations to both sides of the mean of the chunk's picked values, and a table with
the mean of each bin. Error feedback corrects the rest.

Layout: i64 picks per chunk, i64 exponent of the tables' scale; then for all chunks: the positions,
two in three bytes (the earlier in the lower bits); the bins, four in a byte (the earlier in the
lower bits); four fp16 table entries. With 64 picks that is 96 + 16 + 8 bytes for 16384: ratio 136.
The last chunk may be shorter. A chunk with fewer non-zeros than picks repeats its first non-zero; a
chunk of zeros has zeros at its first position.

When: pseudo-gradients of many local steps over very slow links.

Source: SparseLoCo's code as our notes describe it (64 x 64 chunks, top 64, 12-bit positions, 2-bit
bins over 6 sigma with a mean per bin). Reconstructed or ours: chunks are runs of the flat vector,
not tiles of its matrices; a table per chunk; fp16 tables.

Shape legend: P = elements of the vector; C = chunks; K = picks of a chunk; W = picks of all chunks;
N = elements of a piece; E = 4096 elements of a chunk; B = bytes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import CodecTraits, Coded, wrong
from geo_ray.codecs.buffers import (
    Reader,
    as_fp32,
    check_num,
    halve,
    header,
    joined,
    piece_of,
    split,
    widen,
    zeros,
)

CHUNK = 4096

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def chunk_picks(x_P: Tensor, keep: int) -> tuple[Ints, Floats]:
    """Return ascending positions (C, K) within each chunk, and the elements (C, K) there.

    Of equal magnitudes the earliest are picked. The last chunk is padded with zeros.

    Args:
        x_P: contiguous fp32, any device.
        keep: K.
    """
    whole = x_P.numel() // CHUNK * CHUNK
    parts = split(x_P[:whole], max(piece_of(x_P.device), CHUNK))
    if whole < x_P.numel():
        last_E = torch.zeros(CHUNK, device=x_P.device)
        last_E[: x_P.numel() - whole] = x_P[whole:]
        parts.append(last_E)
    found = [_of_piece(part_N.view(-1, CHUNK), keep) for part_N in parts]
    none = np.zeros((0, keep))
    return (
        np.concatenate([none.astype(np.int64), *(at for at, _ in found)]),
        np.concatenate([none.astype(np.float32), *(values for _, values in found)]),
    )


def _of_piece(x_CE: Tensor, keep: int) -> tuple[Ints, Floats]:
    if x_CE.is_cpu:
        at_N = np.flatnonzero(marks(x_CE.numpy(), keep))
        values_N = x_CE.view(-1).numpy()[at_N]
    else:
        found_N = torch.nonzero(marks_elsewhere(x_CE, keep).view(-1)).view(-1)
        at_N, values_N = found_N.cpu().numpy(), x_CE.view(-1)[found_N].cpu().numpy()
    return at_N.reshape(-1, keep) % CHUNK, values_N.reshape(-1, keep)


def marks(x_CE: Floats, keep: int) -> NDArray[np.bool_]:
    """Mark exactly ``keep`` elements per row."""
    magnitude_CE = np.abs(x_CE)
    # The bits of non-negative numbers order as the numbers do, and whole numbers are faster.
    bits_CE = magnitude_CE.view(np.int32).copy()
    bits_CE.partition(CHUNK - keep, axis=1)
    kth_C1 = bits_CE[:, CHUNK - keep, None].view(np.float32)
    marks_CE = magnitude_CE >= kth_C1
    if np.count_nonzero(marks_CE) > keep * len(x_CE):  # some row has equals at the edge
        more_CE, equal_CE = magnitude_CE > kth_C1, magnitude_CE == kth_C1
        left_C1 = keep - np.count_nonzero(more_CE, axis=1)[:, None]
        marks_CE = more_CE | (equal_CE & (np.cumsum(equal_CE, axis=1, dtype=np.int16) <= left_C1))
    return marks_CE


def marks_elsewhere(x_CE: Tensor, keep: int) -> Tensor:
    """Do the same on an accelerator."""
    magnitude_CE = x_CE.abs()
    kth_C1 = magnitude_CE.topk(keep, dim=1).values[:, -1:]
    more_CE, equal_CE = magnitude_CE > kth_C1, magnitude_CE == kth_C1
    left_C1 = keep - more_CE.sum(1, keepdim=True)
    return more_CE | (equal_CE & (equal_CE.cumsum(1) <= left_C1))


BINS = 4
_BIN_SIGMAS = 1.5  # four of them cover three standard deviations to both sides

Bytes = NDArray[np.uint8]


def without_zeros(at_CK: Ints, x_CK: Floats) -> tuple[Ints, Floats]:
    """Replace each chunk's picked zeros by its first non-zero.

    A bin's mean is not zero, so zeros should not be sent; repeating a value does no harm. A chunk
    of zeros repeats its first.
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
    """Return the bin (C, K) of each value, and the mean (C, 4) of the values in each bin.

    Bins are uniform over three standard deviations to both sides of the mean; values
    outside belong to the outermost. An empty bin's mean is 0.
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
    """Pack an even count of numbers below 4096, two in three bytes."""
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
    """Pack a multiple of four numbers below 4, four in a byte."""
    a, b, c, d = numbers_W.reshape(-1, 4).T
    return np.asarray(a | b << 2 | c << 4 | d << 6, np.uint8)


def unpack_2(packed_B: Bytes) -> Bytes:
    """Undo `pack_2`; every result is below 4."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    return (packed_B[:, None] >> shifts & np.uint8(3)).reshape(-1)


_MIN_KEEP, _MAX_KEEP, _KEEP_STEP = 4, 1024, 4


class ChunkedTopK(StrictModel):
    """Configuration and rule of `chunked_topk`."""

    kind: Literal["chunked_topk"] = "chunked_topk"
    keep: int = Field(
        64,
        ge=_MIN_KEEP,
        le=_MAX_KEEP,
        multiple_of=_KEEP_STEP,
        description="elements that are sent of every 4096",
    )

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        return CodecTraits(
            lossy=True,
            bits_per_value=(14 * self.keep + 64) / CHUNK,
            suits_answers=False,
            expected_loss=0.015,
        )

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Pick, bin, pack."""
        x_P = as_fp32(x_P)
        at_CK, x_CK = without_zeros(*chunk_picks(x_P, self.keep))
        bins_CK, table_C4 = bins_and_table(x_CK)
        half_W = torch.empty(table_C4.size, dtype=torch.float16)
        exponent = halve(torch.from_numpy(table_C4.reshape(-1)), half_W)
        packed = torch.from_numpy(pack_12(at_CK)), torch.from_numpy(pack_2(bins_CK)), half_W
        return Coded(self.kind, x_P.numel(), joined(header(self.keep, exponent), *packed))

    def decode(self, coded: Coded) -> Tensor:
        """Put each bin's mean at the positions."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        keep, exponent = reader.header(2)
        if not _MIN_KEEP <= keep <= _MAX_KEEP or keep % _KEEP_STEP:
            raise wrong(self.kind, f"{keep} picks per chunk")
        chunks = -(-num // CHUNK)
        at_B = reader.take(chunks * keep // 2 * 3, torch.uint8)
        bins_B = reader.take(chunks * keep // 4, torch.uint8)
        half_W = reader.take(chunks * BINS, torch.float16)
        reader.done()
        table_W = widen(self.kind, half_W, exponent, torch.empty(half_W.numel()))
        at_CK = unpack_12(at_B.numpy()).reshape(chunks, keep)
        at_CK += np.arange(0, chunks * CHUNK, CHUNK)[:, None]
        if chunks and at_CK[-1].max() >= num:
            raise wrong(self.kind, "a position is beyond the end")
        bins_CK = unpack_2(bins_B.numpy()).reshape(chunks, keep).astype(np.int64)
        out_P = zeros(num)
        table_C4 = table_W.numpy().reshape(chunks, BINS)
        out_P.numpy()[at_CK] = np.take_along_axis(table_C4, bins_CK, 1)
        return out_P
