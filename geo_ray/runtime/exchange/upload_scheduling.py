"""Scheduled uploads: regions ask before they send, and sum updates for each other.

    region --ask--> upload coordinator     small, or no contention: the update follows at once
           <-grant-                        otherwise it waits for this
           <-gather- and --part--> helper --ask_sum, sum--> upload coordinator
           <--bundled-- helper <----bundle-----

Every bridge has an upload coordinator; requests go to the one in the averager's region. One lock
covers a decision and its commit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from geo_ray.base.errors import GeoRayError, LinkDownError
from geo_ray.runtime.exchange.direct import Pass, Route, Routes, StagedPath, UpdateStage
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.wire_format import (
    UPDATE,
    as_bytes,
    as_tensor,
    payload_bytes,
    read_reply,
    reply_meta,
)
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.uploads import (
    Decision,
    Dissolve,
    Drop,
    Gather,
    Grant,
    HelperScheduler,
    Take,
    TransfersConfig,
    UploadRequest,
)
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Kind, Meta, below, count, flag, number, optional_count
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import CONTROL, DATA, Message
from geo_ray.transport.wire.record import Field, Known, Record, Rows

MOST_PARTS: Final = 1024
MOST_BYTES: Final = 1 << 40


class Asked(NamedTuple):
    """A region's request; ``sent`` says that the update has been sent already."""

    ask: UploadRequest
    sent: bool


class Summed(NamedTuple):
    """A helper's sum: its number, and its updates in order."""

    group: int
    parts: tuple[UploadRequest, ...]


class GroupPart(NamedTuple):
    """An update for a helper to sum, with the number of the sum."""

    group: int
    update: UpdateMessage


_SIZE: Final = Field("size_bytes", below(MOST_BYTES + 1))


def _possible_norm(norm: float) -> float:
    """Return an invalid norm, such as NaN, as 0."""
    return float(norm) if norm >= 0 else 0.0


_NORM: Final = Kind("a number", number.fits, _possible_norm)
_REQUEST: Final = Record(
    UploadRequest,
    Known("region"),
    "attempt seq",
    _SIZE,
    "base_version",
    Field("norm", _NORM),
    "final again",
)
_PART: Final = Record(
    UploadRequest,
    "region=regions attempt=attempts seq=seqs base_version=base_versions",
    Known("size_bytes"),
)
_COMMON: Final = ("version", "stop", "checkpoint", "halt", "payload_P")
_BUNDLED: Final = Record(
    ReplyMessage, "to=tos seq=seqs", *map(Known, _COMMON), num_samples=0, own=True
)
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
    """Encode a region's request; ``sent`` says that the update has been sent already."""
    return ASK.write(Asked(ask, sent))


def read_ask(peer: str, meta: Meta) -> Asked:
    """The inverse of `ask_meta`; a region asks for itself only."""
    return ASK.read(meta, region=peer)


def ask_of(update: UpdateMessage, *, norm: float = 0.0, again: bool = False) -> UploadRequest:
    """Return the request for an update."""
    return UploadRequest(
        update.region,
        update.attempt,
        update.seq,
        update.size_bytes,
        update.base_version,
        norm,
        update.final,
        again,
    )


def headers_of(parts: Sequence[UploadRequest]) -> tuple[UpdateMessage, ...]:
    """Return the updates of a sum without their payloads."""
    empty = torch.empty(0)
    return tuple(UpdateMessage(a.region, a.attempt, a.seq, a.base_version, 0, empty) for a in parts)


def read_bundle(meta: Meta, payload_P: Tensor) -> tuple[ReplyMessage, ...]:
    """Return the answers of `bundle_meta`, which share one payload."""
    return BUNDLE.read(meta, payload_P=payload_P)


def can_bundle(replies: Sequence[ReplyMessage]) -> bool:
    """Return whether these differ only in their receivers."""
    first = replies[0]
    same = {(r.version, r.stop, r.checkpoint, r.halt, r.own, r.final) for r in replies}
    payloads = {r.payload_P.data_ptr() for r in replies}
    return len(same) == 1 and len(payloads) == 1 and first.own and first.coded is None


