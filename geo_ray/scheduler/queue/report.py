"""Report of a queue, for users and programs: its jobs and a forecast of future allocations.

The forecast runs the queue's own decisions slot by slot, with jobs at their observed speed and no
new jobs. It writes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from pydantic import Field

from geo_ray.base.errors import QueueMissingError
from geo_ray.base.model import StrictModel
from geo_ray.base.notebooks import ShownModel
from geo_ray.base.text import counted
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.journal import EndedEntry, GoneEntry, ObservationEntry, QueueJournal
from geo_ray.scheduler.queue.model import Capacity, QueueObservation, fraction_per_s
from geo_ray.scheduler.queue.monitor import starts
from geo_ray.scheduler.queue.slots import (
    GENERATION_SLOTS,
    QueueSlots,
    TickInputs,
    begun_slot,
    workers_text,
)
from geo_ray.scheduler.queue.state import JobSegment, JobState, QueuedJob, QueueLocation, QueueState


class JobSegmentRow(StrictModel):
    """A time span in which a job had a constant allocation."""

    since_unix_s: float
    until_unix_s: float | None = Field(description="null: current")
    workers: dict[str, int] = Field(description="by region")


ShownState = Literal["waiting", "running", "leaving", "ended"]
_SHOWN: Final[dict[JobState, ShownState]] = {
    JobState.WAITING: "waiting",
    JobState.STARTING: "running",
    JobState.RUNNING: "running",
    JobState.LEAVING: "leaving",
    JobState.ENDED: "ended",
}


class QueueJobRow(StrictModel):
    """Status of a job."""

    name: str
    id: str = Field(description="name of its run directory in the queue's `runs`")
    tenant: str
    state: ShownState
    outcome: str | None = Field(description="how it ended; null: it has not ended")
    code: str | None = Field(description="code of the error that ended it")
    message: str = Field(description="reason of the state")
    value: float
    deadline_s: float | None = Field(description="seconds from submission")
    submitted_unix_s: float
    ended_unix_s: float | None
    utility: float | None = Field(description="achieved value; null: it has not ended")
    done: float = Field(description="completed fraction of its work")
    factor: float = Field(description="observed speed relative to the declared one")
    attempts: int = Field(description="number of attempts")
    segments: tuple[JobSegmentRow, ...] = Field(description="past and current allocations")
    planned: tuple[JobSegmentRow, ...] = Field(
        (), description="expected allocations without new jobs"
    )

    @property
    def ends_unix_s(self) -> float | None:
        """Expected end time; None: unknown."""
        return self.planned[-1].until_unix_s if self.planned else None


class QueueReport(ShownModel):
    """Status of a queue."""

    name: str
    policy: str
    slot_s: float
    slot: int | None = Field(
        description="current slot of its policy generation; null: none has begun"
    )
    runs: str = Field(description="location of the runs")
    capacity: dict[str, tuple[float, float]] = Field(description="observed GPUs and CPUs by region")
    written_unix_s: float = Field(description="time of the last journal entry")
    is_served: bool | None = Field(
        None, description="whether the queue is served; null: unknown after a single read"
    )
    jobs: tuple[QueueJobRow, ...] = Field(
        description="running and waiting jobs in order, then the others"
    )

    def job(self, name: str) -> QueueJobRow | None:
        """Return a job by its name; None: unknown."""
        return next((row for row in self.jobs if row.name == name), None)

    def view(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """See `ShownModel.view`."""
        running = sum(row.state in ("running", "leaving") for row in self.jobs)
        waiting = sum(row.state == "waiting" for row in self.jobs)
        line = f"{self.name}: {self.policy}, {counted(len(self.jobs), 'job')}, "
        line += f"{running} running, {waiting} waiting"
        if self.is_served is False:
            line += ", not served"
        rows = [
            (row.name, row.tenant, row.outcome or row.state, f"{row.done:.0%}", row.message)
            for row in self.jobs
        ]
        return line, ("job", "tenant", "state", "done", ""), rows


def report_of(
    state: QueueState, planned: Mapping[str, Sequence[JobSegment]] | None = None
) -> QueueReport:
    """Return the report of a queue.

    Args:
        state: of the queue.
        planned: result of `forecast`; None: no forecast.
    """
    config, slots, known = state.config, state.generation.slots, planned or {}
    living = state.living()
    ended = [job for job in state.jobs.values() if job.state is JobState.ENDED]
    return QueueReport(
        name="" if config is None else config.name,
        policy="" if config is None else config.policy,
        slot_s=0.0 if config is None else config.slot_s,
        slot=slots[-1].slot if slots else None,
        runs="" if config is None else f"{config.runs}/{config.name}",
        capacity=dict(slots[-1].capacity) if slots else {},
        written_unix_s=state.written_unix_s,
        jobs=tuple(_row(job, state, known.get(job.name, ())) for job in [*living, *ended]),
    )


def utility_of_end(job: QueuedJob) -> float | None:
    """Return the achieved value of a job; None: it has not ended.

    It depends on the slots from the arrival slot to the last slot, with the slot length at that
    time.
    """
    if job.end is None:
        return None
    if job.end.outcome != "finished" or job.shown_unix_s is None:
        return 0.0
    slot_s = job.ended_slot_s
    return job.request.value.of(max(0.0, (job.end.unix_s - job.shown_unix_s) // slot_s), slot_s)


def _row(job: QueuedJob, state: QueueState, planned: Sequence[JobSegment]) -> QueueJobRow:
    value, progress, end = job.request.value, job.progress, job.end
    return QueueJobRow(
        name=job.name,
        id=job.id,
        tenant=job.tenant,
        state=_SHOWN[job.state],
        outcome=None if end is None else end.outcome,
        code=None if end is None else end.code,
        message=_message(job, state),
        value=value.value,
        deadline_s=value.deadline_s,
        submitted_unix_s=job.submitted_unix_s,
        ended_unix_s=None if end is None else end.unix_s,
        utility=utility_of_end(job),
        done=progress.done,
        factor=progress.factor,
        attempts=state.attempts.get(job.name, 0),
        segments=tuple(_segment_row(each) for each in progress.segments),
        planned=tuple(_segment_row(each) for each in planned),
    )


def _segment_row(each: JobSegment) -> JobSegmentRow:
    return JobSegmentRow(
        since_unix_s=each.since_unix_s, until_unix_s=each.until_unix_s, workers=each.workers
    )


def _message(job: QueuedJob, state: QueueState) -> str:
    if job.end is not None:
        return job.end.message
    problem = f"; trouble: {job.progress.problem}" if job.progress.problem else ""
    return _stands(job, state) + problem


def _stands(job: QueuedJob, state: QueueState) -> str:
    attempt = job.attempt
    if attempt is not None and attempt.leave is not None:
        return f"is saved: {attempt.leave.why}, {attempt.leave.message}"
    if attempt is not None:
        slow = job.progress.factor
        note = f"; {slow:.2g} times the declared speed" if slow < 0.8 or slow > 1.25 else ""
        return workers_text(attempt.workers) + note
    slot = state.generation.slots[-1] if state.generation.slots else None
    if slot is None:
        return "waits for the first slot"
    if job.name not in slot.jobs:
        known = job.name in state.generation.known
        return "its regions have no capacity" if known else "waits for the next slot"
    if job.name in slot.held:
        return slot.held[job.name]
    if job.name in slot.rejected:
        return "no feasible schedule next to existing reservations; retried at the next slot"
    if job.name in slot.given:
        return "starts as soon as capacity is free"
    return "scheduled for a later slot"


MOST_SLOTS: Final = 60


def forecast(
    state: QueueState, config: QueueConfig, slots: QueueSlots, now: TickInputs
) -> dict[str, Sequence[JobSegment]]:
    """Return the expected allocations of active jobs by name.

    Args:
        state: state of the queue; not modified.
        config: the queue.
        slots: its policy state; not modified.
        now: current inputs, assumed to stay constant.
    """
    if not state.generation.slots:
        return {}
    state, slots = copy.deepcopy(state), copy.deepcopy(slots)
    names = [job.name for job in state.living()]
    at_s, slot = now.unix_s, state.generation.slots[-1].slot
    for _ in range(MOST_SLOTS):
        slot += 1
        tick_s = max(at_s, state.generation.began_unix_s + slot * config.slot_s)
        _train(state, config, at_s, tick_s)
        at_s = tick_s
        if slot >= GENERATION_SLOTS or not state.living():
            break
        state.feed(begun_slot(state, config, slots, slot, TickInputs(at_s, now.capacity)))
        _go(state, config, at_s, now.capacity)
    found = {}
    for name in names:
        all_of_it = state.jobs[name].progress.segments
        found[name] = tuple(
            JobSegment(max(each.since_unix_s, now.unix_s), each.workers, each.until_unix_s)
            for each in all_of_it
            if each.until_unix_s is None or each.until_unix_s > now.unix_s
        )
    return {name: each for name, each in found.items() if each}


def _train(state: QueueState, config: QueueConfig, since_s: float, until_s: float) -> None:
    for job in state.living():
        attempt, progress = job.attempt, job.progress
        if attempt is None:
            continue
        per_s = fraction_per_s(job.request.spec, attempt.workers, attempt.averager, config)
        per_s *= progress.factor
        begins_s = min(
            since_s, progress.observed_unix_s
        )  # from when its completed fraction is known
        if job.state is JobState.STARTING:
            start_s = config.start_s if state.start_s is None else state.start_s
            begins_s = max(since_s, attempt.since_unix_s + start_s)
        done = progress.done + max(0.0, until_s - begins_s) * per_s
        if done < 1.0 - 1e-9 or per_s <= 0:
            state.feed([ObservationEntry(unix_s=until_s, done={job.name: min(1.0, done)})])
            continue
        _end(state, job, begins_s + (1.0 - progress.done) / per_s, attempt.number)


def _end(state: QueueState, job: QueuedJob, unix_s: float, attempt: int) -> None:
    gone = GoneEntry(unix_s=unix_s, job=job.name, attempt=attempt, how="finished")
    state.feed([gone, EndedEntry(unix_s=unix_s, job=job.name, outcome="finished")])


def _go(state: QueueState, config: QueueConfig, unix_s: float, capacity: Capacity) -> None:
    for job in state.living():
        attempt = job.attempt
        if attempt is None or attempt.leave is None:
            continue
        number = attempt.number
        state.feed([GoneEntry(unix_s=unix_s, job=job.name, attempt=number, how="saved")])
        if attempt.leave.why not in ("preempted", "resized"):
            state.feed([EndedEntry(unix_s=unix_s, job=job.name, outcome="cancelled")])
    state.feed(starts(state, config, QueueObservation(unix_s, capacity)))


class QueueReader:
    """Reads new entries of a queue repeatedly; needs no cluster.

    Args:
        location: location of the queue.
    """

    def __init__(self, location: QueueLocation) -> None:
        self._location = location
        self._journal: QueueJournal | None = None
        self._state = QueueState()
        self._slots: QueueSlots | None = None
        self._asked = 0

    @property
    def state(self) -> QueueState:
        """State as last read."""
        return self._state

    def read(self) -> QueueState:
        """Read new entries; return the state.

        Raises:
            QueueMissingError: the queue does not exist.
            QueueJournalError: the journal is invalid.
        """
        self._journal = self._journal or QueueJournal(self._location.store())
        self._state.feed(self._journal.read())
        if self._state.config is None:
            raise QueueMissingError(f"no queue exists in {self._location.shown}")
        return self._state

    def report(self, unix_s: float) -> QueueReport:
        """Read new entries; return the report with forecast.

        Args:
            unix_s: current time.
        """
        state = self.read()
        if state.config is None or not state.generation.slots:
            return report_of(state)
        generation = state.generation
        if self._slots is None or (self._slots.number, self._asked) != (
            generation.number,
            len(generation.slots),
        ):
            self._slots = QueueSlots(state.config, generation, state.jobs)
            self._asked = len(generation.slots)
        now = TickInputs(unix_s, generation.slots[-1].capacity)
        return report_of(state, forecast(state, state.config, self._slots, now))
