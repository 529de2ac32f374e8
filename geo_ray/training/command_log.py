"""Command log of the averager, and snapshots of its state.

An `Averager` is deterministic: two that apply the same entries in the same order hold the same
state to the bit. A replica follows by applying the log. A state snapshot (`StateSnapshot`) lets a
replica start in the middle of a run. `resume_averager` restores a checkpoint: absent regions count
as having left, and the regions that waited for them are answered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from geo_ray.base.errors import CheckpointCorruptError, GeoRayError
from geo_ray.codecs.feedback import open_coded
from geo_ray.training.averager import Averager, set_interval
from geo_ray.training.membership import MemberChange, View
from geo_ray.training.messages import Barrier, ReplyMessage, UpdateMessage


@dataclass(frozen=True, slots=True)
class TakeIn:
    """Take in one update."""

    update: UpdateMessage


@dataclass(frozen=True, slots=True)
class TakeSum:
    """Take in the sum of several updates, whose headers are ``parts``."""

    parts: tuple[UpdateMessage, ...]
    total_P: Tensor


@dataclass(frozen=True, slots=True)
class Skip:
    """Answer an update without taking it in."""

    region: str
    attempt: int
    seq: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask all regions to finish."""


@dataclass(frozen=True, slots=True)
class BeginCheckpoint:
    """Begin a checkpoint."""

    id: int
    halt: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """Continue without a region."""

    region: str


@dataclass(frozen=True, slots=True)
class ChangeMembers:
    """Change the members at the next barrier."""

    change: MemberChange


@dataclass(frozen=True, slots=True)
class Begun:
    """Mark a joining region as active."""

    region: str


@dataclass(frozen=True, slots=True)
class ChangeInterval:
    """Ask regions to exchange after so many steps."""

    steps: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Call the strategy's `on_wake`, unless it is no longer due."""


@dataclass(frozen=True, slots=True)
class Promote:
    """Make the receiver of the log the standby from this entry on; changes no other state."""


Op = (
    TakeIn
    | TakeSum
    | Skip
    | Stop
    | BeginCheckpoint
    | Leave
    | ChangeMembers
    | Begun
    | ChangeInterval
    | Wake
    | Promote
)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of the log.

    Attributes:
        number: index, from 1.
        op: command.
        now_s: averager's time at which the command is executed.
    """

    number: int
    op: Op
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LogOutcome:
    """Result of executing an entry.

    Attributes:
        replies: answers to open requests.
        done: False if the command was not possible: a part of a sum was already taken in, or a
            checkpoint must wait after a failover.
        error: reason for a refusal, which leaves the state unchanged, or the averager's failure
            (`Averager.failure`).
    """

    replies: list[ReplyMessage]
    done: bool = True
    error: GeoRayError | None = None


def execute_entry(averager: Averager, entry: LogEntry) -> LogOutcome:
    """Execute an entry at its time."""
    averager.state.now_s = entry.now_s
    return execute(averager, entry.op)


def execute(averager: Averager, op: Op) -> LogOutcome:
    """Execute a command; errors are part of the outcome, so that all replicas agree."""
    try:
        match op:
            case TakeIn(update):
                return LogOutcome(averager.on_update(update))
            case TakeSum(parts, total_P):
                replies = averager.on_sum(parts, total_P)
                return LogOutcome(replies or [], replies is not None)
            case Skip(region, attempt, seq):
                return LogOutcome(averager.on_skip(region, attempt, seq))
            case BeginCheckpoint(number, halt):
                return LogOutcome([], averager.begin_checkpoint(number, halt=halt))
            case Leave(region):
                return LogOutcome(averager.leave(region))
            case ChangeMembers(change):
                return LogOutcome(averager.change(change))
            case Begun(region):
                averager.begun(region)
                return LogOutcome([])
            case ChangeInterval(steps):
                interval = averager.strategy.traits.exchange.interval
                set_interval(averager.state, steps, interval)
                return LogOutcome([])
            case Wake():
                return LogOutcome(averager.on_wake() if _is_due(averager) else [])
            case Stop():
                averager.request_stop()
                return LogOutcome([])
            case Promote():
                return LogOutcome([])
    except GeoRayError as error:
        return LogOutcome([], done=False, error=error)


def _is_due(averager: Averager) -> bool:
    wake_s = averager.state.wake_s
    return wake_s is not None and wake_s <= averager.state.now_s


def distance(averager: Averager, op: Op) -> float:
    """Upper bound on how far an entry moves the averager's state, as a Euclidean norm.

    For strategies that send changes, the state is the sum of all changes taken in; for strategies
    that send models, it is the newest models. The distance is infinite for rounds, which commit in
    every region or in none, and for final updates.
    """
    match op:
        case TakeSum(_, total_P):
            return _norm(total_P)
        case TakeIn(update):
            if update.final or averager.strategy.traits.in_rounds:
                return math.inf
            return _update_distance(averager, update)
        case _:
            return 0.0


def _update_distance(averager: Averager, update: UpdateMessage) -> float:
    vector_P = update.payload_P
    if averager.strategy.traits.sends == "model":
        before_P = averager.state.memory.get(f"model/{update.region}")
        if before_P is None or update.coded is not None or vector_P.shape != before_P.shape:
            return math.inf
        return _norm(vector_P - before_P)
    if update.coded is not None:
        try:
            vector_P = open_coded(averager.wire.plan.up, update.coded, averager.num_params)
        except GeoRayError:
            return math.inf  # execution refuses it
    return _norm(vector_P)


def _norm(vector_P: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(vector_P))
    return norm if math.isfinite(norm) else math.inf


_ASKS = ("stop", "checkpoint", "halt", "draining", "flush", "view")  # of an answer's receiver


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A copy of an averager's state: tensors by name, and plain values."""

    tensors: dict[str, Tensor]
    control: dict[str, object]


