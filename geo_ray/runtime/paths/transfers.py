"""Transfers that take turns: a region asks before it ships, and helps to sum.

region --ask--> upload coordinator     small, or nobody in the way: the update follows at once
       <-grant-                        otherwise it waits for this
       <-gather- and --part--> helper --ask_sum, sum--> upload coordinator
                 <--bundled-- helper <----bundle-----

Every bridge has an upload coordinator; the one at the averager's home is asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from geo_ray.errors import LinkDownError
from geo_ray.runtime.messages.exchange import (
    as_bytes,
    as_tensor,
    payload_bytes,
    read_reply,
    reply_meta,
)
from geo_ray.runtime.messages.transfers import (
    GATHER,
    GROUP_PART,
    SUM,
    GroupPart,
    Summed,
    ask_meta,
    ask_of,
    read_bundle,
)
from geo_ray.runtime.paths.base import Pass, Route, StagedPath, UpdateStage
from geo_ray.runtime.paths.upload_coordinator import UploadCoordinator
from geo_ray.strategies.base import Reply, Update
from geo_ray.transfers.config import TransfersConfig
from geo_ray.transfers.requests import UploadRequest
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import CONTROL, Message
from geo_ray.transport.wire.meta import Meta

log = logging.getLogger(__name__)

_MOST_GROUPS: Final = 8


@dataclass(slots=True)
class _Pending:
    """An update of the own region that is not answered yet."""

    update: Update
    ship: Pass
    shipped: bool
    helper: str | None = None


@dataclass(slots=True)
class _Group:
    """A sum in the making at this region."""

    asks: tuple[UploadRequest, ...] = ()
    arrived: dict[str, Update] = field(default_factory=dict)
    total_P: Tensor | None = None


class Transfers:
    """One bridge's part; see the module's docstring.

    Args:
        region: this region.
        config: how transfers take turns.
        path: that this is a stage of.
        rtts_s: round trip times by region, as far as they are known.
    """

    def __init__(
        self,
        region: str,
        config: TransfersConfig,
        path: StagedPath,
        rtts_s: Callable[[], Mapping[str, float]],
    ) -> None:
        self._region = region
        self._config = config
        self._path = path
        self.uploads = UploadCoordinator(config, path, rtts_s)
        self._lock = threading.Lock()
        self._open = True
        self._pending: dict[int, _Pending] = {}
        self._groups: dict[int, _Group] = {}

    @property
    def stage(self) -> UpdateStage:
        """What the path calls."""
        return UpdateStage(
            depart=self._depart,
            answered=self._answered,
            arrive=lambda update, take, again: self.uploads.arrived(
                update, lambda: take(update), again=again
            ),
            on_moved=self._on_moved,
            routes={
                "ask": self.uploads.on_ask,
                "ask_sum": self.uploads.on_ask_sum,
                "sum": self.uploads.on_sum,
                "grant": self._from_home(self._on_grant),
                "gate": self._from_home(self._on_gate),
                "gather": self._from_home(self._on_gather),
                "grant_sum": self._from_home(self._on_grant_sum),
                "bundle": self._from_home(self._on_bundle),
                "transfer_part": self._on_part,
                "bundled": self._on_bundled,
            },
            close=self.uploads.close,
        )

    # ------------------------------------------------------------------ as a region

    def _depart(self, update: Update, ship: Pass, again: bool) -> None:
        norm = 0.0
        if self._config.max_staleness is not None and update.coded is None:
            norm = float(torch.linalg.vector_norm(update.payload_P))
        with self._lock:
            at_once = self._open or update.size_bytes <= self._config.small_bytes
            self._pending[update.seq] = _Pending(update, ship, at_once)
        meta = ask_meta(ask_of(update, norm=norm, again=again), sent=at_once)
        self._send_home(Message("ask", meta, b"", "control", CONTROL))
        if at_once:
            ship(update)

    def _on_moved(self) -> None:
        with self._lock:
            self._open = True
            self._groups.clear()

    def _answered(self, reply: Reply) -> Reply:
        """An answer for the own region; one to a sum without the own part of it."""
        with self._lock:
            pending = self._pending.pop(reply.seq, None)
            own = (self._region, reply.seq)  # a sum that it was in is over
            self._groups = {
                number: group
                for number, group in self._groups.items()
                if own not in [(ask.region, ask.seq) for ask in group.asks]
            }
        if pending is None or not reply.own:
            return reply
        return replace(reply, payload_P=reply.payload_P - pending.update.payload_P, own=False)

    def _on_gate(self, meta: Meta, message: Message) -> None:
        self._open = fields.flag(meta, "open")

    def _on_grant(self, meta: Meta, message: Message) -> None:
        with self._lock:
            pending = self._pending.get(fields.count(meta, "seq"))
            if pending is None or pending.shipped:
                return
            pending.shipped = True
        pending.ship(pending.update)

    def _on_gather(self, meta: Meta, message: Message) -> None:
        """The own update goes into a sum; perhaps it is summed here."""
        gather = GATHER.read(meta)
        own = next((ask for ask in gather.asks if ask.region == self._region), None)
        with self._lock:
            pending = None if own is None else self._pending.get(own.seq)
            if pending is None or pending.shipped or pending.update.coded is not None:
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

    def _join(self, group: int, update: Update, asks: tuple[UploadRequest, ...] = ()) -> None:
        """One more part is here; it may come before the message that this is a group."""
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
        self._try(self._path.home.region, Message("ask_sum", meta, b"", "control", CONTROL))

    def _on_grant_sum(self, meta: Meta, message: Message) -> None:
        group = fields.count(meta, "seq")
        with self._lock:
            found = self._groups.get(group)
        if found is not None and found.total_P is not None:
            parts = SUM.write(Summed(group, found.asks))
            self._send_home(Message("sum", parts, as_bytes(found.total_P), "update"))

    def _on_bundle(self, meta: Meta, message: Message) -> None:
        """One answer for all who were in a sum; what is in it is their business."""
        payload_P = as_tensor(view_of(message.payload))
        for reply in read_bundle(meta, payload_P):
            if reply.to == self._region:
                self._path.give(reply)
            else:
                body = as_bytes(payload_P)
                self._try(reply.to, Message("bundled", reply_meta(reply), body, "reply"))

    # ------------------------------------------------------------------ small things

    def _from_home(self, handler: Callable[[Meta, Message], None]) -> Route:
        def checked(peer: str, message: Message) -> None:
            if peer == self._path.home.region:
                handler(message.meta, message)

        return checked

    def _send_home(self, message: Message) -> None:
        self._path.send(self._path.home.region, message)

    def _try(self, peer: str, message: Message) -> None:
        """A helper out of reach delays a sum until the upload coordinator gives it up; no more."""
        try:
            self._path.send(peer, message)
        except LinkDownError as error:
            log.warning("%s for region '%s' was not sent: %s", message.kind, peer, error)


def _fit(parts: list[Update], asks: tuple[UploadRequest, ...]) -> bool:
    """Whether these are the updates that were asked for, and can be added up."""
    sizes = {part.payload_P.numel() for part in parts}
    named = all(
        (part.epoch, part.seq) == (ask.epoch, ask.seq)
        for part, ask in zip(parts, asks, strict=True)
    )
    return named and len(sizes) == 1
