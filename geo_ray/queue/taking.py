"""Taking in what tenants ask: whether they may, and whether it can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field, ValidationError

from geo_ray.config.region import RegionConfig
from geo_ray.errors import (
    GeoRayError,
    InvariantError,
    QueueDeniedError,
    QueueRequestError,
    TenantQuotaError,
)
from geo_ray.queue.config import QueueConfig, TenantConfig
from geo_ray.queue.entries import ENTRIES, AnyEntry, EndedEntry, LeaveEntry, TakenEntry
from geo_ray.queue.job_spec import (
    AnyRequest,
    CancelRequest,
    JobRequest,
    MoveRequest,
    RegionNeeds,
    SubmitRequest,
)
from geo_ray.queue.packed import MOST_PACKED_BYTES, pack
from geo_ray.queue.state import QueuedJob, QueueState

MOST_JOB_BYTES: Final = MOST_PACKED_BYTES - 10_000
"""Of a job as it is written down, packed; a snapshot adds what has become of it."""
_MOST_AHEAD_S: Final = 3600.0
_TOLD: Final = 500  # characters of a refusal


def taken(
    state: QueueState, config: QueueConfig, tenant: str, request: AnyRequest, unix_s: float
) -> list[AnyEntry]:
    """Return what becomes of a request whose signature was found right.

    Args:
        state: of the queue.
        config: the queue.
        tenant: who asks.
        request: what.
        unix_s: when.
    """
    entry = TakenEntry(unix_s=unix_s, tenant=tenant, request=request)
    try:
        if request.sent_unix_s > unix_s + _MOST_AHEAD_S:
            raise QueueRequestError(
                f"it was sent {request.sent_unix_s - unix_s:.0f} s from now",
                fix="Set the clock of the computer that sends it.",
            )
        match request:
            case SubmitRequest():
                _check_submit(state, config, tenant, request)
                _check_written(entry)
            case CancelRequest():
                job = _job_of(state, config, tenant, request.job)
                return [entry, *_cancelled(job, tenant, unix_s)]
            case MoveRequest():
                _check_move(state, config, tenant, request)
    except Exception as error:  # of this request alone, whatever it is
        told = error if isinstance(error, GeoRayError) else InvariantError(repr(error))
        refused = {"code": told.code, "refused": told.message[:_TOLD]}
        return [entry.model_copy(update={**refused, "request": _named(request)})]
    return [entry]


def _named(request: AnyRequest) -> AnyRequest:
    """What was asked, without what nobody will train: whoever is refused fills no journal."""
    if not isinstance(request, SubmitRequest):
        return request
    spec = request.job.spec
    one = spec.model_copy(update={"regions": dict([next(iter(spec.regions.items()))])})
    bare: dict[str, object] = {"config": {}, "working_dir": None, "spec": one}
    return request.model_copy(update={"job": request.job.model_copy(update=bare)})


def _check_written(entry: TakenEntry) -> None:
    """Refuse what could not be written down."""
    entries: list[AnyEntry] = [entry]
    if len(pack(ENTRIES, entries)) > MOST_JOB_BYTES:
        raise QueueRequestError(
            "its configuration is too large",
            fix=f"A job as it is written down has at most {MOST_JOB_BYTES} bytes, packed.",
        )


def _check_submit(
    state: QueueState, config: QueueConfig, tenant: str, request: SubmitRequest
) -> None:
    job, quota = request.job, config.tenants[tenant]
    if job.name in state.jobs:
        raise QueueRequestError(f"there is a job {job.name} already")
    unknown = sorted(set(job.spec.regions) - set(config.regions))
    if unknown:
        raise QueueRequestError(
            f"job {job.name} has data in {', '.join(unknown)}; the queue has "
            f"{', '.join(config.regions)}"
        )
    _check_spec(job)
    _check_code(job, tenant, quota)
    living = sum(each.tenant == tenant for each in state.living())
    if living >= quota.most_jobs:
        raise TenantQuotaError(f"tenant {tenant} has {living} of {quota.most_jobs} jobs")
    if quota.most_worth is not None and job.worth.worth > quota.most_worth:
        raise TenantQuotaError(
            f"tenant {tenant} may give a job a worth of {quota.most_worth:g}, not of "
            f"{job.worth.worth:g}"
        )
    least = 1 if job.spec.anywhere else job.spec.least_regions
    if quota.most_workers is not None and least > quota.most_workers:
        raise TenantQuotaError(
            f"job {job.name} needs {least} workers, and tenant {tenant} may have "
            f"{quota.most_workers}"
        )
    _check_size(config, request)


class _DataSize(BaseModel):
    batch_size: int = Field(32, ge=1)


class _Taken(BaseModel):
    """The keys of a configuration that say what Ray is asked for."""

    regions: tuple[RegionConfig, ...]
    data: _DataSize = _DataSize()


def _check_spec(job: JobRequest) -> None:
    """Refuse a job that would take other resources than the schedulers are told.

    The tenant writes both. What runs is the configuration, so room and quotas must go by that.
    """
    spec = job.spec
    try:
        config = _Taken.model_validate_json(json.dumps(job.config))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise QueueRequestError(
            f"the configuration of job {job.name} makes no sense: {where}: {first['msg']}"
        ) from None
    needs = {each.name: RegionNeeds.of(each, config.data.batch_size) for each in config.regions}
    if any(each.copies > 1 or each.label != each.name for each in config.regions):
        raise QueueRequestError(
            f"job {job.name}: regions of a job in a queue are regions of its cluster, each once"
        )
    if needs.keys() != spec.regions.keys() or len(needs) < len(config.regions):
        raise QueueRequestError(
            f"job {job.name} says that its regions are {', '.join(spec.regions)}; those of its "
            f"configuration are {', '.join(each.name for each in config.regions)}"
        )
    for name, real in needs.items():
        for key, value in real.model_dump().items():
            said = getattr(spec.regions[name], key)
            if said != value:
                raise QueueRequestError(
                    f"job {job.name} says {key} {said:g} of region {name}, and its configuration "
                    f"takes {value:g}",
                    fix="Submit it with `geo-ray queue submit`, which derives these numbers.",
                )


def _check_code(job: JobRequest, tenant: str, quota: TenantConfig) -> None:
    """Refuse code from anywhere but the tenant's own directory."""
    path, root = job.working_dir, quota.working_dirs
    if path is None:
        return
    if root is None:
        raise QueueDeniedError(
            f"jobs of tenant {tenant} may bring no code of their own",
            fix="Let the queue's operator set tenants.NAME.working_dirs.",
        )
    if ".." in path.split("/") or not Path(path).is_relative_to(root):
        raise QueueDeniedError(
            f"the code of tenant {tenant} must lie below {root}, and {path} does not"
        )


