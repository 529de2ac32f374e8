"""Admission and scheduling at the start of a slot: inputs and results of the policy.

A policy counts only workers of a region; a run also has servers, and another number of workers
needs a restart. The result of the policy is applied in this order: whole jobs, quotas of tenants,
keeping current allocations, membership changes, the value check, and capacity. The state of a
policy is not stored: it is rebuilt by asking a new policy the same questions from the journal
(`QueueSlots`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from geo_ray.base.errors import ValueTooLowError
from geo_ray.scheduler.cluster import SharedCluster
from geo_ray.scheduler.policies.registry import policy_named
from geo_ray.scheduler.policy import JobProgress, SlotDecision, SlotScheduler, SlotView
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.job_spec import JobSpec, Workers
from geo_ray.scheduler.queue.journal import (
    AnyEntry,
    EndedEntry,
    GivenJob,
    LeaveEntry,
    ObservedJob,
    ReshapeEntry,
    SlotEntry,
)
from geo_ray.scheduler.queue.model import (
    WINDOW_SLOTS,
    Capacity,
    adapted,
    allocation_of,
    cluster_job,
    cluster_of,
    fraction_per_s,
    given_of,
    observe_capacity,
    work_rows,
)
from geo_ray.scheduler.queue.state import (
    JobAttempt,
    JobState,
    PolicyGeneration,
    QueuedJob,
    QueueState,
)


def why_not_covered(
    config: QueueConfig,
    job: QueuedJob,
    workers: Workers,
    averager: str,
    capacity: Capacity,
    unix_s: float,
) -> str | None:
    """Return why the value of a job does not cover its machines; None: it does.

    Args:
        config: the queue.
        job: the job.
        workers: workers by region.
        averager: region of the averager.
        capacity: current capacity.
        unix_s: current time.
    """
    if not config.value_per_usd:
        return None
    spec, value = job.request.spec, job.request.value
    per_s = fraction_per_s(spec, workers, averager, config) * job.progress.factor
    if per_s <= 0:
        return None
    left_s = (1.0 - job.progress.done) / per_s
    slots = max(0.0, unix_s + left_s - job.submitted_unix_s) / config.slot_s
    usd = usd_per_hour(config, spec, workers, capacity) * left_s / 3600.0
    utility, price = value.of(slots, config.slot_s), config.value_per_usd * usd
    if utility >= price:
        return None
    return f"its value by then is {utility:.4g}, but its machines cost {usd:.4g} USD"


def usd_per_hour(config: QueueConfig, spec: JobSpec, workers: Workers, capacity: Capacity) -> float:
    """Return the hourly cost of a job's fraction of the machines, by its dominant resource."""
    total = 0.0
    for name, count in workers.items():
        region, needs = config.regions[name], spec.needs(name)
        gpus, cpus = capacity.get(name, (0.0, 0.0))
        usd = region.usd_per_hour
        if region.machines is not None:
            machine = region.machines
            gpus, cpus, usd = machine.gpus, machine.cpus, machine.usd_per_hour
        fractions = [
            used / has
            for used, has in ((needs.gpus * count, gpus), (needs.cpus_of(count), cpus))
            if has
        ]
        total += usd * max(fractions, default=0.0)
    return total


_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class TickInputs:
    """Inputs of a scheduling tick.

    Attributes:
        unix_s: current time.
        capacity: current capacity.
    """

    unix_s: float
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Wanted:
    """Allocation that a job should have.

    Attributes:
        workers: workers by region.
        averager: region of the averager.
        restart: whether a running job must be restarted.
    """

    workers: Workers
    averager: str
    restart: bool = False


@dataclass(slots=True)
class FreeCapacity:
    """Free capacity of a cluster.

    Attributes:
        free: GPUs and CPUs by region.
    """

    free: dict[str, tuple[float, float]] = field(default_factory=dict)

    def fits(self, spec: JobSpec, workers: Workers) -> str | None:
        """Return the first region without enough capacity; None: the workers fit."""
        for region, count in workers.items():
            gpus, cpus = self.free.get(region, (0.0, 0.0))
            needs = spec.needs(region)
            if needs.gpus * count > gpus + _EPS or needs.cpus_of(count) > cpus + _EPS:
                return region
        return None

    def take(self, spec: JobSpec, workers: Workers, times: int = 1) -> None:
        """Subtract an allocation, or add it back."""
        for region, count in workers.items():
            gpus, cpus = self.free.get(region, (0.0, 0.0))
            needs = spec.needs(region)
            self.free[region] = (
                gpus - times * needs.gpus * count,
                cpus - times * needs.cpus_of(count),
            )


def _waits(job: QueuedJob) -> bool:
    return job.state is JobState.WAITING


