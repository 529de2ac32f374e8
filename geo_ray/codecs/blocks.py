"""Whole numbers per block: each block is divided by its largest magnitude over `top`.

Shape legend: P = elements of the vector; N = of a piece; S = blocks; K = elements of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from geo_ray.codecs.base import wrong
from geo_ray.codecs.buffers import Reader, piece_of, split

MIN_BLOCK, MAX_BLOCK = 16, 1 << 16

# A scale is kept within normal numbers, and so far from the end of fp32 that `top` times it is
# finite in spite of rounding.
_TINY, _MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def blocks_in(num: int, block: int) -> int:
    """Return the number of blocks of ``num`` elements; the last may be shorter."""
    return -(-num // block)


def cut(x: Tensor, whole: int, unit: int, rows: int) -> list[Tensor]:
    """Split a row into pieces of whole blocks; a shorter last block is a separate piece.

    Args:
        x: 1-D.
        whole: number of whole blocks.
        unit: entries of ``x`` per block.
        rows: blocks per piece.
    """
    head, tail = x[: whole * unit], x[whole * unit :]
    return [*split(head, rows * unit), *split(tail, unit)]


def rows_of(block: int, device: torch.device) -> int:
    """Return the blocks per piece."""
    return max(piece_of(device) // block, 1)


def quantised(x_P: Tensor, scales_S: Tensor, block: int, top: int) -> Iterator[Tensor]:
    """Round ``x / scale`` to whole numbers of -top..top, in the pieces of `cut`.

    Args:
        x_P: contiguous fp32, any device.
        scales_S: on the same device; written.
        block: elements that share a scale.
        top: largest whole number.

    Yields:
        The rounded values (fp32) of each piece; overwritten by the next.
    """
    whole, rows = x_P.numel() // block, rows_of(block, x_P.device)
    scratch_P = torch.empty(min(x_P.numel(), rows * block), device=x_P.device)
    for x_N, scale_S in zip(
        cut(x_P, whole, block, rows), cut(scales_S, whole, 1, rows), strict=True
    ):
        x_SK = x_N.view(scale_S.numel(), -1)
        scratch_SK = scratch_P[: x_N.numel()].view(x_SK.shape)
        torch.amax(torch.abs(x_SK, out=scratch_SK), 1, out=scale_S)
        scale_S.div_(top).clamp_(_TINY, _MAX / top * (1 - 1e-6))
        torch.div(x_SK, scale_S[:, None], out=scratch_SK)
        yield scratch_SK.round_().view(-1)


def restore(codes_N: Tensor, scale_S: Tensor, out_N: Tensor) -> None:
    """Multiply the int8 whole numbers of a piece by their scales, into fp32 ``out_N``."""
    out_N.copy_(codes_N)
    out_N.view(scale_S.numel(), -1).mul_(scale_S[:, None])


def read_block(kind: str, reader: Reader, multiple_of: int = 1) -> int:
    """Return the block length from a header.

    Raises:
        FrameError: no encoder uses it.
    """
    (block,) = reader.header(1)
    if not MIN_BLOCK <= block <= MAX_BLOCK or block % multiple_of:
        raise wrong(kind, f"blocks of {block} elements")
    return block


def read_scales(kind: str, reader: Reader, num: int) -> Tensor:
    """Return the scales (S,) of ``num`` blocks.

    Raises:
        FrameError: one of them is negative or not finite.
    """
    scales_S = reader.take(num, torch.float32)
    if num and not (bool(scales_S.isfinite().all()) and float(scales_S.min()) >= 0.0):
        raise wrong(kind, "a scale is negative or not finite")
    return scales_S
