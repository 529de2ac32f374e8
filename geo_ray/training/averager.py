"""The averager: applies every region's updates exactly once and answers them.

A pure state machine around a strategy's `on_update`. The averager adds deduplication by (region,
attempt, sequence number), refusal of non-finite or wrongly sized updates, checkpoints, decoding,
model buffers, changes of the sync interval (`set_interval`), and completion: final updates are
answered once those of all regions are in. An exception during a change becomes `failure` and is
raised by every later call. `stalled_regions` detects that no region can make progress.

Source of the snapshot: Chandy and Lamport, "Distributed Snapshots" (1985); reconstructed.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from geo_ray.base.errors import AveragerFailedError, GeoRayError, InvariantError, StalledError
from geo_ray.base.user_code import error_summary
from geo_ray.strategies import additive
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.training.checkpoint_parts import (
    AveragerSnapshot,
    SnapshotMarks,
    load_messages,
    save_messages,
)
from geo_ray.training.lazy_copy import Unread
from geo_ray.training.membership import MemberChange, View, flushes, follow
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.model_buffers import AVERAGER_PREFIX as _BUFFERS
from geo_ray.training.model_buffers import AveragerBuffers
from geo_ray.training.noise import AveragerNoise
from geo_ray.training.parameters import fragment_bounds
from geo_ray.training.payload_encoding import AveragerWire, check_payload


def averager_failure(strategy: Strategy, error: Exception) -> GeoRayError:
    """Return the typed error for an exception of a strategy or of the code around it."""
    if isinstance(error, GeoRayError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return AveragerFailedError(
        f"strategy '{strategy.kind}' failed in the averager: {error_summary(error)} "
        f"({frame.filename}:{frame.lineno})"
    )


@dataclass(slots=True)
class AveragerClock:
    """The averager's own clock, which continues after a resume from the checkpoint's time."""

    _ahead_s: float = 0.0  # lead over the host's clock
    _saved_s: float | None = None  # own time at the restored snapshot

    def own_s(self, host_s: float) -> float:
        """Return the averager's time of an event at ``host_s`` of the host's clock."""
        if self._saved_s is not None:
            self._ahead_s, self._saved_s = self._saved_s - host_s, None
        return host_s + self._ahead_s

    def host_s(self, own_s: float | None) -> float | None:
        """Convert a time of the averager's clock to the host's clock; None for None."""
        return None if own_s is None else own_s - self._ahead_s

    def restore(self, saved_s: object) -> None:
        """Continue from an exported time at the next event."""
        self._saved_s = None if saved_s is None else float(str(saved_s))


_STEPS: Final = (
    "geo_ray:interval"  # no "/": names that end in "/NAME" are per region and leave with it
)
_INSTEAD: Final = "geo_ray:interval_instead"


def set_interval(state: AveragerState, steps: int, interval: int | None) -> None:
    """Set the sync interval to ``steps``; the next answer to each region contains it."""
    state.numbers[_STEPS], state.numbers[_INSTEAD] = float(steps), float(interval or 0)


def restore_numbers(
    state: AveragerState, numbers: Mapping[str, object], interval: int | None
) -> None:
    """Restore the numbers of a checkpoint.

    If the user changed the configured interval before the resume, an interval requested earlier is
    dropped.
    """
    state.numbers.clear()
    state.numbers.update({str(name): float(str(value)) for name, value in numbers.items()})
    if state.numbers.get(_INSTEAD, 0.0) != float(interval or 0):
        state.numbers.pop(_STEPS, None)
        state.numbers.pop(_INSTEAD, None)


def interval_of(state: AveragerState) -> int | None:
    """Return the requested number of steps; None: as configured."""
    steps = state.numbers.get(_STEPS)
    return None if steps is None else int(steps)


def with_interval(reply: ReplyMessage, state: AveragerState) -> ReplyMessage:
    """Return the answer with the requested number of steps."""
    steps = interval_of(state)
    if steps is None or reply.steps is not None:
        return reply
    return replace(reply, steps=steps)


OPEN: Final = "open/"
"""Prefix of the names under which tensors of open requests and newest answers are saved."""


@dataclass(slots=True)
class RequestRegistry:
    """Requests that the averager has taken in, its answers, and the final updates.

    Requests are numbered by (region, attempt, seq), and a region has at most one open. The newest
    number of each region therefore identifies duplicates, and a duplicate only needs the newest
    answer.

    Attributes:
        last: attempt and number of each region's newest request that was taken in or discarded.
        answers: newest answer to each region, as sent.
        finals: final updates that wait for those of the other regions.
    """

    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    answers: dict[str, ReplyMessage] = field(default_factory=dict)
    finals: dict[str, UpdateMessage] = field(default_factory=dict)

    def newest(self, region: str) -> tuple[int, int]:
        """Return attempt and number of the newest request of ``region``; zeros without one."""
        return self.last.get(region, (0, 0))

    def is_known(self, update: UpdateMessage) -> bool:
        """Tell whether ``update`` is a duplicate."""
        return (update.attempt, update.seq) <= self.newest(update.region)

    def has_finals(self, members: Sequence[str]) -> bool:
        """Tell whether all regions have sent their final update."""
        return all(name in self.finals for name in members)

    def take(self, update: UpdateMessage) -> None:
        """Record that ``update`` was taken in or discarded."""
        self.last[update.region] = (update.attempt, update.seq)

    def unanswered(self, members: Sequence[str]) -> dict[str, int]:
        """The numbers of the requests that were taken in and not answered yet, by region."""
        answered = {region: reply.seq for region, reply in self.answers.items()}
        return {
            region: seq
            for region, (_, seq) in self.last.items()
            if region in members and answered.get(region) != seq
        }

    def join(self, region: str, donor: str) -> None:
        """Register a joining region as a copy of its donor: with its numbers and without an answer.

        The joining region keeps its own attempt, because each region counts its own: with the
        donor's, which may be larger, its requests would count as duplicates.
        """
        self.answers.pop(region, None)
        self.last[region] = (self.newest(region)[0], self.newest(donor)[1])

    def leave(self, region: str) -> None:
        """Remove a region; its numbers stay, so that late messages are recognized."""
        self.finals.pop(region, None)
        self.answers.pop(region, None)

    @property
    def is_finishing(self) -> bool:
        """Whether some region has sent, or was asked for, its final update, and not all have."""
        return bool(self.finals) or any(r.stop and not r.final for r in self.answers.values())

    def live(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, object]]:
        """Return tensors that will change, tensors that will not, and plain values.

        Final updates stay in their senders' buffers until they are answered. Answers never change.
        """
        finals, final_rows = save_messages(OPEN + "finals", list(self.finals.values()))
        answers, answer_rows = save_messages(OPEN + "answers", list(self.answers.values()))
        return finals, answers, {"finals": final_rows, "answers": answer_rows}

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        last: Mapping[str, Sequence[int]],
        exchanges: Mapping[str, object],
        *,
        draining: bool,
    ) -> None:
        """Restore the result of `live`.

        Flags of restored answers that ask for a checkpoint or a halt are cleared; for the stop flag
        see `filter_stops`.

        Args:
            tensors: tensors by name.
            last: numbers by region.
            exchanges: plain values.
            draining: whether the run is still in its last round.

        Raises:
            CheckpointCorruptError: messages cannot be read.
        """
        self.last = {str(r): (int(pair[0]), int(pair[1])) for r, pair in last.items()}
        finals = load_messages(UpdateMessage, tensors, exchanges.get("finals"))
        self.finals = {update.region: update for update in finals}
        self.answers.clear()
        for reply in load_messages(ReplyMessage, tensors, exchanges.get("answers")):
            reply = replace(
                reply, checkpoint=None, halt=False, draining=reply.draining and draining
            )
            self.answers[reply.to] = reply

    def filter_stops(self, stopping: bool, *, of_final_updates: bool) -> None:
        """Clear the stop flag of restored answers if the run no longer stops there.

        Args:
            stopping: whether the run still stops there.
            of_final_updates: whether answers to final updates also keep the flag.
        """
        for region, reply in self.answers.items():
            stop = reply.stop and stopping and (of_final_updates or not reply.final)
            self.answers[region] = replace(reply, stop=stop)


@dataclass(slots=True)
class AveragerCompletion:
    """Decides when the averager asks regions to finish.

    The counterpart is `geo_ray.training.server`. If codecs hold coding errors that only a round's
    final update can send, regions are notified one round before (`ReplyMessage.draining`). If a run
    is resumed with another goal after some region had sent its final update for the previous goal,
    the previous goal is completed first.

    Attributes:
        state: strategy's state, which has the flag for stopping.
        announces: whether the last round is announced, so that codecs send their errors in it.
        has_final_updates: whether there is always an exchange after the last step.
        goal: description of the run's goal; a run resumed with another goal continues although it
            was asked to finish.
        enough: rows of all regions after which they are asked to finish; None: no limit.
        samples: rows behind all updates so far.
    """

    state: AveragerState
    announces: bool
    has_final_updates: bool
    goal: str = ""
    enough: int | None = None
    samples: int = 0
    _first: str | None = None  # earlier goal, which regions complete first
    _draining: bool = False  # the next round is the last

    @property
    def stopping(self) -> bool:
        """Whether regions are asked to finish, now or with their next round."""
        return (self.state.stopping and self._first is None) or self._draining

    @property
    def continues(self) -> bool:
        """Whether the run continues, because the round announced as the last had too few rows."""
        return self.announces and self.enough is not None and not self.stopping

    def stop(self) -> None:
        """Ask every region to finish with its next answer, or one round later if announced."""
        if self.announces:
            self._draining = True
        else:
            self.state.stopping, self._first = True, None

    def count(self, samples: int) -> None:
        """Count the rows behind an update."""
        self.samples += samples
        self.state.stopping |= self._has_enough

    def passed(self) -> None:
        """Record that all final updates are in; if they ended an earlier goal, continue."""
        if self._first is not None:
            self._first, self.state.stopping = None, self._has_enough

    def marked(self, reply: ReplyMessage) -> ReplyMessage:
        """Return the answer with the flags and counters of completion."""
        reply = replace(
            with_interval(reply, self.state), stop=self.state.stopping, seen=self.samples
        )
        if not self.announces or reply.final:
            return reply
        # Assume that the next round has as many rows as this one.
        is_next = self.enough is not None and self.samples + reply.num_samples >= self.enough
        return replace(reply, draining=self._draining or is_next)

    def export(self, saved: RequestRegistry) -> dict[str, object]:
        """Return plain values for a checkpoint."""
        stops = (self._first or self.goal) if self.state.stopping else None
        found: dict[str, object] = {"samples": self.samples, "stops": stops}
        if self._draining or any(reply.draining for reply in saved.answers.values()):
            found["drains"] = [self.goal, self._draining]
        return found

    def is_draining(self, control: Mapping[str, object]) -> bool:
        """Tell whether the saved run was in its last round for the same goal."""
        drains = control.get("drains")
        return isinstance(drains, list) and drains[0] == self.goal

    def restore(self, control: Mapping[str, object], saved: RequestRegistry) -> None:
        """Restore the result of `export`; ``saved`` is already restored."""
        self.samples = int(str(control.get("samples", 0)))
        drains = control.get("drains")
        self._draining = isinstance(drains, list) and self.is_draining(control) and bool(drains[1])
        goal = control.get("stops")
        is_earlier = goal not in {None, self.goal} and self.has_final_updates
        self._first = str(goal) if is_earlier and saved.is_finishing else None
        self.state.stopping = goal == self.goal or self._first is not None
        saved.filter_stops(self.state.stopping, of_final_updates=goal == self.goal)

    def export_exact(self) -> list[object]:
        """Return plain values for a replica of the same run."""
        return [self.state.stopping, self._first, self._draining]

    def restore_exact(self, values: Sequence[Any]) -> None:
        """Restore the result of `export_exact`, after `restore`."""
        self.state.stopping, self._first, self._draining = values

    @property
    def _has_enough(self) -> bool:
        return self.enough is not None and self.samples >= self.enough


log = logging.getLogger(__name__)

AVERAGER_WIRE: Final = "wire/"
"""Prefix of the names under which references and coding errors are saved."""


@dataclass(slots=True)
class Averager:
    """Averager: takes in every region's updates exactly once and answers them.

    A pure state machine around a strategy's `on_update`. It adds:

    - exactly-once semantics: a duplicate gets the earlier answer;
    - refusal of payloads that are not finite or have the wrong size;
    - completion: all regions stop at the same exchange, also after a number of rows;
    - checkpoints as consistent cuts that do not block training: the averager copies its state with
      the open round and the newest answers, and marks the next answer to every region with the
      checkpoint's id. A region copies its state before it merges a marked answer. Messages in
      flight need no record, since a resumed region repeats its open request;
    - codecs: a strategy sees vectors only. Payloads are decoded after the check for duplicates, and
      a repeated answer is identical to the byte;
    - model buffers, which bypass strategy and codec (`AveragerBuffers`);
    - final updates, which are held until those of all regions are in. If a run is resumed with
      another goal after some region was asked to finish, it first completes the previous goal;
    - failure: an exception during a state change becomes `failure`, which every later call raises.

    Source of the consistent cut: Chandy and Lamport, "Distributed Snapshots" (1985); reconstructed.

    Attributes:
        strategy: strategy.
        num_params: P, the size of every payload.
        state: strategy's state.
        snapshots: finished parts of checkpoints, which the shell takes and writes.
        wire: decodes updates and encodes replies.
        goal, enough: see `AveragerCompletion`.
        noise: gradient noise across regions.
        failure: error that ended the averager; None while it works.
        model_buffers: mean of the regions' model buffers.
        view: membership view; the strategy's list of members follows it.
    """

    strategy: Strategy
    num_params: int
    state: AveragerState
    snapshots: list[AveragerSnapshot] = field(default_factory=list)
    wire: AveragerWire = field(default_factory=AveragerWire)
    enough: InitVar[int | None] = None
    goal: InitVar[str] = ""
    noise: AveragerNoise = field(default_factory=AveragerNoise)
    model_buffers: AveragerBuffers = field(default_factory=AveragerBuffers)
    failure: GeoRayError | None = None
    view: View = field(init=False)
    _registry: RequestRegistry = field(default_factory=RequestRegistry)
    _marks: SnapshotMarks = field(default_factory=SnapshotMarks)
    _completion: AveragerCompletion = field(init=False)
    _change: MemberChange | None = None  # change of members at the next barrier
    _clock: AveragerClock = field(default_factory=AveragerClock)
    _unread: Unread = field(default_factory=Unread)  # lazy copies of the newest checkpoint

    def __post_init__(self, enough: int | None, goal: str) -> None:
        traits = self.strategy.traits
        bounds = self.wire.plan.bounds
        bounds = bounds or tuple(fragment_bounds(self.num_params, traits.exchange.fragments))
        self.state.fragments = bounds
        has_final_updates = traits.exchange.last == "always"
        announces = traits.in_rounds and not has_final_updates and self.wire.plan.owes
        self._completion = AveragerCompletion(
            self.state, announces, has_final_updates, goal, enough
        )
        self.view = View(self.state.members)

    @property
    def stopping(self) -> bool:
        """Whether regions are asked to finish, now or with their next round."""
        return self._completion.stopping

    @property
    def samples(self) -> int:
        """Rows behind all updates so far."""
        return self._completion.samples

    def at(self, host_s: float) -> None:
        """Set the time of the present event by its host's clock."""
        self.state.now_s = self._clock.own_s(host_s)

    @property
    def wakes_s(self) -> float | None:
        """Time of the next requested `on_wake`, by the host's clock; None without one."""
        return self._clock.host_s(self.state.wake_s)

    def on_wake(self) -> list[ReplyMessage]:
        """Handle the time that the strategy asked for (`AveragerState.wake_s`)."""
        self._unread.secure()
        with self._changing():
            self.state.wake_s = None
            return self._publish(self.strategy.on_wake(self.state))

    @property
    def may_begin_checkpoint(self) -> bool:
        """Whether no region can hold an answer of a lost leader that is unknown here."""
        return self._marks.may_begin

    def on_update(self, update: UpdateMessage) -> list[ReplyMessage]:
        """Take in one update.

        Returns:
            Answers to this or to other regions' open requests; possibly none yet.

        Raises:
            InvariantError: unknown region, or a payload of the wrong size.
            RegionLostError: the region was removed.
            FrameError: the encoded payload is invalid.
            ReferenceLostError: the payload is a difference from an unknown reference.
            NonFiniteError: the payload has NaN or infinity. After any of these errors the state is
                unchanged.
            GeoRayError: the averager has failed, see `failure`.
        """
        self._check_works()
        is_known = self._registry.is_known(update)
        # The answer may be missing although the update is known: the region has left.
        if not (is_known and update.region in self._registry.answers):
            self.view.check(update.region, update.view)
        self._unread.secure()
        if is_known:
            return self._repeat(update)
        with self._changing(may_refuse=True):
            self.model_buffers.check(update)
            update = self._opened(update)
        with self._changing():
            return self._take_in(update)

    def _take_in(self, update: UpdateMessage) -> list[ReplyMessage]:
        self.begun(update.region)
        self.model_buffers.take(update)
        self._registry.take(update)
        self._registry.answers.pop(update.region, None)
        self._completion.count(update.num_samples)
        if not update.final:
            return self._release_finals() + self._answer(update.content(self.state.version))
        self._registry.finals[update.region] = update
        return self._finished()

    def on_sum(self, parts: Sequence[UpdateMessage], total_P: Tensor) -> list[ReplyMessage] | None:
        """Take in the sum of several updates, of which only the headers are known.

        Returns:
            Answers; None if the sum cannot be taken in as a whole. The state is then unchanged, and
            the parts must be sent individually.

        Raises:
            InvariantError: if it has the wrong size or the strategy has no use for sums.
            NonFiniteError: if it has NaN or infinity; the state is unchanged.
        """
        self._check_works()
        combine = self.strategy.traits.averager.adds_up
        if combine is None:
            raise InvariantError(f"strategy {self.strategy} cannot take in a sum of updates")
        for part in parts:
            stranger = part.region not in self.view.members
            if self._registry.is_known(part) or stranger or part.final:
                return None
        check_payload(total_P, self.state.fragments, f"a sum of {[part.region for part in parts]}")
        self._unread.secure()
        with self._changing():
            for part in parts:
                self._registry.take(part)
                self._completion.count(part.num_samples)
            replies = self._release_finals()
            contents = [part.content(self.state.version) for part in parts]
            answers = additive.relay_sum(self.state, contents, total_P, combine)
            return replies + self._publish(answers, own=True)

    def on_skip(self, region: str, attempt: int, seq: int) -> list[ReplyMessage]:
        """Answer an update that is too stale without taking it in."""
        self._check_works()
        self.view.check(region)
        skipped = UpdateMessage(region, attempt, seq, 0, 0, torch.empty(0))
        if self._registry.is_known(skipped):
            return self._repeat(skipped)
        self._unread.secure()
        with self._changing():
            self._registry.take(skipped)
            replies = self._release_finals()
            content = skipped.content(self.state.version)
            answer = additive.refresh(self.state, content, self.num_params)
            return replies + self._publish([answer])

    def last(self, region: str) -> tuple[int, int]:
        """Return attempt and number of the newest update of ``region`` taken in or discarded."""
        return self._registry.newest(region)

    @property
    def unanswered(self) -> dict[str, int]:
        """The numbers of the updates that were taken in and not answered yet, by region."""
        return self._registry.unanswered(self.state.members)

    @property
    def is_plain(self) -> bool:
        """Whether every update is answered on its own: no final update waits for others."""
        return not self._registry.finals

    def change(self, change: MemberChange) -> list[ReplyMessage]:
        """Change the members at the next barrier, see `geo_ray.training.membership`.

        Returns:
            Answers to regions that waited for others. Nothing changes while `is_changing`, or once
            the run is asked to finish; `view` shows when the change is done.

        Raises:
            InvariantError: a joining region is already a member, or a leaving region is not.
        """
        change.after(self.view)
        if self.is_changing or self.stopping:
            return []
        self._unread.secure()
        with self._changing():
            self._change = change
            return self.release_waiting() if self._is_flushing else []

    def admit(self, change: MemberChange) -> None:
        """Change the members at once, at the start of a run that is resumed from a barrier.

        Raises:
            InvariantError: a joining region is already a member, or a leaving region is not.
        """
        donor, view = change.donor(self.view), change.after(self.view)
        self._enter(view, donor)

    def cancel_change(self) -> None:
        """Drop a pending membership change: no barrier follows."""
        self._change = None

    def begun(self, region: str) -> None:
        """Mark a joining region active; its first update does the same."""
        self.view = self.view.begun(region)

    @property
    def is_changing(self) -> bool:
        """Whether a membership change is pending, or a joining region is not active yet."""
        return self._change is not None or bool(self.view.joining)

    def leave(self, region: str) -> list[ReplyMessage]:
        """Continue without a region; answer the regions that waited only for it."""
        self._change = self._change and self._change.but(region)
        if region not in self.view.members:
            return []
        return self.go_on_in(self.view.without(region))

    def go_on_in(self, view: View) -> list[ReplyMessage]:
        """Enter a view that lacks regions; answer the regions that waited only for them."""
        self._unread.secure()
        with self._changing():
            state = self.state
            self._enter(view)
            self._note_finished()
            replies = self.release_waiting()
            if self._registry.finals and (
                state.waiting or self._registry.has_finals(state.members)
            ):
                return replies + self._finished()
            if state.waiting and all(name in state.waiting for name in state.members):
                # Only the lost region was missing: any waiting update, handled again, completes the
                # round.
                return replies + self._answer(state.waiting.pop(state.members[0]))
            return replies

    def _enter(self, view: View, donor: str = "") -> None:
        parts = (self.wire, self.model_buffers, self._registry, self._marks)
        follow(self.state, parts, view, donor)
        self.view = view

    def _at_barrier(self, replies: list[ReplyMessage]) -> list[ReplyMessage]:
        """Apply a pending membership change at this barrier; return the answers with its flags."""
        change, self._change = self._change, None
        if change is None or any(reply.stop for reply in replies):
            return replies
        donor, view = change.donor(self.view), change.after(self.view)
        self._enter(view, donor)
        marked = change.marked(replies, view, donor)
        self._registry.answers |= {reply.to: reply for reply in marked}  # it may be requested again
        return marked

    def request_stop(self) -> None:
        """Ask every region to finish with its next answer, or one round later if announced."""
        self._completion.stop()

    def forget_answers(self) -> None:
        """Free the newest answers, where regions never repeat an update; their headers stay."""
        for region, reply in self._registry.answers.items():
            size = reply.payload_P.numel() if reply.coded is None else reply.coded.num
            gone_P = torch.empty(size, device="meta")
            self._registry.answers[region] = replace(reply, payload_P=gone_P, coded=None)

    def begin_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """Copy the present state for a checkpoint, and mark the next answer to every region.

        Args:
            checkpoint: id, larger than all before.
            halt: regions pause after they have copied their state.

        Returns:
            False if it is not possible: see `may_begin_checkpoint`, a membership change, or a
            failure.
        """
        if not self.may_begin_checkpoint or self.failure is not None or self.is_changing:
            return False
        *tensors, control = self._live()
        self.snapshots.append(AveragerSnapshot(checkpoint, self._unread.copy(*tensors), control))
        self._marks.begin(checkpoint, halt=halt)
        return True

    def on_failover(self, region: str) -> None:
        """Continue in ``region`` after a failover; regions may hold answers unknown here."""
        self._change = self._change and self._change.but(region)
        self._marks.on_failover(self.state.members)
        self._clock.restore(self.state.now_s)  # time of the previous host

    def settle(self, region: str) -> None:
        """Record that a region holds no answers of a lost leader except those known here."""
        self._marks.settle(region)

    def export(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return copies of tensors, and plain values, for a checkpoint."""
        changing, fixed, control = self._live()
        return fixed | {name: value.clone() for name, value in changing.items()}, control

    def _live(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, object]]:
        """Return tensors that will change, tensors that will not, and plain values.

        Open requests stay in their senders' buffers until they are answered.
        """
        state = self.state
        wire_tensors, wire = self.wire.export()
        buffers, buffer_rows = self.model_buffers.export()
        waiting, waiting_rows = save_messages(OPEN + "waiting", list(state.waiting.values()))
        finals, answers, exchanges = self._registry.live()
        changing = state.memory | waiting | finals
        fixed = {AVERAGER_WIRE + k: v for k, v in wire_tensors.items()} | buffers | answers
        control: dict[str, object] = {
            "version": state.version,
            "numbers": dict(state.numbers),
            "members": list(state.members),
            "last": {region: list(pair) for region, pair in self._registry.last.items()},
            "wire": wire,
            "noise": self.noise.meter.export(),
            "exchanges": {"waiting": waiting_rows} | exchanges,
            "now_s": state.now_s,
            "wake_s": state.wake_s,
        }
        control |= self._completion.export(self._registry)
        control |= {"buffer_rows": buffer_rows} if buffers else {}
        control |= {"view": self.view.export()} if self.view.generation > 1 else {}
        return changing, fixed, control

    def restore(self, tensors: Mapping[str, Tensor], control: Mapping[str, object]) -> None:
        """Restore the result of `export`.

        Raises:
            ConfigChangedError: it was saved with other codecs.
            CheckpointCorruptError: open requests or answers cannot be read.
        """
        last, wire = control["last"], control.get("wire", {})
        numbers, exchanges = control.get("numbers", {}), control.get("exchanges", {})
        saved = (last, wire, numbers, exchanges)
        if not all(isinstance(value, Mapping) for value in saved):
            raise InvariantError("checkpoint without the averager's state")
        last, wire, numbers, exchanges = (dict(cast(Mapping[str, Any], value)) for value in saved)
        separate = {
            k: v for k, v in tensors.items() if k.startswith((AVERAGER_WIRE, OPEN, _BUFFERS))
        }
        on_wire = {
            k.removeprefix(AVERAGER_WIRE): v
            for k, v in separate.items()
            if k.startswith(AVERAGER_WIRE)
        }
        self.wire.restore(on_wire, wire)
        self.model_buffers.restore(separate, control.get("buffer_rows"))
        state = self.state
        state.memory.clear()
        state.memory.update({k: v.clone() for k, v in tensors.items() if k not in separate})
        self.view = self.view.restored(control.get("view"))
        state.version = int(str(control["version"]))
        restore_numbers(state, numbers, self.strategy.traits.exchange.interval)
        state.waiting.clear()
        waiting = load_messages(Update, separate, exchanges.get("waiting"))
        state.waiting.update({update.region: update for update in waiting})
        self.noise.meter.restore(control.get("noise"))
        now_s, wake_s = control.get("now_s"), control.get("wake_s")
        self._clock.restore(now_s)
        state.wake_s = None if wake_s is None else float(str(wake_s))
        self._registry.restore(
            separate, last, exchanges, draining=self._completion.is_draining(control)
        )
        self._completion.restore(control, self._registry)
        self._note_finished()

    # ------------------------------------------------------------------ inside

    def _check_works(self) -> None:
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def _changing(self, *, may_refuse: bool = False) -> Iterator[None]:
        """Guard a state change: any exception but a refusal ends the averager."""
        self._check_works()
        try:
            yield
        except Exception as error:
            if may_refuse and isinstance(error, GeoRayError):
                raise
            log.exception("the averager failed")
            self.failure = averager_failure(self.strategy, error)
            raise self.failure from error

    def checked(self, update: UpdateMessage) -> UpdateMessage:
        """Return an update, decoded and checked, without taking it in; a duplicate is unchanged.

        So several averagers can take in the parts of an update all or none.

        Raises:
            GeoRayError: `on_update` would refuse it.
        """
        self._check_works()
        if self._registry.is_known(update):
            return update
        self.view.check(update.region, update.view)
        self.model_buffers.check(update)
        return self._finite(self.wire.opened(update, self.num_params))

    def _opened(self, update: UpdateMessage) -> UpdateMessage:
        """Decode and check an update."""
        return self._finite(self.wire.decode(update, self.num_params))

    def _finite(self, update: UpdateMessage) -> UpdateMessage:
        """Check a decoded update."""
        what = f"update {update.seq} of region '{update.region}'"
        check_payload(update.payload_P, self.state.fragments, what, update.fragment)
        return update

    def _repeat(self, update: UpdateMessage) -> list[ReplyMessage]:
        saved = self._registry
        newest = saved.newest(update.region) == (update.attempt, update.seq)
        answer, final = saved.answers.get(update.region), saved.finals.get(update.region)
        if newest and final is not None and not update.final:
            with self._changing():
                del saved.finals[update.region]  # the region was resumed with more steps
                self._note_finished()
                return self._answer(replace(final, final=False).content(self.state.version))
        is_known = answer is not None and newest and not answer.payload_P.is_meta
        return [answer] if answer is not None and is_known else []

    def _note_finished(self) -> None:
        self.state.finished = frozenset(self._registry.finals)

    def _finished(self) -> list[ReplyMessage]:
        """Handle a new final update, or the departure of a region: complete the run if all are in.

        Otherwise answer the regions that wait for a finished one.
        """
        self._note_finished()
        if self._registry.has_finals(self.state.members):
            finals, self._registry.finals = self._registry.finals, {}
            self._note_finished()
            self._completion.passed()
            continues = self._completion.continues
            updates = [replace(finals[name], final=not continues) for name in self.state.members]
            replies = [
                reply
                for update in updates
                for reply in self._answer(update.content(self.state.version))
            ]
            return replies if continues else self._at_barrier(replies)
        if not self.strategy.traits.averager.frees or not self.state.waiting:
            return self._release_finals()
        return self._publish(self.strategy.on_finished(self.state))

    def _answer(self, update: Update) -> list[ReplyMessage]:
        measured = self.noise.measured(self.strategy, self.state, update)
        answers = self.strategy.on_update(self.state, update)
        self.noise.take(self.state.version, measured, answers)
        replies = self._publish(answers)
        if update.final:  # all final updates are in, and answered together
            return replies
        if replies and self._change is not None and not self._is_flushing:  # a round is over
            return self._at_barrier(replies)
        if self.state.stopping or self._is_flushing:
            replies += self.release_waiting()
        if self._registry.finals and self.state.waiting:  # they may wait for a finished region
            replies += self._release_finals()
        return replies

    def release_waiting(self) -> list[ReplyMessage]:
        """Answer every waiting region, if the strategy lets some wait."""
        if not self.strategy.traits.averager.releases:
            return []
        return self._publish(self.strategy.on_release(self.state))

    @property
    def _is_flushing(self) -> bool:
        return self._change is not None and flushes(self.strategy.traits)

    def _publish(self, answers: Sequence[Reply], *, own: bool = False) -> list[ReplyMessage]:
        messages = [
            ReplyMessage.sending(
                answer,
                seq=self._registry.newest(answer.to)[1],  # a region has one open request at most
                version=self.state.version,
                own=own,
            )
            for answer in answers
        ]
        replies = [
            self._marked(reply) for reply in self.model_buffers.attach(self.wire.encode(messages))
        ]
        for reply in replies:
            self._registry.answers[reply.to] = reply
        return replies

    def _marked(self, reply: ReplyMessage) -> ReplyMessage:
        view, flush = self.view.wire_generation, self._is_flushing and not reply.final
        return self._marks.marked(replace(self._completion.marked(reply), flush=flush, view=view))

    def _release_finals(self) -> list[ReplyMessage]:
        """Take final updates as ordinary ones, so that they are answered.

        In an open round, regions may wait for a finished one, which itself waits for their final
        updates. Not needed where the strategy knows which regions have finished.
        """
        if not self.state.waiting or self.strategy.traits.averager.frees:
            return []
        finals, self._registry.finals = list(self._registry.finals.values()), {}
        self._note_finished()
        return [
            reply
            for final in finals
            for reply in self._answer(replace(final, final=False).content(self.state.version))
        ]


class AveragerFactory(Protocol):
    """Builds an averager that has done nothing yet."""

    def __call__(self) -> Averager:
        """Build it."""


def open_requests(averager: Averager) -> dict[str, int] | None:
    """The updates that an averager has taken in and not answered, by region.

    None if it may still answer them by itself, because its strategy wants to be woken.
    """
    return averager.unanswered if averager.wakes_s is None else None


def stalled_regions(
    still: Mapping[str, int | None], unanswered: Mapping[str, int] | None
) -> dict[str, int]:
    """Return the requests that will never be answered, by region; empty while progress is possible.

    Args:
        still: request that each unfinished region is blocked on, or None (`Server.blocked_on`).
        unanswered: result of `open_requests`; None if unknown.
    """
    waits = {region: seq for region, seq in still.items() if seq is not None}
    if unanswered is None or len(waits) < len(still):
        return {}
    return waits if all(unanswered.get(r) == seq for r, seq in waits.items()) else {}


def stalled_error(waits: Mapping[str, int]) -> StalledError:
    """The error that ends a run whose regions wait for these requests."""
    who = ", ".join(f"'{region}' (update {seq})" for region, seq in sorted(waits.items()))
    return StalledError(
        "no region makes progress: each waits for the averager's answer, and the averager for "
        f"another update of one of them: {who}"
    )