def fitted(
    config: QueueConfig,
    jobs: Sequence[QueuedJob],
    given: Mapping[str, GivenJob],
    now: TickInputs,
    regions: Mapping[str, Sequence[str]],
) -> tuple[dict[str, Wanted], dict[str, str]]:
    """Return the allocations that are applied, and why others are not.

    Args:
        config: the queue.
        jobs: active jobs, in order.
        given: allocations by the policy.
        now: inputs of the tick.
        regions: available regions of each job.
    """
    left = FreeCapacity(dict(now.capacity))
    of_tenant: dict[str, int] = {}
    wanted: dict[str, Wanted] = {}
    held: dict[str, str] = {}
    attempts_first = sorted(jobs, key=_waits)
    for job in attempts_first:
        if job.name not in given:
            continue
        spec = job.request.spec
        found = _wanted(job, given[job.name], regions.get(job.name, ()))
        if isinstance(found, str):
            held[job.name] = found
            continue
        quota = config.tenants[job.tenant].most_workers if job.tenant in config.tenants else 0
        has = of_tenant.get(job.tenant, 0)
        if job.attempt is not None and job.state is not JobState.LEAVING:
            found = _retained(config, job, job.attempt, found, left)
        if quota is not None and has + sum(found.workers.values()) > quota:
            held[job.name] = f"tenant {job.tenant} has {has} of {quota} workers"
            continue
        shortfall = why_not_covered(
            config, job, found.workers, found.averager, now.capacity, now.unix_s
        )
        if shortfall is not None:
            held[job.name] = shortfall
            continue
        full = left.fits(spec, found.workers)
        if full is not None:
            held[job.name] = f"no capacity left in {full}"
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
            return f"the policy allocated no worker in {', '.join(missing) or 'any region'}"
        workers = {name: min(count, spec.needs(name).rows) for name, count in workers.items()}
        while sum(workers.values()) > spec.among(there).most_workers:
            workers[max(workers, key=workers.__getitem__)] -= 1
    averager = max(given.servers, key=lambda name: (workers.get(name, 0), name), default="")
    if spec.averager in workers:
        averager = spec.averager  # as configured
    if averager not in workers:
        averager = max(workers, key=lambda name: (workers[name], name))
    return Wanted(workers, averager)


def _retained(
    config: QueueConfig, job: QueuedJob, attempt: JobAttempt, new: Wanted, left: FreeCapacity
) -> Wanted:
    spec, old = job.request.spec, attempt.workers
    keeps = Wanted(old, attempt.averager)
    if dict(new.workers) == old:
        return keeps
    joined = {name for name in new.workers if name not in old}
    common = {name: count for name, count in new.workers.items() if name in old}
    has_averager = attempt.averager in new.workers
    if has_averager and (joined or len(common) < len(old)):
        # Regions join and leave; the number of workers per region stays as started.
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
    rest = 1.0 - job.progress.done
    before = fraction_per_s(spec, old, attempt.averager, config) * job.progress.factor
    after = fraction_per_s(spec, new.workers, new.averager, config) * job.progress.factor
    saved_s = rest / before - rest / after if before and after else 0.0
    if saved_s > 2 * config.patience.resize_s:
        return Wanted(new.workers, new.averager, restart=True)
    return keeps


GENERATION_SLOTS: Final = 400


