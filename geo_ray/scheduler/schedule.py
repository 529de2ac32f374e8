"""Schedules: allocation, progress and cost of each job in each slot; validation.

`check_schedule` validates a schedule against every rule from its allocations alone, independently
of the replay that produced it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from geo_ray.base.errors import InvariantError
from geo_ray.scheduler.cluster import Allocation, SharedCluster
from geo_ray.scheduler.job import ClusterJob


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Allocation of a job in a slot.

    Attributes:
        slot: number of the slot.
        job: its id.
        allocation: the allocation.
        used_s: seconds of the allocation; less than a slot in the slot in which the job ends.
        lost_s: seconds of these without training because the allocation changed.
        rows: completed rows.
        usd: cost, including egress.
    """

    slot: int
    job: str
    allocation: Allocation
    used_s: float
    lost_s: float
    rows: float
    usd: float


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission decision for a job.

    Attributes:
        job: its id.
        slot: slot of the decision.
        is_admitted: whether it was admitted; otherwise it was rejected for good.
        surplus: utility minus price; None: the policy computes none.
    """

    job: str
    slot: int
    is_admitted: bool
    surplus: float | None = None


@dataclass(frozen=True)
class ClusterSchedule:
    """A schedule: allocations by slot, their progress and their cost.

    Attributes:
        cluster: the cluster.
        jobs: by id.
        uses: allocations in the order of slots.
        finished_s: end time of each job that ended, from the start of slot 0.
        admissions: admission decisions in order.
        decision_s: decision time of each slot, per arrived job.
    """

    cluster: SharedCluster
    jobs: Mapping[str, ClusterJob]
    uses: tuple[SlotUse, ...]
    finished_s: Mapping[str, float]
    admissions: tuple[Admission, ...] = ()
    decision_s: tuple[float, ...] = field(default=(), compare=False)

    @property
    def usd(self) -> float:
        """Total cost."""
        return sum(use.usd for use in self.uses)

    def utility(self, job: str) -> float:
        """Return the achieved utility of a job; 0 if it did not end."""
        if job not in self.finished_s:
            return 0.0
        one = self.jobs[job]
        last = max(0, -(-self.finished_s[job] // self.cluster.slot_s) - 1)
        return one.utility.of(last - one.arrival_slot)

    @property
    def total_utility(self) -> float:
        """Total utility of all jobs."""
        return sum(self.utility(job) for job in self.finished_s)


_EPS = 1e-6


def check_schedule(schedule: ClusterSchedule) -> None:
    """Reject a schedule that violates a rule.

    Raises:
        InvariantError: names the first violations.
    """
    found = list(violations(schedule))
    if found:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise InvariantError(f"a schedule violates rules: {'; '.join(found[:3])}{more}")


def violations(schedule: ClusterSchedule) -> Iterator[str]:
    """Yield every violation as text."""
    yield from _capacities(schedule)
    done: dict[str, float] = defaultdict(float)
    observed: set[tuple[int, str]] = set()
    for use in schedule.uses:
        if (use.slot, use.job) in observed:
            yield f"{use.job} has two allocations in slot {use.slot}"
        observed.add((use.slot, use.job))
        yield from _one(schedule, use)
        done[use.job] += use.rows
    yield from _books(schedule, done)


def _capacities(schedule: ClusterSchedule) -> Iterator[str]:
    cluster = schedule.cluster
    by_slot: dict[int, list[SlotUse]] = defaultdict(list)
    for use in schedule.uses:
        by_slot[use.slot].append(use)
    for slot, uses in by_slot.items():
        used: dict[int, np.ndarray] = defaultdict(partial(np.zeros, len(cluster.resources)))
        for use in uses:
            demands = schedule.jobs[use.job].demands
            for site, count in use.allocation.workers:
                used[site] += count * demands.worker_R
            for site, count in use.allocation.servers:
                used[site] += count * demands.server_R
        for site, used_R in used.items():
            over_R = used_R - cluster.capacity_TSR[slot, site]
            if (over_R > _EPS * (1 + used_R)).any():
                name = cluster.resources[int(over_R.argmax())]
                yield f"site {cluster.sites[site].name} exceeds its {name} in slot {slot}"


def _one(schedule: ClusterSchedule, use: SlotUse) -> Iterator[str]:
    cluster, job, had = schedule.cluster, schedule.jobs[use.job], use.allocation
    where = f"{use.job} in slot {use.slot}"
    workers = sum(count for _, count in had.workers)
    servers = sum(count for _, count in had.servers)
    if use.slot < job.arrival_slot:
        yield f"{where}: before its arrival"
    if any(count < 1 for _, count in (*had.workers, *had.servers)):
        yield f"{where}: an empty entry"
    if workers > min(job.demands.most_workers, had.batch):
        yield f"{where}: {workers} workers, more than it may have"
    if workers < 1 or servers * job.demands.workers_per_server < workers:
        yield f"{where}: {servers} parameter servers for {workers} workers"
    if not job.speed.batch.rows <= had.batch <= job.speed.batch.most_rows:
        yield f"{where}: a batch of {had.batch}"
    regions = {cluster.sites[site].region for site, _ in had.workers}
    if job.data and regions - set(job.data):
        yield f"{where}: a worker in a region without its data"
    if use.used_s > cluster.slot_s + _EPS or not 0 <= use.lost_s <= use.used_s + _EPS:
        yield f"{where}: {use.used_s} s used and {use.lost_s} s lost in a slot"
    rows = job.rows_per_s(cluster, had) * max(0.0, use.used_s - use.lost_s)
    if abs(rows - use.rows) > _EPS * (1 + rows):
        yield f"{where}: {use.rows} rows, where {rows} could be done"
    usd = job.machines_usd_per_s(cluster, had, use.slot) * use.used_s
    usd += job.egress_usd_per_s(cluster, had) * max(0.0, use.used_s - use.lost_s)
    if abs(usd - use.usd) > _EPS * (1 + usd):
        yield f"{where}: {use.usd} USD, where it costs {usd}"


def _books(schedule: ClusterSchedule, done: dict[str, float]) -> Iterator[str]:
    rejected = {one.job for one in schedule.admissions if not one.is_admitted}
    for name, job in schedule.jobs.items():
        rows, is_done = done.get(name, 0.0), name in schedule.finished_s
        enough = rows >= job.rows * (1 - _EPS)
        if is_done and not enough:
            yield f"{name} ended after {rows} of {job.rows} rows"
        if rows > job.rows * (1 + _EPS) + _EPS:
            yield f"{name} did {rows} of {job.rows} rows"
        if enough and not is_done:
            yield f"{name} has completed its work without an end"
        if name in rejected and rows:
            yield f"{name} was rejected but completed {rows} rows"