def snapshot_of(averager: Averager) -> StateSnapshot:
    """Copy the complete state of an averager without interrupting it."""
    tensors, control = averager.export()
    books, change, view = averager._registry, averager._change, averager.view
    control["exact"] = {
        "view": {name: _plain(value) for name, value in asdict(view).items()},
        "change": None if change is None else {k: _plain(v) for k, v in asdict(change).items()},
        "asks": {region: _asked(reply) for region, reply in books.answers.items()},
        "marks": averager._marks.export(),
        "ending": averager._completion.export_exact(),
    }
    return StateSnapshot({name: value.clone() for name, value in tensors.items()}, control)


def install_snapshot(averager: Averager, snapshot: StateSnapshot) -> None:
    """Restore the state of `snapshot_of` into a new averager.

    Raises:
        CheckpointCorruptError: the snapshot is invalid.
        ConfigChangedError: the snapshot was taken with other codecs.
    """
    averager.restore(snapshot.tensors, snapshot.control)
    try:
        exact = cast(Mapping[str, Any], snapshot.control["exact"])
        averager.view = View(**{name: _tuples(value) for name, value in exact["view"].items()})
        averager.state.members = averager.view.members
        change = exact["change"]
        if change is not None:
            change = MemberChange(**{name: _tuples(value) for name, value in change.items()})
        averager._change = change
        answers = averager._registry.answers
        for region, asks in exact["asks"].items():
            barrier = None if asks["barrier"] is None else Barrier(**asks["barrier"])
            asked = {name: asks[name] for name in _ASKS}
            answers[region] = replace(answers[region], barrier=barrier, **asked)
        averager._marks.restore(exact["marks"])
        averager._completion.restore_exact(exact["ending"])
        averager.state.now_s = float(str(snapshot.control["now_s"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"a copy of the averager cannot be read: {error!r}") from error


def _asked(reply: ReplyMessage) -> dict[str, object]:
    barrier = None if reply.barrier is None else asdict(reply.barrier)
    return {name: getattr(reply, name) for name in _ASKS} | {"barrier": barrier}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _tuples(value: object) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def resume_averager(
    averager: Averager, tensors: Mapping[str, Tensor], control: Mapping[str, object]
) -> None:
    """Restore a new averager from a checkpoint.

    Args:
        averager: new averager over the present regions.
        tensors: tensors of the averager's part.
        control: plain values of the averager's part.

    Raises:
        ConfigChangedError: the checkpoint was saved with other codecs.
        CheckpointCorruptError: the checkpoint cannot be read.
        GeoRayError: the strategy cannot continue without the absent regions.
    """
    there, saved = averager.state.members, control.get("members")
    before = {str(name) for name in saved} if isinstance(saved, list) else set(there)
    gone = sorted(before.difference(there))
    if gone:
        averager.state.members = tuple(sorted({*there, *before}))
        averager.view = View(averager.state.members)
    averager.restore(tensors, control)
    if gone:
        averager.state.now_s = float(str(control.get("now_s", averager.state.now_s)))
        averager.go_on_in(averager.view.changed((), gone))
