"""What bridges tell each other about transfers, as headers; what comes in is checked before use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from geo_ray.runtime.messages.exchange import UPDATE
from geo_ray.strategies.base import Reply, Update
from geo_ray.transfers.requests import Gather, UploadRequest
from geo_ray.transport.wire.fields import Kind, below, count, flag, number, optional_count
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.record import Field, Known, Record, Rows

MOST_PARTS: Final = 1024
MOST_BYTES: Final = 1 << 40


class Asked(NamedTuple):
    """A region's request; ``sent`` says that the update is on its way already."""

    ask: UploadRequest
    sent: bool


class Summed(NamedTuple):
    """A helper's sum: its number, and the updates that make it, in their order."""

    group: int
    parts: tuple[UploadRequest, ...]


class GroupPart(NamedTuple):
    """An update for a helper to sum, with the number of the sum."""

    group: int
    update: Update


_SIZE: Final = Field("size_bytes", below(MOST_BYTES + 1))
# A norm that cannot be counts as none; NaN as well.
_NORM: Final = Kind("a number", number.fits, lambda norm: float(norm) if norm >= 0 else 0.0)
_REQUEST: Final = Record(
    UploadRequest,
    Known("region"),
    "epoch seq",
    _SIZE,
    "base_version",
    Field("norm", _NORM),
    "final again",
)
_PART: Final = Record(
    UploadRequest,
    "region=regions epoch=epochs seq=seqs base_version=base_versions",
    Known("size_bytes"),
)
_COMMON: Final = ("version", "stop", "checkpoint", "halt", "payload_P")
_BUNDLED: Final = Record(Reply, "to=tos seq=seqs", *map(Known, _COMMON), num_samples=0, own=True)
ASK: Final = Record(Asked, Field("ask", _REQUEST), "sent")
PARTS: Final = Rows(_PART, _SIZE, least=1, most=MOST_PARTS, distinct="regions")
SUM: Final = Record(Summed, "group", Field("parts", PARTS))
GATHER: Final = Record(Gather, "group helper", Field("asks", PARTS))
GROUP_PART: Final = Record(GroupPart, "group", Field("update", UPDATE))
BUNDLE: Final = Rows(
    _BUNDLED,
    Field("version", count),
    Field("stop", flag),
    Field("checkpoint", optional_count),
    Field("halt", flag),
    least=1,
    most=MOST_PARTS,
)

bundle_meta = BUNDLE.write


def ask_meta(ask: UploadRequest, *, sent: bool) -> Meta:
    """A region's request; ``sent`` says that the update is on its way already."""
    return ASK.write(Asked(ask, sent))


def read_ask(peer: str, meta: Meta) -> Asked:
    """The inverse of `ask_meta`; a region asks for itself only."""
    return ASK.read(meta, region=peer)


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


def headers_of(parts: Sequence[UploadRequest]) -> tuple[Update, ...]:
    """The updates of a sum without their payloads."""
    empty = torch.empty(0)
    return tuple(Update(a.region, a.epoch, a.seq, a.base_version, 0, empty) for a in parts)


def read_bundle(meta: Meta, payload_P: Tensor) -> tuple[Reply, ...]:
    """The answers of `bundle_meta`, which share one payload."""
    return BUNDLE.read(meta, payload_P=payload_P)


def can_bundle(replies: Sequence[Reply]) -> bool:
    """Whether these differ in nothing but whom they are for."""
    first = replies[0]
    same = {(r.version, r.stop, r.checkpoint, r.halt, r.own, r.final) for r in replies}
    payloads = {r.payload_P.data_ptr() for r in replies}
    return len(same) == 1 and len(payloads) == 1 and first.own and first.coded is None
