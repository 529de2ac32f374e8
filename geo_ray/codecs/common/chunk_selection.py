"""Finds the largest magnitudes of every chunk of 4096 elements.

Shape legend: P = elements of the vector; N = of a piece; C = chunks; E = 4096 elements of a chunk;
K = picks of a chunk.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geo_ray.codecs.common.buffers import piece_of, split

CHUNK = 4096

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def chunk_picks(x_P: Tensor, keep: int) -> tuple[Ints, Floats]:
    """Per chunk, positions (C, K) within it, rising, and the elements (C, K) there.

    Of equal magnitudes the earliest are picked. The last chunk counts as filled up with zeros.

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
    """Marks exactly ``keep`` elements per row."""
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
    """The same on an accelerator."""
    magnitude_CE = x_CE.abs()
    kth_C1 = magnitude_CE.topk(keep, dim=1).values[:, -1:]
    more_CE, equal_CE = magnitude_CE > kth_C1, magnitude_CE == kth_C1
    left_C1 = keep - more_CE.sum(1, keepdim=True)
    return more_CE | (equal_CE & (equal_CE.cumsum(1) <= left_C1))
