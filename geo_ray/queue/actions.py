"""What is to be done so that the world is as the journal has it; all of it may be done again."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from geo_ray.autoscale.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.queue.config import QueueConfig
from geo_ray.queue.job_spec import JobRequest
from geo_ray.queue.seen import QueueSeen
from geo_ray.queue.state import QueuedJob, QueueState


@dataclass(frozen=True, slots=True)
class Submit:
    """Give a job's attempt to the job server, which takes each of a name once.

    Attributes:
        id: of the job.
        tenant: whose it is.
        request: the job.
        attempt: its number.
        workers: by region.
        averager: its region.
    """

    id: str
    tenant: str
    request: JobRequest
    attempt: int
    workers: Mapping[str, int]
    averager: str


@dataclass(frozen=True, slots=True)
class AskStop:
    """Ask a run to save and end.

    Attributes:
        job: its name.
    """

    job: str


@dataclass(frozen=True, slots=True)
class EndSubmission:
    """End a submission whatever becomes of it.

    Attributes:
        submission: its name.
    """

    submission: str


@dataclass(frozen=True, slots=True)
class ChangeMember:
    """Let a region join a run, or leave it.

    Attributes:
        job: its name.
        verb: which.
        region: of the run.
    """

    job: str
    verb: Literal["add", "drain", "remove"]
    region: str


@dataclass(frozen=True, slots=True)
class AskMachines:
    """Let an autoscaler follow another target.

    Attributes:
        target: what should run.
    """

    target: ClusterTarget


Action = Submit | AskStop | EndSubmission | ChangeMember | AskMachines


def submission_name(queue: str, job: str, attempt: int) -> str:
    """Return the job server's name of an attempt.

    Args:
        queue: its name.
        job: id of the job.
        attempt: its number.
    """
    return f"geoq-{queue}.{job}.{attempt}"


def is_submission_of(queue: str, name: str) -> bool:
    """Whether a submission is one of a queue, and not of one whose name only begins like it."""
    return re.fullmatch(rf"geoq-{re.escape(queue)}\.[^.]+\.[0-9a-f]{{8}}\.\d+", name) is not None


def actions_of(job: QueuedJob, config: QueueConfig, seen: QueueSeen) -> list[Action]:
    """Return what must be done now for a job.

    Args:
        job: which.
        config: the queue.
        seen: what is seen.
    """
    attempt, one = job.attempt, seen.attempts.get(job.name)
    if attempt is None or one is None:
        return []
    name = submission_name(config.name, job.id, attempt.number)
    if attempt.leave is not None:
        if one.state != "going":
            return []
        late = seen.unix_s - attempt.leave_unix_s > config.patience.save_s
        return [AskStop(job.name) if one.trains and not late else EndSubmission(name)]
    if one.state == "unknown":
        return [
            Submit(
                job.id, job.tenant, job.request, attempt.number, attempt.workers, attempt.averager
            )
        ]
    found: list[Action] = []
    for region, stands in one.members.items() if one.trains else ():
        if region in attempt.workers and stands in ("absent", "left", "did not join"):
            found.append(ChangeMember(job.name, "add", region))
        elif region not in attempt.workers and stands == "member":
            found.append(ChangeMember(job.name, "drain", region))
        elif region not in attempt.workers and stands == "lost":
            found.append(ChangeMember(job.name, "remove", region))  # it must not come back
    return found


def target_of(state: QueueState, config: QueueConfig) -> ClusterTarget:
    """Return the machines that the jobs which were given something need, by region."""
    gpus = dict.fromkeys(config.regions, 0.0)
    cpus = dict.fromkeys(config.regions, 0.0)
    slot = state.era.slots[-1] if state.era.slots else None
    for job in state.living():
        if job.attempt is not None:
            workers = job.attempt.workers
        elif slot is not None and job.name in slot.given and job.name not in slot.held:
            workers = slot.given[job.name].workers
        else:
            continue
        for region, count in workers.items():
            if region not in config.regions:
                continue  # the queue has it no more, and rents nothing there
            needs = job.request.spec.needs(region)
            gpus[region] += needs.gpus * count
            cpus[region] += needs.cpus_of(count)
    regions = []
    for name, about in config.regions.items():
        machine = about.machines
        if machine is None:
            continue
        count = math.ceil(cpus[name] / machine.cpus - 1e-9)
        if machine.gpus:
            count = max(count, math.ceil(gpus[name] / machine.gpus - 1e-9))
        kind = MachineKind(
            machine.type, 1.0, machine.cap, machine.markets, (), machine.usd_per_hour
        )
        rows_per_s = float(min(count, machine.cap))
        regions.append(RegionTarget(name, machine.at, rows_per_s, (kind,), None, (None,), 0))
    return ClusterTarget(tuple(regions))
