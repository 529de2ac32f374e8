"""State of a queue, computed from its journal, and the location of a queue."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Final, Literal

from pydantic import JsonValue, TypeAdapter

from geo_ray.base.errors import InvariantError, QueueJournalError, QueueMissingError, StoreError
from geo_ray.base.files import make_directory, unwritable
from geo_ray.base.states import StateTable
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.job_spec import (
    AnyRequest,
    CancelRequest,
    JobRequest,
    MoveRequest,
    SubmitRequest,
)
from geo_ray.scheduler.queue.journal import (
    AnyEntry,
    EndedEntry,
    GoneEntry,
    LeaveEntry,
    ObservationEntry,
    OpenedEntry,
    PolicyGenerationEntry,
    QueueJournal,
    RequestEntry,
    ReshapeEntry,
    SlotEntry,
    SnapshotEntry,
    StartEntry,
    is_there,
)
from geo_ray.storage.conditional_store import ConditionalStore, StoreLocation
from geo_ray.storage.uri import is_s3, join, local_path


class JobState(StrEnum):
    """The state of a job in the queue; `JOB` lists the events that change it."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    ENDED = "ended"


JobEvent = Literal["start", "step", "reshape", "leave", "gone", "end"]
_S = JobState

JOB: Final[StateTable[JobState, JobEvent]] = StateTable(
    name="Job of a queue",
    states={
        _S.WAITING: "It has no attempt, and waits for machines.",
        _S.STARTING: "An attempt is submitted and has not taken its first step.",
        _S.RUNNING: "Its attempt trains.",
        _S.LEAVING: "Its attempt is being saved and stopped: preempted, resized, or ending.",
        _S.ENDED: "It has finished, failed, or was cancelled or refused.",
    },
    moves={
        (_S.WAITING, "start"): _S.STARTING,
        (_S.STARTING, "step"): _S.RUNNING,
        (_S.STARTING, "reshape"): _S.STARTING,
        (_S.RUNNING, "reshape"): _S.RUNNING,
        (_S.STARTING, "leave"): _S.LEAVING,
        (_S.RUNNING, "leave"): _S.LEAVING,
        (_S.LEAVING, "leave"): _S.LEAVING,  # with another reason, for example a cancellation
        (_S.LEAVING, "step"): _S.LEAVING,
        (_S.STARTING, "gone"): _S.WAITING,
        (_S.RUNNING, "gone"): _S.WAITING,
        (_S.LEAVING, "gone"): _S.WAITING,
        (_S.WAITING, "end"): _S.ENDED,
        (_S.STARTING, "end"): _S.ENDED,
        (_S.RUNNING, "end"): _S.ENDED,
        (_S.LEAVING, "end"): _S.ENDED,
    },
)

SNAPSHOT_FORMAT: Final = "queue-snapshot-3"

KEPT_ENDED: Final = 500
"""Maximum number of ended jobs that are retained."""
KEPT_ANSWERS: Final = 200
"""Maximum number of answers per tenant that are retained."""
_KEPT_SEGMENTS: Final = 200  # per job
_AT_ONCE: Final = 50  # largest number of answers per snapshot entry
_UNSEEN_S: Final = 60.0
"""Seconds without an entry after which progress is unknown; running jobs write one every 30 s."""


@dataclass(slots=True)
class JobSegment:
    """A time span in which a job had a constant allocation.

    Attributes:
        since_unix_s: start.
        workers: workers by region.
        until_unix_s: end; None: current.
    """

    since_unix_s: float
    workers: dict[str, int]
    until_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobFailure:
    """A failed attempt.

    Attributes:
        unix_s: time of the failure.
        is_lost: whether the cause lies outside the job, such as a lost machine.
        had_begun: whether it had taken a step.
    """

    unix_s: float
    is_lost: bool
    had_begun: bool


