"""What is seen of a queue's cluster and of its jobs at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from geo_ray.queue.model import Room

SubmissionState = Literal["unknown", "going", "over"]
RunEnd = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class SubmissionSeen:
    """A job's attempt, as job server and run's directory tell of it.

    Attributes:
        state: unknown: the job server has never heard of it.
        done: share of the job's work; None: its run has not begun.
        trains: whether its run takes steps.
        members: state of each region of the run, as `geo_ray.members` says it; empty: not known.
        end: how its run has ended, if it is over; None: without a word.
        code: of the error that ended it.
        told: its message.
        problem: why its run, or a line of its log, cannot be read; "" if all can.
    """

    state: SubmissionState
    done: float | None = None
    trains: bool = False
    members: Mapping[str, str] = field(default_factory=dict)
    end: RunEnd | None = None
    code: str | None = None
    told: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class QueueSeen:
    """See the module's docstring.

    Attributes:
        unix_s: when.
        room: what there is.
        attempts: by name of the job, those that are going by the journal.
        strays: submissions of this queue that run and are no job's attempt any more.
    """

    unix_s: float
    room: Room
    attempts: Mapping[str, SubmissionSeen] = field(default_factory=dict)
    strays: tuple[str, ...] = ()
