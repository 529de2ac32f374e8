"""A history of jobs on a shared cluster, slot by slot, under one policy.

What a policy decides at a slot's beginning holds for the slot. A job that has something else than
in the slot before loses the policy's `change_s`; its first start is free. It pays for what it has
until it ends, at the prices of the slot, and for egress while it trains.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from geo_ray.errors import InvariantError, ScheduleInputError
from geo_ray.scheduling.model.allocation import Allocation
from geo_ray.scheduling.model.cluster import SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.schedule import Admission, ClusterSchedule, SlotUse
from geo_ray.scheduling.policies.base import (
    JobProgress,
    SchedulingPolicy,
    SlotScheduler,
    SlotView,
)

_DONE = 1e-9  # share of a job's rows that may be missing by rounding


def replay_jobs(
    cluster: SharedCluster,
    jobs: Sequence[ClusterJob],
    policy: SchedulingPolicy,
    *,
    seed: int = 0,
    on_slot: Callable[[int], None] | None = None,
) -> ClusterSchedule:
    """Replay a history.

    Args:
        cluster: what there is.
        jobs: in any order.
        policy: who decides.
        seed: of what the policy leaves to chance.
        on_slot: told every slot that begins.

    Raises:
        ScheduleInputError: two jobs have one name, or one could never run on this cluster.
    """
    check_jobs(cluster, jobs)
    return _History(cluster, jobs, policy, policy.begin(cluster, seed)).run(on_slot)


def check_jobs(cluster: SharedCluster, jobs: Sequence[ClusterJob]) -> None:
    """Refuse jobs that no schedule could hold.

    Raises:
        ScheduleInputError: names the first.
    """
    seen: set[str] = set()
    most_SR = (
        cluster.capacity_TSR.max(axis=0)
        if cluster.capacity_TSR.strides[0]
        else (cluster.capacity_TSR[0])
    )
    for job in jobs:
        if job.id in seen:
            raise ScheduleInputError(f"two jobs are called {job.id}")
        seen.add(job.id)
        if job.arrival_slot < 0 or job.rows <= 0:
            raise ScheduleInputError(f"job {job.id}: it comes before slot 0, or has no work")
        if min(job.demands.most_workers, job.speed.batch.rows) < max(1, len(job.data)):
            raise ScheduleInputError(f"job {job.id}: fewer workers than regions with its data")
        if set(job.data) - set(range(len(cluster.net.names))):
            raise ScheduleInputError(f"job {job.id}: its data lie in a region that is not there")
        demands, allowed_S = job.demands, job.may_work_S(cluster)
        fits_S = (most_SR >= demands.worker_R - 1e-9).all(axis=1)
        regions = cluster.region_S[fits_S & allowed_S]
        has_servers = (most_SR >= demands.server_R - 1e-9).all(axis=1).any()
        if not len(regions) or set(job.data) - set(regions.tolist()) or not has_servers:
            raise ScheduleInputError(
                f"job {job.id} is larger than the cluster: no site that it may use has room for "
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
        self._jobs = {job.id: job for job in sorted(jobs, key=lambda job: job.arrival_slot)}
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
        self._check_room(view, decision.allocations)
        for name in list(self._active):
            self._advance(slot, name, decision.allocations.get(name))

    def _check_room(self, view: SlotView, given: Mapping[str, Allocation]) -> None:
        """Refuse what does not fit, before anything is counted."""
        used_SR = np.zeros_like(view.capacity_SR)
        for name, each in given.items():
            if name not in self._active:
                raise InvariantError(f"{name} was given something and is not there")
            demands = self._active[name].job.demands
            for site, count in each.workers:
                used_SR[site] += count * demands.worker_R
            for site, count in each.servers:
                used_SR[site] += count * demands.server_R
        if (used_SR > view.capacity_SR * (1 + 1e-9) + 1e-6).any():
            raise InvariantError(f"more was given in slot {view.slot} than there is")

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
        attained_s = now.attained_s + gpus * given.num_workers * slot_s
        self._active[name] = JobProgress(now.job, rows_left, attained_s, given, 0)