@dataclass(slots=True)
class QueuedJobProgress:
    """Progress of a job.

    Attributes:
        done: completed fraction of its work.
        factor: observed speed relative to the declared one.
        moved_unix_s: when its work last grew, or an attempt began.
        failures: failed attempts, in order.
        ran_s: training time of ended attempts.
        waited: number of slots without an allocation since the last slot with one.
        service_s: attained worker seconds.
        segments: allocations over time.
        expected: fraction of its work expected by the declared speed.
        mark: time and completed fraction at the start of the current speed observation; None: none
            yet.
        observed_unix_s: time of the last recorded progress.
        problem: current problem; "" for none.
    """

    done: float = 0.0
    factor: float = 1.0
    moved_unix_s: float = 0.0
    failures: list[JobFailure] = field(default_factory=list)
    ran_s: float = 0.0
    waited: int = 0
    service_s: float = 0.0
    segments: list[JobSegment] = field(default_factory=list)
    expected: float = 0.0
    mark: tuple[float, float] | None = None
    observed_unix_s: float = 0.0
    problem: str = ""


@dataclass(slots=True)
class JobAttempt:
    """A submission of a job to the job server.

    Attributes:
        number: of the attempt, from 1.
        since_unix_s: time of the decision.
        workers: current workers by region.
        averager: region of the averager.
        leave: why it leaves, in state `LEAVING`.
        leave_unix_s: when saving began.
        begun_done: completed fraction before it.
        begun_unix_s: when its first step was observed.
        is_timed: whether it was observed from its start.
    """

    number: int
    since_unix_s: float
    workers: dict[str, int]
    averager: str
    leave: LeaveEntry | None = None
    leave_unix_s: float = 0.0
    begun_done: float = 0.0
    begun_unix_s: float | None = None
    is_timed: bool = True


@dataclass(slots=True)
class QueuedJob:
    """A job of the queue.

    Attributes:
        id: unique id; name of its run directory and part of its submission names.
        request: the request, with later changes.
        tenant: its tenant.
        submitted_unix_s: when it was accepted.
        order: sort key of waiting jobs.
        progress: its progress.
        state: its state.
        attempt: its attempt, in states `STARTING`, `RUNNING` and `LEAVING`.
        surplus: surplus at admission; None: unknown.
        shown_unix_s: start of its arrival slot.
        end: how it ended, in state `ENDED`.
        ended_slot_s: slot length of the queue when it ended.
    """

    id: str
    request: JobRequest
    tenant: str
    submitted_unix_s: float
    order: float
    progress: QueuedJobProgress
    state: JobState
    attempt: JobAttempt | None = None
    surplus: float | None = None
    shown_unix_s: float | None = None
    end: EndedEntry | None = None
    ended_slot_s: float = 0.0

    def apply(self, event: JobEvent) -> None:
        """Change the state.

        Raises:
            InvariantError: the event is impossible in this state.
        """
        self.state = JOB.after(self.state, event)

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.request.name


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """Answer to a request.

    Attributes:
        tenant: tenant of the request.
        unix_s: when it was processed.
        sent_unix_s: when it was sent, by its own time, at most `unix_s`.
        code: error code; None: accepted.
        refused: reason of the refusal.
    """

    tenant: str
    unix_s: float
    sent_unix_s: float
    code: str | None = None
    refused: str | None = None


@dataclass(slots=True)
class PolicyGeneration:
    """Slots of one policy instance.

    Attributes:
        number: 1-based index of the generation.
        began_unix_s: start of its slot 0.
        slots: all slots that have begun.
        known: jobs that were shown to the policy.
        admitted: admitted jobs, including those of earlier generations.
        stranded: admitted jobs that the policy of this generation cannot place.
        moved: waiting jobs to show to the policy again: their value has changed, or no schedule was
            found for them.
    """

    number: int = 0
    began_unix_s: float = 0.0
    slots: list[SlotEntry] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    admitted: set[str] = field(default_factory=set)
    stranded: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)


def _ended_unix_s(job: QueuedJob) -> float:
    return 0.0 if job.end is None else job.end.unix_s


