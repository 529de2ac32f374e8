"""Exchange transports: their interface, and the plain transport to an averager that cannot move.

A bridge has one `UpdatePath`, chosen by `runtime.exchange.build`: direct (`DirectPath`), standby
(the averager can move) or overlay (updates are summed on their way). Its `UpdateStage` decides when
an update leaves and when it is applied: at once, scheduled (`upload_scheduling`), or in a reliable
and a lossy part (`differential`). All paths share `Answers` (pending replies), `BridgeFailure`, and
`LocalAverager`: the averager inside the bridge of its region, whose inputs it serializes and whose
outputs it sends.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from torch import Tensor

from geo_ray.base.errors import (
    AveragerFailedError,
    DeadlineExceededError,
    FrameError,
    GeoRayError,
    InvariantError,
    LinkDownError,
)
from geo_ray.base.user_code import error_summary
from geo_ray.storage.places import PartPlaces
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.averager import Averager, interval_of, open_requests
from geo_ray.training.checkpoint_parts import AveragerSnapshot, typed, write_averager_part
from geo_ray.training.command_log import (
    Begun,
    ChangeInterval,
    ChangeMembers,
    Leave,
    LogOutcome,
    Op,
    Skip,
    TakeIn,
    TakeSum,
    Wake,
    execute,
)
from geo_ray.training.config import UNREACHABLE_S
from geo_ray.training.membership import AveragerLeader, View
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.wire_format import (
    payload_bytes,
    read_refusal,
    read_reply,
    read_update,
    refusal_meta,
    reply_meta,
    update_meta,
)
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)

FailureCallback = Callable[[GeoRayError], None]


class BridgeFailure:
    """The first failure of a bridge; later ones are only logged.

    A message counts as received before it is handled. An error in a handler, or in a background
    thread, would be lost, and with it the answer to an update. Therefore it ends the run.

    Attributes:
        region: region of the bridge.
    """

    def __init__(self, region: str) -> None:
        self._region = region
        self._lock = threading.Lock()
        self._hearers: list[FailureCallback] = []
        self._first: GeoRayError | None = None

    @property
    def first(self) -> GeoRayError | None:
        """The failure; None: there is none."""
        return self._first

    def listen(self, callback: FailureCallback) -> None:
        """Call ``callback`` at the failure, or now if there is one already."""
        with self._lock:
            self._hearers.append(callback)
            first = self._first
        if first is not None:
            callback(first)

    def note(self, error: Exception, doing: str) -> GeoRayError:
        """Record a failure.

        Args:
            error: a `GeoRayError` is used unchanged; others are converted, with the line that
                raised them.
            doing: the operation that failed, for messages.

        Returns:
            The typed error.
        """
        typed = self._typed(error, doing)
        if typed is not error:
            log.error("%s", typed.message, exc_info=error)
        with self._lock:
            if self._first is not None:
                return typed
            self._first = typed
            hearers = list(self._hearers)
        log.error("the bridge of region '%s' failed: %s", self._region, typed)
        for callback in hearers:
            callback(typed)
        return typed

    def _typed(self, error: Exception, doing: str) -> GeoRayError:
        if isinstance(error, GeoRayError):
            return error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return AveragerFailedError(
            f"the bridge of region '{self._region}' failed at {doing}: {error_summary(error)} "
            f"({frame.filename}:{frame.lineno})"
        )


_LOOK_S: Final = 0.5  # seconds between checks that the averager's region is reachable


class Answers:
    """Passes answers from receiving threads to the waiting one, by the number of their update.

    Args:
        region: this region.
        timeout_s: longest wait.
        is_reachable: whether a region is connected now.
        unreachable_s: how long the averager's region may be unreachable.
    """

    def __init__(
        self,
        region: str,
        timeout_s: float,
        is_reachable: Callable[[str], bool] = lambda region: True,
        unreachable_s: float = UNREACHABLE_S,
    ) -> None:
        self._region = region
        self._timeout_s = timeout_s
        self._is_reachable = is_reachable
        self._unreachable_s = unreachable_s
        self._changed = threading.Condition()
        self._here: dict[int, ReplyMessage | GeoRayError] = {}
        self._end: GeoRayError | None = None

    def give(self, reply: ReplyMessage) -> None:
        """Store the averager's answer for the thread that waits for it."""
        self._put(reply.seq, reply)

    def fail(self, seq: int, error: GeoRayError) -> None:
        """Raise ``error`` in the wait for update ``seq``, which the averager refused."""
        self._put(seq, error)

    def wait(self, seq: int, leader: Callable[[], str]) -> ReplyMessage:
        """Wait for the answer to update ``seq``.

        Args:
            seq: its number.
            leader: returns the averager's region, which may change.

        Raises:
            DeadlineExceededError: it did not arrive in time.
            LinkDownError: the averager's region is unreachable, or the bridge is closing.
            GeoRayError: the update was refused, or `end` was called with this error.
        """
        began_s = reached_s = time.monotonic()
        while (answer := self._look(seq)) is None:
            now_s, peer = time.monotonic(), leader()
            if peer == self._region or self._is_reachable(peer):
                reached_s = now_s
            elif now_s - reached_s > self._unreachable_s:
                raise LinkDownError(
                    f"region '{self._region}': the averager's region '{peer}' has been "
                    f"unreachable for {self._unreachable_s:g} s; update {seq} has no answer"
                )
            if now_s - began_s > self._timeout_s:
                raise DeadlineExceededError(
                    f"region '{self._region}': the averager in '{peer}' did not answer update "
                    f"{seq} within train.step_timeout_s = {self._timeout_s:g} s; on a slow link a "
                    "large model may need longer"
                )
        if isinstance(answer, GeoRayError):
            raise answer
        return answer

    def _look(self, seq: int) -> ReplyMessage | GeoRayError | None:
        """Wait briefly; return the answer, if it has arrived. Older answers are dropped."""
        with self._changed:
            if seq not in self._here and self._end is None:
                self._changed.wait(min(_LOOK_S, self._timeout_s))
            for old in [number for number in self._here if number < seq]:
                del self._here[old]
            if seq in self._here:
                return self._here.pop(seq)
            if self._end is not None:
                raise self._end
        return None

    def close(self) -> None:
        """Fail every current and later `wait`: the bridge is closing."""
        self.end(LinkDownError(f"the bridge of region '{self._region}' is closing"))

    def end(self, error: GeoRayError) -> None:
        """Raise ``error`` in every current and later `wait`; only the first call counts."""
        with self._changed:
            self._end = self._end or error
            self._changed.notify_all()

    def _put(self, seq: int, answer: ReplyMessage | GeoRayError) -> None:
        with self._changed:
            self._here[seq] = answer
            self._changed.notify_all()


