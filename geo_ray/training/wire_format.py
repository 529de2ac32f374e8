"""Updates, replies and work items as message headers and payloads; input is checked before use.

A coded payload is the codec's data, then the numbers of the lossy blocks (int32, little-
endian), then the blocks; lost blocks are absent.

Shape legend: P = elements of the vector; B = bytes; L = lossy blocks; K = bytes of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from geo_ray.base.errors import FrameError, GeoRayError, from_code
from geo_ray.base.types import CodedPartition, Span, StepReport
from geo_ray.codecs.base import Coded, LossyBlocks, LossyReport
from geo_ray.data.tasks.base import Stats
from geo_ray.training.effects import Assignment
from geo_ray.training.messages import Barrier, ReplyMessage, UpdateMessage
from geo_ray.training.shard import Contribution, Pull
from geo_ray.transport.wire.fields import (
    Meta,
    count,
    counts,
    flag,
    number,
    optional_count,
    optional_text,
    text,
)
from geo_ray.transport.wire.frames import Buffer
from geo_ray.transport.wire.record import Field, Known, Record, Rows

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
    """Return the sizes of a payload for its header."""
    lossy = coded.lossy
    shape = (0, 0, 0) if lossy is None else (*lossy.blocks_LK.shape, lossy.bands)
    return CodedSizes(coded.num, coded.data_B.numel(), *shape)


def coded_bytes(coded: Coded) -> memoryview:
    """Return the bytes of an encoded payload; without a copy if it has no lossy blocks."""
    lossy = coded.lossy
    if lossy is None or not len(lossy.ids_L):  # torch cannot view empty ids as bytes
        return _view(coded.data_B)
    parts = [coded.data_B, lossy.ids_L.contiguous().view(torch.uint8), lossy.blocks_LK.reshape(-1)]
    return _view(torch.cat([part.cpu() for part in parts]))


def read_coded(kind: str, sizes: CodedSizes, payload: Buffer | None) -> Coded:
    """Decode a header and bytes to an encoded payload.

    Tensors share memory with ``payload`` if it is writable.

    Raises:
        FrameError: the sizes are inconsistent.
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


def as_bytes(payload_P: Tensor) -> memoryview:
    """Return a fp32 CPU tensor (P,), or one of bytes, as bytes, without a copy."""
    return memoryview(payload_P.detach().contiguous().cpu().numpy().data).cast("B")


def as_tensor(buffer: memoryview | bytearray | bytes | None, count: int | None = None) -> Tensor:
    """Return bytes as a fp32 tensor (P,), without a copy; it shares memory with ``buffer``.

    Raises:
        FrameError: the size is not that of ``count`` floats.
    """
    view = memoryview(b"" if buffer is None else buffer)
    if view.nbytes % 4 or (count is not None and view.nbytes != 4 * count):
        raise FrameError(f"payload of {view.nbytes} bytes, {count} fp32 values were expected")
    if view.nbytes == 0:
        return torch.empty(0)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.float32)


def payload_bytes(message: UpdateMessage | ReplyMessage) -> memoryview:
    """Return the payload of an update or a reply as on the wire, without a copy if possible.

    Model buffers follow it.
    """
    coded = message.coded
    own = as_bytes(message.payload_P) if coded is None else coded_bytes(coded)
    if not message.buffers_E.numel():
        return own
    both = bytearray(own.nbytes + message.buffers_E.numel())
    both[: own.nbytes] = own
    both[own.nbytes :] = message.buffers_E.contiguous().numpy().data
    return memoryview(both)


_BUFFERS: Final = "buffer_bytes"
_WEIGHT: Final = "buffers_weight"


