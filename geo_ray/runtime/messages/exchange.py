"""Updates, replies and work as plain dictionaries beside a payload: what frames carry."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from geo_ray.errors import FrameError, GeoRayError, from_code
from geo_ray.runtime.messages import fields
from geo_ray.runtime.messages.coded_payload import (
    coded_bytes,
    coded_meta,
    lossy_meta,
    read_coded,
    read_lossy,
)
from geo_ray.strategies.base import Reply, Update
from geo_ray.tasks.base import Stats
from geo_ray.training.server.effects import Assignment
from geo_ray.training.server.shard import Contribution
from geo_ray.transport.wire.meta import Meta
from geo_ray.types import CodedShare, Span, StepReport


def as_bytes(payload_P: Tensor) -> memoryview:
    """A fp32 CPU tensor (P,) as bytes, without a copy."""
    return memoryview(payload_P.detach().contiguous().cpu().numpy().data).cast("B")


def as_tensor(buffer: memoryview | bytearray | bytes | None, count: int | None = None) -> Tensor:
    """Bytes as a fp32 tensor (P,), without a copy; shares memory with ``buffer``.

    Raises:
        FrameError: if the size is not that of ``count`` floats.
    """
    view = memoryview(b"" if buffer is None else buffer)
    if view.nbytes % 4 or (count is not None and view.nbytes != 4 * count):
        raise FrameError(f"payload of {view.nbytes} bytes, {count} fp32 values were expected")
    if view.nbytes == 0:
        return torch.empty(0)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.float32)


def payload_bytes(message: Update | Reply) -> memoryview:
    """The payload of an update or a reply as it goes on the wire, without a copy if it can be."""
    return as_bytes(message.payload_P) if message.coded is None else coded_bytes(message.coded)


def update_meta(update: Update) -> Meta:
    """Header of an update; its payload goes beside it."""
    return {
        "region": update.region,
        "epoch": update.epoch,
        "seq": update.seq,
        "base_version": update.base_version,
        "num_samples": update.num_samples,
        "final": update.final,
        "fragment": update.fragment,
        "steps": update.steps,
        "step_s": update.step_s,
        "exchange_s": update.exchange_s,
        "grad_sq": update.grad_sq,
        **coded_meta(update.coded, update.against),
    }


def read_update(meta: Meta, payload: memoryview | bytes | None) -> Update:
    """The update of a header and a payload.

    Raises:
        FrameError: if a field is missing or has the wrong type or range.
    """
    coded = read_coded(meta, payload)
    return Update(
        region=fields.text(meta, "region"),
        epoch=fields.count(meta, "epoch"),
        seq=fields.count(meta, "seq"),
        base_version=fields.count(meta, "base_version"),
        num_samples=fields.count(meta, "num_samples"),
        payload_P=as_tensor(payload if coded is None else None),
        final=fields.flag(meta, "final"),
        fragment=fields.count(meta, "fragment"),
        coded=coded,
        against=fields.optional_count(meta, "against"),
        steps=fields.count(meta, "steps"),
        step_s=fields.number(meta, "step_s"),
        exchange_s=fields.number(meta, "exchange_s"),
        grad_sq=fields.optional_number(meta, "grad_sq"),
    )


def reply_meta(reply: Reply) -> Meta:
    """Header of a reply; its payload goes beside it."""
    return {
        "to": reply.to,
        "seq": reply.seq,
        "version": reply.version,
        "num_samples": reply.num_samples,
        "final": reply.final,
        "stop": reply.stop,
        "checkpoint": reply.checkpoint,
        "halt": reply.halt,
        "skipped": reply.dropped,
        "own": reply.own,
        "fragment": reply.fragment,
        "share": reply.share,
        "steps": reply.steps,
        "held_s": reply.held_s,
        "seen": reply.seen,
        "reliable": reply.reliable,
        **lossy_meta(reply.lossy),
        **coded_meta(reply.coded, reply.against),
    }


def read_reply(meta: Meta, payload: memoryview | bytes | None) -> Reply:
    """The reply of a header and a payload.

    Raises:
        FrameError: if a field is missing or has the wrong type or range.
    """
    coded = read_coded(meta, payload)
    return Reply(
        to=fields.text(meta, "to"),
        seq=fields.count(meta, "seq"),
        version=fields.count(meta, "version"),
        num_samples=fields.count(meta, "num_samples"),
        payload_P=as_tensor(payload if coded is None else None),
        final=fields.flag(meta, "final"),
        stop=fields.flag(meta, "stop"),
        checkpoint=fields.optional_count(meta, "checkpoint"),
        halt=fields.flag(meta, "halt"),
        dropped=fields.flag(meta, "skipped"),
        own=fields.flag(meta, "own"),
        lossy=read_lossy(meta),
        fragment=fields.count(meta, "fragment"),
        share=fields.number(meta, "share"),
        steps=fields.optional_count(meta, "steps"),
        held_s=fields.number(meta, "held_s"),
        seen=fields.count(meta, "seen"),
        reliable=fields.optional_number(meta, "reliable"),
        coded=coded,
        against=fields.optional_count(meta, "against"),
    )


def dropped_meta(seq: int) -> Meta:
    """The bridge's word that nobody took in update ``seq`` and nobody will answer it."""
    return {"dropped": seq}