class Route(Protocol):
    """Handles messages of one kind from other regions."""

    def __call__(self, peer: str, message: Message, /) -> None:
        """Handle a message of the region ``peer``."""


Routes = Mapping[str, Route]
"""Handlers by kind of message."""


class Pass(Protocol):
    """Receives an update from a stage."""

    def __call__(self, update: UpdateMessage, /) -> None:
        """Send it, or apply it."""


class UpdateStage:
    """Decides when an update leaves its region and when it is applied; here: immediately.

    `Transfers` and `Differential` are the other stages.
    """

    def depart(self, update: UpdateMessage, ship: Pass, *, again: bool) -> None:
        """Send an update of the own region as soon as the stage permits, if at all.

        Args:
            update: its payload stays unchanged until it is answered.
            ship: sends it.
            again: an earlier leader had answered it.
        """
        ship(update)

    def answered(self, reply: ReplyMessage) -> ReplyMessage:
        """Return an answer for the own region in its final form."""
        return reply

    def recall(self) -> Meta:
        """Stop sending the last update; return which part is unsent, for a message header."""
        return {"seq": None}

    def arrive(self, update: UpdateMessage, take: Pass, *, again: bool) -> None:
        """Apply an update when it is due, in the averager's region.

        Args:
            update: the update.
            take: applies it.
            again: an earlier leader had answered it.
        """
        take(update)

    def attach(self, reply: ReplyMessage) -> ReplyMessage:
        """Return an answer to another region with what the stage adds to it."""
        return reply

    def on_moved(self) -> None:
        """Forget requests to the averager: it has moved, and its new leader does not know them."""

    def on_address(self, region: str, address: Address) -> None:
        """Record the address of a region's endpoint."""

    def routes(self) -> Routes:
        """Handlers of the stage's messages."""
        return {}

    def export(self, averager: Averager) -> dict[str, object]:
        """Return the state of the stage for the averager's part of a checkpoint, as plain values.

        Args:
            averager: knows the newest applied update of every region.
        """
        return {}

    def status(self, links: Mapping[str, Any]) -> dict[str, Any]:
        """Return the counters; add the traffic of the stage to the counters in ``links``."""
        return {}

    def close(self) -> None:
        """End all threads."""