class _Payload:
    """The codec of a message's payload: fp32, or encoded with its sizes in the header.

    Model buffers may follow it; the header then has their size.
    """

    names = ("coded", "against", *SIZES.names, _BUFFERS, _WEIGHT)

    def write(self, value: UpdateMessage | ReplyMessage) -> Meta:
        """See `ValueCodec`."""
        header: Meta = {"coded": None, "against": value.against}
        if value.coded is not None:
            header = {"coded": value.coded.kind, "against": value.against}
            header |= SIZES.write(sizes_of(value.coded))
        if value.buffers_E.numel():
            header[_BUFFERS] = value.buffers_E.numel()
            if isinstance(value, ReplyMessage):
                header[_WEIGHT] = value.buffers_weight
        return header

    def read(self, meta: Meta, payload: Buffer | None = None, **known: Any) -> dict[str, Any]:
        """See `ValueCodec`."""
        found, payload = self._model_buffers(meta, payload)
        return found | self._own(meta, payload)

    @staticmethod
    def _model_buffers(meta: Meta, payload: Buffer | None) -> tuple[dict[str, Any], Buffer | None]:
        """Return the model buffers, and the payload before them."""
        if _BUFFERS not in meta:
            return {}, payload
        size, view = count(meta, _BUFFERS), memoryview(b"" if payload is None else payload)
        if not 0 < size <= view.nbytes:
            raise FrameError(f"'{_BUFFERS}' of a header is {size}, the payload is {view.nbytes}")
        start = view.nbytes - size
        found: dict[str, Any] = {
            "buffers_E": torch.frombuffer(bytearray(view[start:]), dtype=torch.uint8)
        }
        if _WEIGHT in meta:
            found["buffers_weight"] = number(meta, _WEIGHT)
        return found, view[:start]

    @staticmethod
    def _own(meta: Meta, payload: Buffer | None) -> dict[str, Any]:
        kind = optional_text(meta, "coded")
        found = {"coded": None, "against": optional_count(meta, "against")}
        if kind is not None:
            coded = read_coded(kind, SIZES.read(meta), payload)
            return found | {"coded": coded, "payload_P": torch.empty(0)}
        if header := [name for name in SIZES.names if name in meta]:
            raise FrameError(f"a header without 'coded' has {', '.join(header)}")
        return found | {"payload_P": as_tensor(payload)}


class Refusal(NamedTuple):
    """The averager's refusal of update ``seq``."""

    seq: int
    error: GeoRayError


@dataclass(frozen=True, slots=True)
class _Evaluation:
    version: int
    rows: int
    final: bool
    names: list[str]
    sizes: list[int]
    model: str | None


UPDATE: Final = Record(
    UpdateMessage,
    "region attempt seq base_version num_samples final fragment steps step_s exchange_s grad_sq",
    Field("view", count, default=0),
    Field("unused", counts, default=()),
    Field("", _Payload()),
)
REPLY: Final = Record(
    ReplyMessage,
    "to seq version num_samples final stop checkpoint halt dropped=skipped own fragment own_weight",
    "steps held_s seen reliable",
    Field("draining", flag, default=False),
    Field("flush", flag, default=False),
    Field("barrier", Record(Barrier, "view=barrier is_donor leaves"), default=None),
    Field("view", count, default=0),
    Field("lossy", LOSSY, default=None),
    Field("next_fragment", count, default=0),
    Field("unused", counts, default=()),
    Field("", _Payload()),
)
ERROR: Final = Field("error", Record(from_code, "code message", Field("fix", text)))
_REFUSAL: Final = Record(Refusal, "seq", ERROR)
_SPAN: Final = Record(Span, "start count")
_SHARE: Final = Record(
    CodedPartition,
    Field("span", Record(Span, "start=part_starts count=part_counts")),
    "weight=part_weights",
)
_ASSIGNMENT: Final = Record(
    Assignment,
    Known("worker"),
    "version",
    Field("span", _SPAN, null=True),
    "evaluate eval_params=judged",
    Field("parts", Rows(_SHARE)),
    "done",
    Field("partition", optional_count, default=None),
    Field("repeats", Rows(Record(Span, "start=repeat_starts count=repeat_counts")), default=()),
    Field("steps", count, default=1),
    Field("stride", count, default=0),
)
_PULL: Final = Record(Pull, Known("worker"), "ticket version=pull_version judged=pull_judged")
_REPORT: Final = Record(
    StepReport,
    Field("span", _SPAN),
    "loss compute_s refused grad_sq learning_rate",
    Field("unused", counts, default=()),
)
_EARLIER: Final = Rows(
    Record(
        StepReport,
        Field("span", Record(Span, "start=earlier_starts count=earlier_counts")),
        "loss=losses compute_s=seconds grad_sq=norms learning_rate=rates",
    ),
    sparse="norms rates",
)
_UNUSED, _NUM_UNUSED = "earlier_unused", "earlier_num_unused"
_EVALUATION: Final = Record(_Evaluation, "version rows final names sizes model")
_CONTRIBUTIONS: Final = Rows(
    Record(Contribution, "worker=workers num_samples=samples weight=weights"), sparse="weights"
)

