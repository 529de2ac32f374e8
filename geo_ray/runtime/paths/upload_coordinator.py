"""Decides when uploads to the averager happen: runs the scheduler and carries out its decisions.

Whatever the averager takes in passes here, in the order of the decisions: one lock covers a
decision and the commit that follows from it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from geo_ray.errors import GeoRayError, LinkDownError
from geo_ray.runtime.messages.exchange import as_bytes, as_tensor
from geo_ray.runtime.messages.transfers import (
    GATHER,
    SUM,
    ask_of,
    bundle_meta,
    can_bundle,
    headers_of,
    read_ask,
)
from geo_ray.runtime.paths.base import StagedPath
from geo_ray.strategies.base import Update
from geo_ray.transfers.config import TransfersConfig
from geo_ray.transfers.helpers import HelperScheduler
from geo_ray.transfers.requests import Decision, Dissolve, Drop, Gather, Grant, Take, UploadRequest
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import CONTROL, DATA, Message
from geo_ray.transport.wire.meta import Meta

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0  # between looks at round trip times
_SHORTEST_S: Final = 0.001


@dataclass(slots=True)
class _Here:
    """What has arrived and waits for its turn: an update, or a sum with its helper."""

    take: Callable[[], None]
    total_P: Tensor | None = None
    helper: str = ""


class UploadCoordinator:
    """See the module's docstring.

    Args:
        config: how transfers take turns.
        path: the way to the averager, and at its home the averager.
        rtts_s: round trip times by region, as far as they are known.
    """

    def __init__(
        self,
        config: TransfersConfig,
        path: StagedPath,
        rtts_s: Callable[[], Mapping[str, float]],
    ) -> None:
        self._first_home = path.home.region
        self._path = path
        self._rtts_s = rtts_s
        self._looked_s = float("-inf")
        self._line = HelperScheduler(config, self._first_home)
        self._here: dict[tuple[str, bool], _Here] = {}
        self._newest: dict[str, tuple[int, int]] = {}
        self._gates: dict[str, bool] = {}
        self._changed = threading.Condition()  # guards all of it; its lock may be taken again
        self._closed = False
        self._timer: threading.Thread | None = None

    def seed(self, mbps_by_region: Mapping[str, float]) -> None:
        """Begin with rates of paths to the averager that were measured elsewhere."""
        with self._changed:
            self._line.line.rates.paths |= dict(mbps_by_region)

    def close(self) -> None:
        """Decide nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._timer is not None:
            self._timer.join(5.0)

    # ------------------------------------------------------------------ events

    def on_ask(self, peer: str, message: Message) -> None:
        """A region wants to send, or has begun to."""
        ask, sent = read_ask(peer, message.meta)
        with self._changed:
            now_s = self._look()
            if (ask.epoch, ask.seq) <= self._newest.get(peer, (0, 0)) and not ask.again:
                return  # its update has overtaken it
            if sent:
                self._decide(self._line.began(now_s, ask))
            else:
                self._decide(self._line.ask(now_s, self._path.version(), ask))

    def on_ask_sum(self, peer: str, message: Message) -> None:
        """A helper has all parts of a sum."""
        ask = self._read_sum(peer, message.meta)
        with self._changed:
            self._decide(self._line.ask(self._look(), self._path.version(), ask))

    def arrived(self, update: Update, take: Callable[[], None], *, again: bool) -> None:
        """An update is here.

        Args:
            update: which.
            take: commits it; called when it is its turn, if ever.
            again: an earlier home of the averager had answered it already.
        """
        ask = ask_of(update, again=again)
        with self._changed:
            if not again:
                self._newest[ask.region] = (ask.epoch, ask.seq)
            self._here[ask.key] = _Here(take)
            self._decide(self._line.arrived(self._look(), self._path.version(), ask))

    def on_sum(self, peer: str, message: Message) -> None:
        """A sum of updates is here."""
        ask = self._read_sum(peer, message.meta)
        total_P = as_tensor(view_of(message.payload))
        with self._changed:
            self._here[ask.key] = _Here(lambda: None, total_P, peer)
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
                    self._path.skip(ask.region, ask.epoch, ask.seq)
                    self._tell_gate(ask.region)
                case Grant(ask):
                    kind = "grant_sum" if ask.parts else "grant"
                    self._tell(ask.region, kind, {"seq": ask.seq})
                case Gather():
                    for ask in decision.asks:
                        self._tell(ask.region, "gather", GATHER.write(decision))
                case Dissolve(group):
                    self._forget(group)
        self._start_timer()
        self._changed.notify_all()

    def _take(self, ask: UploadRequest) -> list[Decision]:
        here = self._here.pop(ask.key, None)
        if here is None:
            log.error("nothing is here of what region '%s' sent", ask.region)
            return []
        if here.total_P is None:
            here.take()
            self._tell_gate(ask.region)
            return []
        return self._take_sum(ask, here.total_P, here.helper)

    def _take_sum(self, ask: UploadRequest, total_P: Tensor, helper: str) -> list[Decision]:
        group = ask.seq
        try:
            replies = self._path.take_sum(headers_of(ask.parts), total_P)
        except GeoRayError as error:  # then its parts are asked for, and refused by themselves
            log.error("the sum %d of region '%s' was refused: %s", group, helper, error)
            replies = None
        if replies is None:
            return self._line.refuse(time.monotonic(), self._path.version(), group)
        self._line.committed(group)
        for part in ask.parts:
            self._newest[part.region] = (part.epoch, part.seq)
        if len(replies) > 1 and can_bundle(replies):
            payload = as_bytes(replies[0].payload_P)
            self._tell(helper, "bundle", bundle_meta(replies), payload)
        else:
            for reply in replies:
                self._path.deliver(reply)
        for part in ask.parts:
            self._tell_gate(part.region)
        return []

    def _forget(self, group: int) -> None:
        for key, here in list(self._here.items()):
            if here.helper and key[0] == f"{here.helper}/{group}":
                del self._here[key]

    def _tell_gate(self, region: str) -> None:
        """Whether a region need not wait for its next grant, if that is news for it."""
        is_open = self._line.is_quiet
        if region != self._first_home and self._gates.get(region, True) != is_open:
            self._gates[region] = is_open
            self._tell(region, "gate", {"open": is_open})

    def _tell(self, region: str, kind: str, meta: Meta, payload: memoryview | None = None) -> None:
        lane, traffic = (CONTROL, "control") if payload is None else (DATA, "reply")
        try:
            self._path.send(region, Message(kind, meta, payload or b"", traffic, lane))
        except LinkDownError as error:  # it will ask again, or is gone
            log.warning("%s for region '%s' was not sent: %s", kind, region, error)

    # ------------------------------------------------------------------ time

    def _look(self) -> float:
        """The time; and every so often, how far away regions are."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._line.line.rates.latency_s |= dict(self._rtts_s())
        return now_s

    def _start_timer(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = threading.Thread(target=self._run, name="transfers", daemon=True)
            self._timer.start()

    def _run(self) -> None:
        try:
            self._keep_time()
        except Exception as error:
            self._path.fail(error, "the transfers' time line")

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
