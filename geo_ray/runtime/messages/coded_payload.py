"""A coded payload as header fields and bytes, and back; what comes in is checked before use.

The bytes are the codec's data, then the lossy blocks' numbers (int32, little-endian), then the
blocks. What got lost of the blocks is simply not there.

Shape legend: P = elements of the vector; B = bytes; L = lossy blocks; K = bytes of one block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from geo_ray.codecs.base import Coded, LossyBlocks
from geo_ray.codecs.common.dgt_report import LossyReport
from geo_ray.errors import FrameError
from geo_ray.runtime.messages import fields
from geo_ray.transport.wire.meta import Meta

_ID_BYTES = 4


def coded_meta(coded: Coded | None, against: int | None) -> Meta:
    """Header fields of a payload: what codec it is of, and which difference."""
    meta: Meta = {"coded": None if coded is None else coded.kind, "against": against}
    if coded is not None:
        lossy = coded.lossy
        meta["num"] = coded.num
        meta["data_bytes"] = coded.data_B.numel()
        meta["loose_blocks"] = 0 if lossy is None else lossy.blocks_LK.shape[0]
        meta["loose_block_bytes"] = 0 if lossy is None else lossy.blocks_LK.shape[1]
        meta["loose_bands"] = 0 if lossy is None else lossy.bands
    return meta


def lossy_meta(report: LossyReport | None) -> Meta:
    """Header fields of what an averager tells of lossy blocks."""
    if report is None:
        return {}
    return {
        "loose_now": report.now,
        "loose_late_seq": report.late_seq,
        "loose_late": report.late,
    }


def read_lossy(meta: Meta) -> LossyReport | None:
    """The inverse of `lossy_meta`.

    Raises:
        FrameError: if a field is missing or wrong.
    """
    if "loose_now" not in meta:
        return None
    return LossyReport(
        fields.data(meta, "loose_now"),
        fields.optional_count(meta, "loose_late_seq"),
        fields.data(meta, "loose_late"),
    )


def coded_bytes(coded: Coded) -> memoryview:
    """The bytes of a coded payload; without a copy if nothing of it is loose."""
    lossy = coded.lossy
    if lossy is None:
        return _view(coded.data_B)
    parts = [coded.data_B, lossy.ids_L.contiguous().view(torch.uint8), lossy.blocks_LK.reshape(-1)]
    return _view(torch.cat([part.cpu() for part in parts]))


def read_coded(meta: Meta, payload: memoryview | bytes | bytearray | None) -> Coded | None:
    """The coded payload of a header and bytes; None if it is not coded.

    Tensors share memory with ``payload`` where that can be written.

    Raises:
        FrameError: if a field is missing or wrong, or the sizes do not fit together.
    """
    kind = fields.optional_text(meta, "coded")
    if kind is None:
        return None
    view = memoryview(b"" if payload is None else payload)
    num_data, blocks, block_bytes, bands = (
        fields.count(meta, name)
        for name in ("data_bytes", "loose_blocks", "loose_block_bytes", "loose_bands")
    )
    if view.nbytes != num_data + blocks * (_ID_BYTES + block_bytes) or (blocks and not bands):
        raise FrameError(
            f"a payload coded as {kind!r} has {view.nbytes} bytes; its header says {num_data} and "
            f"{blocks} blocks of {block_bytes} in {bands} bands"
        )
    data_B = _tensor(view)
    lossy = None
    if bands:
        ids_end = num_data + _ID_BYTES * blocks
        ids_L = np.frombuffer(view[num_data:ids_end], dtype="<i4").astype(np.int32)
        lossy = LossyBlocks(
            torch.from_numpy(ids_L), data_B[ids_end:].view(blocks, block_bytes), bands
        )
    return Coded(kind, fields.count(meta, "num"), data_B[:num_data], lossy)


def _view(data_B: Tensor) -> memoryview:
    return memoryview(data_B.detach().contiguous().cpu().numpy().data).cast("B")


def _tensor(view: memoryview) -> Tensor:
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
