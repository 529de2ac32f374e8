"""Schedules: what each job had in each slot, what it did and cost; and their validation.

`check_schedule` tests a schedule against every rule from its uses alone. It shares no sum with
the replay that made the schedule.
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
    """What a job had in a slot.

    Attributes:
        slot: which.
        job: its id.
        allocation: what it had.
        used_s: seconds that it had it; less than a slot in the one in which it ends.
        lost_s: of these, seconds in which it did not train because its resources changed.
        rows: that it did.
        usd: what that cost, egress included.
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
    """What was decided about a job when it came.

    Attributes:
        job: its id.
        slot: when.
        is_admitted: or turned away for good.
        surplus: what it is worth beyond what it costs; None: the policy does not ask.
    """

    job: str
    slot: int
    is_admitted: bool
    surplus: float | None = None


@dataclass(frozen=True)
class ClusterSchedule:
    """A schedule: who had what in which slot, what was done with it, and what it cost.

    Attributes:
        cluster: what there was.
        jobs: by id.
        uses: in the order of slots.
        finished_s: when each job that ended did, from the start of slot 0.
        admissions: in the order in which they were decided.
        decision_s: seconds that deciding took in each slot, for each job that came in it.
    """

    cluster: SharedCluster
    jobs: Mapping[str, ClusterJob]
    uses: tuple[SlotUse, ...]
    finished_s: Mapping[str, float]
    admissions: tuple[Admission, ...] = ()
    decision_s: tuple[float, ...] = field(default=(), compare=False)

    @property
    def usd(self) -> float:
        """What all of it cost."""
        return sum(use.usd for use in self.uses)

    def utility(self, job: str) -> float:
        """Return what a job was worth: 0 if it did not end."""
        if job not in self.finished_s:
            return 0.0
        one = self.jobs[job]
        last = max(0, -(-self.finished_s[job] // self.cluster.slot_s) - 1)
        return one.utility.of(last - one.arrival_slot)

    @property
    def total_utility(self) -> float:
        """What all jobs were value."""
        return sum(self.utility(job) for job in self.finished_s)


_EPS = 1e-6


def check_schedule(schedule: ClusterSchedule) -> None:
    """Refuse a schedule that breaks a rule.

    Raises:
        InvariantError: names the first rules that are broken.
    """
    found = list(violations(schedule))
    if found:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise InvariantError(f"a schedule breaks rules: {'; '.join(found[:3])}{more}")


def violations(schedule: ClusterSchedule) -> Iterator[str]:
    """Yield every rule that is broken, in words."""
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
                yield f"site {cluster.sites[site].name} gives too much {name} in slot {slot}"


def _one(schedule: ClusterSchedule, use: SlotUse) -> Iterator[str]:
    cluster, job, had = schedule.cluster, schedule.jobs[use.job], use.allocation
    where = f"{use.job} in slot {use.slot}"
    workers = sum(count for _, count in had.workers)
    servers = sum(count for _, count in had.servers)
    if use.slot < job.arrival_slot:
        yield f"{where}: before it came"
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
        yield f"{where}: a worker where its data are not"
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
    turned_away = {one.job for one in schedule.admissions if not one.is_admitted}
    for name, job in schedule.jobs.items():
        rows, is_done = done.get(name, 0.0), name in schedule.finished_s
        enough = rows >= job.rows * (1 - _EPS)
        if is_done and not enough:
            yield f"{name} ended after {rows} of {job.rows} rows"
        if rows > job.rows * (1 + _EPS) + _EPS:
            yield f"{name} did {rows} of {job.rows} rows"
        if enough and not is_done:
            yield f"{name} has done all and has no end"
        if name in turned_away and rows:
            yield f"{name} was turned away and did {rows} rows"
