"""A slot's beginning: what the policy is asked, and what its answer means for each job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from geo_ray.errors import NotWorthError
from geo_ray.queue.config import QueueConfig
from geo_ray.queue.entries import (
    AnyEntry,
    EndedEntry,
    GivenJob,
    LeaveEntry,
    ReshapeEntry,
    SeenJob,
    SlotEntry,
)
from geo_ray.queue.fitting import NowSeen, Wanted, fitted
from geo_ray.queue.job_spec import Workers
from geo_ray.queue.model import Room
from geo_ray.queue.slots import QueueSlots
from geo_ray.queue.state import QueuedJob, QueueState

_LATE: Final = 0.2  # of a start that takes longer than others did, that is still to come


def question_of(state: QueueState, config: QueueConfig, slot: int, now: NowSeen) -> SlotEntry:
    """Return what a policy is to be asked.

    Args:
        state: of the queue.
        config: the queue.
        slot: of the era.
        now: what is seen.
    """
    era = state.era
    newest = era.slots[-1] if era.slots else None
    before = {} if newest is None else newest.jobs
    jobs: dict[str, SeenJob] = {}
    arrived: list[str] = []
    again: list[str] = []
    for job in state.living():
        regions = regions_there(job, now.room)
        leave = None if job.attempt is None else job.attempt.leave
        if leave is not None and leave.why not in ("preempted", "resized"):
            continue  # it ends
        if not regions:
            continue  # if the policy does not know it yet, it has not come for that
        seen = before.get(job.name)
        is_other = seen is not None and seen.regions != regions
        if job.name in era.moved or is_other:
            again.append(job.name)  # it is another job now, as far as the policy is concerned
        if job.name not in era.known or job.name in again:
            arrived.append(job.name)
        jobs[job.name] = SeenJob(
            left=max(0.0, 1.0 - job.course.done),
            worth=job.request.worth,
            factor=job.course.factor,
            regions=regions,
            start_s=_start_s(state, config, job, now.unix_s),
            waited=job.course.waited,
            attained_s=job.course.attained_s,
            admitted=job.name in era.admitted,
            lost=newest is not None and _has_lost(job, newest, is_other=is_other),
        )
    living = {job.name for job in state.living()}
    gone = [name for name in before if name not in living]
    gone += [name for name in [*again, *era.moved] if name in era.known and name not in gone]
    return SlotEntry(
        unix_s=now.unix_s,
        slot=slot,
        room=dict(now.room),
        arrived=tuple(arrived),
        gone=tuple(gone),
        jobs=jobs,
    )


def _has_lost(job: QueuedJob, newest: SlotEntry, *, is_other: bool) -> bool:
    """Whether a job has lost since the newest slot what it had, and not by its own doing."""
    if any(each.is_lost and each.unix_s >= newest.unix_s for each in job.course.failures):
        return True
    has_begun = job.attempt is not None or bool(job.course.failures or job.course.done)
    return has_begun and (is_other or job.name not in newest.jobs)


def _start_s(state: QueueState, config: QueueConfig, job: QueuedJob, unix_s: float) -> float:
    """Return how long a job will take to its first step, as starts have taken so far."""
    start_s = config.start_s if state.start_s is None else state.start_s
    if job.attempt is None or job.attempt.leave is not None:
        return start_s
    if not job.is_starting:
        return 0.0
    return max(_LATE * start_s, start_s - (unix_s - job.attempt.since_unix_s))


def regions_there(job: QueuedJob, room: Room) -> tuple[str, ...]:
    """Return the regions of a job that have anything; none if they are too few for it."""
    spec = job.request.spec
    wanted = room if spec.anywhere else spec.regions
    found = tuple(name for name in wanted if any(room.get(name, (0.0, 0.0))))
    return found if len(found) >= spec.least_regions else ()


def begun_slot(
    state: QueueState, config: QueueConfig, slots: QueueSlots, slot: int, now: NowSeen
) -> list[AnyEntry]:
    """Return what is to be written down at a slot's beginning.

    Args:
        state: of the queue.
        config: the queue.
        slots: the era's policy; it is asked, so what is returned must be written down.
        slot: which.
        now: what is seen.
    """
    entry = slots.decide(question_of(state, config, slot, now))
    again = {name for name in entry.turned_away if name in state.era.admitted}
    jobs = [job for job in state.living() if job.name in entry.jobs]
    regions = {name: seen.regions for name, seen in entry.jobs.items()}
    stranded = [job for job in jobs if job.name in again | state.era.stranded]
    given = {**entry.given, **_starting(jobs, entry), **_leftovers(stranded, entry)}
    wanted, held = fitted(config, jobs, given, now, regions)
    entry = entry.model_copy(
        update={
            "given": {
                name: GivenJob(workers=dict(each.workers), servers={each.averager: 1})
                for name, each in wanted.items()
            },
            "held": held,
        }
    )
    slots.answered(entry)
    found: list[AnyEntry] = [entry]
    for name in entry.turned_away:
        payoff = entry.payoffs.get(name)
        if name not in again and payoff is not None:  # else no schedule was found: it waits
            found.append(
                EndedEntry(
                    unix_s=now.unix_s,
                    job=name,
                    outcome="turned away",
                    code=NotWorthError.code,
                    told=f"it is worth {-payoff:.4g} less than what it would take from others",
                )
            )
    for job in state.living():
        found += _changes(job, wanted.get(job.name), held.get(job.name), now.unix_s)
    return found


def _changes(
    job: QueuedJob, wanted: Wanted | None, held: str | None, unix_s: float
) -> Sequence[AnyEntry]:
    attempt = job.attempt
    if attempt is None or attempt.leave is not None:
        return ()
    if wanted is None:
        told = held or "the policy gives its machines to others"
        return [LeaveEntry(unix_s=unix_s, job=job.name, why="preempted", told=told)]
    if wanted.restart:
        told = f"goes on with {workers_text(wanted.workers)}"
        return [LeaveEntry(unix_s=unix_s, job=job.name, why="resized", told=told)]
    if dict(wanted.workers) != attempt.workers:
        return [ReshapeEntry(unix_s=unix_s, job=job.name, workers=dict(wanted.workers))]
    return ()


def workers_text(workers: Workers) -> str:
    """Return how people read it."""
    return ", ".join(f"{count} in {name}" for name, count in workers.items())


def _starting(jobs: Sequence[QueuedJob], entry: SlotEntry) -> dict[str, GivenJob]:
    """Leave their machines to jobs until they have trained as long as their start took."""
    found = {}
    for job in jobs:
        attempt = job.attempt
        if attempt is None or attempt.leave is not None:
            continue
        begun_unix_s = attempt.begun_unix_s
        if begun_unix_s is not None:
            took_s = begun_unix_s - attempt.since_unix_s
            if entry.unix_s - begun_unix_s >= took_s:
                continue
        if all(name in entry.jobs[job.name].regions for name in attempt.workers):
            found[job.name] = GivenJob(workers=dict(attempt.workers), servers={attempt.averager: 1})
    return found


def _leftovers(stranded: Sequence[QueuedJob], entry: SlotEntry) -> dict[str, GivenJob]:
    """Give those that a policy has no place for what they asked for; it may not fit."""
    found = {}
    for job in stranded:
        spec = job.request.spec
        if job.name in entry.given:
            continue
        there = entry.jobs[job.name].regions
        names = [name for name in spec.regions if name in there] or list(there)[:1]
        found[job.name] = GivenJob(
            workers={name: spec.needs(name).workers for name in names}, servers={}
        )
    return found
