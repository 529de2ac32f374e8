"""Updates to an averager that may move: `StandbyNode` with sockets, threads and time.

One lock covers what happens to the node and the order in which its messages leave; a thread of its
own sends them, because a full outbox must not keep an acknowledgement from being heard.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Final

from torch import Tensor

from geo_ray.errors import FrameError, GeoRayError, InvariantError
from geo_ray.runtime.actors.alarm import Alarm
from geo_ray.runtime.actors.event_buffer import EventBuffer
from geo_ray.runtime.messages.standby import KINDS, read_standby, standby_message
from geo_ray.runtime.paths.answers import Answers
from geo_ray.runtime.paths.base import Routes, StageMaker
from geo_ray.runtime.paths.local_averager import AveragerOutput
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.home import AveragerHome
from geo_ray.training.averager.log import (
    BeginCheckpoint,
    Begun,
    ChangeMembers,
    ChangePace,
    Op,
    Skip,
    Stop,
    TakeIn,
    Wake,
)
from geo_ray.training.averager.pace import pace_of
from geo_ray.training.averager.replication import copied_update
from geo_ray.training.averager.stalled import open_requests
from geo_ray.training.averager.standby import (
    AnswerOwn,
    EntryDone,
    RefuseOwn,
    SendMessage,
    StandbyEffect,
    StandbyEvent,
    StandbyNode,
)
from geo_ray.training.averager.standby_messages import (
    AveragerRefusal,
    AveragerRequest,
    StandbyMessage,
)
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.message import BACKGROUND, DATA, Message

log = logging.getLogger(__name__)

_LONGEST_TICK_S: Final = 0.1
_COMMIT_S: Final = 30.0  # for a checkpoint to begin


class StandbyPath:
    """See the module's docstring and `UpdatePath`.

    Args:
        node: the state machine.
        endpoint: this region's.
        output: takes what the averager leaves beside its answers.
        answers: where the own region's requests wait.
        event_buffer: takes events for the controller.
        stage: builds the stage of this path.
    """

    def __init__(
        self,
        node: StandbyNode,
        endpoint: Endpoint,
        output: AveragerOutput,
        answers: Answers,
        event_buffer: EventBuffer,
        stage: StageMaker,
    ) -> None:
        self._node = node
        self._endpoint = endpoint
        self._output = output
        self._answers = answers
        self._event_buffer = event_buffer
        self._log_lane = DATA if node.bound == 0 else BACKGROUND  # with 0 everything waits for it
        self._bare = node.bound == 0 or node.caller.keeps
        self._alarm = Alarm(lambda: self._offer(Wake()))
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
    def home(self) -> AveragerHome:
        """See `UpdatePath`."""
        return self._node.home

    # ------------------------------------------------------------------ for the own region

    def exchange(self, update: Update) -> Reply:
        """See `UpdatePath`; the region may use its buffer again when it is answered."""
        # A copy: a message to a home that was cut off may leave long after another one's answer.
        kept = copied_update(update)
        with self._changed:
            asked = [AveragerRequest(op) for op in self._node.caller.submit(kept)]
            is_home = self._node.primary is not None
            if not is_home:
                self._carry_out([SendMessage(self.home.region, request) for request in asked])
        if is_home:
            for request in asked:
                self._arrived(self._node.region, request)
        return self._answers.wait(update.seq, lambda: self.home.region)

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
            self._carry_out(self._node.on_report_dead(region, comes_back=comes_back))

    def tell_members(self, op: ChangeMembers | Begun | ChangePace) -> None:
        """See `UpdatePath`; it is carried out once the standby has it."""
        with self._changed:
            averager = self._node.averager
            if averager is None:
                raise InvariantError(f"the averager does not live in '{self._node.region}'")
            if isinstance(op, ChangeMembers):
                op.change.after(averager.view)
            self._offer(op)

    def status(self) -> dict[str, Any]:
        """See `UpdatePath`; also how far the averager is ahead of its standby, and who stands by.

        A region says of itself that it stands by, for the home that it follows: nobody else knows
        for certain.
        """
        with self._changed:
            node, primary = self._node, self._node.primary
            if primary is None:
                return {"version": None, "stands_by": node.stands_by}
            averager = primary.averager
            return {
                "version": averager.state.version,
                "ahead": primary.ahead,
                "open": open_requests(averager),
                "view": averager.view,
                "pace": pace_of(averager.state),
                "stands_by": False,
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
        """See `StagedPath`; the message leaves after those that were sent before it."""
        self._outgoing.put((to, message))

    def give(self, reply: Reply) -> None:
        """See `StagedPath`, as for all that follows."""
        self._answers.give(self.stage.answered(reply))

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
        """Answers leave as messages of the node."""

    def refuse(self, update: Update, error: GeoRayError) -> None:
        """Refusals leave as messages of the node."""

    def fail(self, error: Exception, doing: str) -> None:
        """A thread of the stage has met an error."""
        self._output.failure.note(error, doing)

    # ------------------------------------------------------------------ messages and effects

    def _on_message(self, peer: str, message: Message) -> None:
        with self._changed:
            epoch = message.meta.get("hub_epoch")
            if message.kind == "log" and isinstance(epoch, int) and epoch < self.home.epoch:
                return  # of a home that is none any more; what it is about may be gone as well
            try:
                parsed = read_standby(peer, message, self._node.caller.find)
            except FrameError as error:
                if message.kind != "update":
                    raise
                # Who speaks otherwise ends itself, and nobody else.
                log.error("an update of region '%s' cannot be read: %s", peer, error.message)
                seq = fields.count(message.meta, "seq")
                self._send(peer, AveragerRefusal(self.home.epoch, seq, error))
                return
        if isinstance(parsed, AveragerRequest):
            self._arrived(peer, parsed)
            return
        with self._changed:
            self._carry_out(self._node.on_message(peer, parsed))

    def _arrived(self, peer: str, request: AveragerRequest) -> None:
        """A request for the averager here; the stage decides when an update is taken in."""

        def take() -> None:
            with self._changed:
                self._carry_out(self._node.on_message(peer, request))

        if not isinstance(request.op, TakeIn):
            take()
        elif request.op.update.region == peer:
            self.stage.arrive(request.op.update, lambda _: take(), request.again)

    def _offer(self, op: Op) -> None:
        with self._changed:
            self._carry_out(self._node.offer(op, time.monotonic()))

    def _carry_out(self, effects: Sequence[StandbyEffect]) -> None:
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
        elif self._node.shadow is not None and self._node.shadow.averager.failure is not None:
            self._output.failure.note(self._node.shadow.averager.failure, "the standby")
        self._changed.notify_all()

    def _send(self, to: str, parsed: StandbyMessage) -> None:
        message = standby_message(to, parsed, self._log_lane, bare=self._bare)
        if isinstance(parsed, AveragerRequest) and isinstance(parsed.op, TakeIn):
            update, again = parsed.op.update, parsed.again
            self.stage.depart(update, lambda _: self.send(to, message), again)
        else:
            self.send(to, message)

    def _note(self, event: StandbyEvent) -> None:
        if event.what == "took_over":
            log.warning("region '%s' hosts the averager now", event.region)
            self._event_buffer.add("hub_moved", epoch=event.epoch)
        elif event.what == "left":
            log.warning("the run goes on without region '%s': its data are missing", event.region)
            self._event_buffer.add("region_left", name=event.region)
        elif event.what == "appointed":
            log.info("region '%s' stands by for the averager now", event.region)
            self._event_buffer.add("standby_ready", name=event.region, epoch=event.epoch)
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
        tick_s = min(_LONGEST_TICK_S, self._node.watch.takeover_s / 10)
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, tick_s):
                    return
                try:
                    seen = {p: s for p, s in self._endpoint.stats().items() if s["connected"]}
                    rtts_s = {p: s["rtt_min_s"] for p, s in seen.items()}
                    known_s = {p: rtt_s for p, rtt_s in rtts_s.items() if rtt_s is not None}
                    self._carry_out(self._node.tick(time.monotonic(), seen, known_s))
                except Exception as error:
                    self.fail(error, "the watch over the averager")
                    return
