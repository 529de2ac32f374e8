"""What an averager is asked to do, as entries of a log.

An `Averager` is deterministic: two that carry out the same entries in the same order hold the same
state and give the same answers, to the bit. So a standby is kept by sending it the log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geo_ray.codecs.common.feedback import open_coded
from geo_ray.errors import GeoRayError
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.averager import Averager
from geo_ray.training.averager.pace import set_pace
from geo_ray.training.membership.border import MemberChange


@dataclass(frozen=True, slots=True)
class TakeIn:
    """Take in one update."""

    update: Update


@dataclass(frozen=True, slots=True)
class TakeSum:
    """Take in the sum of several updates, whose headers are ``parts``."""

    parts: tuple[Update, ...]
    total_P: Tensor


@dataclass(frozen=True, slots=True)
class Skip:
    """Answer an update without taking it in."""

    region: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell all regions to finish."""


@dataclass(frozen=True, slots=True)
class BeginCheckpoint:
    """Begin a checkpoint."""

    id: int
    halt: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """Go on without a region."""

    region: str


@dataclass(frozen=True, slots=True)
class ChangeMembers:
    """Let members change at the next border."""

    change: MemberChange


@dataclass(frozen=True, slots=True)
class Begun:
    """A region that has joined is there."""

    region: str


@dataclass(frozen=True, slots=True)
class ChangePace:
    """Ask regions to exchange after so many steps from now on."""

    steps: int


@dataclass(frozen=True, slots=True)
class Wake:
    """The time that the strategy asked for has come, unless that is over meanwhile."""


@dataclass(frozen=True, slots=True)
class Appoint:
    """Whoever is sent the log stands by from here on; nothing else changes."""


Op = (
    TakeIn
    | TakeSum
    | Skip
    | Stop
    | BeginCheckpoint
    | Leave
    | ChangeMembers
    | Begun
    | ChangePace
    | Wake
    | Appoint
)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of the log.

    Attributes:
        number: counts from 1.
        op: what to do.
        now_s: the averager's time at which it is done.
    """

    number: int
    op: Op
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LogOutcome:
    """What carrying out an entry gave.

    Attributes:
        replies: answers to open requests.
        done: whether it was possible: some parts of a sum may be in already, and a checkpoint must
            wait after a takeover.
        error: why it was refused, and the averager's state is unchanged; or why the averager has
            failed (`Averager.failure`).
    """

    replies: list[Reply]
    done: bool = True
    error: GeoRayError | None = None


def carry_out_entry(averager: Averager, entry: LogEntry) -> LogOutcome:
    """Do what a line of the log says, at its time."""
    averager.state.now_s = entry.now_s
    return carry_out(averager, entry.op)


def carry_out(averager: Averager, op: Op) -> LogOutcome:
    """Do what an entry says; an error is an outcome like others, the same for everybody."""
    try:
        match op:
            case TakeIn(update):
                return LogOutcome(averager.on_update(update))
            case TakeSum(parts, total_P):
                replies = averager.on_sum(parts, total_P)
                return LogOutcome(replies or [], replies is not None)
            case Skip(region, epoch, seq):
                return LogOutcome(averager.on_skip(region, epoch, seq))
            case BeginCheckpoint(number, halt):
                return LogOutcome([], averager.begin_checkpoint(number, halt=halt))
            case Leave(region):
                return LogOutcome(averager.leave(region))
            case ChangeMembers(change):
                return LogOutcome(averager.change(change))
            case Begun(region):
                averager.begun(region)
                return LogOutcome([])
            case ChangePace(steps):
                interval = averager.strategy.traits.exchange.interval
                set_pace(averager.state, steps, interval)
                return LogOutcome([])
            case Wake():
                return LogOutcome(averager.on_wake() if _is_due(averager) else [])
            case Stop():
                averager.request_stop()
                return LogOutcome([])
            case Appoint():
                return LogOutcome([])
    except GeoRayError as error:
        return LogOutcome([], done=False, error=error)


def _is_due(averager: Averager) -> bool:
    wake_s = averager.state.wake_s
    return wake_s is not None and wake_s <= averager.state.now_s


def distance(averager: Averager, op: Op) -> float:
    """How far an entry moves what the averager stands for, at most: a Euclidean norm.

    For strategies that send changes that is the sum of all changes that were taken in. For those
    that send models it is the newest models. It is infinite where no part may be missing: rounds,
    which commit in every region or in none, and final updates.
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


def _update_distance(averager: Averager, update: Update) -> float:
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
            return math.inf  # it will be refused
    return _norm(vector_P)


def _norm(vector_P: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(vector_P))
    return norm if math.isfinite(norm) else math.inf