@dataclass(slots=True)
class QueueState:
    """State of a queue, computed from the entries of its journal.

    Attributes:
        config: configuration as last served.
        token: fencing token of the last server.
        queue_id: random id, generated when the queue was first served.
        taken: number of accepted jobs.
        jobs: all jobs by name, in order of arrival.
        answers: answers to the newest requests of each tenant, by id.
        answered_until: by tenant, send time of the newest request whose answer is not retained.
            Earlier requests may have been answered and are not processed again.
        attempts: number of attempts by job.
        generation: current policy generation.
        written_unix_s: time of the newest entry.
        observed_unix_s: time of the last recorded observation.
        start_s: average seconds from the start of an attempt to its first step; newer attempts
            count more. None: unknown.
    """

    config: QueueConfig | None = None
    token: int = 0
    queue_id: str = ""
    taken: int = 0
    jobs: dict[str, QueuedJob] = field(default_factory=dict)
    answers: dict[str, RequestAnswer] = field(default_factory=dict)
    answered_until: dict[str, float] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    generation: PolicyGeneration = field(default_factory=PolicyGeneration)
    written_unix_s: float = 0.0
    observed_unix_s: float = 0.0
    start_s: float | None = None
    _parts: list[SnapshotEntry] = field(default_factory=list, compare=False)

    def was_answered(self, tenant: str, request: AnyRequest) -> bool:
        """Whether a request was, or may have been, answered before."""
        return request.id in self.answers or (
            request.sent_unix_s <= self.answered_until.get(tenant, -math.inf)
        )

    def living(self) -> list[QueuedJob]:
        """Return the jobs that have not ended, in order."""
        found = [job for job in self.jobs.values() if job.state is not JobState.ENDED]
        return sorted(found, key=attrgetter("order"))

    def feed(self, entries: Iterable[AnyEntry]) -> None:
        """Apply entries in order."""
        for entry in entries:
            try:
                self._feed_one(entry)
            except (KeyError, InvariantError, StopIteration, IndexError, ValueError) as error:
                raise QueueJournalError(
                    f"the journal contradicts itself: {entry.kind} at {entry.unix_s:.3f}: {error!r}"
                ) from error

    def _feed_one(self, entry: AnyEntry) -> None:
        if isinstance(entry, SnapshotEntry):
            self._restore(entry)
            return
        self._parts.clear()  # discard an incomplete snapshot: its writer died
        if isinstance(entry, OpenedEntry):
            self._resume(entry.unix_s)
        self.written_unix_s = max(self.written_unix_s, entry.unix_s)
        self._feed(entry)

    def _feed(self, entry: AnyEntry) -> None:
        match entry:
            case OpenedEntry():
                self.config, self.token = entry.config, entry.token
                self.queue_id = entry.queue_id
            case RequestEntry():
                self._take(entry)
            case PolicyGenerationEntry():
                admitted = self.generation.admitted
                self.generation = PolicyGeneration(entry.number, entry.unix_s, admitted=admitted)
            case SlotEntry():
                self._slot(entry)
            case ObservationEntry():
                self._see(entry)
            case EndedEntry():
                self._end(entry)
            case StartEntry() | ReshapeEntry() | LeaveEntry() | GoneEntry():
                self._attempt(entry)

    def snapshot(self, unix_s: float) -> list[SnapshotEntry]:
        """Return a snapshot as entries that replace all earlier ones.

        It omits answers to all but the newest requests of each tenant, jobs that ended long ago,
        and the configurations of ended jobs.
        """
        retained = self._retained()
        heads: list[dict[str, JsonValue]] = [_HEAD.dump_python(retained, mode="json")]
        heads[0]["format"] = SNAPSHOT_FORMAT
        heads[0] |= {
            "jobs": {},
            "answers": {},
            "generation": {**_dict(heads[0]["generation"]), "slots": []},
        }
        parts = [SnapshotEntry(unix_s=unix_s, part=0, head=heads[0])]
        for job in retained.jobs.values():
            value = _JOB.dump_python(job, mode="json")
            parts.append(SnapshotEntry(unix_s=unix_s, part=len(parts), job=value))
        for slot in retained.generation.slots:
            parts.append(SnapshotEntry(unix_s=unix_s, part=len(parts), slot=slot))
        answers = list(_ANSWERS.dump_python(retained.answers, mode="json").items())
        for first in range(0, len(answers), _AT_ONCE):
            some = dict(answers[first : first + _AT_ONCE])
            parts.append(SnapshotEntry(unix_s=unix_s, part=len(parts), answers=some))
        parts[-1] = parts[-1].model_copy(update={"is_last": True})
        return parts

    def _retained(self) -> QueueState:
        """Return the state without what a snapshot omits."""
        shown = {
            name for slot in self.generation.slots for name in slot.jobs
        }  # requested by the policy
        ended = [job for job in self.jobs.values() if job.state is JobState.ENDED]
        ended.sort(key=_ended_unix_s)
        old = {job.name for job in ended[: max(0, len(ended) - KEPT_ENDED)]} - shown
        jobs = {name: _slim(job) for name, job in self.jobs.items() if name not in old}
        answers, until = dict(self.answers), dict(self.answered_until)
        of_tenant: dict[str, list[str]] = {}
        for id, answer in answers.items():
            of_tenant.setdefault(answer.tenant, []).append(id)
        for tenant, ids in of_tenant.items():
            for id in ids[: max(0, len(ids) - KEPT_ANSWERS)]:
                sent_s = answers.pop(id).sent_unix_s
                until[tenant] = max(until.get(tenant, -math.inf), sent_s)
        admitted, stranded = (
            self.generation.admitted & jobs.keys(),
            self.generation.stranded & jobs.keys(),
        )
        generation = replace(self.generation, admitted=admitted, stranded=stranded)
        attempts = {name: count for name, count in self.attempts.items() if name in jobs}
        retained = replace(self, jobs=jobs, answers=answers, answered_until=until)
        return replace(retained, generation=generation, attempts=attempts, _parts=[])

    def _restore(self, entry: SnapshotEntry) -> None:
        """Apply a part of a snapshot; the last one replaces the state."""
        if entry.part == 0:
            self._parts.clear()
        if entry.part != len(self._parts):
            self._parts.clear()  # incomplete snapshot: keep the state before it
            return
        self._parts.append(entry)
        if not entry.is_last:
            return
        parts, head = list(self._parts), self._parts[0].head
        if head is not None and head.get("format") != SNAPSHOT_FORMAT:
            raise QueueJournalError(
                "the journal has a snapshot of an earlier release of geo_ray; this release reads "
                f"{SNAPSHOT_FORMAT}"
            )
        found = _HEAD.validate_json(json.dumps(head))
        for part in parts:
            if part.job is not None:
                job = _JOB.validate_json(json.dumps(part.job))
                found.jobs[job.name] = job
            if part.slot is not None:
                found.generation.slots.append(part.slot)
            found.answers |= _ANSWERS.validate_json(json.dumps(part.answers))
        jobs = self.jobs  # keep this dict object: the policy refers to it
        for each in fields(self):
            setattr(self, each.name, getattr(found, each.name))
        jobs.clear()
        jobs |= found.jobs
        self.jobs = jobs

    def _resume(self, unix_s: float) -> None:
        """A process serves the queue again: the timeouts of all jobs restart.

        Observations of speed and start-up remain valid unless the gap was long: a process that
        continues immediately decides as the previous one would have.
        """
        was_unseen = not 0.0 <= unix_s - self.written_unix_s <= _UNSEEN_S
        for job in self.living():
            progress, attempt = job.progress, job.attempt
            if attempt is None:
                continue
            progress.moved_unix_s = unix_s
            if job.state is JobState.LEAVING:
                attempt.leave_unix_s = unix_s
            if was_unseen:
                progress.observed_unix_s, progress.mark, attempt.is_timed = unix_s, None, False

    def _take(self, entry: RequestEntry) -> None:
        self.answers[entry.request.id] = RequestAnswer(
            entry.tenant,
            entry.unix_s,
            min(entry.request.sent_unix_s, entry.unix_s),
            entry.code,
            entry.refused,
        )
        if entry.refused is not None:
            return
        match entry.request:
            case SubmitRequest(job=request):
                order = max((job.order for job in self.jobs.values()), default=0.0) + 1.0
                progress = QueuedJobProgress(moved_unix_s=entry.unix_s)
                self.taken += 1
                self.jobs[request.name] = QueuedJob(
                    job_id(request.name, self.queue_id, self.taken),
                    request,
                    entry.tenant,
                    entry.unix_s,
                    order,
                    progress,
                    JOB.initial,
                )
            case MoveRequest() as move:
                self._move(move)
            case CancelRequest():
                pass  # a separate entry records that the job leaves or has ended

    def _move(self, move: MoveRequest) -> None:
        job = self.jobs[move.job]
        if move.value is not None:
            job.request = job.request.model_copy(update={"value": move.value.of(job.request.value)})
            if job.name in self.generation.known and job.state is JobState.WAITING:
                self.generation.moved.add(job.name)
        queue = [each for each in self.living() if each is not job]
        if move.position is None or not queue:
            return
        at = {"first": 0, "last": len(queue)}.get(move.position)
        if at is None:
            at = next(i for i, each in enumerate(queue) if each.name == move.before)
        queue.insert(at, job)
        for index, each in enumerate(queue):
            each.order = float(index)

    def _slot(self, entry: SlotEntry) -> None:
        self.generation.slots.append(entry)
        self.generation.known -= set(entry.gone)
        self.generation.known |= set(entry.arrived)
        self.generation.moved.clear()
        self.generation.stranded -= set(entry.arrived)
        self.generation.stranded |= set(entry.rejected) & self.generation.admitted
        self.generation.admitted |= set(entry.arrived) - set(entry.rejected)
        # Jobs without a schedule are not rejected: the policy is asked again.
        self.generation.moved |= {
            name
            for name in entry.rejected
            if entry.surpluses.get(name) is None and name not in self.generation.admitted
        }
        slot_s = self.config.slot_s if self.config is not None else 0.0
        for name in entry.arrived:
            one = self.jobs[name]
            if one.shown_unix_s is None:
                one.shown_unix_s = self.generation.began_unix_s + entry.slot * slot_s
        for name, surplus in entry.surpluses.items():
            self.jobs[name].surplus = surplus
        for job in self.living():
            progress, given = job.progress, entry.given.get(job.name)
            if given is None or job.name in entry.held:
                progress.waited += 1
            else:
                progress.waited = 0
                progress.service_s += sum(given.workers.values()) * slot_s

    def _see(self, entry: ObservationEntry) -> None:
        for name, problem in entry.problems.items():
            self.jobs[name].progress.problem = problem
        if not entry.done:
            return
        self.observed_unix_s = entry.unix_s
        for name, done in entry.done.items():
            progress = self.jobs[name].progress
            if done > progress.done:
                progress.moved_unix_s = entry.unix_s
                progress.mark = progress.mark or (entry.unix_s, done)
                self._begin(self.jobs[name], entry.unix_s)
            progress.done, progress.observed_unix_s = done, entry.unix_s
        for name, expected in entry.expected.items():
            self.jobs[name].progress.expected = expected
        for name, factor in entry.factors.items():
            self.jobs[name].progress.factor = factor

    def _begin(self, job: QueuedJob, unix_s: float) -> None:
        attempt = job.attempt
        if attempt is None or attempt.begun_unix_s is not None:
            return
        job.apply("step")
        attempt.begun_unix_s = unix_s
        if not attempt.is_timed:
            return
        took_s = unix_s - attempt.since_unix_s
        self.start_s = took_s if self.start_s is None else (self.start_s + took_s) / 2

    def _attempt(self, entry: StartEntry | ReshapeEntry | LeaveEntry | GoneEntry) -> None:
        job = self.jobs[entry.job]
        progress = job.progress
        if isinstance(entry, StartEntry):
            job.apply("start")
            self.attempts[entry.job] = entry.attempt
            job.attempt = JobAttempt(
                entry.attempt,
                entry.unix_s,
                dict(entry.workers),
                entry.averager,
                begun_done=progress.done,
            )
            progress.moved_unix_s, progress.mark = entry.unix_s, None
            self._change_segment(progress, entry.unix_s, dict(entry.workers))
            return
        attempt = job.attempt
        if attempt is None:
            raise InvariantError(f"{entry.job} has no attempt that could {entry.kind}")
        match entry:
            case ReshapeEntry():
                job.apply("reshape")
                attempt.workers = dict(entry.workers)
                progress.mark = None
                self._change_segment(progress, entry.unix_s, dict(entry.workers))
            case LeaveEntry():
                job.apply("leave")
                attempt.leave, attempt.leave_unix_s = entry, entry.unix_s
            case GoneEntry():
                job.apply("gone")
                job.attempt = None
                progress.ran_s += entry.unix_s - attempt.since_unix_s
                progress.moved_unix_s = entry.unix_s
                if entry.how in ("failed", "lost"):
                    had_begun = attempt.begun_unix_s is not None
                    failure = JobFailure(entry.unix_s, entry.how == "lost", had_begun)
                    progress.failures.append(failure)
                self._change_segment(progress, entry.unix_s, None)

    def _end(self, entry: EndedEntry) -> None:
        job = self.jobs[entry.job]
        job.apply("end")
        job.end = entry
        if self.config is not None:
            job.ended_slot_s = self.config.slot_s
        if entry.outcome == "finished":
            job.progress.done = 1.0
        self._change_segment(job.progress, entry.unix_s, None)
        job.attempt = None

    @staticmethod
    def _change_segment(
        progress: QueuedJobProgress, unix_s: float, workers: dict[str, int] | None
    ) -> None:
        if progress.segments and progress.segments[-1].until_unix_s is None:
            progress.segments[-1].until_unix_s = unix_s
        if workers is not None:
            progress.segments.append(JobSegment(unix_s, workers))