class UpdatePath(Protocol):
    """Transports one region's updates to the averager; see the module."""

    @property
    def leader(self) -> AveragerLeader:
        """The averager's current leader."""

    @property
    def stage(self) -> UpdateStage:
        """The path's stage; the bridge forwards messages and addresses to it, and closes it."""

    def exchange(self, update: UpdateMessage) -> ReplyMessage:
        """Send an update of the own region to the averager; blocks until it is answered.

        Returns:
            The answer.

        Raises:
            GeoRayError: it was refused, not answered in time, or the path closes.
        """

    def routes(self) -> Routes:
        """Return the handlers of the path's messages."""

    def request_stop(self) -> None:
        """Let the averager, which is here, ask all regions to finish."""

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """Let the averager, which is here, begin a checkpoint; False if it cannot be now."""

    def report_dead(self, region: str, *, comes_back: bool = False) -> None:
        """Record that ``region`` is dead, as the controller has observed.

        Args:
            region: the region.
            comes_back: only its bridge is dead and will be replaced. An averager there moves, and
                the run waits for the region.
        """

    def submit_command(self, op: ChangeMembers | Begun | ChangeInterval) -> None:
        """Submit a command of the controller to the averager, which is in this region.

        Raises:
            InvariantError: members cannot change here (`why_fixed`, `why_no_joins`).
            GeoRayError: the averager refuses it.
        """

    def status(self) -> dict[str, Any]:
        """The averager's version and open requests if it is here, and counters: plain values."""

    def close(self) -> None:
        """End all threads, and all waits for an answer."""


class StagedPath(Protocol):
    """The part of a path that its stage uses; only `leader`, `send` and `give` work everywhere."""

    @property
    def leader(self) -> AveragerLeader:
        """The averager's current leader."""

    def send(self, to: str, message: Message) -> None:
        """Send a message to another region."""

    def give(self, reply: ReplyMessage) -> None:
        """Pass an answer to the waiting own region."""

    def version(self) -> int:
        """Number of commits, including those that wait for the standby."""

    def skip(self, region: str, attempt: int, seq: int) -> None:
        """Answer an update without applying it."""

    def take_sum(
        self, parts: tuple[UpdateMessage, ...], total_P: Tensor
    ) -> list[ReplyMessage] | None:
        """Apply a sum of updates; return None if its parts must be sent individually.

        Raises:
            GeoRayError: the averager refuses it.
        """

    def deliver(self, reply: ReplyMessage) -> None:
        """Send an answer."""

    def refuse(self, update: UpdateMessage, error: GeoRayError) -> None:
        """Report a refusal to the update's region."""

    def fail(self, error: Exception, doing: str) -> None:
        """Report an error in a thread of the stage, which would otherwise be lost."""


class StageFactory(Protocol):
    """Builds a path's stage; the path calls it in its constructor."""

    def __call__(self, path: StagedPath, /) -> UpdateStage:
        """Return the stage of ``path``."""