update_meta, read_update = UPDATE.write, UPDATE.read
reply_meta, read_reply = REPLY.write, REPLY.read
answer_meta = _ASSIGNMENT.write
pull_meta = _PULL.write
read_refusal = _REFUSAL.read
read_contributions = _CONTRIBUTIONS.read


def read_answer(worker: int, meta: Meta) -> Assignment:
    """Return a worker's next assignment."""
    return _ASSIGNMENT.read(meta, worker=worker)


WantedState = Literal["push", "between", "model", "optimizer"]
"""What a worker that makes the optimizer's steps must send next.

push: its push again, which was not handled, with parameters and optimizer; between: both;
model: its parameters; optimizer: the optimizer's state.
"""


def state_meta(wanted: WantedState) -> Meta:
    """Return the request for the state of a worker that makes the optimizer's steps."""
    return {"wants_state": wanted}


def wanted_state(meta: Meta) -> str | None:
    """Return the request of `state_meta` in an answer to a worker; None if there is none."""
    return optional_text(meta, "wants_state") if "wants_state" in meta else None


def read_pull(worker: int, meta: Meta) -> Pull:
    """Return what a worker may fetch from every shard."""
    return _PULL.read(meta, worker=worker)


def report_meta(report: StepReport, earlier: Sequence[StepReport] = ()) -> Meta:
    """Return a worker's reports as a request's header.

    Args:
        report: on its newest step.
        earlier: on steps before it, of which none is refused.
    """
    meta: Meta = {"op": "push", **_REPORT.write(report)}
    if earlier:
        meta |= _EARLIER.write(earlier)
        meta[_UNUSED] = [index for each in earlier for index in each.unused]
        meta[_NUM_UNUSED] = [len(each.unused) for each in earlier]
    return meta


def read_reports(meta: Meta) -> list[StepReport]:
    """Return the reports of `report_meta`, the newest last."""
    last = _REPORT.read(meta)
    if _UNUSED not in meta and _NUM_UNUSED not in meta:
        return [last]
    earlier, unused = _EARLIER.read(meta), counts(meta, _UNUSED)
    sizes = counts(meta, _NUM_UNUSED)
    if len(sizes) != len(earlier) or sum(sizes) != len(unused):
        raise FrameError(f"'{_NUM_UNUSED}' is {sizes}, for {len(earlier)} reports")
    stops = list(accumulate(sizes))
    parts = [tuple(unused[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True)]
    return [*(replace(e, unused=p) for e, p in zip(earlier, parts, strict=True)), last]


def contributions_meta(contributions: Sequence[Contribution]) -> Meta:
    """Return a step's contributions as a request's header; all or none have weights."""
    return {"op": "apply", **_CONTRIBUTIONS.write(contributions)}


def refusal_meta(seq: int, error: GeoRayError) -> Meta:
    """Return the averager's refusal of update ``seq`` as a header."""
    return _REFUSAL.write(Refusal(seq, error))


def stats_message(
    version: int, stats: Stats, rows: int, *, final: bool, model: str | None = None
) -> tuple[Meta, memoryview]:
    """Return a worker's evaluation: names and sizes as header, the float64 sums as payload.

    ``model`` is the digest of the evaluated parameters, if reported.
    """
    names = sorted(stats)
    arrays = [np.ascontiguousarray(stats[name], dtype=np.float64).reshape(-1) for name in names]
    sizes = [array.size for array in arrays]
    header = _Evaluation(version, rows, final, names, sizes, model)
    return {"op": "stats", **_EVALUATION.write(header)}, memoryview(
        np.concatenate(arrays).data
    ).cast("B")


def read_stats(meta: Meta, payload: Buffer | None) -> dict[str, list[float]]:
    """Return the sums of `stats_message` by name.

    Raises:
        FrameError: a field is missing or invalid, or names, sizes and payload are inconsistent.
    """
    found = _EVALUATION.read(meta)
    names, sizes = found.names, found.sizes
    data = memoryview(b"" if payload is None else payload)
    if len(names) != len(sizes) or data.nbytes != 8 * sum(sizes):
        raise FrameError(f"statistics {names} of sizes {sizes} came with {data.nbytes} bytes")
    flat = np.frombuffer(data, dtype=np.float64)
    edges = pairwise(np.cumsum([0, *sizes]))
    return {
        name: flat[start:stop].tolist() for name, (start, stop) in zip(names, edges, strict=True)
    }