log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0  # between measurements of round trip times
_SHORTEST_S: Final = 0.001


@dataclass(slots=True)
class _Here:
    """An arrived update that waits to be applied, or a sum with its helper."""

    update: UpdateMessage | None = None
    take: Pass | None = None
    total_P: Tensor | None = None
    helper: str = ""


class UploadCoordinator:
    """Runs the scheduler of uploads to the averager and executes its decisions.

    Everything that the averager applies passes here, in the order of the decisions: one lock covers
    a decision and the commit that follows from it.

    Args:
        config: how transfers take turns.
        path: the path to the averager, and at the leader the averager.
        endpoint: provides the round trip times to other regions.
    """

    def __init__(
        self,
        config: TransfersConfig,
        path: StagedPath,
        endpoint: Endpoint,
    ) -> None:
        self._first_leader = path.leader.region
        self._path = path
        self._endpoint = endpoint
        self._looked_s = float("-inf")
        self._line = HelperScheduler(config, self._first_leader)
        self._here: dict[tuple[str, bool], _Here] = {}
        self._newest: dict[str, tuple[int, int]] = {}
        self._permissions: dict[str, bool] = {}
        self._changed = threading.Condition()  # guards all attributes; reentrant
        self._closed = False
        self._timer: threading.Thread | None = None

    def seed(self, mbps_by_region: Mapping[str, float]) -> None:
        """Set initial rates of paths to the averager, from other measurements."""
        with self._changed:
            self._line.line.rates.paths |= dict(mbps_by_region)

    def close(self) -> None:
        """Stop making decisions."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._timer is not None:
            self._timer.join(5.0)

    # ------------------------------------------------------------------ events

    def on_ask(self, peer: str, message: Message) -> None:
        """Handle a region's request to send, or its note that it has begun to."""
        ask, sent = read_ask(peer, message.meta)
        with self._changed:
            now_s = self._look()
            if (ask.attempt, ask.seq) <= self._newest.get(peer, (0, 0)) and not ask.again:
                return  # its update has overtaken it
            if sent:
                self._decide(self._line.began(now_s, ask))
            else:
                self._decide(self._line.ask(now_s, self._path.version(), ask))

    def on_ask_sum(self, peer: str, message: Message) -> None:
        """Handle a helper's report that it has all parts of a sum."""
        ask = self._read_sum(peer, message.meta)
        with self._changed:
            self._decide(self._line.ask(self._look(), self._path.version(), ask))

    def arrived(self, update: UpdateMessage, take: Pass, *, again: bool) -> None:
        """Handle an arrived update.

        Args:
            update: the update.
            take: commits it; called when it is due, if ever.
            again: an earlier leader of the averager had answered it.
        """
        ask = ask_of(update, again=again)
        with self._changed:
            if not again:
                self._newest[ask.region] = (ask.attempt, ask.seq)
            self._here[ask.key] = _Here(update, take)
            self._decide(self._line.arrived(self._look(), self._path.version(), ask))

    def on_sum(self, peer: str, message: Message) -> None:
        """Handle an arrived sum of updates."""
        ask = self._read_sum(peer, message.meta)
        total_P = as_tensor(view_of(message.payload))
        with self._changed:
            self._here[ask.key] = _Here(total_P=total_P, helper=peer)
            self._decide(self._line.arrived(self._look(), self._path.version(), ask))

    @staticmethod
    def _read_sum(peer: str, meta: Meta) -> UploadRequest:
        group, parts = SUM.read(meta)
        oldest = min(part.base_version for part in parts)
        return UploadRequest(peer, 0, group, parts[0].size_bytes, oldest, parts=parts)

    # ------------------------------------------------------------------ decisions

    def _decide(self, decisions: list[Decision]) -> None:
        todo = deque(decisions)
        while todo:
            decision = todo.popleft()
            match decision:
                case Take(ask):
                    todo.extend(self._take(ask))
                case Drop(ask):
                    self._here.pop(ask.key, None)
                    self._path.skip(ask.region, ask.attempt, ask.seq)
                    self._send_permission(ask.region)
                case Grant(ask):
                    kind = "grant_sum" if ask.parts else "grant"
                    self._send_control(ask.region, kind, {"seq": ask.seq})
                case Gather():
                    for ask in decision.asks:
                        self._send_control(ask.region, "gather", GATHER.write(decision))
                case Dissolve(group):
                    self._forget(group)
        self._start_timer()
        self._changed.notify_all()

    def _take(self, ask: UploadRequest) -> list[Decision]:
        here = self._here.pop(ask.key, None)
        if here is None:
            log.error("no update of region '%s' is waiting", ask.region)
            return []
        if here.total_P is not None:
            return self._take_sum(ask, here.total_P, here.helper)
        if here.update is not None and here.take is not None:
            here.take(here.update)
        self._send_permission(ask.region)
        return []

    def _take_sum(self, ask: UploadRequest, total_P: Tensor, helper: str) -> list[Decision]:
        group = ask.seq
        try:
            replies = self._path.take_sum(headers_of(ask.parts), total_P)
        except GeoRayError as error:  # its parts are then requested, and refused individually
            log.error("the sum %d of region '%s' was refused: %s", group, helper, error)
            replies = None
        if replies is None:
            return self._line.refuse(time.monotonic(), self._path.version(), group)
        self._line.committed(group)
        for part in ask.parts:
            self._newest[part.region] = (part.attempt, part.seq)
        if len(replies) > 1 and can_bundle(replies):
            payload = as_bytes(replies[0].payload_P)
            self._send_control(helper, "bundle", bundle_meta(replies), payload)
        else:
            for reply in replies:
                self._path.deliver(reply)
        for part in ask.parts:
            self._send_permission(part.region)
        return []

    def _forget(self, group: int) -> None:
        for key, here in list(self._here.items()):
            if here.helper and key[0] == f"{here.helper}/{group}":
                del self._here[key]

    def _send_permission(self, region: str) -> None:
        """Notify a region, if changed, whether it may send without waiting for its next grant."""
        is_open = self._line.is_quiet
        if region != self._first_leader and self._permissions.get(region, True) != is_open:
            self._permissions[region] = is_open
            self._send_control(region, "permission", {"open": is_open})

    def _send_control(
        self, region: str, kind: str, meta: Meta, payload: memoryview | None = None
    ) -> None:
        lane, traffic = (CONTROL, "control") if payload is None else (DATA, "reply")
        try:
            self._path.send(region, Message(kind, meta, payload or b"", traffic, lane))
        except LinkDownError as error:  # the region asks again, or is gone
            log.warning("%s for region '%s' was not sent: %s", kind, region, error)

    # ------------------------------------------------------------------ time

    def _look(self) -> float:
        """Return the time; update the round trip times periodically."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._line.line.rates.latency_s |= _rtts_s(self._endpoint)
        return now_s

    def _start_timer(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = threading.Thread(target=self._run, name="transfers", daemon=True)
            self._timer.start()

    def _run(self) -> None:
        try:
            self._keep_time()
        except Exception as error:
            self._path.fail(error, "the upload schedule")

    def _keep_time(self) -> None:
        with self._changed:
            while not self._closed:
                due_s = self._line.next_deadline_s()
                now_s = time.monotonic()
                if due_s is None or due_s > now_s:
                    self._changed.wait(None if due_s is None else max(_SHORTEST_S, due_s - now_s))
                    continue
                self._decide(self._line.tick(now_s, self._path.version()))
                self._changed.wait(_SHORTEST_S)


_MOST_GROUPS: Final = 8


@dataclass(slots=True)
class _Pending:
    """An update of the own region without an answer."""

    update: UpdateMessage
    ship: Pass
    sent: bool
    helper: str | None = None


@dataclass(slots=True)
class _Group:
    """A sum in progress at this region."""

    asks: tuple[UploadRequest, ...] = ()
    arrived: dict[str, UpdateMessage] = field(default_factory=dict)
    total_P: Tensor | None = None


class Transfers(UpdateStage):
    """The stage of one bridge; see the module.

    Args:
        region: this region.
        config: how transfers take turns.
        path: the path of this stage.
        endpoint: provides the round trip times to other regions.
    """

    def __init__(
        self,
        region: str,
        config: TransfersConfig,
        path: StagedPath,
        endpoint: Endpoint,
    ) -> None:
        self._region = region
        self._config = config
        self._path = path
        self.uploads = UploadCoordinator(config, path, endpoint)
        self._lock = threading.Lock()
        self._open = True
        self._pending: dict[int, _Pending] = {}
        self._groups: dict[int, _Group] = {}

    def routes(self) -> Routes:
        """See `UpdateStage`."""
        return {
            "ask": self.uploads.on_ask,
            "ask_sum": self.uploads.on_ask_sum,
            "sum": self.uploads.on_sum,
            "grant": self._from_leader(self._on_grant),
            "permission": self._from_leader(self._on_permission),
            "gather": self._from_leader(self._on_gather),
            "grant_sum": self._from_leader(self._on_grant_sum),
            "bundle": self._from_leader(self._on_bundle),
            "transfer_part": self._on_part,
            "bundled": self._on_bundled,
        }

    def arrive(self, update: UpdateMessage, take: Pass, *, again: bool) -> None:
        """See `UpdateStage`."""
        self.uploads.arrived(update, take, again=again)

    def close(self) -> None:
        """See `UpdateStage`."""
        self.uploads.close()

    # ------------------------------------------------------------------ as a region

    def depart(self, update: UpdateMessage, ship: Pass, *, again: bool) -> None:
        """See `UpdateStage`."""
        norm = 0.0
        if self._config.max_staleness is not None and update.coded is None:
            norm = float(torch.linalg.vector_norm(update.payload_P))
        with self._lock:
            at_once = self._open or update.size_bytes <= self._config.small_bytes
            self._pending[update.seq] = _Pending(update, ship, at_once)
        meta = ask_meta(ask_of(update, norm=norm, again=again), sent=at_once)
        self._send_to_leader(Message("ask", meta, b"", "control", CONTROL))
        if at_once:
            ship(update)

    def on_moved(self) -> None:
        """See `UpdateStage`."""
        with self._lock:
            self._open = True
            self._groups.clear()

    def answered(self, reply: ReplyMessage) -> ReplyMessage:
        """Return an answer for the own region; its own part is removed from the answer to a sum."""
        with self._lock:
            pending = self._pending.pop(reply.seq, None)
            own = (self._region, reply.seq)  # the sum with this update is complete
            self._groups = {
                number: group
                for number, group in self._groups.items()
                if own not in [(ask.region, ask.seq) for ask in group.asks]
            }
        if pending is None or not reply.own:
            return reply
        return replace(reply, payload_P=reply.payload_P - pending.update.payload_P, own=False)

    def _on_permission(self, meta: Meta, message: Message) -> None:
        self._open = fields.flag(meta, "open")

    def _on_grant(self, meta: Meta, message: Message) -> None:
        with self._lock:
            pending = self._pending.get(fields.count(meta, "seq"))
            if pending is None or pending.sent:
                return
            pending.sent = True
        pending.ship(pending.update)

    def _on_gather(self, meta: Meta, message: Message) -> None:
        """Send the own update to a sum, which may be formed here."""
        gather = GATHER.read(meta)
        own = next((ask for ask in gather.asks if ask.region == self._region), None)
        with self._lock:
            pending = None if own is None else self._pending.get(own.seq)
            if pending is None or pending.sent or pending.update.coded is not None:
                return
            pending.helper = gather.helper
        if gather.helper == self._region:
            self._join(gather.group, pending.update, gather.asks)
            return
        update = pending.update
        part = GROUP_PART.write(GroupPart(gather.group, update))
        self._try(gather.helper, Message("transfer_part", part, payload_bytes(update), "update"))

    def _on_bundled(self, peer: str, message: Message) -> None:
        reply = read_reply(message.meta, view_of(message.payload))
        with self._lock:
            pending = self._pending.get(reply.seq)
        if pending is not None and pending.helper == peer and reply.to == self._region:
            self._path.give(reply)

    # ------------------------------------------------------------------ as a helper

    def _on_part(self, peer: str, message: Message) -> None:
        group, update = GROUP_PART.read(message.meta, view_of(message.payload))
        if update.region == peer and update.coded is None:
            self._join(group, update)

    def _join(
        self, group: int, update: UpdateMessage, asks: tuple[UploadRequest, ...] = ()
    ) -> None:
        """Add a part; it may arrive before the message that announces the group."""
        with self._lock:
            found = self._groups.setdefault(group, _Group())
            found.asks = found.asks or asks
            found.arrived.setdefault(update.region, update)
            while len(self._groups) > _MOST_GROUPS:
                self._groups.pop(min(self._groups))
            if not found.asks or found.total_P is not None:
                return
            parts = [found.arrived.get(ask.region) for ask in found.asks]
            present = [part for part in parts if part is not None]
            if len(present) < len(found.asks) or not _fit(present, found.asks):
                return
            total_P = present[0].payload_P.clone()
            for part in present[1:]:
                total_P.add_(part.payload_P)
            found.total_P = total_P
            found.arrived.clear()
        meta = SUM.write(Summed(group, found.asks))
        self._try(self._path.leader.region, Message("ask_sum", meta, b"", "control", CONTROL))

    def _on_grant_sum(self, meta: Meta, message: Message) -> None:
        group = fields.count(meta, "seq")
        with self._lock:
            found = self._groups.get(group)
        if found is not None and found.total_P is not None:
            parts = SUM.write(Summed(group, found.asks))
            self._send_to_leader(Message("sum", parts, as_bytes(found.total_P), "update"))

    def _on_bundle(self, meta: Meta, message: Message) -> None:
        """Forward one answer to all regions of a sum, without interpreting it."""
        payload_P = as_tensor(view_of(message.payload))
        for reply in read_bundle(meta, payload_P):
            if reply.to == self._region:
                self._path.give(reply)
            else:
                body = as_bytes(payload_P)
                self._try(reply.to, Message("bundled", reply_meta(reply), body, "reply"))

    # ------------------------------------------------------------------ small things

    def _from_leader(self, handler: Callable[[Meta, Message], None]) -> Route:
        def checked(peer: str, message: Message) -> None:
            if peer == self._path.leader.region:
                handler(message.meta, message)

        return checked

    def _send_to_leader(self, message: Message) -> None:
        self._path.send(self._path.leader.region, message)

    def _try(self, peer: str, message: Message) -> None:
        """Send to a helper; an unreachable one only delays the sum until it is given up."""
        try:
            self._path.send(peer, message)
        except LinkDownError as error:
            log.warning("%s for region '%s' was not sent: %s", message.kind, peer, error)


def _fit(parts: list[UpdateMessage], asks: tuple[UploadRequest, ...]) -> bool:
    """Return whether these are the requested updates, and can be added."""
    sizes = {part.payload_P.numel() for part in parts}
    named = all(
        (part.attempt, part.seq) == (ask.attempt, ask.seq)
        for part, ask in zip(parts, asks, strict=True)
    )
    return named and len(sizes) == 1


def _rtts_s(endpoint: Endpoint) -> dict[str, float]:
    """Return the shortest round trips by region, where measured."""
    found = {peer: stats["rtt_min_s"] for peer, stats in endpoint.stats().items()}
    return {peer: rtt_s for peer, rtt_s in found.items() if rtt_s is not None}
