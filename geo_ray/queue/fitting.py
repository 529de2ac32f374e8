"""From what a policy gives to what is done: who fits, who keeps what it has, who is held back.

A policy counts in workers of a region; a run also has servers there, and another number of workers
in a region means a restart. Rules, in this order:

1. *Whole*: a job has a worker in each of its regions that is there, and the averager in one.
2. *Quota*: a tenant has no more workers than it may, the first jobs first.
3. *Keep*: who has as many regions and other numbers of workers keeps what it has, unless more
   workers save twice what the restart costs, or there is no room for it.
4. *Members*: regions join and leave a run that goes on, with the workers that it was started with.
   If its averager's region is to leave, it is restarted.
5. *Money*: what it has costs no more than it is worth when it ends.
6. *Room*: with all that belongs to it, a job fits beside those that come before it: who runs, then
   in the order of the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from geo_ray.queue.config import QueueConfig
from geo_ray.queue.covering import why_not_covered
from geo_ray.queue.entries import GivenJob
from geo_ray.queue.job_spec import JobSpec, Workers
from geo_ray.queue.model import Room, share_per_s
from geo_ray.queue.state import JobAttempt, QueuedJob

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class NowSeen:
    """The moment of a border.

    Attributes:
        unix_s: when.
        room: what there is.
    """

    unix_s: float
    room: Room


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job is to have.

    Attributes:
        workers: by region.
        averager: its region.
        restart: whether that takes a restart of a run that goes on.
    """

    workers: Workers
    averager: str
    restart: bool = False


@dataclass(slots=True)
class FreeRoom:
    """What is left of a cluster's room.

    Attributes:
        free: GPUs and CPUs by region.
    """

    free: dict[str, tuple[float, float]] = field(default_factory=dict)

    def fits(self, spec: JobSpec, workers: Workers) -> str | None:
        """Return the first region without room; None: there is."""
        for region, count in workers.items():
            gpus, cpus = self.free.get(region, (0.0, 0.0))
            needs = spec.needs(region)
            if needs.gpus * count > gpus + _EPS or needs.cpus_of(count) > cpus + _EPS:
                return region
        return None

    def take(self, spec: JobSpec, workers: Workers, times: int = 1) -> None:
        """Take so much, or give it back."""
        for region, count in workers.items():
            gpus, cpus = self.free.get(region, (0.0, 0.0))
            needs = spec.needs(region)
            self.free[region] = (
                gpus - times * needs.gpus * count,
                cpus - times * needs.cpus_of(count),
            )


def fitted(
    config: QueueConfig,
    jobs: Sequence[QueuedJob],
    given: Mapping[str, GivenJob],
    now: NowSeen,
    regions: Mapping[str, Sequence[str]],
) -> tuple[dict[str, Wanted], dict[str, str]]:
    """Return what jobs are to have, and why others that were given something have nothing.

    Args:
        config: the queue.
        jobs: that have not ended, in their order.
        given: by a policy.
        now: what is seen.
        regions: of each job, those that are there.
    """
    left = FreeRoom(dict(now.room))
    of_tenant: dict[str, int] = {}
    wanted: dict[str, Wanted] = {}
    held: dict[str, str] = {}
    for job in sorted(jobs, key=lambda each: each.phase == "waiting"):  # who runs comes first
        if job.name not in given:
            continue
        spec = job.request.spec
        found = _wanted(job, given[job.name], regions.get(job.name, ()))
        if isinstance(found, str):
            held[job.name] = found
            continue
        quota = config.tenants[job.tenant].most_workers if job.tenant in config.tenants else 0
        has = of_tenant.get(job.tenant, 0)
        if job.attempt is not None and job.attempt.leave is None:
            found = _kept(config, job, job.attempt, found, left)
        if quota is not None and has + sum(found.workers.values()) > quota:
            held[job.name] = f"tenant {job.tenant} has {has} of {quota} workers"
            continue
        dear = why_not_covered(config, job, found.workers, found.averager, now.room, now.unix_s)
        if dear is not None:
            held[job.name] = dear
            continue
        full = left.fits(spec, found.workers)
        if full is not None:
            held[job.name] = f"no room in {full} beside the others"
            continue
        left.take(spec, found.workers)
        of_tenant[job.tenant] = has + sum(found.workers.values())
        wanted[job.name] = found
    return wanted, held


def _wanted(job: QueuedJob, given: GivenJob, there: Sequence[str]) -> Wanted | str:
    spec = job.request.spec
    workers = {region: count for region, count in given.workers.items() if count}
    if not spec.anywhere:
        missing = [region for region in there if not workers.get(region)]
        if missing or not workers:
            return f"the policy gave it no worker in {', '.join(missing) or 'any region'}"
        workers = {name: min(count, spec.needs(name).rows) for name, count in workers.items()}
        while sum(workers.values()) > spec.among(there).most_workers:
            workers[max(workers, key=lambda name: workers[name])] -= 1
    averager = max(given.servers, key=lambda name: (workers.get(name, 0), name), default="")
    if spec.averager in workers:
        averager = spec.averager  # as its owner said
    if averager not in workers:
        averager = max(workers, key=lambda name: (workers[name], name))
    return Wanted(workers, averager)


def _kept(
    config: QueueConfig, job: QueuedJob, attempt: JobAttempt, new: Wanted, left: FreeRoom
) -> Wanted:
    spec, old = job.request.spec, attempt.workers
    keeps = Wanted(old, attempt.averager)
    if dict(new.workers) == old:
        return keeps
    joined = {name for name in new.workers if name not in old}
    common = {name: count for name, count in new.workers.items() if name in old}
    has_averager = attempt.averager in new.workers
    if has_averager and (joined or len(common) < len(old)):
        # Members come and go; how many workers each has stays as it was started.
        shape = {name: old[name] for name in common}
        shape |= {name: spec.needs(name).workers for name in joined}
        if left.fits(spec, shape) is None:
            return Wanted(shape, attempt.averager)
        shape = {name: old[name] for name in common}
        if left.fits(spec, shape) is None:
            return Wanted(shape, attempt.averager)
    if not has_averager or not common:
        return Wanted(new.workers, new.averager, restart=True)
    if left.fits(spec, old) is not None:
        return Wanted(new.workers, new.averager, restart=True)
    rest = 1.0 - job.course.done
    before = share_per_s(spec, old, attempt.averager, config) * job.course.factor
    after = share_per_s(spec, new.workers, new.averager, config) * job.course.factor
    saved_s = rest / before - rest / after if before and after else 0.0
    if saved_s > 2 * config.patience.resize_s:
        return Wanted(new.workers, new.averager, restart=True)
    return keeps
