"""What is shown of a queue, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BarKind = Literal["had", "has", "planned"]


@dataclass(frozen=True, slots=True)
class QueueBar:
    """A time in which a job has the same.

    Attributes:
        start_s: its beginning, from the queue's.
        end_s: its end.
        kind: whether it is over, lasts, or is to come.
        told: what it has, in words.
    """

    start_s: float
    end_s: float
    kind: BarKind
    told: str


@dataclass(frozen=True, slots=True)
class QueueLane:
    """A job.

    Attributes:
        name: of the job.
        tenant: whose it is.
        state: in a word.
        is_over: whether it has ended.
        bars: what it has when.
        came_s: when it came.
        deadline_s: when half of its worth is gone; None: never.
        cells: what the table says of it: why it stands so, worth, done, speed, starts.
    """

    name: str
    tenant: str
    state: str
    is_over: bool
    bars: tuple[QueueBar, ...]
    came_s: float
    deadline_s: float | None
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueueRoomRow:
    """A region.

    Attributes:
        region: its name.
        cells: GPUs and CPUs that are there, and how many jobs have something.
    """

    region: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueueView:
    """All that is shown of a queue.

    Attributes:
        name: of the queue.
        is_served: whether anybody serves it; None: not known.
        about: in words: policy, slot, where it is.
        facts: numbers with their names.
        lanes: jobs: who runs and waits in order, then the rest, newest first.
        rooms: by region.
        now_s: the present, from the queue's beginning.
    """

    name: str
    is_served: bool | None
    about: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    lanes: tuple[QueueLane, ...]
    rooms: tuple[QueueRoomRow, ...]
    now_s: float