def joined(*tables: Routes) -> dict[str, Route]:
    """Merge tables of handlers.

    Raises:
        InvariantError: two tables handle the same kind.
    """
    found: dict[str, Route] = {}
    for table in tables:
        twice = sorted(found.keys() & table.keys())
        if twice:
            raise InvariantError(f"messages of the kinds {twice} have two handlers")
        found |= table
    return found


class Alarm:
    """A timer that can be set repeatedly; only the last setting counts.

    Attributes:
        ring: called in a separate thread, at most once per setting.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._at_s: float | None = None

    def set(self, at_s: float | None) -> None:
        """Ring at ``at_s`` (`time.monotonic`), and at no other time; None: never."""
        with self._lock:
            if at_s == self._at_s:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._at_s, self._timer = at_s, None
            if at_s is not None:
                wait_s = max(0.0, at_s - time.monotonic())
                self._timer = threading.Timer(wait_s, self._rang, (at_s,))
                self._timer.daemon = True
                self._timer.start()

    def _rang(self, at_s: float) -> None:
        with self._lock:
            if at_s != self._at_s:
                return
            self._at_s = self._timer = None
        self._ring()


class Staged(Protocol):
    """A path with a stage, which adds plain values to the averager's part of a checkpoint."""

    @property
    def stage(self) -> UpdateStage:
        """The stage."""


class AveragerOutput:
    """Handles the averager's outputs besides answers: checkpoint parts, events, its failure.

    Attributes:
        event_buffer: receives events for the controller.
        places: where parts of checkpoints are written.
        failure: the bridge's failure.
    """

    def __init__(
        self, event_buffer: EventBuffer, places: PartPlaces, failure: BridgeFailure
    ) -> None:
        self.failure = failure
        self._event_buffer = event_buffer
        self._places = places

    def collect(self, averager: Averager, path: Staged | None = None) -> None:
        """Process the outputs of ``averager``; call under the lock that guards it."""
        snapshots, averager.snapshots = averager.snapshots, []
        # Write in another thread: disks are slow, and this may be the link's receiving thread.
        for snapshot in snapshots:
            snapshot.control["attach"] = {} if path is None else path.stage.export(averager)
            threading.Thread(target=self._write, args=(snapshot,), daemon=True).start()
        for reading in averager.noise.news():  # totals over all regions
            self._event_buffer.add("noise", **{**reading.fields(), "region": None})
        if averager.failure is not None:
            self.failure.note(averager.failure, "the averager")

    def _write(self, snapshot: AveragerSnapshot) -> None:
        try:
            part = write_averager_part(self._places, snapshot)
        except Exception as error:  # report every class: the controller waits for the part
            self._event_buffer.add("part_failed", id=snapshot.id, error=typed(error))
        else:
            self._event_buffer.add("parts", id=snapshot.id, step=0, parts=[part])


