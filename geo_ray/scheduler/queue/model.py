"""Model of a queue's jobs and regions as the shared cluster of the policies; observations.

A region is one site with the current capacity of its running nodes; future capacity is unknown, so
all sites are spot sites. A job's parameter server is its averager. The needs of a region's servers
and bridges are distributed over its workers; `RegionNeeds.cpus_of` is exact and is checked before a
start. The start-up time of a job counts as work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from geo_ray.planner.profile import StepModel
from geo_ray.planner.timing import Timing
from geo_ray.scheduler.cluster import (
    Allocation,
    ClusterSite,
    RegionNet,
    SharedCluster,
    counts_of,
    unit_prices,
)
from geo_ray.scheduler.job import (
    MACHINE,
    BatchLimits,
    ClusterJob,
    JobDemands,
    JobSpeed,
    SigmoidUtility,
)
from geo_ray.scheduler.policies.pd_ors import PdOrsPolicy
from geo_ray.scheduler.policy import SchedulingPolicy
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.job_spec import JobSpec, JobValue
from geo_ray.scheduler.queue.journal import GivenJob, ObservedJob

KINDS: Final = ("gpu", "cpu")
Capacity = Mapping[str, tuple[float, float]]
"""GPUs and CPUs by region."""
WINDOW_SLOTS: Final = 200
"""Look-ahead of the policies, in slots."""
_MANY_SLOTS: Final = 1e6


def cluster_of(config: QueueConfig, capacity: Capacity, slots: int) -> SharedCluster:
    """Return the cluster of a queue. Its arrays may be modified, as `observe_capacity` does.

    Args:
        config: the queue.
        capacity: current capacity.
        slots: number of slots.
    """
    names = tuple(config.regions)
    links = [[config.link_between(a, b) for b in names] for a in names]
    mbps_GG = np.array([[link.mbps for link in row] for row in links])
    rtt_s_GG = np.array([[link.rtt_s for link in row] for row in links])
    usd_GG = np.array([[link.usd_per_gb for link in row] for row in links])
    np.fill_diagonal(rtt_s_GG, 0.0)
    np.fill_diagonal(usd_GG, 0.0)
    for g, name in enumerate(names):
        mbps_GG[g, g] = config.regions[name].inside_mbps
    sites = tuple(
        ClusterSite(name, g, config.regions[name].inside_mbps, spot=True)
        for g, name in enumerate(names)
    )
    shape = (slots, len(names), len(KINDS))
    net = RegionNet(names, mbps_GG, usd_GG, rtt_s_GG)
    cluster = SharedCluster(sites, KINDS, config.slot_s, np.zeros(shape), np.zeros(shape), net)
    observe_capacity(cluster, config, capacity, 0)
    return cluster


def observe_capacity(
    cluster: SharedCluster, config: QueueConfig, capacity: Capacity, slot: int
) -> None:
    """Set the capacity of a slot and of all later slots."""
    for g, name in enumerate(cluster.net.names):
        region, units = config.regions[name], capacity.get(name, (0.0, 0.0))
        cluster.capacity_TSR[slot:, g] = units
        usd_per_hour, has = region.usd_per_hour, units
        if region.machines is not None:
            usd_per_hour = region.machines.usd_per_hour
            has = (region.machines.gpus, region.machines.cpus)
        cluster.usd_per_h_TSR[slot:, g] = unit_prices(usd_per_hour, has) if any(has) else 0.0


def speed_of(spec: JobSpec, factor: float = 1.0) -> JobSpeed:
    """Return the speed of a job: ``factor`` times the declared one."""
    speed, rows = spec.speed, spec.rows_per_step
    steps = StepModel(
        "",
        speed.fixed_s / factor,
        speed.lan_s / factor,
        {MACHINE: speed.row_s / factor},
        {MACHINE: (1, rows)},
        (1, spec.most_workers),
        0.0,
    )
    hides = math.inf if speed.hides is None else speed.hides
    return JobSpeed(
        steps,
        speed.model_bytes / factor,
        BatchLimits(rows, rows),
        Timing(speed.every, hides),
    )


def utility_of(value: JobValue, slot_s: float, waited_slots: float) -> SigmoidUtility:
    """Return the utility of a job after ``waited_slots`` slots."""
    if value.deadline_s is None:
        return SigmoidUtility(value.value, 1.0, _MANY_SLOTS)
    target = value.deadline_s / slot_s - waited_slots
    return SigmoidUtility(value.value, value.urgency, target)


def demands_of(spec: JobSpec) -> JobDemands:
    """Return the demands of a worker, with its part of the servers."""
    gpus = max(each.gpus for each in spec.regions.values())
    cpus = max(each.cpus + each.server_cpus / each.workers for each in spec.regions.values())
    most = max(spec.most_workers, len(spec.regions) if not spec.anywhere else 1)
    return JobDemands(
        np.array([gpus, cpus]), np.zeros(len(KINDS)), most, most, min(spec.workers, most)
    )


def cluster_job(
    name: str,
    spec: JobSpec,
    observed: ObservedJob,
    arrival_slot: int,
    waited_slots: float,
    cluster: SharedCluster,
) -> ClusterJob:
    """Return a queued job as a job of the shared cluster.

    Args:
        name: name of the job.
        spec: its specification.
        observed: its state.
        arrival_slot: slot in which it was shown to the policy.
        waited_slots: slots since its submission until then.
        cluster: cluster of the queue.
    """
    data: dict[int, float] = {}
    spec = spec.among(observed.regions)
    if not spec.anywhere:
        numbers = {region: g for g, region in enumerate(cluster.net.names)}
        rows = spec.rows_per_step
        data = {numbers[name]: each.rows / rows for name, each in spec.regions.items()}
    return ClusterJob(
        name,
        arrival_slot,
        work_rows(spec, observed),
        demands_of(spec),
        speed_of(spec, observed.factor),
        utility_of(observed.value, cluster.slot_s, waited_slots),
        data,
    )


def work_rows(spec: JobSpec, observed: ObservedJob) -> float:
    """Return the remaining work of a job in rows, including its start-up."""
    step_s = float(
        speed_of(spec, observed.factor).step_s(demands_of(spec).wanted_workers, spec.rows_per_step)
    )
    start = observed.start_s / step_s * spec.rows_per_step if step_s else 0.0
    return max(observed.left * spec.rows, 1e-6) + start


def given_of(allocation: Allocation, cluster: SharedCluster) -> GivenJob:
    """Return an allocation by region names."""
    names = [site.name for site in cluster.sites]
    return GivenJob(
        workers={names[site]: count for site, count in allocation.workers},
        servers={names[site]: count for site, count in allocation.servers},
    )


def allocation_of(given: GivenJob, spec: JobSpec, cluster: SharedCluster) -> Allocation:
    """Return the inverse of `given_of`."""
    numbers = {site.name: number for number, site in enumerate(cluster.sites)}
    return Allocation(
        counts_of({numbers[name]: count for name, count in given.workers.items()}),
        counts_of({numbers[name]: count for name, count in given.servers.items()}),
        spec.among(given.workers).rows_per_step,
    )


def fraction_per_s(
    spec: JobSpec, workers: Mapping[str, int], averager: str, config: QueueConfig
) -> float:
    """Return the fraction of its work that a job completes per second, by its declared speed.

    0 if it is unknown because a region of the job was removed from the queue.

    Args:
        spec: specification of the job.
        workers: its workers by region.
        averager: region of its averager.
        config: the queue, which has the links.
    """
    if not config.regions.keys() >= {*workers, averager}:
        return 0.0
    cluster = cluster_of(config, {}, 1)
    observed = ObservedJob(left=1.0, value=JobValue(), factor=1.0, regions=tuple(workers))
    job = cluster_job("", spec, observed, 0, 0.0, cluster)
    given = GivenJob(workers=dict(workers), servers={averager: 1})
    return job.rows_per_s(cluster, allocation_of(given, spec, cluster)) / job.rows


def adapted(policy: SchedulingPolicy, value_per_usd: float) -> SchedulingPolicy:
    """Return a policy adapted to queues: jobs may take many slots, and money may count."""
    if not isinstance(policy, PdOrsPolicy):
        return policy
    search = replace(policy.search, value_per_usd=value_per_usd)
    return replace(policy, search=search, window=WINDOW_SLOTS, fine=True, endless=True)


SubmissionState = Literal["unknown", "going", "over"]
RunEnd = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class ObservedSubmission:
    """State of a job's attempt, from the job server and the run directory.

    Attributes:
        state: unknown: the job server has no such submission.
        done: completed fraction of the job's work; None: its run has not begun.
        trains: whether its run takes steps.
        members: state of each region of the run; empty: unknown.
        end: how its run has ended; None: it has not reported an end.
        code: error code of the end.
        message: error message.
        problem: why its run or log cannot be read; "" if it can.
    """

    state: SubmissionState
    done: float | None = None
    trains: bool = False
    members: Mapping[str, str] = field(default_factory=dict)
    end: RunEnd | None = None
    code: str | None = None
    message: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class QueueObservation:
    """Observations of a queue's cluster and jobs.

    Attributes:
        unix_s: time of the observation.
        capacity: current capacity.
        attempts: active attempts by job name.
        orphans: running submissions of this queue that belong to no attempt.
    """

    unix_s: float
    capacity: Capacity
    attempts: Mapping[str, ObservedSubmission] = field(default_factory=dict)
    orphans: tuple[str, ...] = ()
