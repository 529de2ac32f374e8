"""Replays a history of jobs on a shared cluster under one policy; outcome metrics and their page.

A decision at the start of a slot holds for the slot. A job whose allocation changes loses the
policy's `change_s`; its first start is free. It pays for its allocation until it ends, at the
prices of the slot, and for egress while it trains. Completion time is measured from arrival to end;
*fairness* is Jain's index of the slowdowns relative to running alone.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Final

import numpy as np

from geo_ray.base.errors import InvariantError, ScheduleInputError
from geo_ray.base.text import duration_text, number_text
from geo_ray.scheduler.cluster import Allocation, SharedCluster
from geo_ray.scheduler.job import ClusterJob, LinkUsed
from geo_ray.scheduler.policy import JobProgress, SchedulingPolicy, SlotScheduler, SlotView
from geo_ray.scheduler.schedule import Admission, ClusterSchedule, SlotUse
from geo_ray.telemetry.charts import Curve, bars_chart, curves_chart
from geo_ray.telemetry.html_page import html_page, section, table, write_html

_DONE = 1e-9  # fraction of a job's rows that may be missing by rounding


def replay_jobs(
    cluster: SharedCluster,
    jobs: Sequence[ClusterJob],
    policy: SchedulingPolicy,
    *,
    seed: int = 0,
    on_slot: Callable[[int], None] | None = None,
) -> ClusterSchedule:
    """Replay a job history under one policy.

    Args:
        cluster: the cluster.
        jobs: jobs in any order.
        policy: the policy.
        seed: seed of the policy's random choices.
        on_slot: called with the number of every slot that begins.

    Raises:
        ScheduleInputError: two jobs have the same name, or one can never run on this cluster.
    """
    check_jobs(cluster, jobs)
    return _History(cluster, jobs, policy, policy.begin(cluster, seed)).run(on_slot)


def check_jobs(cluster: SharedCluster, jobs: Sequence[ClusterJob]) -> None:
    """Reject jobs that no schedule could contain.

    Raises:
        ScheduleInputError: names the first one.
    """
    observed: set[str] = set()
    most_SR = (
        cluster.capacity_TSR.max(axis=0)
        if cluster.capacity_TSR.strides[0]
        else (cluster.capacity_TSR[0])
    )
    for job in jobs:
        if job.id in observed:
            raise ScheduleInputError(f"two jobs are named {job.id}")
        observed.add(job.id)
        if job.arrival_slot < 0 or job.rows <= 0:
            raise ScheduleInputError(f"job {job.id}: it arrives before slot 0, or has no work")
        if min(job.demands.most_workers, job.speed.batch.rows) < max(1, len(job.data)):
            raise ScheduleInputError(f"job {job.id}: fewer workers than regions with its data")
        if set(job.data) - set(range(len(cluster.net.names))):
            raise ScheduleInputError(f"job {job.id}: its data are in an unknown region")
        demands, allowed_S = job.demands, job.may_work_S(cluster)
        fits_S = (most_SR >= demands.worker_R - 1e-9).all(axis=1)
        regions = cluster.region_S[fits_S & allowed_S]
        has_servers = (most_SR >= demands.server_R - 1e-9).all(axis=1).any()
        if not len(regions) or set(job.data) - set(regions.tolist()) or not has_servers:
            raise ScheduleInputError(
                f"job {job.id} is larger than the cluster: no allowed site has capacity for "
                "one of its workers or parameter servers"
            )


class _History:
    def __init__(
        self,
        cluster: SharedCluster,
        jobs: Sequence[ClusterJob],
        policy: SchedulingPolicy,
        scheduler: SlotScheduler,
    ) -> None:
        self._cluster = cluster
        self._jobs = {job.id: job for job in sorted(jobs, key=attrgetter("arrival_slot"))}
        self._change_s = policy.change_s
        self._scheduler = scheduler
        self._active: dict[str, JobProgress] = {}
        self._uses: list[SlotUse] = []
        self._finished_s: dict[str, float] = {}
        self._admissions: list[Admission] = []
        self._decision_s: list[float] = []

    def run(self, on_slot: Callable[[int], None] | None) -> ClusterSchedule:
        arriving = defaultdict[int, list[ClusterJob]](list)
        for job in self._jobs.values():
            arriving[job.arrival_slot].append(job)
        last = max(arriving, default=-1)
        for slot in range(self._cluster.slots):
            if on_slot is not None:
                on_slot(slot)
            if not self._active and slot > last:
                break
            arrived = arriving.get(slot, [])
            self._active |= {job.id: JobProgress(job, job.rows) for job in arrived}
            if self._active:
                self._slot(slot, arrived)
        return ClusterSchedule(
            self._cluster,
            self._jobs,
            tuple(self._uses),
            self._finished_s,
            tuple(self._admissions),
            tuple(self._decision_s),
        )

    def _slot(self, slot: int, arrived: Sequence[ClusterJob]) -> None:
        view = SlotView(slot, arrived, self._active, self._cluster.capacity_TSR[slot])
        began_s = time.perf_counter()
        decision = self._scheduler.decide(view)
        took_s = time.perf_counter() - began_s
        self._decision_s.append(took_s / max(1, len(arrived)))
        self._admissions += decision.admissions
        for each in decision.admissions:
            if not each.is_admitted:
                self._active.pop(each.job, None)
        self._check_capacity(view, decision.allocations)
        for name in list(self._active):
            self._advance(slot, name, decision.allocations.get(name))

    def _check_capacity(self, view: SlotView, given: Mapping[str, Allocation]) -> None:
        """Reject allocations that do not fit, before they are counted."""
        used_SR = np.zeros_like(view.capacity_SR)
        for name, each in given.items():
            if name not in self._active:
                raise InvariantError(f"{name} has an allocation but is not active")
            demands = self._active[name].job.demands
            for site, count in each.workers:
                used_SR[site] += count * demands.worker_R
            for site, count in each.servers:
                used_SR[site] += count * demands.server_R
        if (used_SR > view.capacity_SR * (1 + 1e-9) + 1e-6).any():
            raise InvariantError(f"the allocations of slot {view.slot} exceed the capacity")

    def _advance(self, slot: int, name: str, given: Allocation | None) -> None:
        now, slot_s = self._active[name], self._cluster.slot_s
        if given is None:
            waited = now.waited_slots + 1
            self._active[name] = replace(now, had=None, waited_slots=waited)
            return
        is_new = now.rows_left >= now.job.rows
        lost_s = 0.0 if is_new or given == now.had else min(slot_s, self._change_s)
        per_s = now.job.rows_per_s(self._cluster, given)
        rows = min(now.rows_left, per_s * (slot_s - lost_s))
        rows_left = now.rows_left - rows
        is_done = rows_left <= _DONE * now.job.rows
        if is_done:
            rows = now.rows_left
        used_s = min(slot_s, lost_s + rows / per_s) if is_done else slot_s
        usd = now.job.machines_usd_per_s(self._cluster, given, slot) * used_s
        usd += now.job.egress_usd_per_s(self._cluster, given) * (used_s - lost_s)
        self._uses.append(SlotUse(slot, name, given, used_s, lost_s, rows, usd))
        if is_done:
            self._finished_s[name] = slot * slot_s + used_s
            del self._active[name]
            return
        gpus = float(now.job.demands.worker_R[0]) or 1.0
        service_s = now.service_s + gpus * given.num_workers * slot_s
        self._active[name] = JobProgress(now.job, rows_left, service_s, given, 0)


@dataclass(frozen=True, slots=True)
class CompletionTimes:
    """Completion times of the jobs that ended, in seconds; nan if there is none."""

    mean_s: float
    median_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """Outcome of a schedule: the metrics that policies are compared by.

    Completion time is measured from arrival to end, over jobs that ended. *Makespan* is from the
    first arrival to the last end. *Utilization* is the mean over the slots until then of the
    fraction in use of the most used resource. *Fairness* is Jain's index over all jobs of their
    speed relative to running alone (0 for a job that did not end): 1 if all were slowed equally.

    Attributes:
        utility: total utility of all jobs.
        completion: completion times.
        ended: number of jobs that ended.
        rejected: number of jobs rejected on arrival.
        no_schedule: number of rejected jobs without a feasible schedule.
        makespan_s: until the last end.
        utilisation: fraction in use.
        fairness: Jain's index.
        usd: total cost.
        decision_s: longest decision time per job.
    """

    utility: float
    completion: CompletionTimes
    ended: int
    rejected: int
    no_schedule: int
    makespan_s: float
    utilisation: float
    fairness: float
    usd: float
    decision_s: float


def outcome_of(schedule: ClusterSchedule) -> ScheduleOutcome:
    """Return the outcome of a schedule."""
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
        sum(not one.is_admitted and one.surplus is None for one in schedule.admissions),
        makespan_s,
        _utilisation(schedule),
        _fairness(schedule),
        schedule.usd,
        max(schedule.decision_s, default=0.0),
    )


def alone_s(schedule: ClusterSchedule, job: ClusterJob) -> float:
    """Return the seconds that a job would take alone on one site."""
    workers = min(job.demands.most_workers, job.speed.batch.rows)
    link = LinkUsed(float(schedule.cluster.inside_mbps_S.max()), is_inside=True)
    counts_W = np.arange(1, workers + 1)
    servers_W = -(-counts_W // job.demands.workers_per_server)
    per_s_W = job.speed.rows_per_s(counts_W, servers_W, job.speed.batch.rows, link)
    return job.rows / float(per_s_W.max())


def used_fractions(schedule: ClusterSchedule) -> np.ndarray:
    """Return the fraction in use of the most used resource, by slot until the last use."""
    last = max((use.slot for use in schedule.uses), default=-1)
    used_TR = np.zeros((last + 1, len(schedule.cluster.resources)))
    for use in schedule.uses:
        units_R = schedule.jobs[use.job].demands.units_R(
            use.allocation.num_workers, use.allocation.num_servers
        )
        used_TR[use.slot] += units_R * (use.used_s / schedule.cluster.slot_s)
    there_TR = schedule.cluster.capacity_TSR[: last + 1].sum(axis=1)
    fraction_TR = np.divide(used_TR, there_TR, out=np.zeros_like(used_TR), where=there_TR > 0)
    return np.asarray(fraction_TR.max(axis=1, initial=0.0))


def _times(took_s: list[float]) -> CompletionTimes:
    if not took_s:
        return CompletionTimes(math.nan, math.nan, math.nan)
    middle, high = np.percentile(took_s, [50, 99])
    return CompletionTimes(float(np.mean(took_s)), float(middle), float(high))


def _utilisation(schedule: ClusterSchedule) -> float:
    fractions = used_fractions(schedule)
    return float(fractions.mean()) if len(fractions) else 0.0


def _fairness(schedule: ClusterSchedule) -> float:
    slot_s = schedule.cluster.slot_s
    speeds = []
    for name, job in schedule.jobs.items():
        took_s = schedule.finished_s.get(name, math.inf) - job.arrival_slot * slot_s
        speeds.append(alone_s(schedule, job) / took_s)
    total, squares = sum(speeds), sum(one * one for one in speeds)
    return total * total / (len(speeds) * squares) if squares else 0.0


HEADINGS: Final = (
    "policy",
    "utility",
    "mean",
    "median",
    "p99",
    "makespan",
    "in use",
    "fairness",
    "ended",
    "rejected",
    "USD",
    "decision",
)
NOTE: Final = (
    "Completion times (mean, median, p99) cover the jobs that ended. Fairness is Jain's index of "
    "the speed of jobs relative to running alone; the decision time is the longest "
    "of one job."
)


def cells(name: str, outcome: ScheduleOutcome) -> list[str]:
    """Return the metrics of a policy as text, in the order of `HEADINGS`."""
    times = outcome.completion
    return [
        name,
        number_text(outcome.utility),
        duration_text(times.mean_s),
        duration_text(times.median_s),
        duration_text(times.p99_s),
        duration_text(outcome.makespan_s),
        f"{outcome.utilisation:.0%}",
        f"{outcome.fairness:.2f}",
        str(outcome.ended),
        str(outcome.rejected)
        + (f" ({outcome.no_schedule} without a schedule)" if outcome.no_schedule else ""),
        f"{outcome.usd:.2f}",
        f"{outcome.decision_s * 1e3:.1f} ms",
    ]


def write_schedule_page(
    title: str, schedules: Mapping[str, ClusterSchedule], bound: float | None, path: Path
) -> Path:
    """Write a self-contained HTML page.

    Args:
        title: title of the page.
        schedules: schedules by policy.
        bound: upper bound on the utility; None: not computed.
        path: output file.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    outcomes = {name: outcome_of(each) for name, each in schedules.items()}
    rows = [[escape(text) for text in cells(name, each)] for name, each in outcomes.items()]
    utilities = {name: max(0.0, each.utility) for name, each in outcomes.items()}
    if bound is not None:
        utilities["upper bound"] = bound
    ended, fractions = [], []
    for place, (name, each) in enumerate(schedules.items()):
        slot_s = each.cluster.slot_s
        took = sorted(
            ended_s - each.jobs[job].arrival_slot * slot_s
            for job, ended_s in each.finished_s.items()
        )
        part = np.arange(1, len(took) + 1) / max(1, len(each.jobs))
        ended.append(Curve(name, np.array(took, dtype=np.float64), part.astype(np.float64), place))
        used = used_fractions(each)
        fractions.append(Curve(name, np.arange(len(used), dtype=np.float64) * slot_s, used, place))
    charts = (
        bars_chart("Utility", utilities, number_text)
        + curves_chart(
            "Fraction of all jobs that ended within",
            ended,
            x_label="completion",
            x_time=True,
            zero=True,
        )
        + curves_chart("Share in use", fractions, x_label="time", x_time=True, zero=True)
    )
    body = (
        f"<header><h1>{escape(title)}</h1></header>"
        + section("Policies", table(HEADINGS, rows), NOTE)
        + section("Charts", f'<div class="charts">{charts}</div>')
    )
    return write_html(html_page(title, body), path)
