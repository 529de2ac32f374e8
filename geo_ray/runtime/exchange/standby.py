"""Exchange with an averager that can fail over: `StandbyNode` with sockets, threads and time.

One lock covers changes of the node and the order of its messages. A separate thread sends them,
since a full outbox must not delay an acknowledgement. A state snapshot travels as one
safetensors file, read with the size limits of a checkpoint.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from geo_ray.base.canonical import JSONObject, canonical_json
from geo_ray.base.errors import CheckpointCorruptError, FrameError, GeoRayError, InvariantError
from geo_ray.runtime.exchange.direct import Alarm, Answers, AveragerOutput, Routes, StageFactory
from geo_ray.runtime.exchange.upload_scheduling import PARTS, headers_of
from geo_ray.storage.parts import aligned, check_header, encode_header, header_bytes
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.averager import interval_of, open_requests
from geo_ray.training.command_log import (
    BeginCheckpoint,
    Begun,
    ChangeInterval,
    ChangeMembers,
    Leave,
    LogEntry,
    Op,
    Promote,
    Skip,
    StateSnapshot,
    Stop,
    TakeIn,
    TakeSum,
    Wake,
)
from geo_ray.training.failover import (
    AnswerOwn,
    AveragerAnswer,
    AveragerLost,
    AveragerRefusal,
    AveragerRequest,
    EntryDone,
    InstallSnapshot,
    LogAck,
    LogAppend,
    NewAverager,
    RefuseOwn,
    SendMessage,
    StandbyEffect,
    StandbyEvent,
    StandbyMessage,
    StandbyNode,
)
from geo_ray.training.membership import AveragerLeader, MemberChange
from geo_ray.training.messages import ReplyMessage, UpdateMessage, no_buffers
from geo_ray.training.replication import copied_update
from geo_ray.training.wire_format import (
    ERROR,
    REPLY,
    UPDATE,
    as_bytes,
    as_tensor,
    payload_bytes,
)
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.uploads import UploadRequest
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta, flag, number, texts
from geo_ray.transport.wire.frames import Buffer, view_of
from geo_ray.transport.wire.message import BACKGROUND, CONTROL, DATA, Message
from geo_ray.transport.wire.record import CountList, Field, Known, OneOf, Record

_CONTROL: Final = "control"


def snapshot_bytes(snapshot: StateSnapshot) -> memoryview:
    """Serialize the plain values, then the tensors, those with the largest elements first."""
    tensors = aligned(snapshot.tensors)
    header = encode_header(
        tensors, {_CONTROL: canonical_json(cast(JSONObject, snapshot.control)).decode()}
    )
    found = bytearray(len(header) + sum(t.nbytes for t in tensors.values()))
    found[: len(header)] = header
    place = len(header)
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found[place : place + tensor.nbytes] = flat.numpy().data
        place += tensor.nbytes
    return memoryview(found)


def read_snapshot(payload: Buffer) -> StateSnapshot:
    """The inverse of `snapshot_bytes`; the tensors belong to the caller.

    Raises:
        FrameError: the payload is invalid.
    """
    view = memoryview(payload).cast("B")
    try:
        metadata, entries = check_header(view, view.nbytes)
        control = json.loads(metadata[_CONTROL])
    except (CheckpointCorruptError, ValueError, KeyError, RecursionError) as error:
        raise FrameError(f"a snapshot of the averager cannot be read: {error}") from error
    if not isinstance(control, dict):
        raise FrameError("a snapshot of the averager has no plain values")
    start, tensors = header_bytes(bytes(view[:8])), {}
    for entry in entries:
        own = bytearray(view[start + entry.start : start + entry.stop])
        tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)
        if own:
            flat = torch.frombuffer(own, dtype=entry.dtype)
            tensors[entry.name] = flat.reshape(entry.shape)
    return StateSnapshot(tensors, control)


Finder = Callable[[int, int], UpdateMessage | None]
"""``find(attempt, seq)``: returns an update that this region still holds."""


@dataclass(frozen=True, slots=True)
class _TakeInYours:
    """An entry for an update of the standby's own region, without the payload."""

    update: UpdateMessage