def read_dropped(meta: Meta) -> int | None:
    """The number of the dropped update; None if ``meta`` is that of a reply."""
    return fields.count(meta, "dropped") if "dropped" in meta else None


def refusal_meta(seq: int, error: GeoRayError) -> Meta:
    """The averager's refusal of update ``seq`` as a header."""
    return {"seq": seq, "code": error.code, "message": error.message, "fix": error.fix}


def read_refusal(meta: Meta) -> tuple[int, GeoRayError]:
    """The inverse of `refusal_meta`; a code that this release lacks gives the tree's root."""
    error = from_code(
        fields.text(meta, "code"), fields.text(meta, "message"), fields.text(meta, "fix")
    )
    return fields.count(meta, "seq"), error


def answer_meta(answer: Assignment) -> Meta:
    """A worker's next work as a header."""
    span = answer.span
    return {
        "version": answer.version,
        "start": None if span is None else span.start,
        "count": None if span is None else span.count,
        "evaluate": answer.evaluate,
        "judged": answer.eval_params,
        "part_starts": [part.span.start for part in answer.parts],
        "part_counts": [part.span.count for part in answer.parts],
        "part_weights": [part.weight for part in answer.parts],
        "done": answer.done,
    }


def read_answer(worker: int, meta: Meta) -> Assignment:
    """The inverse of `answer_meta`."""
    has_span = fields.optional_count(meta, "start") is not None
    return Assignment(
        worker,
        fields.count(meta, "version"),
        _span(meta) if has_span else None,
        fields.flag(meta, "evaluate"),
        fields.flag(meta, "done"),
        fields.flag(meta, "judged"),
        _parts(meta),
    )


def report_meta(report: StepReport) -> Meta:
    """What a worker tells beside its gradient, as a header."""
    return {
        "op": "push",
        "start": report.span.start,
        "count": report.span.count,
        "loss": report.loss,
        "compute_s": report.compute_s,
        "refused": report.refused,
        "grad_sq": report.grad_sq,
    }


def read_report(meta: Meta) -> StepReport:
    """The inverse of `report_meta`."""
    return StepReport(
        _span(meta),
        fields.optional_number(meta, "loss"),
        fields.number(meta, "compute_s"),
        fields.optional_text(meta, "refused"),
        fields.optional_number(meta, "grad_sq"),
    )


def stats_message(version: int, stats: Stats, rows: int, *, final: bool) -> tuple[Meta, memoryview]:
    """A worker's evaluation: names and sizes in the header, the float64 sums as payload."""
    names = sorted(stats)
    arrays = [np.ascontiguousarray(stats[name], dtype=np.float64).reshape(-1) for name in names]
    meta: Meta = {
        "op": "stats",
        "version": version,
        "rows": rows,
        "final": final,
        "names": [*names],
        "sizes": [array.size for array in arrays],
    }
    return meta, memoryview(np.concatenate(arrays).data).cast("B")


def read_stats(meta: Meta, payload: memoryview | bytes | None) -> dict[str, list[float]]:
    """The sums of `stats_message` by name.

    Raises:
        FrameError: if names, sizes and payload do not fit together.
    """
    names, sizes = fields.texts(meta, "names"), fields.counts(meta, "sizes")
    data = memoryview(b"" if payload is None else payload)
    if len(names) != len(sizes) or data.nbytes != 8 * sum(sizes):
        raise FrameError(f"statistics {names} of sizes {sizes} came with {data.nbytes} bytes")
    flat = np.frombuffer(data, dtype=np.float64)
    edges = pairwise(np.cumsum([0, *sizes]))
    return {
        name: flat[start:stop].tolist() for name, (start, stop) in zip(names, edges, strict=True)
    }


def contributions_meta(contributions: Sequence[Contribution]) -> Meta:
    """A step's contributions as a header; all of them have a weight of their own, or none has."""
    weights = [c.weight for c in contributions if c.weight is not None]
    return {
        "op": "apply",
        "workers": [c.worker for c in contributions],
        "samples": [c.num_samples for c in contributions],
        "weights": [*weights],
    }


def read_contributions(meta: Meta) -> list[Contribution]:
    """The inverse of `contributions_meta`."""
    workers, samples = fields.counts(meta, "workers"), fields.counts(meta, "samples")
    weights = fields.numbers(meta, "weights")
    if len(workers) != len(samples) or len(weights) not in (0, len(workers)):
        raise FrameError(
            f"contributions of {len(workers)} workers with {len(samples)} sizes and "
            f"{len(weights)} weights"
        )
    own: Sequence[float | None] = weights or [None] * len(workers)
    return [Contribution(*each) for each in zip(workers, samples, own, strict=True)]


def _parts(meta: Meta) -> tuple[CodedShare, ...]:
    starts, counts = fields.counts(meta, "part_starts"), fields.counts(meta, "part_counts")
    weights = fields.numbers(meta, "part_weights")
    if not len(starts) == len(counts) == len(weights):
        raise FrameError(f"parts of {len(starts)}, {len(counts)} and {len(weights)} entries")
    spans = [Span(*pair) for pair in zip(starts, counts, strict=True)]
    return tuple(CodedShare(*pair) for pair in zip(spans, weights, strict=True))


def _span(meta: Meta) -> Span:
    return Span(fields.count(meta, "start"), fields.count(meta, "count"))
