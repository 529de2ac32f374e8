"""Blocks of a vector, and the three formats that a lossy block can have.

A lossy block is decoded by itself, whatever became of others:

    fp32   E values
    fp16   fp32 scale, E halves; the largest magnitude is 1 before it is multiplied by the scale
    int4   fp32 scale, E codes of 4 bit, two per byte, low half first; value = (code - 8) * scale

Shape legend: P = elements of the vector; N = blocks; E = elements of a block; L = lossy blocks;
K = bytes of a lossy block; B = bytes.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

BlockFormat = Literal["fp32", "fp16", "int4"]
FORMATS: Final[tuple[BlockFormat, ...]] = ("fp32", "fp16", "int4")

LARGEST_LOSSY_BYTES: Final = 1300
"""What a lossy block may have, so that a datagram of 1400 bytes holds it."""

_LEVELS = 7  # int4: -7 to 7 around code 8


def cut(x_P: Tensor, elements: int) -> Tensor:
    """The vector as blocks (N, E), the last one filled up with zeros; a view if it is full."""
    missing = -x_P.numel() % elements
    if missing:
        x_P = torch.cat([x_P, x_P.new_zeros(missing)])
    return x_P.view(-1, elements)


def strength(grid_NE: Tensor, num: int) -> Tensor:
    """Mean magnitude per block, fp32 (N,); what fills up the last of P = ``num`` does not count."""
    mean_N: Tensor = torch.linalg.vector_norm(grid_NE, ord=1, dim=1) / grid_NE.shape[1]
    if num:
        mean_N[-1] *= grid_NE.shape[1] / (grid_NE.shape[1] - (grid_NE.numel() - num))
    return mean_N


def lossy_bytes(form: BlockFormat, elements: int) -> int:
    """K of a block of ``elements`` elements."""
    if form == "fp32":
        return 4 * elements
    return 4 + (2 * elements if form == "fp16" else -(-elements // 2))


def pack_lossy(form: BlockFormat, grid_LE: Tensor) -> Tensor:
    """Blocks as bytes, uint8 (L, K), on their device."""
    if form == "fp32":
        return grid_LE.contiguous().view(torch.uint8)
    top_L1 = grid_LE.abs().amax(dim=1, keepdim=True)
    if form == "fp16":
        scale_L1 = top_L1
        body_LB = _quotient(grid_LE, scale_L1).to(torch.float16).view(torch.uint8)
    else:
        scale_L1 = top_L1 / _LEVELS
        codes_LE = (_quotient(grid_LE, scale_L1).round() + 8).to(torch.uint8)
        if codes_LE.shape[1] % 2:
            codes_LE = torch.cat([codes_LE, codes_LE.new_zeros(len(codes_LE), 1)], dim=1)
        body_LB = codes_LE[:, 0::2] | codes_LE[:, 1::2] << 4
    return torch.cat([scale_L1.contiguous().view(torch.uint8), body_LB], dim=1)


def unpack_lossy(form: BlockFormat, blocks_LK: Tensor, elements: int) -> Tensor:
    """The inverse of `pack_lossy`: fp32 (L, E). The caller has checked K."""
    if form == "fp32":
        return _seen_as(blocks_LK, torch.float32)
    scale_L1 = _seen_as(blocks_LK[:, :4], torch.float32)
    body_LB = blocks_LK[:, 4:]
    if form == "fp16":
        return _seen_as(body_LB, torch.float16).float() * scale_L1
    codes_LE = torch.stack([body_LB & 15, body_LB >> 4], dim=2).flatten(1)[:, :elements]
    return (codes_LE.float() - 8) * scale_L1


def pack_bits(ids_R: Tensor, num: int) -> Tensor:
    """A bit per block, set for ``ids_R``: uint8 (ceil(num / 8),)."""
    marks = np.zeros(num, dtype=bool)
    marks[ids_R.to(torch.int64).cpu().numpy()] = True
    return torch.from_numpy(np.packbits(marks))


def unpack_bits(bits_B: Tensor, num: int) -> Tensor:
    """The inverse of `pack_bits`: int64, ascending; bits beyond ``num`` do not count."""
    marks = np.unpackbits(bits_B.numpy(), count=num)
    return torch.from_numpy(np.flatnonzero(marks))


def _seen_as(rows_LB: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of bytes as numbers; a copy if they lie badly in memory."""
    flat_B = rows_LB.flatten()
    if flat_B.storage_offset() % dtype.itemsize or flat_B.data_ptr() % dtype.itemsize:
        flat_B = flat_B.clone()
    return flat_B.view(dtype).view(len(rows_LB), rows_LB.shape[1] // dtype.itemsize)


def _quotient(grid_LE: Tensor, scale_L1: Tensor) -> Tensor:
    """Zeros where the scale is zero; a tiny scale must not make infinities."""
    return torch.where(scale_L1 > 0, grid_LE / scale_L1, 0.0)