class QueueSlots:
    """Policy of a generation, which can be rebuilt from the journal.

    A policy remembers its reservations. This state is not stored: a new process asks a new policy
    the same questions from the journal in the same order, which leads to the same state.
    Generations keep that sequence short.

    Args:
        config: the queue.
        generation: generation from the journal.
        jobs: all its jobs, by name.
    """

    def __init__(
        self, config: QueueConfig, generation: PolicyGeneration, jobs: Mapping[str, QueuedJob]
    ) -> None:
        self._config, self._generation, self._jobs = config, generation, jobs
        self._begun: tuple[SharedCluster, SlotScheduler] | None = None
        self._arrived: dict[str, int] = {}
        self._gone: list[str] = []
        self._before: SlotEntry | None = None
        for entry in generation.slots:
            self._ask(entry)
            self._before = entry

    @property
    def number(self) -> int:
        """Number of the generation."""
        return self._generation.number

    def decide(self, question: SlotEntry) -> SlotEntry:
        """Return a slot with the decision of the policy.

        Args:
            question: slot with the observations.
        """
        decision, cluster = self._ask(question)
        surpluses = {each.job: each.surplus for each in decision.admissions}
        rejected = tuple(each.job for each in decision.admissions if not each.is_admitted)
        given = {name: given_of(each, cluster) for name, each in decision.allocations.items()}
        answer = {"given": given, "surpluses": surpluses, "rejected": rejected}
        return question.model_copy(update=answer)

    def answered(self, entry: SlotEntry) -> None:
        """Record the applied result of a slot, which the next question includes."""
        self._before = entry

    def _ask(self, entry: SlotEntry) -> tuple[SlotDecision, SharedCluster]:
        if self._begun is None:
            cluster = cluster_of(self._config, entry.capacity, GENERATION_SLOTS + WINDOW_SLOTS)
            policy = adapted(policy_named(self._config.policy), self._config.value_per_usd)
            self._begun = (cluster, policy.begin(cluster, self._generation.number))
        cluster, scheduler = self._begun
        observe_capacity(cluster, self._config, entry.capacity, entry.slot)
        self._gone += entry.gone
        if (
            not entry.jobs
        ):  # without jobs the policy is not asked; ended jobs are reported with the next question
            return SlotDecision({}), cluster
        gone, self._gone = self._gone, []
        for name in entry.arrived:
            self._arrived[name] = entry.slot
        active = {name: self._progress(name, entry, cluster) for name in entry.jobs}
        view = SlotView(
            entry.slot,
            [active[name].job for name in entry.arrived],
            active,
            cluster.capacity_TSR[entry.slot],
            gone,
            frozenset(name for name in entry.jobs if entry.jobs[name].admitted),
            frozenset(name for name in entry.jobs if entry.jobs[name].lost),
        )
        return scheduler.decide(view), cluster

    def _progress(self, name: str, entry: SlotEntry, cluster: SharedCluster) -> JobProgress:
        observed, job = entry.jobs[name], self._jobs[name]
        spec = job.request.spec
        arrival = self._arrived[name]
        slot_s = self._config.slot_s
        began_unix_s = self._generation.began_unix_s + arrival * slot_s
        shown_unix_s = began_unix_s if job.shown_unix_s is None else job.shown_unix_s
        waited = max(0.0, round((began_unix_s - shown_unix_s) / slot_s))
        one = cluster_job(name, spec, observed, arrival, waited, cluster)
        before, had = self._before, None
        retained = before is not None and name in before.given and name not in before.held
        if before is not None and retained and before.jobs[name].regions == observed.regions:
            had = allocation_of(before.given[name], spec, cluster)
        return JobProgress(one, work_rows(spec, observed), observed.service_s, had, observed.waited)


_LATE: Final = 0.2  # assumed remaining fraction of a start that takes longer than others did


def question_of(state: QueueState, config: QueueConfig, slot: int, now: TickInputs) -> SlotEntry:
    """Return the question for a policy.

    Args:
        state: state of the queue.
        config: the queue.
        slot: number of the slot in its generation.
        now: inputs of the tick.
    """
    generation = state.generation
    newest = generation.slots[-1] if generation.slots else None
    before = {} if newest is None else newest.jobs
    jobs: dict[str, ObservedJob] = {}
    arrived: list[str] = []
    again: list[str] = []
    for job in state.living():
        regions = regions_there(job, now.capacity)
        leave = None if job.attempt is None else job.attempt.leave
        if leave is not None and leave.why not in ("preempted", "resized"):
            continue  # it is ending
        if not regions:
            continue  # if it is new to the policy, it has no capacity yet to arrive with
        observed = before.get(job.name)
        is_other = observed is not None and observed.regions != regions
        if job.name in generation.moved or is_other:
            again.append(job.name)  # resubmit it to the policy as a new job
        if job.name not in generation.known or job.name in again:
            arrived.append(job.name)
        jobs[job.name] = ObservedJob(
            left=max(0.0, 1.0 - job.progress.done),
            value=job.request.value,
            factor=job.progress.factor,
            regions=regions,
            start_s=_start_s(state, config, job, now.unix_s),
            waited=job.progress.waited,
            service_s=job.progress.service_s,
            admitted=job.name in generation.admitted,
            lost=newest is not None and _has_lost(job, newest, is_other=is_other),
        )
    living = {job.name for job in state.living()}
    gone = [name for name in before if name not in living]
    gone += [
        name
        for name in [*again, *generation.moved]
        if name in generation.known and name not in gone
    ]
    return SlotEntry(
        unix_s=now.unix_s,
        slot=slot,
        capacity=dict(now.capacity),
        arrived=tuple(arrived),
        gone=tuple(gone),
        jobs=jobs,
    )


def _has_lost(job: QueuedJob, newest: SlotEntry, *, is_other: bool) -> bool:
    """Whether a job has lost its allocation since the newest slot without being at fault."""
    if any(each.is_lost and each.unix_s >= newest.unix_s for each in job.progress.failures):
        return True
    has_begun = job.attempt is not None or bool(job.progress.failures or job.progress.done)
    return has_begun and (is_other or job.name not in newest.jobs)