class LocalAverager:
    """A thread-safe averager without a standby.

    Args:
        averager: the averager.
        output: handles its outputs besides answers.
        answer: receives answers of a wake-up that the strategy requested.
        path: its stage adds to checkpoints.
    """

    def __init__(
        self,
        averager: Averager,
        output: AveragerOutput,
        answer: Callable[[Sequence[ReplyMessage]], None],
        path: Staged | None = None,
    ) -> None:
        self._averager = averager
        self._output = output
        self._answer = answer
        self._path = path
        self._lock = threading.Lock()
        self._alarm = Alarm(self._on_wake)
        averager.at(time.monotonic())
        self._alarm.set(averager.wakes_s)  # a restored averager may have one pending

    @property
    def version(self) -> int:
        """Commits so far."""
        return self._averager.state.version

    @property
    def interval(self) -> int | None:
        """Requested steps between exchanges; None: not requested."""
        return interval_of(self._averager.state)

    @property
    def view(self) -> View:
        """The membership view."""
        return self._averager.view

    def open_requests(self) -> dict[str, int] | None:
        """See `open_requests`; does not wait, and returns None while the averager is busy."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return open_requests(self._averager)
        finally:
            self._lock.release()

    def execute(self, op: Op) -> LogOutcome:
        """Execute a command."""
        with self._lock:
            self._averager.at(time.monotonic())
            outcome = execute(self._averager, op)
            self._alarm.set(self._averager.wakes_s)
            self._output.collect(self._averager, self._path)
        return outcome

    def take_in_round(self, updates: Sequence[UpdateMessage]) -> list[ReplyMessage]:
        """Apply all updates of a round.

        Raises:
            GeoRayError: it refuses them.
        """
        with self._lock:
            try:
                return [reply for update in updates for reply in self._averager.on_update(update)]
            finally:
                self._output.collect(self._averager)

    def request_stop(self) -> None:
        """Ask all regions, in their next answers, to finish."""
        with self._lock:
            self._averager.request_stop()

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """Begin a checkpoint; False if it cannot be now."""
        with self._lock:
            self._averager.at(time.monotonic())
            begun = self._averager.begin_checkpoint(checkpoint, halt=halt)
            self._output.collect(self._averager, self._path)
        return begun

    def close(self) -> None:
        """Cancel the timer."""
        self._alarm.set(None)

    def _on_wake(self) -> None:
        try:
            self._answer(self.execute(Wake()).replies)
        except Exception as error:  # this thread has no caller that would receive it
            self._output.failure.note(error, "scheduled answers")


class DirectPath:
    """The plain exchange transport; see the module and `UpdatePath`.

    Args:
        endpoint: this region's endpoint.
        leader: the averager's leader.
        averager: the averager, if it is here.
        output: handles the averager's outputs besides answers.
        answers: where the own region's requests wait.
        stage: builds the stage of this path.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        leader: AveragerLeader,
        averager: Averager | None,
        output: AveragerOutput,
        answers: Answers,
        stage: StageFactory,
    ) -> None:
        self._endpoint = endpoint
        self._region = endpoint.identity.region
        self.leader = leader
        self.answers = answers
        if (averager is not None) != (self._region == leader.region):
            raise InvariantError(f"'{self._region}': the averager belongs to '{leader.region}'")
        self._local: LocalAverager | None = None
        if averager is not None:
            self._local = LocalAverager(averager, output, self._deliver_all, self)
        self._failure = output.failure
        self._arrived_s: dict[str, float] = {}
        self.stage = stage(self)

    # ------------------------------------------------------------------ for the own region

    def exchange(self, update: UpdateMessage) -> ReplyMessage:
        """See `UpdatePath`."""
        if self._local is not None:
            self._take_in(update)
        else:
            self.stage.depart(update, self._ship, again=False)
        return self.answers.wait(update.seq, lambda: self.leader.region)

    def _ship(self, update: UpdateMessage) -> None:
        message = Message("update", update_meta(update), payload_bytes(update), "update")
        self.send(self.leader.region, message)

    # ------------------------------------------------------------------ for the controller

    def request_stop(self) -> None:
        """See `UpdatePath`."""
        self._here().request_stop()

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """See `UpdatePath`."""
        return self._here().request_checkpoint(checkpoint, halt=halt)

    def report_dead(self, region: str, *, comes_back: bool = False) -> None:
        """See `UpdatePath`; answers regions that waited only for this one."""
        if comes_back:  # the averager cannot move here
            return
        log.warning("continuing without region '%s': its data are missing", region)
        self._tell(Leave(region))

    def submit_command(self, op: ChangeMembers | Begun | ChangeInterval) -> None:
        """See `UpdatePath`."""
        self._tell(op)

    def _tell(self, op: Op) -> None:
        outcome = self._here().execute(op)
        if outcome.error is not None:
            raise outcome.error
        self._deliver_all(outcome.replies)

    def status(self) -> dict[str, Any]:
        """See `UpdatePath`."""
        if self._local is None:
            return {"version": None}
        return {
            "version": self._local.version,
            "open": self._local.open_requests(),
            "view": self._local.view,
            "interval": self._local.interval,
        }

    def close(self) -> None:
        """See `UpdatePath`."""
        self.answers.close()
        if self._local is not None:
            self._local.close()

    # ------------------------------------------------------------------ other regions

    def routes(self) -> Routes:
        """See `UpdatePath`."""
        return {"update": self._on_update, "reply": self._on_reply, "refused": self._on_refused}

    def _on_update(self, peer: str, message: Message) -> None:
        try:
            update = read_update(message.meta, view_of(message.payload))
        except FrameError as error:  # ends only the peer that violates the protocol
            log.error("an update of region '%s' cannot be read: %s", peer, error.message)
            refusal = refusal_meta(fields.count(message.meta, "seq"), error)
            self.send(peer, Message("refused", refusal, b"", "control"))
            return
        if update.region != peer:
            log.warning("region '%s' sent an update in the name of '%s'", peer, update.region)
            return
        self._take_in(update)

    def _on_reply(self, peer: str, message: Message) -> None:
        if peer == self.leader.region:
            self.give(read_reply(message.meta, view_of(message.payload)))

    def _on_refused(self, peer: str, message: Message) -> None:
        if peer == self.leader.region:
            self.answers.fail(*read_refusal(message.meta))

    # ------------------------------------------------------------------ for the stage

    def send(self, to: str, message: Message) -> None:
        """See `StagedPath`, as for all following methods."""
        self._endpoint.send(to, message)

    def give(self, reply: ReplyMessage) -> None:
        """Pass an answer to the own region."""
        self.answers.give(self.stage.answered(reply))

    def version(self) -> int:
        """Commits so far."""
        return self._here().version

    def skip(self, region: str, attempt: int, seq: int) -> None:
        """Answer an update without applying it."""
        self._deliver_all(self._here().execute(Skip(region, attempt, seq)).replies)

    def take_sum(
        self, parts: tuple[UpdateMessage, ...], total_P: Tensor
    ) -> list[ReplyMessage] | None:
        """Apply a sum of updates."""
        outcome = self._here().execute(TakeSum(parts, total_P))
        if outcome.error is not None:
            raise outcome.error
        return outcome.replies if outcome.done else None

    def deliver(self, reply: ReplyMessage) -> None:
        """Send an answer."""
        arrived_s = self._arrived_s.get(reply.to)
        if arrived_s is not None:
            reply = replace(reply, held_s=time.monotonic() - arrived_s)
        reply = self.stage.attach(reply)
        if reply.to == self._region:
            self.give(reply)
            return
        self.send(reply.to, Message("reply", reply_meta(reply), payload_bytes(reply), "reply"))

    def refuse(self, update: UpdateMessage, error: GeoRayError) -> None:
        """Report a refusal to the update's region."""
        if update.region == self._region:
            self.answers.fail(update.seq, error)
            return
        meta = refusal_meta(update.seq, error)
        self.send(update.region, Message("refused", meta, b"", "control"))

    def fail(self, error: Exception, doing: str) -> None:
        """Record an error in a thread of the stage."""
        self._failure.note(error, doing)

    # ------------------------------------------------------------------ at the leader

    def _here(self) -> LocalAverager:
        if self._local is None:
            raise InvariantError(f"region '{self._region}' does not host the averager")
        return self._local

    def _take_in(self, update: UpdateMessage) -> None:
        self._arrived_s[update.region] = time.monotonic()
        self.stage.arrive(update, self._commit, again=False)

    def _commit(self, update: UpdateMessage) -> None:
        outcome = self._here().execute(TakeIn(update))
        if outcome.error is not None:
            log.error("update %d of '%s' refused: %s", update.seq, update.region, outcome.error)
            self.refuse(update, outcome.error)
        self._deliver_all(outcome.replies)

    def _deliver_all(self, replies: Sequence[ReplyMessage]) -> None:
        for reply in replies:
            self.deliver(reply)