@dataclass(frozen=True, slots=True)
class _TakeParts:
    """An entry for a sum, whose total is the message's payload."""

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
    MemberChange,
    Field("joins", _Names("joins")),
    Field("leaves", _Names("leaves")),
    "preferred_donor",
)
_OPS: Final = OneOf[Any](
    "what",
    {
        "yours": Record(_TakeInYours, Field("update", UPDATE)),
        "update": _TAKE_IN,
        "sum": Record(_TakeParts, Field("parts", PARTS)),
        "skip": Record(Skip, "region attempt seq"),
        "stop": Record(Stop),
        "checkpoint": Record(BeginCheckpoint, "id halt"),
        "leave": Record(Leave, "region"),
        "members": Record(ChangeMembers, Field("change", _CHANGE)),
        "begun": Record(Begun, "region"),
        "interval": Record(ChangeInterval, "steps"),
        "wake": Record(Wake),
        "promote": Record(Promote),
    },
)
_ENTRY: Final = Field(
    "entry", Record(LogEntry, "number", Field("op", _OPS), Field("now_s", number, default=0.0))
)
_SKIP: Final = Field("op", Record(Skip, Known("region"), "attempt seq"))
_TERM: Final = "term=leader_term"
_SHAPES: Final = {
    "update": _Shape(TakeIn, Record(AveragerRequest, Field("op", _TAKE_IN), "again"), "update"),
    "skip": _Shape(Skip, Record(AveragerRequest, _SKIP, again=True)),
    "reply": _Shape(
        AveragerAnswer,
        Record(AveragerAnswer, _TERM, "number stable", Field("reply", REPLY)),
        "reply",
    ),
    "refused": _Shape(AveragerRefusal, Record(AveragerRefusal, _TERM, "seq", ERROR)),
    "log": _Shape(LogAppend, Record(LogAppend, _TERM, _ENTRY), "standby", None),
    "install_snapshot": _Shape(
        InstallSnapshot,
        Record(InstallSnapshot, _TERM, "number", Known("snapshot")),
        "standby",
        BACKGROUND,
    ),
    "log_ack": _Shape(
        LogAck,
        Record(LogAck, _TERM, "number", Field("follows", flag, default=True)),
        "standby",
        CONTROL,
    ),
    "averager_lost": _Shape(AveragerLost, Record(AveragerLost, _TERM, "lost"), lane=CONTROL),
    # In the same lane as the answers that follow it, so that it arrives first.
    "new_averager": _Shape(
        NewAverager,
        Record(NewAverager, _TERM, Field("last", CountList("last_attempt", "last_seq"))),
    ),
}
_KIND_OF: Final = {shape.of: kind for kind, shape in _SHAPES.items()}
KINDS: Final = tuple(_SHAPES)


def standby_message(to: str, content: StandbyMessage, log_lane: int, *, bare: bool) -> Message:
    """Build a message for region ``to``.

    Args:
        to: the receiver.
        content: the content.
        log_lane: lane of entries that the standby must have before they count. The rest of the log,
            and the snapshot before it, use the last lane; all other payloads use the data lane.
        bare: whether an entry for the standby's own update may omit the payload, because the
            standby certainly still holds it.
    """
    kind = _KIND_OF[type(content.op if isinstance(content, AveragerRequest) else content)]
    shape = _SHAPES[kind]
    payload: Buffer = b""
    match content:
        case AveragerRequest(TakeIn(update)):
            payload = payload_bytes(update)
        case AveragerAnswer(reply=reply):
            payload = payload_bytes(reply)
        case LogAppend(entry=entry, counts=counts):
            op, payload = _outgoing(entry.op, to if bare and counts else None)
            content = replace(content, entry=replace(entry, op=op))
            log_lane = log_lane if counts else BACKGROUND
        case InstallSnapshot(snapshot=snapshot):
            payload = snapshot_bytes(snapshot)
    lane = log_lane if shape.lane is None else shape.lane
    return Message(kind, shape.record.write(content), payload, shape.traffic, lane)


