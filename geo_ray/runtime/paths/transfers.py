"""Transfers that take turns: a region asks before it ships, helps to sum, and hosts the desk.

region --ask--> averager's desk        small, or nobody in the way: the update follows at once
       <-grant-                        otherwise it waits for this
       <-gather- and --part--> helper --ask_sum, sum--> desk
                 <--bundled-- helper <----bundle-----
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
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
from geo_ray.runtime.paths.upload_coordinator import Say, UploadCoordinator
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
    ship: Callable[[], None]
    shipped: bool
    helper: str | None = None


@dataclass(slots=True)
class _Group:
    """A sum in the making at this region."""

    asks: tuple[UploadRequest, ...] = ()
    arrived: dict[str, Update] = field(default_factory=dict)
    total_P: Tensor | None = None


class TransfersPath:
    """One bridge's part; see the module's docstring.

    Args:
        region: this region.
        config: how transfers take turns.
        hub: names the region that hosts the averager at present.
        say: sends a message to a region.
        uploads: of this bridge, in case it is the averager's home.
        give: takes an answer for the own region.
    """

    def __init__(
        self,
        region: str,
        config: TransfersConfig,
        hub: Callable[[], str],
        say: Say,
        uploads: UploadCoordinator,
        give: Callable[[Reply], None],
    ) -> None:
        self._region = region
        self._config = config
        self._hub = hub
        self._say = say
        self.uploads = uploads
        self._give = give
        self._lock = threading.Lock()
        self._open = True
        self._pending: dict[int, _Pending] = {}
        self._groups: dict[int, _Group] = {}

    def routes(self) -> dict[str, Callable[[str, Message], None]]:
        """Handlers of this road's messages by kind."""
        return {
            "ask": self.uploads.on_ask,
            "ask_sum": self.uploads.on_ask_sum,
            "sum": self.uploads.on_sum,
            "grant": self._from_hub(self._on_grant),
            "gate": self._from_hub(self._on_gate),
            "gather": self._from_hub(self._on_gather),
            "grant_sum": self._from_hub(self._on_grant_sum),
            "bundle": self._from_hub(self._on_bundle),
            "transfer_part": self._on_part,
            "bundled": self._on_bundled,
        }

    def close(self) -> None:
        """End the desk's thread."""
        self.uploads.close()

    # ------------------------------------------------------------------ as a region

    def send(self, update: Update, ship: Callable[[], None], *, again: bool = False) -> None:
        """Send an update to the averager when it is its turn.

        Args:
            update: which; its payload must stay as it is until it is answered.
            ship: sends it.
            again: an earlier averager had answered it already.
        """
        norm = 0.0
        if self._config.max_staleness is not None and update.coded is None:
            norm = float(torch.linalg.vector_norm(update.payload_P))
        with self._lock:
            at_once = self._open or update.size_bytes <= self._config.small_bytes
            self._pending[update.seq] = _Pending(update, ship, at_once)
        meta = ask_meta(ask_of(update, norm=norm, again=again), sent=at_once)
        self._say(self._hub(), Message("ask", meta, b"", "control", CONTROL))
        if at_once:
            ship()

    def restart(self) -> None:
        """The averager has moved: nobody there knows of what was asked before."""
        with self._lock:
            self._open = True
            self._groups.clear()

    def answered(self, reply: Reply) -> Reply:
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
        pending.ship()

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
            self._give(reply)

    # ------------------------------------------------------------------ as a helper

    def _on_part(self, peer: str, message: Message) -> None:
        group, update = GROUP_PART.read(message.meta, view_of(message.payload))
        if update.region == peer and update.coded is None:
            self._join(group, update)

    def _join(self, group: int, update: Update, asks: tuple[UploadRequest, ...] = ()) -> None:
        """One more part is here; it may come before the word that this is a group."""
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
        self._try(self._hub(), Message("ask_sum", meta, b"", "control", CONTROL))

    def _on_grant_sum(self, meta: Meta, message: Message) -> None:
        group = fields.count(meta, "seq")
        with self._lock:
            found = self._groups.get(group)
        if found is not None and found.total_P is not None:
            parts = SUM.write(Summed(group, found.asks))
            self._say(self._hub(), Message("sum", parts, as_bytes(found.total_P), "update"))

    def _on_bundle(self, meta: Meta, message: Message) -> None:
        """One answer for all who were in a sum; what is in it is their business."""
        payload_P = as_tensor(view_of(message.payload))
        for reply in read_bundle(meta, payload_P):
            if reply.to == self._region:
                self._give(reply)
            else:
                body = as_bytes(payload_P)
                self._try(reply.to, Message("bundled", reply_meta(reply), body, "reply"))

    # ------------------------------------------------------------------ small things

    def _from_hub(self, handler: Callable[[Meta, Message], None]) -> Callable[[str, Message], None]:
        def checked(peer: str, message: Message) -> None:
            if peer == self._hub():
                handler(message.meta, message)

        return checked

    def _try(self, peer: str, message: Message) -> None:
        """A helper out of reach delays a sum until the desk gives it up; no more."""
        try:
            self._say(peer, message)
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