def _check_size(config: QueueConfig, request: SubmitRequest) -> None:
    """Refuse what would never fit, where the configuration says how much there is."""
    spec = request.job.spec
    for name in spec.regions if not spec.anywhere else ():
        region, needs = config.regions[name], spec.regions[name]
        cpus, gpus = region.cpus, region.gpus
        if region.machines is not None:
            cpus, gpus = region.machines.cpus * region.machines.cap, None
        if cpus is not None and needs.cpus_of(1) > cpus:
            raise QueueRequestError(
                f"job {request.job.name} is larger than the cluster: a worker and the servers in "
                f"{name} need {needs.cpus_of(1):g} CPUs, and the queue has {cpus:g} there"
            )
        if gpus is not None and needs.gpus > gpus:
            raise QueueRequestError(
                f"job {request.job.name} is larger than the cluster: a worker in {name} needs "
                f"{needs.gpus:g} GPUs, and the queue has {gpus:g} there"
            )


def _job_of(state: QueueState, config: QueueConfig, tenant: str, name: str) -> QueuedJob:
    job = state.jobs.get(name)
    if job is None:
        raise QueueRequestError(f"there is no job {name}")
    if job.end is not None:
        raise QueueRequestError(f"job {name} is over: {job.end.outcome}")
    if job.tenant != tenant and not config.tenants[tenant].operator:
        raise QueueDeniedError(f"job {name} is of tenant {job.tenant}, not of {tenant}")
    return job


def _check_move(state: QueueState, config: QueueConfig, tenant: str, request: MoveRequest) -> None:
    job, who = _job_of(state, config, tenant, request.job), config.tenants[tenant]
    most = config.tenants[job.tenant].most_worth if job.tenant in config.tenants else None
    asked = None if request.worth is None else request.worth.worth
    if asked is not None and most is not None and asked > most:
        raise TenantQuotaError(f"tenant {job.tenant} may give a job a worth of {most:g}")
    if request.place is None:
        if request.worth is None:
            raise QueueRequestError("neither a place nor a worth is named")
        return
    if request.place == "before" and request.before == request.job:
        raise QueueRequestError(f"job {request.job} cannot be before itself")
    if request.place == "before":
        _living(state, request.before)
    if who.operator or request.place == "last":
        return
    passed = [each for each in _passed(state, job, request) if each.tenant != job.tenant]
    if passed:
        raise QueueDeniedError(
            f"job {job.name} would pass {passed[0].name} of tenant {passed[0].tenant}"
        )


def _living(state: QueueState, name: str | None) -> QueuedJob:
    job = None if name is None else state.jobs.get(name)
    if job is None or job.end is not None:
        raise QueueRequestError(f"there is no job {name} that waits or runs")
    return job


def _passed(state: QueueState, job: QueuedJob, request: MoveRequest) -> list[QueuedJob]:
    order = [each for each in state.living() if each.order < job.order]
    if request.place == "first":
        return order
    target = _living(state, request.before)
    return [each for each in order if each.order >= target.order]


def _cancelled(job: QueuedJob, tenant: str, unix_s: float) -> list[AnyEntry]:
    told = f"by tenant {tenant}"
    if job.attempt is None:
        return [EndedEntry(unix_s=unix_s, job=job.name, outcome="cancelled", told=told)]
    return [LeaveEntry(unix_s=unix_s, job=job.name, why="cancelled", told=told)]
