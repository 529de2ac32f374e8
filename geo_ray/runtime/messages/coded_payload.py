"""A coded payload as header fields and bytes, and back; what comes in is checked before use.

The bytes are the codec's data, then the lossy blocks' numbers (int32, little-endian), then the
blocks. What got lost of the blocks is simply not there.

Shape legend: P = elements of the vector; B = bytes; L = lossy blocks; K = bytes of one block.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from geo_ray.codecs.base import Coded, LossyBlocks
from geo_ray.codecs.common.dgt_report import LossyReport
from geo_ray.errors import FrameError
from geo_ray.transport.wire.frames import Buffer
from geo_ray.transport.wire.record import Record

_ID_BYTES: Final = 4


class CodedSizes(NamedTuple):
    """Sizes of a coded payload: P, B, L, K, and rank bands of the lossy blocks (0: has none)."""

    num: int
    data_bytes: int
    blocks: int
    block_bytes: int
    bands: int


SIZES: Final = Record(
    CodedSizes,
    "num data_bytes blocks=loose_blocks block_bytes=loose_block_bytes bands=loose_bands",
)
LOSSY: Final = Record(LossyReport, "now=loose_now late_seq=loose_late_seq late=loose_late")


def sizes_of(coded: Coded) -> CodedSizes:
    """What a header tells of a payload's sizes."""
    lossy = coded.lossy
    shape = (0, 0, 0) if lossy is None else (*lossy.blocks_LK.shape, lossy.bands)
    return CodedSizes(coded.num, coded.data_B.numel(), *shape)


def coded_bytes(coded: Coded) -> memoryview:
    """The bytes of a coded payload; without a copy if it has no lossy blocks."""
    lossy = coded.lossy
    if lossy is None or not len(lossy.ids_L):  # torch cannot view empty ids as bytes
        return _view(coded.data_B)
    parts = [coded.data_B, lossy.ids_L.contiguous().view(torch.uint8), lossy.blocks_LK.reshape(-1)]
    return _view(torch.cat([part.cpu() for part in parts]))


def read_coded(kind: str, sizes: CodedSizes, payload: Buffer | None) -> Coded:
    """The coded payload of a header and bytes.

    Tensors share memory with ``payload`` where that can be written.

    Raises:
        FrameError: if the sizes do not fit together.
    """
    view = memoryview(b"" if payload is None else payload)
    num, num_data, blocks, block_bytes, bands = sizes
    fits = view.nbytes == num_data + blocks * (_ID_BYTES + block_bytes)
    if not fits or (not bands and (blocks or block_bytes)):
        raise FrameError(
            f"a payload coded as {kind!r} has {view.nbytes} bytes; its header says {num_data} "
            f"('data_bytes') and {blocks} blocks of {block_bytes} in {bands} bands"
        )
    data_B = _tensor(view)
    lossy = None
    if bands:
        ids_end = num_data + _ID_BYTES * blocks
        ids_L = np.frombuffer(view[num_data:ids_end], dtype="<i4").astype(np.int32)
        blocks_LK = data_B[ids_end:].view(blocks, block_bytes)
        lossy = LossyBlocks(torch.from_numpy(ids_L), blocks_LK, bands)
    return Coded(kind, num, data_B[:num_data], lossy)


def _view(data_B: Tensor) -> memoryview:
    return memoryview(data_B.detach().contiguous().cpu().numpy().data).cast("B")


def _tensor(view: memoryview) -> Tensor:
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