def job_id(name: str, queue_id: str, number: int) -> str:
    """Return the id of an accepted job: ``NAME.XXXXXXXX``.

    The queue derives it, so a tenant can choose neither the id of another job nor that of a job in
    an earlier queue of the same name. A job's name has no dot, so two names never share an id.

    Args:
        name: name of the job.
        queue_id: id of the queue.
        number: 1-based index among the accepted jobs of the queue.
    """
    digest = hashlib.sha256(f"{queue_id}\n{number}".encode()).hexdigest()
    return f"{name}.{digest[:8]}"


def _slim(job: QueuedJob) -> QueuedJob:
    """Return a job without unbounded data, and without data that an ended job does not need."""
    progress = replace(job.progress, segments=job.progress.segments[-_KEPT_SEGMENTS:])
    if job.state is not JobState.ENDED:
        return replace(job, progress=progress)
    request = job.request.model_copy(update={"config": {}, "working_dir": None})
    return replace(job, progress=progress, request=request)


def _dict(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}


_HEAD: Final = TypeAdapter(QueueState)
_JOB: Final = TypeAdapter(QueuedJob)
_ANSWERS: Final = TypeAdapter(dict[str, RequestAnswer])


def state_of(entries: Iterable[AnyEntry]) -> QueueState:
    """Return the state after some entries."""
    state = QueueState()
    state.feed(entries)
    return state