def read_standby(peer: str, message: Message, find: Finder) -> StandbyMessage:
    """The inverse of `standby_message`.

    Args:
        peer: the sender.
        message: one of `KINDS`.
        find: finds updates of this region that an entry refers to.

    Raises:
        FrameError: a field is missing, or has an invalid type or range.
    """
    shape = _SHAPES.get(message.kind)
    if shape is None:
        raise FrameError(f"'{message.kind}' is not a message of an averager with a standby")
    payload = view_of(message.payload)
    snapshot = read_snapshot(payload) if message.kind == "install_snapshot" else None
    found: StandbyMessage = shape.record.read(message.meta, payload, region=peer, snapshot=snapshot)
    if isinstance(found, LogAppend):
        op = _incoming(found.entry.op, payload, find)
        found = replace(found, entry=replace(found.entry, op=op))
    return found


def _outgoing(op: Op, to: str | None) -> tuple[Any, Buffer]:
    """Return the log message's fields for an entry, and its payload."""
    match op:
        case TakeIn(update) if update.region == to:
            bare = replace(update, payload_P=torch.empty(0), coded=None)
            return _TakeInYours(replace(bare, buffers_E=no_buffers())), b""
        case TakeIn(update):
            return op, payload_bytes(update)
        case TakeSum(parts, total_P):
            asks = [UploadRequest(p.region, p.attempt, p.seq, 0, p.base_version) for p in parts]
            return _TakeParts(tuple(asks)), as_bytes(total_P)
    return op, b""


def _incoming(op: Any, payload: memoryview, find: Finder) -> Op:
    """The inverse of `_outgoing`."""
    match op:
        case _TakeInYours(update):
            found = find(update.attempt, update.seq)
            if found is None:
                name = f"update {update.seq}"
                raise FrameError(f"an entry refers to {name}, which is no longer here")
            return TakeIn(found)
        case _TakeParts(parts):
            return TakeSum(headers_of(parts), as_tensor(payload))
    entry: Op = op
    return entry


log = logging.getLogger(__name__)

_LONGEST_TICK_S: Final = 0.1
_COMMIT_S: Final = 30.0  # for a checkpoint to begin