def _start_s(state: QueueState, config: QueueConfig, job: QueuedJob, unix_s: float) -> float:
    """Return the seconds until a job's first step, as observed for earlier starts."""
    start_s = config.start_s if state.start_s is None else state.start_s
    if job.attempt is None or job.state is JobState.LEAVING:
        return start_s
    if job.state is not JobState.STARTING:
        return 0.0
    return max(_LATE * start_s, start_s - (unix_s - job.attempt.since_unix_s))


def regions_there(job: QueuedJob, capacity: Capacity) -> tuple[str, ...]:
    """Return the regions of a job with capacity; none if they are too few for it."""
    spec = job.request.spec
    wanted = capacity if spec.anywhere else spec.regions
    found = tuple(name for name in wanted if any(capacity.get(name, (0.0, 0.0))))
    return found if len(found) >= spec.least_regions else ()


def begun_slot(
    state: QueueState, config: QueueConfig, slots: QueueSlots, slot: int, now: TickInputs
) -> list[AnyEntry]:
    """Return the entries to write at the start of a slot.

    Args:
        state: state of the queue.
        config: the queue.
        slots: policy of the generation; since it is asked, the result must be written.
        slot: number of the slot.
        now: inputs of the tick.
    """
    entry = slots.decide(question_of(state, config, slot, now))
    again = {name for name in entry.rejected if name in state.generation.admitted}
    jobs = [job for job in state.living() if job.name in entry.jobs]
    regions = {name: observed.regions for name, observed in entry.jobs.items()}
    stranded = [job for job in jobs if job.name in again | state.generation.stranded]
    given = {**entry.given, **_starting(jobs, entry), **_leftovers(stranded, entry)}
    wanted, held = fitted(config, jobs, given, now, regions)
    entry = entry.model_copy(
        update={
            "given": {
                name: GivenJob(workers=dict(each.workers), servers={each.averager: 1})
                for name, each in wanted.items()
            },
            "held": held,
        }
    )
    slots.answered(entry)
    found: list[AnyEntry] = [entry]
    for name in entry.rejected:
        surplus = entry.surpluses.get(name)
        if (
            name not in again and surplus is not None
        ):  # otherwise no schedule was found and it waits
            found.append(
                EndedEntry(
                    unix_s=now.unix_s,
                    job=name,
                    outcome="rejected",
                    code=ValueTooLowError.code,
                    message=f"its value is {-surplus:.4g} less than the price of its resources",
                )
            )
    for job in state.living():
        found += _changes(job, wanted.get(job.name), held.get(job.name), now.unix_s)
    return found


def _changes(
    job: QueuedJob, wanted: Wanted | None, held: str | None, unix_s: float
) -> Sequence[AnyEntry]:
    attempt = job.attempt
    if attempt is None or job.state is JobState.LEAVING:
        return ()
    if wanted is None:
        message = held or "the policy allocates its machines to other jobs"
        return [LeaveEntry(unix_s=unix_s, job=job.name, why="preempted", message=message)]
    if wanted.restart:
        message = f"continues with {workers_text(wanted.workers)}"
        return [LeaveEntry(unix_s=unix_s, job=job.name, why="resized", message=message)]
    if dict(wanted.workers) != attempt.workers:
        return [ReshapeEntry(unix_s=unix_s, job=job.name, workers=dict(wanted.workers))]
    return ()


def workers_text(workers: Workers) -> str:
    """Return worker counts as text."""
    return ", ".join(f"{count} in {name}" for name, count in workers.items())


def _starting(jobs: Sequence[QueuedJob], entry: SlotEntry) -> dict[str, GivenJob]:
    """Keep the machines of jobs until they have trained as long as their start took."""
    found = {}
    for job in jobs:
        attempt = job.attempt
        if attempt is None or job.state is JobState.LEAVING:
            continue
        begun_unix_s = attempt.begun_unix_s
        if begun_unix_s is not None:
            took_s = begun_unix_s - attempt.since_unix_s
            if entry.unix_s - begun_unix_s >= took_s:
                continue
        if all(name in entry.jobs[job.name].regions for name in attempt.workers):
            found[job.name] = GivenJob(workers=dict(attempt.workers), servers={attempt.averager: 1})
    return found


def _leftovers(stranded: Sequence[QueuedJob], entry: SlotEntry) -> dict[str, GivenJob]:
    """Give jobs that the policy cannot place their requested workers, if these fit."""
    found = {}
    for job in stranded:
        spec = job.request.spec
        if job.name in entry.given:
            continue
        there = entry.jobs[job.name].regions
        names = [name for name in spec.regions if name in there] or list(there)[:1]
        found[job.name] = GivenJob(
            workers={name: spec.needs(name).workers for name in names}, servers={}
        )
    return found