@dataclass(frozen=True, slots=True)
class QueueLocation:
    """Location of a queue.

    Attributes:
        uri: directory or ``s3://`` URL.
    """

    uri: str

    @classmethod
    def of(cls, config: QueueConfig) -> QueueLocation:
        """Return the location of a configured queue."""
        if is_s3(config.state):
            return cls(join(config.state, config.name))
        return cls(str(local_path(config.state) / config.name))

    @classmethod
    def at(cls, uri: str | os.PathLike[str]) -> QueueLocation:
        """Return the location with a URI."""
        name = os.fspath(uri)
        return cls(name if is_s3(name) else str(local_path(name)))

    @property
    def is_remote(self) -> bool:
        """Whether it is in a bucket."""
        return StoreLocation(self.uri).is_remote

    @property
    def shown(self) -> str:
        """The location, as shown to users."""
        return StoreLocation(self.uri).shown

    def store(self) -> ConditionalStore:
        """Return the store of journal, inboxes and lease.

        Raises:
            QueueMissingError: the URL is invalid.
        """
        try:
            return StoreLocation(self.uri).store()
        except StoreError as error:
            raise QueueMissingError(error.message, fix=error.fix) from error

    def make(self) -> None:
        """Create the folder, if it is a directory.

        Raises:
            RunDirectoryError: the folder cannot be written.
        """
        if not self.is_remote:
            try:
                make_directory(Path(self.uri), exist_ok=True)
            except OSError as error:
                raise unwritable(Path(self.uri), error) from error

    def is_there(self) -> bool:
        """Whether a queue was ever served here."""
        return is_there(self.store())

    def read(self) -> QueueState:
        """Return the recorded state of the queue.

        Raises:
            QueueMissingError: the queue does not exist.
            QueueJournalError: the journal is invalid.
        """
        entries = QueueJournal(self.store()).read()
        if not entries:
            raise QueueMissingError(f"no queue exists in {self.shown}")
        return state_of(entries)
