"""What is concluded of jobs that run: over, slower than said, overran, stalled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from geo_ray.base.errors import (
    CertificateError,
    ClusterError,
    ConfigChangedError,
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
    ObservationEntry,
    Outcome,
    StartEntry,
)
from geo_ray.scheduler.queue.model import ObservedSubmission, QueueObservation, fraction_per_s
from geo_ray.scheduler.queue.slots import FreeCapacity
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
    ConfigChangedError,
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


def over(job: QueuedJob, config: QueueConfig, observed: QueueObservation) -> list[AnyEntry]:
    """Return what must be written down of a job's attempt that is over; nothing if it is not.

    Args:
        job: which.
        config: the queue.
        observed: what is seen.
    """
    attempt, one = job.attempt, observed.attempts.get(job.name)
    if attempt is None or one is None:
        return []
    if one.state == "over" or (one.state == "unknown" and job.state is JobState.LEAVING):
        return _over(job, attempt, one, config, observed.unix_s)
    return []


def _over(
    job: QueuedJob,
    attempt: JobAttempt,
    observed: ObservedSubmission,
    config: QueueConfig,
    unix_s: float,
) -> list[AnyEntry]:
    entries: list[AnyEntry] = []
    if observed.done is not None and observed.done != job.progress.done:
        entries.append(ObservationEntry(unix_s=unix_s, done={job.name: observed.done}))
    leave = attempt.leave
    gone = GoneEntry(unix_s=unix_s, job=job.name, attempt=attempt.number, how="saved")
    if observed.end == "finished":
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
                    message=leave.message,
                )
            )
        return entries
    message = observed.message or "it ended without a word"
    is_lost = observed.code is None or observed.code in _BLAMELESS
    how = {"how": "lost" if is_lost else "failed", "code": observed.code, "message": message}
    entries.append(gone.model_copy(update=how))
    failures = len(job.progress.failures) + 1
    has_begun = attempt.begun_unix_s is not None or job.progress.done > 0
    if not has_begun and is_refusal(observed.code):
        why = "it cannot start"
    elif failures >= config.patience.attempts:
        why = f"{failures} attempts failed, the last one"
    else:
        return entries
    code = f"{observed.code}: " if observed.code else ""
    entries.append(
        EndedEntry(
            unix_s=unix_s,
            job=job.name,
            outcome="failed",
            code=JobFailedError.code,
            message=f"{why}: {code}{message}",
        )
    )
    return entries


def is_refusal(code: str | None) -> bool:
    """Whether an error means that another start would fail in the same pattern."""
    kind = next((each for each in every_class() if each.code == code), GeoRayError)
    return issubclass(kind, _REFUSALS) and kind.code not in _BLAMELESS


def _code(why: LeaveWhy) -> str | None:
    codes = {"overran": JobOverranError.code, "stalled": JobStalledError.code}
    return codes.get(why)


@dataclass(frozen=True, slots=True)
class ObservedProgress:
    """What is observed of a job that trains.

    Attributes:
        done: share of its work.
        factor: of its speed; None: not known yet.
        expected: share that it would have done by its own numbers; None: as before.
    """

    done: float
    factor: float | None = None
    expected: float | None = None


def observed_progress(
    job: QueuedJob, config: QueueConfig, observed: QueueObservation
) -> ObservedProgress | None:
    """Return what is observed of a job; None: nothing."""
    attempt, one = job.attempt, observed.attempts.get(job.name)
    if attempt is None or one is None or one.done is None:
        return None
    progress, spec, done = job.progress, job.request.spec, min(1.0, one.done)
    per_s = fraction_per_s(spec, attempt.workers, attempt.averager, config)
    if progress.mark is None or per_s <= 0:
        return ObservedProgress(done)
    mark_s, mark_done = progress.mark
    since_s = observed.unix_s - max(mark_s, progress.observed_unix_s)
    expected = progress.expected + max(0.0, since_s) * per_s
    took_s, grew = observed.unix_s - mark_s, one.done - mark_done
    if took_s < _LEAST_S or grew < _LEAST_SHARE:
        return ObservedProgress(done, None, expected)
    factor = grew / took_s / per_s
    return ObservedProgress(done, min(_MOST_FACTOR, max(1 / _MOST_FACTOR, factor)), expected)


def impatience(job: QueuedJob, config: QueueConfig, observed: QueueObservation) -> list[AnyEntry]:
    """Return whether a job must be ended: it overran what it said, or makes no progress.

    Args:
        job: which.
        config: the queue.
        observed: what is seen.
    """
    attempt, progress, patience = job.attempt, job.progress, config.patience
    if attempt is None or job.state is JobState.LEAVING:
        return []
    why: LeaveWhy
    if progress.expected > patience.overrun:
        why = "overran"
        message = (
            f"it has done {progress.done:.0%} in {progress.expected:.1f} times what it said that "
            "all of it takes"
        )
    elif observed.unix_s - progress.moved_unix_s > patience.stall_s:
        why, message = "stalled", f"no step in {patience.stall_s:g} s"
    else:
        return []
    return [LeaveEntry(unix_s=observed.unix_s, job=job.name, why=why, message=message)]


def starts(state: QueueState, config: QueueConfig, observed: QueueObservation) -> list[AnyEntry]:
    """Return the attempts that are to begin: given by the present slot, and there is room now.

    Args:
        state: of the queue.
        config: the queue.
        observed: what is seen.
    """
    if not state.generation.slots:
        return []
    slot = state.generation.slots[-1]
    left = FreeCapacity(dict(observed.capacity))
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
                unix_s=observed.unix_s,
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
    here = [each for each in job.progress.failures if each.unix_s >= slot_unix_s]
    return not here or (len(here) == 1 and here[0].is_lost and here[0].had_begun)