class StandbyPath:
    """The exchange transport with failover; see the module and `UpdatePath`.

    Args:
        node: the state machine.
        endpoint: this region's endpoint.
        output: handles the averager's outputs besides answers.
        answers: where the own region's requests wait.
        event_buffer: receives events for the controller.
        stage: builds the stage of this path.
    """

    def __init__(
        self,
        node: StandbyNode,
        endpoint: Endpoint,
        output: AveragerOutput,
        answers: Answers,
        event_buffer: EventBuffer,
        stage: StageFactory,
    ) -> None:
        self._node = node
        self._endpoint = endpoint
        self._output = output
        self._answers = answers
        self._event_buffer = event_buffer
        self._log_lane = DATA if node.bound == 0 else BACKGROUND  # with 0 all else waits for it
        self._bare = node.bound == 0 or node.caller.keeps
        self._alarm = Alarm(partial(self._offer, Wake()))
        self._changed = threading.Condition(threading.RLock())
        self._begun: dict[int, bool] = {}
        self._closed = False
        self._outgoing: SimpleQueue[tuple[str, Message] | None] = SimpleQueue()
        self.stage = stage(self)
        self._threads = [
            threading.Thread(target=self._send_all, name="standby-send", daemon=True),
            threading.Thread(target=self._watch, name="standby-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def leader(self) -> AveragerLeader:
        """See `UpdatePath`."""
        return self._node.leader

    # ------------------------------------------------------------------ for the own region

    def exchange(self, update: UpdateMessage) -> ReplyMessage:
        """See `UpdatePath`; the region may reuse its buffer once it is answered."""
        # A copy: a message to a partitioned leader may leave long after another leader's answer.
        retained = copied_update(update)
        with self._changed:
            asked = [AveragerRequest(op) for op in self._node.caller.submit(retained)]
            is_leader = self._node.primary is not None
            if not is_leader:
                self._execute([SendMessage(self.leader.region, request) for request in asked])
        if is_leader:
            for request in asked:
                self._arrived(self._node.region, request)
        return self._answers.wait(update.seq, lambda: self.leader.region)

    # ------------------------------------------------------------------ for the controller

    def request_stop(self) -> None:
        """See `UpdatePath`."""
        self._offer(Stop())

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """See `UpdatePath`."""
        deadline_s = time.monotonic() + _COMMIT_S
        with self._changed:
            self._offer(BeginCheckpoint(checkpoint, halt))
            while checkpoint not in self._begun and not self._closed:
                left_s = deadline_s - time.monotonic()
                if self._node.primary is None or left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return self._begun.pop(checkpoint, False)

    def report_dead(self, region: str, *, comes_back: bool = False) -> None:
        """See `UpdatePath`."""
        with self._changed:
            self._execute(self._node.on_report_dead(region, comes_back=comes_back))

    def submit_command(self, op: ChangeMembers | Begun | ChangeInterval) -> None:
        """See `UpdatePath`; executed once the standby has it."""
        with self._changed:
            averager = self._node.averager
            if averager is None:
                raise InvariantError(f"the averager is not in '{self._node.region}'")
            if isinstance(op, ChangeMembers):
                op.change.after(averager.view)
            self._offer(op)

    def status(self) -> dict[str, Any]:
        """See `UpdatePath`; includes the averager's lead over its standby, and the standby.

        Only the standby itself knows for certain that it can take over from the leader it follows,
        so it reports this itself.
        """
        with self._changed:
            node, primary = self._node, self._node.primary
            if primary is None:
                return {"version": None, "is_standby": node.is_standby}
            averager = primary.averager
            return {
                "version": averager.state.version,
                "ahead": primary.ahead,
                "open": open_requests(averager),
                "view": averager.view,
                "interval": interval_of(averager.state),
                "is_standby": False,
            }

    def close(self) -> None:
        """See `UpdatePath`."""
        self._answers.close()
        self._alarm.set(None)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._outgoing.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    # ------------------------------------------------------------------ other regions

    def routes(self) -> Routes:
        """See `UpdatePath`."""
        return dict.fromkeys(KINDS, self._on_message)

    # ------------------------------------------------------------------ for the stage

    def send(self, to: str, message: Message) -> None:
        """See `StagedPath`; messages leave in the order of the calls."""
        self._outgoing.put((to, message))

    def give(self, reply: ReplyMessage) -> None:
        """See `StagedPath`, as for all following methods."""
        self._answers.give(self.stage.answered(reply))

    def version(self) -> int:
        """Number of commits, including those that wait for the standby."""
        with self._changed:
            primary = self._node.primary
            return 0 if primary is None else primary.averager.state.version + primary.waiting

    def skip(self, region: str, attempt: int, seq: int) -> None:
        """Answer an update without applying it."""
        self._offer(Skip(region, attempt, seq))

    def take_sum(
        self, parts: tuple[UpdateMessage, ...], total_P: Tensor
    ) -> list[ReplyMessage] | None:
        """Return None: the parts of a sum must be sent individually."""
        return None

    def deliver(self, reply: ReplyMessage) -> None:
        """Do nothing: answers are messages of the node."""

    def refuse(self, update: UpdateMessage, error: GeoRayError) -> None:
        """Do nothing: refusals are messages of the node."""

    def fail(self, error: Exception, doing: str) -> None:
        """Record an error in a thread of the stage."""
        self._output.failure.note(error, doing)

    # ------------------------------------------------------------------ messages and effects

    def _on_message(self, peer: str, message: Message) -> None:
        with self._changed:
            term = message.meta.get("leader_term")
            if message.kind == "log" and isinstance(term, int) and term < self.leader.term:
                return  # from a former leader; what it refers to may be gone as well
            try:
                parsed = read_standby(peer, message, self._node.caller.find)
            except FrameError as error:
                if message.kind != "update":
                    raise
                # A peer that violates the protocol is disconnected; others are unaffected.
                log.error("an update of region '%s' cannot be read: %s", peer, error.message)
                seq = fields.count(message.meta, "seq")
                self._send(peer, AveragerRefusal(self.leader.term, seq, error))
                return
        if isinstance(parsed, AveragerRequest):
            self._arrived(peer, parsed)
            return
        with self._changed:
            self._execute(self._node.on_message(peer, parsed))

    def _arrived(self, peer: str, request: AveragerRequest) -> None:
        """Handle a request for the averager here; the stage decides when an update is applied."""

        def take(_: UpdateMessage) -> None:
            with self._changed:
                self._execute(self._node.on_message(peer, request))

        if not isinstance(request.op, TakeIn):
            with self._changed:
                self._execute(self._node.on_message(peer, request))
        elif request.op.update.region == peer:
            self.stage.arrive(request.op.update, take, again=request.again)

    def _offer(self, op: Op) -> None:
        with self._changed:
            self._execute(self._node.offer(op, time.monotonic()))

    def _execute(self, effects: Sequence[StandbyEffect]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(to, message):
                    self._send(to, message)
                case AnswerOwn(reply):
                    self.give(reply)
                case RefuseOwn(seq, error):
                    self._answers.fail(seq, error)
                case EntryDone(committed):
                    if isinstance(committed.op, BeginCheckpoint):
                        self._begun[committed.op.id] = committed.outcome.done
                case StandbyEvent():
                    self._note(effect)
        if self._node.averager is not None:
            self._output.collect(self._node.averager)
            self._alarm.set(self._node.wakes_s)
        elif self._node.replica is not None and self._node.replica.averager.failure is not None:
            self._output.failure.note(self._node.replica.averager.failure, "the standby")
        self._changed.notify_all()

    def _send(self, to: str, parsed: StandbyMessage) -> None:
        message = standby_message(to, parsed, self._log_lane, bare=self._bare)
        if isinstance(parsed, AveragerRequest) and isinstance(parsed.op, TakeIn):

            def ship(_: UpdateMessage) -> None:
                self.send(to, message)

            self.stage.depart(parsed.op.update, ship, again=parsed.again)
        else:
            self.send(to, message)

    def _note(self, event: StandbyEvent) -> None:
        if event.what == "failed_over":
            log.warning("region '%s' hosts the averager now", event.region)
            self._event_buffer.add("averager_moved", term=event.term)
        elif event.what == "left":
            log.warning("continuing without region '%s': its data are missing", event.region)
            self._event_buffer.add("region_left", name=event.region)
        elif event.what == "promoted":
            log.info("region '%s' is the averager's standby now", event.region)
            self._event_buffer.add("standby_ready", name=event.region, term=event.term)
            return
        self.stage.on_moved()

    # ------------------------------------------------------------------ threads

    def _send_all(self) -> None:
        while (item := self._outgoing.get()) is not None:
            to, message = item
            try:
                self._endpoint.send(to, message)
            except Exception as error:
                if self._closed:
                    continue
                if not isinstance(error, GeoRayError):
                    self.fail(error, f"'{message.kind}' for region '{to}'")
                    continue
                log.warning("'%s' for region '%s' was not sent: %s", message.kind, to, error)

    def _watch(self) -> None:
        tick_s = min(_LONGEST_TICK_S, self._node.watch.failover_s / 10)
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, tick_s):
                    return
                try:
                    seen = {p: s for p, s in self._endpoint.stats().items() if s["connected"]}
                    rtts_s = {p: s["rtt_min_s"] for p, s in seen.items()}
                    known_s = {p: rtt_s for p, rtt_s in rtts_s.items() if rtt_s is not None}
                    self._execute(self._node.tick(time.monotonic(), seen, known_s))
                except Exception as error:
                    self.fail(error, "the watch over the averager")
                    return
