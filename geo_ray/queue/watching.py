"""What is concluded of jobs that run: over, slower than said, overran, stalled."""

from __future__ import annotations

from typing import Final

from geo_ray.errors import (
    ClusterError,
    DeadlineExceededError,
    DriverLostError,
    HeadLostError,
    JobFailedError,
    JobOverranError,
    JobStalledError,
    LeaseLostError,
    LinkDownError,
    PlacementError,
    RayUnreachableError,
    RegionLostError,
    RunHeldError,
    StoreError,
    WorkerLostError,
)
from geo_ray.queue.config import QueueConfig
from geo_ray.queue.entries import (
    AnyEntry,
    EndedEntry,
    GoneEntry,
    LeaveEntry,
    LeaveWhy,
    Outcome,
    SeenEntry,
    StartEntry,
)
from geo_ray.queue.fitting import FreeRoom
from geo_ray.queue.model import share_per_s
from geo_ray.queue.seen import QueueSeen, SubmissionSeen
from geo_ray.queue.state import JobAttempt, QueuedJob, QueueState

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
        DriverLostError,
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
_LEAST_S: Final = 3.0  # that a speed is observed for before it is believed
_LEAST_SHARE: Final = 0.005
_MOST_FACTOR: Final = 100.0


def over(state: QueueState, config: QueueConfig, seen: QueueSeen) -> list[AnyEntry]:
    """Return what is to be written down of attempts that are over.

    Args:
        state: of the queue.
        config: the queue.
        seen: what is seen.
    """
    found: list[AnyEntry] = []
    for job in state.living():
        attempt, one = job.attempt, seen.attempts.get(job.name)
        if attempt is None or one is None:
            continue
        if one.state == "over" or (one.state == "unknown" and attempt.leave is not None):
            found += _over(job, attempt, one, config, seen.unix_s)
    return found


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
    if failures >= config.patience.attempts:
        entries.append(
            EndedEntry(
                unix_s=unix_s,
                job=job.name,
                outcome="failed",
                code=JobFailedError.code,
                told=f"{failures} attempts failed, the last one: "
                f"{seen.code + ': ' if seen.code else ''}{told}",
            )
        )
    return entries


def _code(why: LeaveWhy) -> str | None:
    codes = {"overran": JobOverranError.code, "stalled": JobStalledError.code}
    return codes.get(why)


def progress(state: QueueState, config: QueueConfig, seen: QueueSeen) -> SeenEntry | None:
    """Return what is observed of jobs that train; None: nothing."""
    done, factors, expected = {}, {}, {}
    for job in state.living():
        attempt, one = job.attempt, seen.attempts.get(job.name)
        if attempt is None or one is None or one.done is None:
            continue
        course, spec = job.course, job.request.spec
        done[job.name] = min(1.0, one.done)
        per_s = share_per_s(spec, attempt.workers, attempt.averager, config)
        if course.mark is None or per_s <= 0:
            continue
        mark_s, mark_done = course.mark
        since_s = seen.unix_s - max(mark_s, course.seen_unix_s)
        expected[job.name] = course.expected + max(0.0, since_s) * per_s
        took_s, grew = seen.unix_s - mark_s, one.done - mark_done
        if took_s >= _LEAST_S and grew >= _LEAST_SHARE:
            factor = grew / took_s / per_s
            factors[job.name] = min(_MOST_FACTOR, max(1 / _MOST_FACTOR, factor))
    if not done:
        return None
    return SeenEntry(unix_s=seen.unix_s, done=done, factors=factors, expected=expected)


def impatience(state: QueueState, config: QueueConfig, seen: QueueSeen) -> list[AnyEntry]:
    """Return which jobs are to be ended: that overran what they said, or do not get on.

    Args:
        state: of the queue.
        config: the queue.
        seen: what is seen.
    """
    found: list[AnyEntry] = []
    patience = config.patience
    for job in state.living():
        attempt, course = job.attempt, job.course
        if attempt is None or attempt.leave is not None:
            continue
        why: LeaveWhy | None = None
        told = ""
        if course.expected > patience.overrun:
            why = "overran"
            told = (
                f"it has done {course.done:.0%} in {course.expected:.1f} times what it said that "
                "all of it takes"
            )
        elif seen.unix_s - course.moved_unix_s > patience.stall_s:
            why, told = "stalled", f"no step in {patience.stall_s:g} s"
        if why is not None:
            found.append(LeaveEntry(unix_s=seen.unix_s, job=job.name, why=why, told=told))
    return found


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
        if job.attempt is not None or given is None or job.name in slot.held:
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
