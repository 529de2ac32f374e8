"""Evaluation of running jobs: ended, slower than declared, overrun, stalled."""

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
"""Error codes of a run that failed without being at fault.

A killed run without a code counts as well.
"""
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
"""Error codes that reject a configuration, its code or its data before training."""
_LEAST_S: Final = 3.0  # minimum observation time of a speed
_LEAST_SHARE: Final = 0.005
_MOST_FACTOR: Final = 100.0


def over(job: QueuedJob, config: QueueConfig, observed: QueueObservation) -> list[AnyEntry]:
    """Return the entries for an attempt that has ended; none if it has not.

    Args:
        job: the job.
        config: the queue.
        observed: observations.
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
    message = observed.message or "it ended without a message"
    is_lost = observed.code is None or observed.code in _BLAMELESS
    how = {"how": "lost" if is_lost else "failed", "code": observed.code, "message": message}
    entries.append(gone.model_copy(update=how))
    failures = len(job.progress.failures) + 1
    has_begun = attempt.begun_unix_s is not None or job.progress.done > 0
    if not has_begun and is_refusal(observed.code):
        why = "cannot start"
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
    """Whether another start would fail with the same error."""
    kind = next((each for each in every_class() if each.code == code), GeoRayError)
    return issubclass(kind, _REFUSALS) and kind.code not in _BLAMELESS


def _code(why: LeaveWhy) -> str | None:
    codes = {"overran": JobOverranError.code, "stalled": JobStalledError.code}
    return codes.get(why)


@dataclass(frozen=True, slots=True)
class ObservedProgress:
    """Observed progress of a running job.

    Attributes:
        done: completed fraction of its work.
        factor: relative speed; None: unknown yet.
        expected: fraction expected by the declared speed; None: unchanged.
    """

    done: float
    factor: float | None = None
    expected: float | None = None


def observed_progress(
    job: QueuedJob, config: QueueConfig, observed: QueueObservation
) -> ObservedProgress | None:
    """Return the observed progress of a job; None: nothing new."""
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
    """Return the entries that end a job that overran its declared time or makes no progress.

    Args:
        job: the job.
        config: the queue.
        observed: observations.
    """
    attempt, progress, patience = job.attempt, job.progress, config.patience
    if attempt is None or job.state is JobState.LEAVING:
        return []
    why: LeaveWhy
    if progress.expected > patience.overrun:
        why = "overran"
        message = (
            f"it has completed {progress.done:.0%} in {progress.expected:.1f} times the declared "
            "time of the whole job"
        )
    elif observed.unix_s - progress.moved_unix_s > patience.stall_s:
        why, message = "stalled", f"no step in {patience.stall_s:g} s"
    else:
        return []
    return [LeaveEntry(unix_s=observed.unix_s, job=job.name, why=why, message=message)]


def starts(state: QueueState, config: QueueConfig, observed: QueueObservation) -> list[AnyEntry]:
    """Return the attempts to start: allocated in the current slot, and fitting now.

    Args:
        state: state of the queue.
        config: the queue.
        observed: observations.
    """
    if not state.generation.slots:
        return []
    slot = state.generation.slots[-1]
    left = FreeCapacity(dict(observed.capacity))
    for job in state.living():
        if job.attempt is not None:  # including jobs that are still leaving
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
    """Whether a job that failed in a slot may start again in it; usually it would fail again.

    Once, immediately, if it was lost while it trained.
    """
    here = [each for each in job.progress.failures if each.unix_s >= slot_unix_s]
    return not here or (len(here) == 1 and here[0].is_lost and here[0].had_begun)
