"""What bridges say about transfers, as headers of messages; what comes in is checked before use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from geo_ray.errors import FrameError
from geo_ray.runtime.messages import fields
from geo_ray.strategies.base import Reply, Update
from geo_ray.transfers.requests import UploadRequest
from geo_ray.transport.wire.meta import Meta, Scalar

MOST_PARTS = 1024
MOST_BYTES = 1 << 40


def ask_meta(ask: UploadRequest, *, sent: bool) -> Meta:
    """A region's ask; ``sent`` says that the update is on its way already."""
    return {
        "epoch": ask.epoch,
        "seq": ask.seq,
        "size_bytes": ask.size_bytes,
        "base_version": ask.base_version,
        "norm": ask.norm,
        "final": ask.final,
        "again": ask.again,
        "sent": sent,
    }


def read_ask(peer: str, meta: Meta) -> tuple[UploadRequest, bool]:
    """The inverse of `ask_meta`; a region asks for itself only.

    Raises:
        FrameError: if a field is missing or has the wrong type or range.
    """
    norm = fields.number(meta, "norm")
    ask = UploadRequest(
        peer,
        fields.count(meta, "epoch"),
        fields.count(meta, "seq"),
        _size(meta),
        fields.count(meta, "base_version"),
        norm if norm >= 0 else 0.0,  # NaN as well
        fields.flag(meta, "final"),
        fields.flag(meta, "again"),
    )
    return ask, fields.flag(meta, "sent")


def ask_of(update: Update, *, norm: float = 0.0, again: bool = False) -> UploadRequest:
    """What would be asked for an update."""
    return UploadRequest(
        update.region,
        update.epoch,
        update.seq,
        update.size_bytes,
        update.base_version,
        norm,
        update.final,
        again,
    )


def parts_meta(asks: Sequence[UploadRequest]) -> Meta:
    """The updates that make a sum, in their order."""
    texts: list[Scalar] = [ask.region for ask in asks]
    return {
        "regions": texts,
        "epochs": [ask.epoch for ask in asks],
        "seqs": [ask.seq for ask in asks],
        "base_versions": [ask.base_version for ask in asks],
        "size_bytes": asks[0].size_bytes,
    }


def read_parts(meta: Meta) -> tuple[UploadRequest, ...]:
    """The inverse of `parts_meta`.

    Raises:
        FrameError: if a field is missing or wrong, or the lists do not fit together.
    """
    regions = fields.texts(meta, "regions")
    columns = [fields.counts(meta, name) for name in ("epochs", "seqs", "base_versions")]
    fit = all(len(column) == len(regions) for column in columns)
    if not fit or not 0 < len(regions) <= MOST_PARTS or len(set(regions)) < len(regions):
        raise FrameError(f"the parts of a sum do not fit together: {len(regions)} regions")
    size_bytes = _size(meta)
    rows = zip(regions, *columns, strict=True)
    return tuple(UploadRequest(r, epoch, seq, size_bytes, base) for r, epoch, seq, base in rows)


def headers_of(parts: Sequence[UploadRequest]) -> tuple[Update, ...]:
    """The updates of a sum without their payloads."""
    empty = torch.empty(0)
    return tuple(Update(a.region, a.epoch, a.seq, a.base_version, 0, empty) for a in parts)


def bundle_meta(replies: Sequence[Reply]) -> Meta:
    """Answers with one payload, for a helper to hand on."""
    first = replies[0]
    return {
        "tos": [reply.to for reply in replies],
        "seqs": [reply.seq for reply in replies],
        "version": first.version,
        "stop": first.stop,
        "checkpoint": first.checkpoint,
        "halt": first.halt,
    }


def can_bundle(replies: Sequence[Reply]) -> bool:
    """Whether these differ in nothing but whom they are for."""
    first = replies[0]
    same = {(r.version, r.stop, r.checkpoint, r.halt, r.own, r.final) for r in replies}
    payloads = {r.payload_P.data_ptr() for r in replies}
    return len(same) == 1 and len(payloads) == 1 and first.own and first.coded is None


def read_bundle(meta: Meta) -> list[tuple[str, int]]:
    """Whom a bundle is for, each with the number of the update that it answers.

    Raises:
        FrameError: if the lists do not fit together.
    """
    tos, seqs = fields.texts(meta, "tos"), fields.counts(meta, "seqs")
    if len(tos) != len(seqs) or not 0 < len(tos) <= MOST_PARTS:
        raise FrameError(f"a bundle of answers for {len(tos)} regions has {len(seqs)} numbers")
    return list(zip(tos, seqs, strict=True))


def _size(meta: Meta) -> int:
    size_bytes = fields.count(meta, "size_bytes")
    if size_bytes > MOST_BYTES:
        raise FrameError(f"an update of {size_bytes} bytes was announced")
    return size_bytes
