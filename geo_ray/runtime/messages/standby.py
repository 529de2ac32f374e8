"""What the bridges of an averager that may move send each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

from geo_ray.errors import FrameError
from geo_ray.runtime.messages.exchange import (
    ERROR,
    REPLY,
    UPDATE,
    as_bytes,
    as_tensor,
    payload_bytes,
)
from geo_ray.runtime.messages.transfers import PARTS, headers_of
from geo_ray.runtime.messages.twin_payload import read_twin, twin_bytes
from geo_ray.strategies.base import Update, nothing_carried
from geo_ray.training.averager.log import (
    Appoint,
    BeginCheckpoint,
    Begun,
    ChangeMembers,
    ChangePace,
    Leave,
    LogEntry,
    Op,
    Skip,
    Stop,
    TakeIn,
    TakeSum,
    Wake,
)
from geo_ray.training.averager.standby_messages import (
    AveragerAnswer,
    AveragerLost,
    AveragerRefusal,
    AveragerRequest,
    LogAck,
    LogAppend,
    LogTwin,
    NewAverager,
    StandbyMessage,
)
from geo_ray.training.membership.border import MemberChange
from geo_ray.transfers.requests import UploadRequest
from geo_ray.transport.wire.fields import flag, number, texts
from geo_ray.transport.wire.frames import Buffer, view_of
from geo_ray.transport.wire.message import BACKGROUND, CONTROL, DATA, Message
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.record import CountList, Field, Known, OneOf, Record

Finder = Callable[[int, int], Update | None]
"""``find(epoch, seq)``: an update of this region that is still in its hands."""


@dataclass(frozen=True, slots=True)
class _TakeInYours:
    """An entry about an update of the standby's own region: without the payload."""

    update: Update


@dataclass(frozen=True, slots=True)
class _TakeParts:
    """An entry about a sum, whose total is the message's payload."""

    parts: tuple[UploadRequest, ...]


class _Shape(NamedTuple):
    of: type  # of the message, or of the request in it
    record: Record[Any]
    traffic: str = "control"
    lane: int | None = DATA  # None: the log's


class _Names:
    """The codec of a tuple of names."""

    def __init__(self, name: str) -> None:
        self.names: tuple[str, ...] = (name,)

    def write(self, value: Sequence[str]) -> Meta:
        """See `ValueCodec`."""
        return {self.names[0]: list(value)}

    def read(self, meta: Meta, payload: Buffer | None = None, **known: Any) -> tuple[str, ...]:
        """See `ValueCodec`."""
        return tuple(texts(meta, self.names[0]))


_TAKE_IN: Final = Record(TakeIn, Field("update", UPDATE))
_CHANGE: Final = Record(
    MemberChange, Field("joins", _Names("joins")), Field("leaves", _Names("leaves")), "donor"
)
_OPS: Final = OneOf[Any](
    "what",
    {
        "yours": Record(_TakeInYours, Field("update", UPDATE)),
        "update": _TAKE_IN,
        "sum": Record(_TakeParts, Field("parts", PARTS)),
        "skip": Record(Skip, "region epoch seq"),
        "stop": Record(Stop),
        "checkpoint": Record(BeginCheckpoint, "id halt"),
        "leave": Record(Leave, "region"),
        "members": Record(ChangeMembers, Field("change", _CHANGE)),
        "begun": Record(Begun, "region"),
        "pace": Record(ChangePace, "steps"),
        "wake": Record(Wake),
        "appoint": Record(Appoint),
    },
)
_ENTRY: Final = Field(
    "entry", Record(LogEntry, "number", Field("op", _OPS), Field("now_s", number, default=0.0))
)
_SKIP: Final = Field("op", Record(Skip, Known("region"), "epoch seq"))
_EPOCH: Final = "epoch=hub_epoch"
_SHAPES: Final = {
    "update": _Shape(TakeIn, Record(AveragerRequest, Field("op", _TAKE_IN), "again"), "update"),
    "skip": _Shape(Skip, Record(AveragerRequest, _SKIP, again=True)),
    "reply": _Shape(
        AveragerAnswer,
        Record(AveragerAnswer, _EPOCH, "number stable", Field("reply", REPLY)),
        "reply",
    ),
    "refused": _Shape(AveragerRefusal, Record(AveragerRefusal, _EPOCH, "seq", ERROR)),
    "log": _Shape(LogAppend, Record(LogAppend, _EPOCH, _ENTRY), "standby", None),
    "log_twin": _Shape(
        LogTwin, Record(LogTwin, _EPOCH, "number", Known("twin")), "standby", BACKGROUND
    ),
    "log_ack": _Shape(
        LogAck,
        Record(LogAck, _EPOCH, "number", Field("follows", flag, default=True)),
        "standby",
        CONTROL,
    ),
    "hub_lost": _Shape(AveragerLost, Record(AveragerLost, _EPOCH, "lost"), lane=CONTROL),
    # In one lane with the answers that follow, or they would come before it.
    "new_hub": _Shape(
        NewAverager,
        Record(NewAverager, _EPOCH, Field("last", CountList("last_epoch", "last_seq"))),
    ),
}
_KIND_OF: Final = {shape.of: kind for kind, shape in _SHAPES.items()}
KINDS: Final = tuple(_SHAPES)


