"""What came of a schedule, in the numbers that policies are compared by.

Completion is from a job's arrival to its end, of the jobs that ended. *Makespan* is from the first
arrival to the last end. *Utilisation* is the mean over the slots until then of the share in use of
the resource that is used most. *Fairness* is Jain's index over all jobs of how fast each went
beside having the whole cluster to itself (0 for one that did not end): 1 if all were slowed alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.schedule import ClusterSchedule
from geo_ray.scheduling.model.speed import LinkUsed


@dataclass(frozen=True, slots=True)
class CompletionTimes:
    """Of the jobs that ended, seconds; nan if there is none."""

    mean_s: float
    median_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """See the module's docstring.

    Attributes:
        utility: of all jobs.
        completion: of those that ended.
        ended: how many did.
        turned_away: how many were, when they came.
        no_schedule: how many of these, as no schedule was found, whatever they were worth.
        makespan_s: until the last end.
        utilisation: share in use.
        fairness: Jain's index.
        usd: what it cost.
        decision_s: the longest time that a decision took, for one job.
    """

    utility: float
    completion: CompletionTimes
    ended: int
    turned_away: int
    no_schedule: int
    makespan_s: float
    utilisation: float
    fairness: float
    usd: float
    decision_s: float


def outcome_of(schedule: ClusterSchedule) -> ScheduleOutcome:
    """Return the numbers of a schedule."""
    slot_s = schedule.cluster.slot_s
    took_s = [
        ended_s - schedule.jobs[name].arrival_slot * slot_s
        for name, ended_s in schedule.finished_s.items()
    ]
    first_s = min((job.arrival_slot for job in schedule.jobs.values()), default=0) * slot_s
    makespan_s = max(schedule.finished_s.values(), default=math.nan) - first_s
    return ScheduleOutcome(
        schedule.total_utility,
        _times(took_s),
        len(took_s),
        sum(not one.is_admitted for one in schedule.admissions),
        sum(not one.is_admitted and one.payoff is None for one in schedule.admissions),
        makespan_s,
        _utilisation(schedule),
        _fairness(schedule),
        schedule.usd,
        max(schedule.decision_s, default=0.0),
    )


def alone_s(schedule: ClusterSchedule, job: ClusterJob) -> float:
    """Return the seconds that a job would take with all that it may have, on one site."""
    workers = min(job.demands.most_workers, job.speed.batch.rows)
    link = LinkUsed(float(schedule.cluster.inside_mbps_S.max()), is_inside=True)
    counts_W = np.arange(1, workers + 1)
    servers_W = -(-counts_W // job.demands.workers_per_server)
    per_s_W = job.speed.rows_per_s(counts_W, servers_W, job.speed.batch.rows, link)
    return job.rows / float(per_s_W.max())


def used_shares(schedule: ClusterSchedule) -> np.ndarray:
    """Return the share in use of the most used resource, by slot until the last use."""
    last = max((use.slot for use in schedule.uses), default=-1)
    used_TR = np.zeros((last + 1, len(schedule.cluster.resources)))
    for use in schedule.uses:
        units_R = schedule.jobs[use.job].demands.units_R(
            use.allocation.num_workers, use.allocation.num_servers
        )
        used_TR[use.slot] += units_R * (use.used_s / schedule.cluster.slot_s)
    there_TR = schedule.cluster.capacity_TSR[: last + 1].sum(axis=1)
    share_TR = np.divide(used_TR, there_TR, out=np.zeros_like(used_TR), where=there_TR > 0)
    return np.asarray(share_TR.max(axis=1, initial=0.0))


def _times(took_s: list[float]) -> CompletionTimes:
    if not took_s:
        return CompletionTimes(math.nan, math.nan, math.nan)
    middle, high = np.percentile(took_s, [50, 99])
    return CompletionTimes(float(np.mean(took_s)), float(middle), float(high))


def _utilisation(schedule: ClusterSchedule) -> float:
    shares = used_shares(schedule)
    return float(shares.mean()) if len(shares) else 0.0


def _fairness(schedule: ClusterSchedule) -> float:
    slot_s = schedule.cluster.slot_s
    speeds = []
    for name, job in schedule.jobs.items():
        took_s = schedule.finished_s.get(name, math.inf) - job.arrival_slot * slot_s
        speeds.append(alone_s(schedule, job) / took_s)
    total, squares = sum(speeds), sum(one * one for one in speeds)
    return total * total / (len(speeds) * squares) if squares else 0.0
