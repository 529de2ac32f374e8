"""The words of an averager that may move as messages; what comes in is checked before use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from geo_ray.errors import FrameError
from geo_ray.runtime.messages import fields
from geo_ray.runtime.messages.exchange import (
    as_bytes,
    as_tensor,
    payload_bytes,
    read_refusal,
    read_reply,
    read_update,
    refusal_meta,
    reply_meta,
    update_meta,
)
from geo_ray.runtime.messages.transfers import headers_of, parts_meta, read_parts
from geo_ray.strategies.base import Update
from geo_ray.training.averager.log import (
    BeginCheckpoint,
    LogEntry,
    Op,
    Skip,
    Stop,
    TakeIn,
    TakeSum,
)
from geo_ray.training.averager.standby import (
    AveragerAnswer,
    AveragerLost,
    AveragerRefusal,
    AveragerRequest,
    LogAck,
    LogAppend,
    NewAverager,
    StandbyMessage,
)
from geo_ray.transfers.requests import UploadRequest as Transfer
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import CONTROL, DATA, Message
from geo_ray.transport.wire.meta import Meta

KINDS = ("update", "skip", "reply", "refused", "log", "log_ack", "hub_lost", "new_hub")

Finder = Callable[[int, int], Update | None]
"""``find(epoch, seq)``: an update of this region that is still in its hands."""


def word_message(to: str, word: StandbyMessage, log_lane: int, *, bare: bool) -> Message:
    """A word for region ``to`` as a message.

    Args:
        to: who it is for.
        word: what to say.
        log_lane: lane of the log; all other payloads have that of data.
        bare: whether an entry about the standby's own update may go without the payload, because
            it is certain to be in its hands still.
    """
    match word:
        case AveragerRequest(TakeIn(update), again):
            meta = {**update_meta(update), "again": again}
            return Message("update", meta, payload_bytes(update), "update")
        case AveragerRequest(Skip(_, epoch, seq), _):
            return Message("skip", {"epoch": epoch, "seq": seq}, b"", "control")
        case AveragerAnswer(epoch, reply, number, stable):
            meta = {"hub_epoch": epoch, "number": number, "stable": stable, **reply_meta(reply)}
            return Message("reply", meta, payload_bytes(reply), "reply")
        case AveragerRefusal(epoch, seq, error):
            meta = {"hub_epoch": epoch, **refusal_meta(seq, error)}
            return Message("refused", meta, b"", "control")
        case LogAppend(epoch, entry):
            head: Meta = {"hub_epoch": epoch, "number": entry.number}
            what, payload = _entry_meta(to if bare else None, entry.op)
            return Message("log", head | what, payload, "standby", log_lane)
        case LogAck(epoch, number):
            meta = {"hub_epoch": epoch, "number": number}
            return Message("log_ack", meta, b"", "standby", CONTROL)
        case AveragerLost(epoch, lost):
            meta = {"hub_epoch": epoch, "lost": lost}
            return Message("hub_lost", meta, b"", "control", CONTROL)
        case NewAverager(epoch, last):
            # In one lane with the answers that follow, or they would come before it.
            meta = {"hub_epoch": epoch, "last_epoch": last[0], "last_seq": last[1]}
            return Message("new_hub", meta, b"", "control", DATA)
    raise FrameError(f"there is no message for {word!r:.100}")


def read_word(peer: str, message: Message, find: Finder) -> StandbyMessage:
    """The inverse of `word_message`.

    Args:
        peer: who sent it.
        message: one of `KINDS`.
        find: finds updates of this region that an entry is about.

    Raises:
        FrameError: if a field is missing or has the wrong type or range.
    """
    meta, payload = message.meta, view_of(message.payload)
    match message.kind:
        case "update":
            return AveragerRequest(TakeIn(read_update(meta, payload)), fields.flag(meta, "again"))
        case "skip":
            seq = fields.count(meta, "seq")
            return AveragerRequest(Skip(peer, fields.count(meta, "epoch"), seq), again=True)
        case "reply":
            number, stable = fields.count(meta, "number"), fields.count(meta, "stable")
            return AveragerAnswer(_epoch(meta), read_reply(meta, payload), number, stable)
        case "refused":
            return AveragerRefusal(_epoch(meta), *read_refusal(meta))
        case "log":
            entry = LogEntry(fields.count(meta, "number"), _read_entry(meta, payload, find))
            return LogAppend(_epoch(meta), entry)
        case "log_ack":
            return LogAck(_epoch(meta), fields.count(meta, "number"))
        case "hub_lost":
            return AveragerLost(_epoch(meta), fields.flag(meta, "lost"))
        case "new_hub":
            last = fields.count(meta, "last_epoch"), fields.count(meta, "last_seq")
            return NewAverager(_epoch(meta), last)
    raise FrameError(f"'{message.kind}' is no word of an averager that may move")


def _epoch(meta: Meta) -> int:
    return fields.count(meta, "hub_epoch")


def _entry_meta(to: str | None, op: Op) -> tuple[Meta, memoryview | bytes]:
    match op:
        case TakeIn(update) if update.region == to:
            bare = replace(update, payload_P=torch.empty(0), coded=None)
            return {"what": "yours", **update_meta(bare)}, b""
        case TakeIn(update):
            return {"what": "update", **update_meta(update)}, payload_bytes(update)
        case TakeSum(parts, total_P):
            asks = [Transfer(p.region, p.epoch, p.seq, 0, p.base_version) for p in parts]
            return {"what": "sum", **parts_meta(asks)}, as_bytes(total_P)
        case Skip(region, epoch, seq):
            return {"what": "skip", "region": region, "epoch": epoch, "seq": seq}, b""
        case Stop():
            return {"what": "stop"}, b""
        case BeginCheckpoint(number, halt):
            return {"what": "checkpoint", "id": number, "halt": halt}, b""
    raise FrameError(f"there is no entry for {op!r:.100}")


def _read_entry(meta: Meta, payload: memoryview | bytes, find: Finder) -> Op:
    match fields.text(meta, "what"):
        case "update":
            return TakeIn(read_update(meta, payload))
        case "yours":
            epoch, seq = fields.count(meta, "epoch"), fields.count(meta, "seq")
            update = find(epoch, seq)
            if update is None:
                raise FrameError(f"an entry is about update {seq}, which is not here any more")
            return TakeIn(update)
        case "sum":
            return TakeSum(headers_of(read_parts(meta)), as_tensor(payload))
        case "skip":
            names = fields.count(meta, "epoch"), fields.count(meta, "seq")
            return Skip(fields.text(meta, "region"), *names)
        case "stop":
            return Stop()
        case "checkpoint":
            return BeginCheckpoint(fields.count(meta, "id"), fields.flag(meta, "halt"))
        case what:
            raise FrameError(f"a log cannot have an entry '{what}'")