def standby_message(to: str, told: StandbyMessage, log_lane: int, *, bare: bool) -> Message:
    """A message for region ``to``.

    Args:
        to: who it is for.
        told: what to send.
        log_lane: lane of what the standby must have before it counts; of the rest of the log, and
            of the copy before it, it is the last one, and all other payloads have that of data.
        bare: whether such an entry about the standby's own update may go without the payload,
            because it is certain to be in its hands still.
    """
    kind = _KIND_OF[type(told.op if isinstance(told, AveragerRequest) else told)]
    shape = _SHAPES[kind]
    payload: Buffer = b""
    match told:
        case AveragerRequest(TakeIn(update)):
            payload = payload_bytes(update)
        case AveragerAnswer(reply=reply):
            payload = payload_bytes(reply)
        case LogAppend(entry=entry, counts=counts):
            op, payload = _outgoing(entry.op, to if bare and counts else None)
            told = replace(told, entry=replace(entry, op=op))
            log_lane = log_lane if counts else BACKGROUND
        case LogTwin(twin=twin):
            payload = twin_bytes(twin)
    lane = log_lane if shape.lane is None else shape.lane
    return Message(kind, shape.record.write(told), payload, shape.traffic, lane)


def read_standby(peer: str, message: Message, find: Finder) -> StandbyMessage:
    """The inverse of `standby_message`.

    Args:
        peer: who sent it.
        message: one of `KINDS`.
        find: finds updates of this region that an entry is about.

    Raises:
        FrameError: if a field is missing or has the wrong type or range.
    """
    shape = _SHAPES.get(message.kind)
    if shape is None:
        raise FrameError(f"'{message.kind}' is no message of an averager that may move")
    payload = view_of(message.payload)
    twin = read_twin(payload) if message.kind == "log_twin" else None
    found: StandbyMessage = shape.record.read(message.meta, payload, region=peer, twin=twin)
    if isinstance(found, LogAppend):
        op = _incoming(found.entry.op, payload, find)
        found = replace(found, entry=replace(found.entry, op=op))
    return found


def _outgoing(op: Op, to: str | None) -> tuple[Any, Buffer]:
    """What the log's message has of an entry, and its payload."""
    match op:
        case TakeIn(update) if update.region == to:
            bare = replace(update, payload_P=torch.empty(0), coded=None)
            return _TakeInYours(replace(bare, carried_E=nothing_carried())), b""
        case TakeIn(update):
            return op, payload_bytes(update)
        case TakeSum(parts, total_P):
            asks = [UploadRequest(p.region, p.epoch, p.seq, 0, p.base_version) for p in parts]
            return _TakeParts(tuple(asks)), as_bytes(total_P)
    return op, b""


def _incoming(op: Any, payload: memoryview, find: Finder) -> Op:
    """The inverse of `_outgoing`."""
    match op:
        case _TakeInYours(update):
            found = find(update.epoch, update.seq)
            if found is None:
                name = f"update {update.seq}"
                raise FrameError(f"an entry is about {name}, which is not here any more")
            return TakeIn(found)
        case _TakeParts(parts):
            return TakeSum(headers_of(parts), as_tensor(payload))
    entry: Op = op
    return entry
