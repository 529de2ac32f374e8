"""What is concluded of jobs that run: over, slower than said, overran, stalled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from geo_ray.base.errors import (
    CertificateError,
    ClusterError,
    ConfigDriftError,
    ConfigError,
    DataError,
    DeadlineExceededError,
    GeoRayError,
    HeadLostError,
    JobFailedError,
    JobOverranError,
    JobStalledError,
    LeaseLostError,
    LinkDownError,
    OwnCodeError,
    PlacementError,
    PlanError,
    QueueRequestError,
    RayUnreachableError,
    RegionLostError,
    RunActorLostError,
    RunHeldError,
    StoreError,
    TaskLoadError,
    WorkerLostError,
    every_class,
)
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.journal import (
    AnyEntry,
    EndedEntry,
    GoneEntry,
    LeaveEntry,
    LeaveWhy,
    Outcome,
    SeenEntry,
    StartEntry,
)
from geo_ray.scheduler.queue.model import QueueSeen, SubmissionSeen, share_per_s
from geo_ray.scheduler.queue.slots import FreeRoom
from geo_ray.scheduler.queue.state import JobAttempt, JobState, QueuedJob, QueueState

_FINAL: Final[dict[LeaveWhy, Outcome]] = {
    "cancelled": "cancelled",
    "overran": "overran",
    "stalled": "stalled",
}
_BLAMELESS: Final = frozenset(
    error.code
    for error in (
        ClusterError,
        DeadlineExceededError,
        RunActorLostError,
        HeadLostError,
        LeaseLostError,
        LinkDownError,
        PlacementError,
        RayUnreachableError,
        RegionLostError,
        RunHeldError,
        StoreError,
        WorkerLostError,
    )
)
"""Codes of what ends a run through no fault of its own; so does what is killed, without a word."""
_REFUSALS: Final = (
    CertificateError,
    ConfigDriftError,
    ConfigError,
    DataError,
    OwnCodeError,
    PlanError,
    QueueRequestError,
    TaskLoadError,
)
"""What refuses a configuration, its code or its data before any of it trains."""
_LEAST_S: Final = 3.0  # that a speed is observed for before it is believed
_LEAST_SHARE: Final = 0.005
_MOST_FACTOR: Final = 100.0


def over(job: QueuedJob, config: QueueConfig, seen: QueueSeen) -> list[AnyEntry]:
    """Return what must be written down of a job's attempt that is over; nothing if it is not.

    Args:
        job: which.
        config: the queue.
        seen: what is seen.
    """
    attempt, one = job.attempt, seen.attempts.get(job.name)
    if attempt is None or one is None:
        return []
    if one.state == "over" or (one.state == "unknown" and job.state is JobState.LEAVING):
        return _over(job, attempt, one, config, seen.unix_s)
    return []


def _over(
    job: QueuedJob,
    attempt: JobAttempt,
    seen: SubmissionSeen,
    config: QueueConfig,
    unix_s: float,
) -> list[AnyEntry]:
    entries: list[AnyEntry] = []
    if seen.done is not None and seen.done != job.course.done:
        entries.append(SeenEntry(unix_s=unix_s, done={job.name: seen.done}))
    leave = attempt.leave
    gone = GoneEntry(unix_s=unix_s, job=job.name, attempt=attempt.number, how="saved")
    if seen.end == "finished":
        entries.append(gone.model_copy(update={"how": "finished"}))
        entries.append(EndedEntry(unix_s=unix_s, job=job.name, outcome="finished"))
        return entries
    if leave is not None:
        entries.append(gone)
        if leave.why in _FINAL:
            outcome = _FINAL[leave.why]
            entries.append(
                EndedEntry(
                    unix_s=unix_s,
                    job=job.name,
                    outcome=outcome,
                    code=_code(leave.why),
                    told=leave.told,
                )
            )
        return entries
    told = seen.told or "it ended without a word"
    is_lost = seen.code is None or seen.code in _BLAMELESS
    how = {"how": "lost" if is_lost else "failed", "code": seen.code, "told": told}
    entries.append(gone.model_copy(update=how))
    failures = len(job.course.failures) + 1
    has_begun = attempt.begun_unix_s is not None or job.course.done > 0
    if not has_begun and is_refusal(seen.code):
        why = "it cannot start"
    elif failures >= config.patience.attempts:
        why = f"{failures} attempts failed, the last one"
    else:
        return entries
    code = f"{seen.code}: " if seen.code else ""
    entries.append(
        EndedEntry(
            unix_s=unix_s,
            job=job.name,
            outcome="failed",
            code=JobFailedError.code,
            told=f"{why}: {code}{told}",
        )
    )
    return entries


def is_refusal(code: str | None) -> bool:
    """Whether an error means that another start would fail in the same way."""
    kind = next((each for each in every_class() if each.code == code), GeoRayError)
    return issubclass(kind, _REFUSALS) and kind.code not in _BLAMELESS


def _code(why: LeaveWhy) -> str | None:
    codes = {"overran": JobOverranError.code, "stalled": JobStalledError.code}
    return codes.get(why)


@dataclass(frozen=True, slots=True)
class JobProgressSeen:
    """What is observed of a job that trains.

    Attributes:
        done: share of its work.
        factor: of its speed; None: not known yet.
        expected: share that it would have done by its own numbers; None: as before.
    """

    done: float
    factor: float | None = None
    expected: float | None = None


def progress(job: QueuedJob, config: QueueConfig, seen: QueueSeen) -> JobProgressSeen | None:
    """Return what is observed of a job; None: nothing."""
    attempt, one = job.attempt, seen.attempts.get(job.name)
    if attempt is None or one is None or one.done is None:
        return None
    course, spec, done = job.course, job.request.spec, min(1.0, one.done)
    per_s = share_per_s(spec, attempt.workers, attempt.averager, config)
    if course.mark is None or per_s <= 0:
        return JobProgressSeen(done)
    mark_s, mark_done = course.mark
    since_s = seen.unix_s - max(mark_s, course.seen_unix_s)
    expected = course.expected + max(0.0, since_s) * per_s
    took_s, grew = seen.unix_s - mark_s, one.done - mark_done
    if took_s < _LEAST_S or grew < _LEAST_SHARE:
        return JobProgressSeen(done, None, expected)
    factor = grew / took_s / per_s
    return JobProgressSeen(done, min(_MOST_FACTOR, max(1 / _MOST_FACTOR, factor)), expected)


def impatience(job: QueuedJob, config: QueueConfig, seen: QueueSeen) -> list[AnyEntry]:
    """Return whether a job must be ended: it overran what it said, or makes no progress.

    Args:
        job: which.
        config: the queue.
        seen: what is seen.
    """
    attempt, course, patience = job.attempt, job.course, config.patience
    if attempt is None or job.state is JobState.LEAVING:
        return []
    why: LeaveWhy
    if course.expected > patience.overrun:
        why = "overran"
        told = (
            f"it has done {course.done:.0%} in {course.expected:.1f} times what it said that "
            "all of it takes"
        )
    elif seen.unix_s - course.moved_unix_s > patience.stall_s:
        why, told = "stalled", f"no step in {patience.stall_s:g} s"
    else:
        return []
    return [LeaveEntry(unix_s=seen.unix_s, job=job.name, why=why, told=told)]


def starts(state: QueueState, config: QueueConfig, seen: QueueSeen) -> list[AnyEntry]:
    """Return the attempts that are to begin: given by the present slot, and there is room now.

    Args:
        state: of the queue.
        config: the queue.
        seen: what is seen.
    """
    if not state.era.slots:
        return []
    slot = state.era.slots[-1]
    left = FreeRoom(dict(seen.room))
    for job in state.living():
        if job.attempt is not None:  # also of those that are still leaving
            left.take(job.request.spec, job.attempt.workers)
    found: list[AnyEntry] = []
    for job in state.living():
        given = slot.given.get(job.name)
        if job.state is not JobState.WAITING or given is None or job.name in slot.held:
            continue
        if not _may_begin(job, slot.unix_s):
            continue
        if left.fits(job.request.spec, given.workers) is not None:
            continue
        left.take(job.request.spec, given.workers)
        found.append(
            StartEntry(
                unix_s=seen.unix_s,
                job=job.name,
                attempt=state.attempts.get(job.name, 0) + 1,
                workers=given.workers,
                averager=next(iter(given.servers)),
            )
        )
    return found


def _may_begin(job: QueuedJob, slot_unix_s: float) -> bool:
    """Whether a job may begin in a slot in which it may have failed: that would fail again.

    Once, at once, if it was lost as it trained: what is left of it may be there still.
    """
    here = [each for each in job.course.failures if each.unix_s >= slot_unix_s]
    return not here or (len(here) == 1 and here[0].is_lost and here[0].had_begun)
