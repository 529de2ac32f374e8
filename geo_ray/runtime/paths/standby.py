"""A bridge's shell around `StandbyNode`: sockets, time, and the averager's home when it is here.

One lock covers what happens to the node and the order in which its words leave; they are sent by a
thread of their own, because a full outbox must not keep an acknowledgement from being heard.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Final, Protocol

from torch import Tensor

from geo_ray.errors import GeoRayError
from geo_ray.runtime.actors.event_buffer import EventBuffer
from geo_ray.runtime.messages.standby import KINDS, read_word, word_message
from geo_ray.runtime.paths.transfers import TransfersPath
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.averager import AveragerSnapshot
from geo_ray.training.averager.log import BeginCheckpoint, Op, Skip, Stop, TakeIn
from geo_ray.training.averager.standby import (
    AnswerOwn,
    AveragerRequest,
    EntryDone,
    RefuseOwn,
    SendMessage,
    StandbyEffect,
    StandbyEvent,
    StandbyNode,
    Word,
)
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.wire.message import BACKGROUND, DATA, Message

log = logging.getLogger(__name__)

_LONGEST_TICK_S: Final = 0.1
_COMMIT_S: Final = 30.0  # for a checkpoint to begin


class Outlet(Protocol):
    """Where the road ends in its own region."""

    def give(self, reply: Reply) -> None:
        """An answer for the lead."""

    def fail(self, seq: int, error: GeoRayError) -> None:
        """The lead's update is refused."""

    def save(self, snapshots: Sequence[AveragerSnapshot]) -> None:
        """Write the averager's part of a checkpoint."""


