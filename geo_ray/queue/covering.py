"""Whether a job pays for its machines: its worth when it ends, against what they cost until then.

Policies with prices (`pd_ors`) have that in their payoff. For all others it is asked at every
slot's beginning, so rented machines are wanted only while the job that has them covers them.
"""

from __future__ import annotations

from geo_ray.queue.config import QueueConfig
from geo_ray.queue.job_spec import JobSpec, Workers
from geo_ray.queue.model import Room, share_per_s
from geo_ray.queue.state import QueuedJob


def why_not_covered(
    config: QueueConfig, job: QueuedJob, workers: Workers, averager: str, room: Room, unix_s: float
) -> str | None:
    """Return why a job does not pay for what it would have; None: it does.

    Args:
        config: the queue.
        job: which.
        workers: by region.
        averager: its region.
        room: what there is.
        unix_s: now.
    """
    if not config.worth_per_usd:
        return None
    spec, worth = job.request.spec, job.request.worth
    per_s = share_per_s(spec, workers, averager, config) * job.course.factor
    if per_s <= 0:
        return None
    left_s = (1.0 - job.course.done) / per_s
    slots = max(0.0, unix_s + left_s - job.came_unix_s) / config.slot_s
    usd = usd_per_hour(config, spec, workers, room) * left_s / 3600.0
    utility, price = worth.of(slots, config.slot_s), config.worth_per_usd * usd
    if utility >= price:
        return None
    return f"worth {utility:.4g} by then, and its machines cost {usd:.4g} USD"


def usd_per_hour(config: QueueConfig, spec: JobSpec, workers: Workers, room: Room) -> float:
    """Return what a job's share of machines costs: of what it uses most of each of them."""
    total = 0.0
    for name, count in workers.items():
        region, needs = config.regions[name], spec.needs(name)
        gpus, cpus = room.get(name, (0.0, 0.0))
        usd = region.usd_per_hour
        if region.machines is not None:
            machine = region.machines
            gpus, cpus, usd = machine.gpus, machine.cpus, machine.usd_per_hour
        shares = [
            used / has
            for used, has in ((needs.gpus * count, gpus), (needs.cpus_of(count), cpus))
            if has
        ]
        total += usd * max(shares, default=0.0)
    return total
