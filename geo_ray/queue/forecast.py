"""What a queue would do if nothing more came and all went as it is reckoned.

The queue's own decisions are asked for, slot by slot, over jobs that train at their observed speed;
a job that is to leave leaves at once. Nothing is written down, and nothing is done.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final

from geo_ray.queue.border import begun_slot
from geo_ray.queue.config import QueueConfig
from geo_ray.queue.entries import EndedEntry, GoneEntry, SeenEntry
from geo_ray.queue.fitting import NowSeen
from geo_ray.queue.model import Room, share_per_s
from geo_ray.queue.seen import QueueSeen
from geo_ray.queue.slots import ERA_SLOTS, QueueSlots
from geo_ray.queue.state import JobStretch, QueuedJob, QueueState
from geo_ray.queue.watching import starts

MOST_SLOTS: Final = 60


def forecast(
    state: QueueState, config: QueueConfig, slots: QueueSlots, now: NowSeen
) -> dict[str, Sequence[JobStretch]]:
    """Return what living jobs will have from now on, by name; nothing for those that have nothing.

    Args:
        state: of the queue; is not changed.
        config: the queue.
        slots: its policy, as it is; is not changed.
        now: the present, which is taken to last.
    """
    if not state.era.slots:
        return {}
    state, slots = copy.deepcopy(state), copy.deepcopy(slots)
    names = [job.name for job in state.living()]
    at_s, slot = now.unix_s, state.era.slots[-1].slot
    for _ in range(MOST_SLOTS):
        slot += 1
        border_s = max(at_s, state.era.began_unix_s + slot * config.slot_s)
        _train(state, config, at_s, border_s)
        at_s = border_s
        if slot >= ERA_SLOTS or not state.living():
            break
        state.feed(begun_slot(state, config, slots, slot, NowSeen(at_s, now.room)))
        _go(state, config, at_s, now.room)
    found = {}
    for name in names:
        all_of_it = state.jobs[name].course.stretches
        found[name] = tuple(
            JobStretch(max(each.since_unix_s, now.unix_s), each.workers, each.until_unix_s)
            for each in all_of_it
            if each.until_unix_s is None or each.until_unix_s > now.unix_s
        )
    return {name: each for name, each in found.items() if each}


def _train(state: QueueState, config: QueueConfig, since_s: float, until_s: float) -> None:
    for job in state.living():
        attempt, course = job.attempt, job.course
        if attempt is None:
            continue
        per_s = share_per_s(job.request.spec, attempt.workers, attempt.averager, config)
        per_s *= course.factor
        begins_s = min(since_s, course.seen_unix_s)  # from when its share is known
        if job.is_starting:
            start_s = config.start_s if state.start_s is None else state.start_s
            begins_s = max(since_s, attempt.since_unix_s + start_s)
        done = course.done + max(0.0, until_s - begins_s) * per_s
        if done < 1.0 - 1e-9 or per_s <= 0:
            state.feed([SeenEntry(unix_s=until_s, done={job.name: min(1.0, done)})])
            continue
        _end(state, job, begins_s + (1.0 - course.done) / per_s, attempt.number)


def _end(state: QueueState, job: QueuedJob, unix_s: float, attempt: int) -> None:
    gone = GoneEntry(unix_s=unix_s, job=job.name, attempt=attempt, how="finished")
    state.feed([gone, EndedEntry(unix_s=unix_s, job=job.name, outcome="finished")])


def _go(state: QueueState, config: QueueConfig, unix_s: float, room: Room) -> None:
    for job in state.living():
        attempt = job.attempt
        if attempt is None or attempt.leave is None:
            continue
        number = attempt.number
        state.feed([GoneEntry(unix_s=unix_s, job=job.name, attempt=number, how="saved")])
        if attempt.leave.why not in ("preempted", "resized"):
            state.feed([EndedEntry(unix_s=unix_s, job=job.name, outcome="cancelled")])
    state.feed(starts(state, config, QueueSeen(unix_s, room)))
