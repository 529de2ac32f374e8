"""The state of a queue, folded from its journal, and the folder that a queue is stored in."""

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
    ReshapeEntry,
    SlotEntry,
    SnapshotEntry,
    StartEntry,
    TakenEntry,
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
        _S.LEAVING: "Its attempt is saved and stopped: preempted, resized, or about to end.",
        _S.ENDED: "It has finished, failed, or was cancelled or refused.",
    },
    moves={
        (_S.WAITING, "start"): _S.STARTING,
        (_S.STARTING, "step"): _S.RUNNING,
        (_S.STARTING, "reshape"): _S.STARTING,
        (_S.RUNNING, "reshape"): _S.RUNNING,
        (_S.STARTING, "leave"): _S.LEAVING,
        (_S.RUNNING, "leave"): _S.LEAVING,
        (_S.LEAVING, "leave"): _S.LEAVING,  # for another reason: it is cancelled
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

SNAPSHOT_FORMAT: Final = "queue-snapshot-2"

KEPT_ENDED: Final = 500
"""Jobs that have ended and are still shown."""
KEPT_ANSWERS: Final = 200
"""Of a tenant."""
_KEPT_SEGMENTS: Final = 200  # of a job
_AT_ONCE: Final = 50  # answers in a part of a snapshot
_UNSEEN_S: Final = 60.0  # without an entry; of jobs that train there is one every 30 s


@dataclass(slots=True)
class JobSegment:
    """A time in which a job had the same.

    Attributes:
        since_unix_s: its beginning.
        workers: by region.
        until_unix_s: its end; None: it lasts.
    """

    since_unix_s: float
    workers: dict[str, int]
    until_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobFailure:
    """An attempt that failed.

    Attributes:
        unix_s: when.
        is_lost: whether through no fault of its own.
        had_begun: whether it had taken a step.
    """

    unix_s: float
    is_lost: bool
    had_begun: bool


@dataclass(slots=True)
class QueuedJobProgress:
    """What has become of a job so far.

    Attributes:
        done: share of its work.
        factor: of its speed, as observed.
        moved_unix_s: when its work last grew, or an attempt began.
        failures: attempts that failed, in their order.
        ran_s: that attempts have trained, those that are over.
        waited: slots in which it had nothing, since it last had something.
        service_s: seconds of workers.
        segments: what it had when.
        expected: share of its work that it would have done by its own numbers.
        mark: when and at which share its present speed began to be observed; None: not yet.
        observed_unix_s: when its share was last written down.
        problem: what goes wrong with it at present; "" for nothing.
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
        since_unix_s: when it was decided.
        workers: that it is to have now, by region.
        averager: region.
        leave: why it leaves, while the job is `LEAVING`.
        leave_unix_s: since when it may save for that.
        begun_done: share of the work that was done before it.
        begun_unix_s: when its first step was observed.
        is_timed: whether it was watched from its beginning on.
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
        id: name of its run directory and part of its submissions' names; no other job has it.
        request: as it was submitted, and moved since.
        tenant: whose it is.
        came_unix_s: when it was taken in.
        order: its place among those that wait; smaller ones come first.
        progress: what has become of it.
        state: its state.
        attempt: its attempt, while it is `STARTING`, `RUNNING` or `LEAVING`.
        surplus: as it was admitted; None: nobody asked.
        shown_unix_s: beginning of the slot in which it came, as far as the policy is concerned.
        end: how it ended, once it is `ENDED`.
        ended_slot_s: length of the queue's slots when it ended.
    """

    id: str
    request: JobRequest
    tenant: str
    came_unix_s: float
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
        """Its name."""
        return self.request.name


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """What became of a request.

    Attributes:
        tenant: who asked.
        unix_s: when it was heard.
        sent_unix_s: when it was sent, as it says; not later than it was heard.
        code: of the error; None: it was granted.
        refused: why.
    """

    tenant: str
    unix_s: float
    sent_unix_s: float
    code: str | None = None
    refused: str | None = None


@dataclass(slots=True)
class PolicyGeneration:
    """The time since a policy began anew.

    Attributes:
        number: of the attempt, from 1.
        began_unix_s: when its slot 0 did.
        slots: all that have begun.
        known: jobs that the policy was told of.
        admitted: jobs that were taken on, in this era or one before.
        stranded: of these, those that this era's policy has no place for.
        moved: waiting jobs that the policy must be told of again: their worth has changed, or it
            found no schedule for them.
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
    """How a queue stands: what the entries of its journal come to.

    Attributes:
        config: as it was last served.
        epoch: number of the lease's holder that served it last.
        queue_id: random identity that the queue got when it was first served.
        taken: jobs that were accepted so far.
        jobs: all of them by name, in the order in which they came.
        answers: to the newest requests of each tenant that were accepted or refused, by id.
        heard_until: by tenant, when the newest request was sent whose answer is not kept: one that
            was sent earlier may have been answered, and is not heard again.
        attempts: submissions so far, by job.
        generation: of the policy.
        written_unix_s: of the newest entry.
        observed_unix_s: when jobs that run were last looked at, for what is written down.
        start_s: that attempts took to their first step, newer ones counting more; None: not known.
    """

    config: QueueConfig | None = None
    epoch: int = 0
    queue_id: str = ""
    taken: int = 0
    jobs: dict[str, QueuedJob] = field(default_factory=dict)
    answers: dict[str, RequestAnswer] = field(default_factory=dict)
    heard_until: dict[str, float] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    generation: PolicyGeneration = field(default_factory=PolicyGeneration)
    written_unix_s: float = 0.0
    observed_unix_s: float = 0.0
    start_s: float | None = None
    _parts: list[SnapshotEntry] = field(default_factory=list, compare=False)

    def was_heard(self, tenant: str, request: AnyRequest) -> bool:
        """Whether a request was answered before, or may have been."""
        return request.id in self.answers or (
            request.sent_unix_s <= self.heard_until.get(tenant, -math.inf)
        )

    def living(self) -> list[QueuedJob]:
        """Return the jobs that have not ended, in their order."""
        found = [job for job in self.jobs.values() if job.state is not JobState.ENDED]
        return sorted(found, key=attrgetter("order"))

    def feed(self, entries: Iterable[AnyEntry]) -> None:
        """Take in entries, in their order."""
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
        self._parts.clear()  # of a snapshot whose writer died
        if isinstance(entry, OpenedEntry):
            self._look_anew(entry.unix_s)
        self.written_unix_s = max(self.written_unix_s, entry.unix_s)
        self._feed(entry)

    def _feed(self, entry: AnyEntry) -> None:
        match entry:
            case OpenedEntry():
                self.config, self.epoch = entry.config, entry.epoch
                self.queue_id = entry.queue_id
            case TakenEntry():
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
        """Return all that must be remembered, as entries that replace those before.

        Forgotten are answers to all but the newest requests of each tenant, jobs that ended long
        ago, and the configurations of those that have ended.
        """
        kept = self._kept()
        heads: list[dict[str, JsonValue]] = [_HEAD.dump_python(kept, mode="json")]
        heads[0]["format"] = SNAPSHOT_FORMAT
        heads[0] |= {
            "jobs": {},
            "answers": {},
            "generation": {**_dict(heads[0]["generation"]), "slots": []},
        }
        parts = [SnapshotEntry(unix_s=unix_s, part=0, head=heads[0])]
        for job in kept.jobs.values():
            value = _JOB.dump_python(job, mode="json")
            parts.append(SnapshotEntry(unix_s=unix_s, part=len(parts), job=value))
        for slot in kept.generation.slots:
            parts.append(SnapshotEntry(unix_s=unix_s, part=len(parts), slot=slot))
        answers = list(_ANSWERS.dump_python(kept.answers, mode="json").items())
        for first in range(0, len(answers), _AT_ONCE):
            some = dict(answers[first : first + _AT_ONCE])
            parts.append(SnapshotEntry(unix_s=unix_s, part=len(parts), answers=some))
        parts[-1] = parts[-1].model_copy(update={"is_last": True})
        return parts

    def _kept(self) -> QueueState:
        """Return the state without what may be forgotten."""
        shown = {
            name for slot in self.generation.slots for name in slot.jobs
        }  # asked for by the policy
        ended = [job for job in self.jobs.values() if job.state is JobState.ENDED]
        ended.sort(key=_ended_unix_s)
        old = {job.name for job in ended[: max(0, len(ended) - KEPT_ENDED)]} - shown
        jobs = {name: _slim(job) for name, job in self.jobs.items() if name not in old}
        answers, until = dict(self.answers), dict(self.heard_until)
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
        kept = replace(self, jobs=jobs, answers=answers, heard_until=until)
        return replace(kept, generation=generation, attempts=attempts, _parts=[])

    def _restore(self, entry: SnapshotEntry) -> None:
        """Take in a part of a snapshot; the last one replaces the state."""
        if entry.part == 0:
            self._parts.clear()
        if entry.part != len(self._parts):
            self._parts.clear()  # its beginning is missing: the entries before it count
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
        jobs = self.jobs  # a policy's memory refers to it
        for each in fields(self):
            setattr(self, each.name, getattr(found, each.name))
        jobs.clear()
        jobs |= found.jobs
        self.jobs = jobs

    def _look_anew(self, unix_s: float) -> None:
        """Somebody looks again: jobs have all their time from now on.

        What was observed of how fast they are and start counts on, unless nobody looked for long:
        whoever goes on at once decides as the one before would have.
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

    def _take(self, entry: TakenEntry) -> None:
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
                pass  # an entry of its own says that the job leaves, or has ended

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
        self.generation.stranded |= set(entry.turned_away) & self.generation.admitted
        self.generation.admitted |= set(entry.arrived) - set(entry.turned_away)
        # Those without a schedule are no refusal of the policy's: it is asked again.
        self.generation.moved |= {
            name
            for name in entry.turned_away
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
    """Return the id of a queue's accepted job: ``NAME.XXXXXXXX``.

    The queue derives it, so a tenant can choose neither another job's id nor that of a job of an
    earlier queue of the same name. A job's name has no dot, hence no two names share an id.

    Args:
        name: of the job.
        queue_id: of the queue.
        number: 1-based index among the jobs that the queue has accepted.
    """
    digest = hashlib.sha256(f"{queue_id}\n{number}".encode()).hexdigest()
    return f"{name}.{digest[:8]}"


def _slim(job: QueuedJob) -> QueuedJob:
    """Return a job without what grows for ever, or is of no use once it has ended."""
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
    """Return what entries come to."""
    state = QueueState()
    state.feed(entries)
    return state


@dataclass(frozen=True, slots=True)
class QueueLocation:
    """A queue's folder.

    Attributes:
        uri: its directory, or its ``s3://`` address.
    """

    uri: str

    @classmethod
    def of(cls, config: QueueConfig) -> QueueLocation:
        """Return where a queue of a configuration lies."""
        if is_s3(config.state):
            return cls(join(config.state, config.name))
        return cls(str(local_path(config.state) / config.name))

    @classmethod
    def at(cls, uri: str | os.PathLike[str]) -> QueueLocation:
        """Return the place that somebody names."""
        name = os.fspath(uri)
        return cls(name if is_s3(name) else str(local_path(name)))

    @property
    def is_remote(self) -> bool:
        """Whether it lies in a bucket."""
        return StoreLocation(self.uri).is_remote

    @property
    def shown(self) -> str:
        """How people would type it."""
        return StoreLocation(self.uri).shown

    def store(self) -> ConditionalStore:
        """Return where journal, boxes and the lease lie.

        Raises:
            QueueMissingError: the address is none.
        """
        try:
            return StoreLocation(self.uri).store()
        except StoreError as error:
            raise QueueMissingError(error.message, fix=error.fix) from error

    def make(self) -> None:
        """Make the folder, if it is a directory.

        Raises:
            RunDirectoryError: it cannot be written.
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
        """Return how the queue stands, as far as it is written down.

        Raises:
            QueueMissingError: there is none.
            QueueJournalError: it cannot be understood.
        """
        entries = QueueJournal(self.store()).read()
        if not entries:
            raise QueueMissingError(f"there is no queue in {self.shown}")
        return state_of(entries)