class StandbyPath:
    """See the module's docstring.

    Args:
        node: the state machine.
        endpoint: this region's.
        outlet: the way into the region.
        event_buffer: takes events for the controller.
    """

    def __init__(
        self,
        node: StandbyNode,
        endpoint: Endpoint,
        outlet: Outlet,
        event_buffer: EventBuffer,
    ) -> None:
        self._node = node
        self._endpoint = endpoint
        self._outlet = outlet
        self._event_buffer = event_buffer
        self._transfers: TransfersPath | None = None
        bound = 0.0 if node.primary is None else node.primary.bound
        self._log_lane = DATA if bound == 0 else BACKGROUND  # with 0 everything waits for it
        self._bare = bound == 0 or node.caller.keeps
        self._changed = threading.Condition(threading.RLock())
        self._begun: dict[int, bool] = {}
        self._closed = False
        self._words: SimpleQueue[tuple[str, Message] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._speak, name="standby-speak", daemon=True),
            threading.Thread(target=self._watch, name="standby-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def use_transfers(self, road: TransfersPath) -> None:
        """Let updates take turns."""
        self._transfers = road

    def routes(self) -> dict[str, Callable[[str, Message], None]]:
        """Handlers of this road's messages by kind."""
        return dict.fromkeys(KINDS, self._on_message)

    @property
    def hub(self) -> str:
        """The region that hosts the averager at present."""
        return self._node.hub

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._words.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    def status(self) -> dict[str, Any]:
        """Who the hub is, and how far the standby is behind: plain values."""
        with self._changed:
            primary = self._node.primary
            status: dict[str, Any] = {"hub": self._node.hub, "hub_epoch": self._node.caller.epoch}
            if primary is not None:
                status |= {"version": primary.averager.state.version, "ahead": primary.ahead}
            return status

    # ------------------------------------------------------------------ for the own region

    def submit(self, update: Update) -> None:
        """The lead has an update; it may use its buffer again when that is answered."""
        # A copy: a message to a hub that was cut off may leave long after another one's answer.
        kept = _copied(update)
        with self._changed:
            self._node.caller.submit(kept)
            is_hub = self._node.primary is not None
            if not is_hub:
                self._carry_out([SendMessage(self._node.hub, AveragerRequest(TakeIn(kept)))])
                return
        self._arrived(self._node.region, AveragerRequest(TakeIn(kept)))

    # ------------------------------------------------------------------ for the controller

    def request_stop(self) -> None:
        """Let the averager tell all regions to finish."""
        self._offer(Stop())

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """Let the averager begin a checkpoint; False if it cannot be now."""
        deadline_s = time.monotonic() + _COMMIT_S
        with self._changed:
            self._offer(BeginCheckpoint(checkpoint, halt))
            while checkpoint not in self._begun and not self._closed:
                left_s = deadline_s - time.monotonic()
                if self._node.primary is None or left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return self._begun.pop(checkpoint, False)

    def on_report_dead(self, region: str) -> None:
        """The controller has seen that ``region`` is dead and will not come back."""
        with self._changed:
            self._carry_out(self._node.on_report_dead(region))

    # ------------------------------------------------------------------ for the desk of transfers

    def post(self, to: str, message: Message) -> None:
        """Send a message after the words that were said before it."""
        self._words.put((to, message))

    def version(self) -> int:
        """Commits so far, and those that wait for the standby."""
        with self._changed:
            primary = self._node.primary
            return 0 if primary is None else primary.averager.state.version + primary.waiting

    def skip(self, region: str, epoch: int, seq: int) -> None:
        """Answer an update without taking it in."""
        self._offer(Skip(region, epoch, seq))

    def take_sum(self, parts: tuple[Update, ...], total_P: Tensor) -> list[Reply] | None:
        """Sums are not taken in here: their parts must come by themselves."""
        return None

    def deliver(self, reply: Reply) -> None:
        """Answers leave as words of the node."""

    # ------------------------------------------------------------------ words

    def _on_message(self, peer: str, message: Message) -> None:
        with self._changed:
            epoch = message.meta.get("hub_epoch")
            if message.kind == "log" and epoch != self._node.caller.epoch:
                return  # of a hub that is none any more; what it is about may be gone as well
            word = read_word(peer, message, self._node.caller.find)
        if isinstance(word, AveragerRequest):
            self._arrived(peer, word)
            return
        with self._changed:
            self._carry_out(self._node.on_word(peer, word))

    def _arrived(self, peer: str, word: AveragerRequest) -> None:
        """A request for the averager here; the desk decides when it is its turn."""

        def take() -> None:
            with self._changed:
                self._carry_out(self._node.on_word(peer, word))

        if self._transfers is None or not isinstance(word.op, TakeIn):
            take()
        elif word.op.update.region == peer:
            self._transfers.uploads.arrived(word.op.update, take, again=word.again)

    def _offer(self, op: Op) -> None:
        with self._changed:
            self._carry_out(self._node.offer(op))

    def _carry_out(self, effects: Sequence[StandbyEffect]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(to, word):
                    self._say(to, word)
                case AnswerOwn(reply):
                    self._outlet.give(reply)
                case RefuseOwn(seq, error):
                    self._outlet.fail(seq, error)
                case EntryDone(committed):
                    if isinstance(committed.op, BeginCheckpoint):
                        self._begun[committed.op.id] = committed.outcome.done
                case StandbyEvent():
                    self._note(effect)
        averager = self._node.averager
        if averager is not None and averager.snapshots:
            snapshots, averager.snapshots = averager.snapshots, []
            self._outlet.save(snapshots)
        for reading in [] if averager is None else averager.noise.news():
            self._event_buffer.add("noise", **{**reading.fields(), "region": None})
        self._changed.notify_all()

    def _say(self, to: str, word: Word) -> None:
        message = word_message(to, word, self._log_lane, bare=self._bare)
        if self._transfers is None or not (
            isinstance(word, AveragerRequest) and isinstance(word.op, TakeIn)
        ):
            self._words.put((to, message))
            return
        self._transfers.send(
            word.op.update, lambda: self._words.put((to, message)), again=word.again
        )

    def _note(self, news: StandbyEvent) -> None:
        if news.what == "took_over":
            log.warning("region '%s' hosts the averager now", news.region)
            self._event_buffer.add("hub_moved", epoch=news.epoch)
        elif news.what == "left":
            log.warning("the run goes on without region '%s': its data are missing", news.region)
            self._event_buffer.add("region_left", name=news.region)
        if self._transfers is not None:
            self._transfers.restart()

    # ------------------------------------------------------------------ threads

    def _speak(self) -> None:
        while (item := self._words.get()) is not None:
            to, message = item
            try:
                self._endpoint.send(to, message)
            except GeoRayError as error:
                if not self._closed:
                    log.warning("'%s' for region '%s' was not sent: %s", message.kind, to, error)

    def _watch(self) -> None:
        tick_s = min(_LONGEST_TICK_S, self._node.watch.takeover_s / 10)
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, tick_s):
                    return
                connected = [p for p, s in self._endpoint.stats().items() if s["connected"]]
                self._carry_out(self._node.tick(time.monotonic(), connected))


def _copied(update: Update) -> Update:
    if update.coded is None:
        return replace(update, payload_P=update.payload_P.clone())
    coded = replace(update.coded, data_B=update.coded.data_B.clone())
    return replace(update, coded=coded)
