"""What is written down of a queue: facts and decisions, in their order, before they are acted on.

The state of a queue is what these come to (`geo_ray.queue.state`); nothing else is remembered.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, TypeAdapter

from geo_ray.config.base import StrictModel
from geo_ray.queue.config import QueueConfig
from geo_ray.queue.job_spec import AnyRequest, JobWorth

Counts = dict[str, int]
LeaveWhy = Literal["preempted", "resized", "cancelled", "overran", "stalled"]
Outcome = Literal["finished", "cancelled", "turned away", "overran", "stalled", "failed"]


class OpenedEntry(StrictModel):
    """A queue begins to be served, by the how manieth holder of its lease."""

    kind: Literal["opened"] = "opened"
    unix_s: float
    epoch: int
    queue_id: str = Field(min_length=1, description="random identity, made when first served")
    config: QueueConfig


class TakenEntry(StrictModel):
    """A request was taken in, or refused."""

    kind: Literal["taken"] = "taken"
    unix_s: float
    tenant: str
    request: AnyRequest
    code: str | None = Field(None, description="of the error; null: it was granted")
    refused: str | None = Field(None, description="why")


class SeenJob(StrictModel):
    """A job as a policy was shown it at a slot's beginning."""

    left: float = Field(ge=0, le=1, description="share of its work")
    worth: JobWorth
    factor: float = Field(gt=0, description="of its speed, as observed")
    regions: tuple[str, ...] = Field((), description="of its data, those that are there")
    start_s: float = Field(0.0, ge=0, description="until it trains, once it has something")
    waited: int = Field(0, ge=0, description="slots in which it had nothing")
    attained_s: float = Field(0.0, ge=0, description="seconds of workers that it has had")
    admitted: bool = Field(False, description="whether it was taken on before this slot")
    lost: bool = Field(
        False,
        description="whether it lost its processes or regions since the slot before, through no "
        "fault of its own",
    )


class GivenJob(StrictModel):
    """What a policy gave a job in a slot."""

    workers: Counts = Field(description="by region")
    servers: Counts = Field(description="by region")


class SlotEntry(StrictModel):
    """A slot begins: what was seen, and what the policy answered."""

    kind: Literal["slot"] = "slot"
    unix_s: float
    slot: int = Field(ge=0, description="of the era")
    room: dict[str, tuple[float, float]] = Field(description="GPUs and CPUs by region")
    arrived: tuple[str, ...] = ()
    gone: tuple[str, ...] = Field((), description="otherwise than by their plan")
    jobs: dict[str, SeenJob] = Field({}, description="that have come and not ended, in order")
    given: dict[str, GivenJob] = Field({}, description="what each has from now on")
    payoffs: dict[str, float | None] = Field({}, description="of jobs that came")
    turned_away: tuple[str, ...] = ()
    held: dict[str, str] = Field({}, description="what was not done of that, and why")


class EraEntry(StrictModel):
    """The policy begins anew; slots count from here."""

    kind: Literal["era"] = "era"
    unix_s: float
    number: int = Field(ge=1)


class StartEntry(StrictModel):
    """A job is to be started, as its how manieth attempt."""

    kind: Literal["start"] = "start"
    unix_s: float
    job: str
    attempt: int = Field(ge=1)
    workers: Counts
    averager: str


class ReshapeEntry(StrictModel):
    """Regions of a job that runs are to join or to leave it."""

    kind: Literal["reshape"] = "reshape"
    unix_s: float
    job: str
    workers: Counts


class LeaveEntry(StrictModel):
    """A job is to be saved and to give its machines back."""

    kind: Literal["leave"] = "leave"
    unix_s: float
    job: str
    why: LeaveWhy
    told: str


class GoneEntry(StrictModel):
    """An attempt is over."""

    kind: Literal["gone"] = "gone"
    unix_s: float
    job: str
    attempt: int
    how: Literal["saved", "finished", "failed", "lost"] = Field(
        description="lost: it failed through no fault of its own"
    )
    code: str | None = None
    told: str = ""


class SeenEntry(StrictModel):
    """What was observed of jobs that run."""

    kind: Literal["seen"] = "seen"
    unix_s: float
    done: dict[str, float] = Field({}, description="share of its work, by job")
    factors: dict[str, float] = Field({}, description="of their speed")
    expected: dict[str, float] = Field(
        {}, description="share that they would have done by their own numbers, since they came"
    )
    problems: dict[str, str] = Field(
        {}, description="what went wrong with a job and with no other; empty: it is over"
    )


class EndedEntry(StrictModel):
    """A job is over."""

    kind: Literal["ended"] = "ended"
    unix_s: float
    job: str
    outcome: Outcome
    code: str | None = None
    told: str = ""


class SnapshotEntry(StrictModel):
    """A part of all that the queue remembers; see `QueueState.snapshot`.

    The last part replaces the state, if all parts came without any other entry in between.
    """

    kind: Literal["snapshot"] = "snapshot"
    unix_s: float
    part: int = Field(ge=0)
    is_last: bool = False
    head: dict[str, JsonValue] | None = Field(None, description="all but the following, in part 0")
    job: dict[str, JsonValue] | None = None
    slot: SlotEntry | None = None
    answers: dict[str, JsonValue] = Field({})


AnyEntry = Annotated[
    OpenedEntry
    | TakenEntry
    | SlotEntry
    | EraEntry
    | StartEntry
    | ReshapeEntry
    | LeaveEntry
    | GoneEntry
    | SeenEntry
    | EndedEntry
    | SnapshotEntry,
    Field(discriminator="kind"),
]
ENTRIES: TypeAdapter[list[AnyEntry]] = TypeAdapter(list[AnyEntry])
