"""Requests of tenants: signed, put into a tenant's inbox, and admitted or refused by the queue.

A tenant's token signs its requests, and the queue has only the public half. An inbox is written
only if it has not changed since it was read, so concurrent writers both succeed, and the queue
removes only what its journal has. Each inbox is a separate object, so that a tenant can be given
access to its inbox only. A request counts once, by its id.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from geo_ray.base.errors import (
    GeoRayError,
    InvariantError,
    QueueDeniedError,
    QueueJournalError,
    QueueRequestError,
    TenantQuotaError,
)
from geo_ray.base.model import StrictModel
from geo_ray.experiment.regions import RegionConfig
from geo_ray.scheduler.queue.config import QueueConfig, TenantConfig
from geo_ray.scheduler.queue.job_spec import (
    AnyRequest,
    CancelRequest,
    JobRequest,
    MoveRequest,
    RegionNeeds,
    SubmitRequest,
)
from geo_ray.scheduler.queue.journal import (
    ENTRIES,
    MOST_PACKED_BYTES,
    AnyEntry,
    EndedEntry,
    LeaveEntry,
    RequestEntry,
    pack,
    unpack,
)
from geo_ray.scheduler.queue.state import QueuedJob, QueueState
from geo_ray.storage.conditional_store import ConditionalStore

_MARK: Final = "geoq1-"


def new_token() -> str:
    """Generate a token, which authorizes requests of its tenant."""
    return _MARK + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")


def key_of(token: str) -> str:
    """Return the public half of a token, for the configuration of the queue.

    Raises:
        QueueDeniedError: the token is invalid.
    """
    return _private(token).public_key().public_bytes_raw().hex()


def sign(token: str, queue_id: str, text: str) -> str:
    """Sign a request for one queue; the signature is invalid for other queues of the same name.

    Raises:
        QueueDeniedError: the token is invalid.
    """
    return _private(token).sign(_said(queue_id, text)).hex()


def is_signed(key: str, queue_id: str, text: str, signature: str) -> bool:
    """Whether the holder of the token of ``key`` signed this for this queue."""
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature), _said(queue_id, text))
    except (InvalidSignature, ValueError):
        return False
    return True


def _said(queue_id: str, text: str) -> bytes:
    return f"geo_ray-queue\n{queue_id}\n{text}".encode()


def _private(token: str) -> Ed25519PrivateKey:
    text = token.strip()
    try:
        if not text.startswith(_MARK):
            raise ValueError("another beginning")
        seed = base64.b64decode(text.removeprefix(_MARK) + "=", altchars=b"-_", validate=True)
        return Ed25519PrivateKey.from_private_bytes(seed)
    except (ValueError, binascii.Error):
        raise QueueDeniedError(
            "this is not a queue token",
            fix="Create one with `geo-ray queue token`; it begins with geoq1-.",
        ) from None


_TRIES: Final = 50
_REQUEST: TypeAdapter[AnyRequest] = TypeAdapter(AnyRequest)


class SignedRequest(StrictModel):
    """A signed request."""

    id: str
    text: str
    signature: str


_REQUESTS: TypeAdapter[list[SignedRequest]] = TypeAdapter(list[SignedRequest])


def inbox_key(tenant: str) -> str:
    """Return the key of a tenant's inbox."""
    return f"inbox-{tenant}.z"


def signed(request: AnyRequest, queue_id: str, token: str) -> SignedRequest:
    """Sign a request.

    Args:
        request: the request.
        queue_id: id of the queue, from its journal.
        token: token of the tenant.

    Raises:
        QueueDeniedError: the token is invalid.
    """
    text = _REQUEST.dump_json(request).decode()
    return SignedRequest(id=request.id, text=text, signature=sign(token, queue_id, text))


def opened(found: SignedRequest, queue_id: str, key: str) -> AnyRequest | None:
    """Return the request; None: it is invalid, or not signed by the tenant."""
    if not is_signed(key, queue_id, found.text, found.signature):
        return None
    try:
        request = _REQUEST.validate_json(found.text)
    except ValidationError:
        return None
    return request if request.id == found.id else None


def submit(store: ConditionalStore, tenant: str, request: SignedRequest) -> None:
    """Put a request into a tenant's inbox.

    Raises:
        QueueRequestError: the inbox is full because the queue is not served, or has too many
            writers.
    """

    def put(inbox: list[SignedRequest]) -> list[SignedRequest]:
        return [*inbox, request]

    _change(store, tenant, put)


def look(store: ConditionalStore, tenant: str) -> list[SignedRequest]:
    """Return the requests in a tenant's inbox.

    An unreadable inbox counts as empty; see `remove`.
    """
    found = store.read(inbox_key(tenant))
    return [] if found is None else _read(found.data, tenant)


def remove(store: ConditionalStore, tenant: str, known: Collection[str]) -> None:
    """Remove processed and invalid requests from the inbox.

    Raises:
        QueueRequestError: the inbox has too many concurrent writers.
    """
    _change(store, tenant, lambda inbox: [each for each in inbox if each.id not in known])


def _change(
    store: ConditionalStore,
    tenant: str,
    change: Callable[[list[SignedRequest]], list[SignedRequest]],
) -> None:
    for _ in range(_TRIES):
        found = store.read(inbox_key(tenant))
        inbox = [] if found is None else _read(found.data, tenant)
        data = pack(_REQUESTS, change(inbox))
        if len(data) > MOST_PACKED_BYTES:
            raise QueueRequestError(
                f"the inbox of tenant {tenant} is full",
                fix="Check with `geo-ray queue list` whether the queue is served.",
            )
        tag = store.write(inbox_key(tenant), data, None if found is None else found.tag)
        if tag is not None:
            return
    raise QueueRequestError(
        f"the inbox of tenant {tenant} has too many concurrent writers",
        fix="Try again.",
    )


def _read(data: bytes, tenant: str) -> list[SignedRequest]:
    try:
        return unpack(_REQUESTS, data, inbox_key(tenant))
    except QueueJournalError:  # a client has written invalid data
        return []


MOST_JOB_BYTES: Final = MOST_PACKED_BYTES - 10_000
"""Maximum size of a stored job, compressed; snapshots add its progress."""
_MOST_AHEAD_S: Final = 3600.0
_MAX_MESSAGE: Final = 500  # characters of a refusal


def taken(
    state: QueueState, config: QueueConfig, tenant: str, request: AnyRequest, unix_s: float
) -> list[AnyEntry]:
    """Return the journal entries that accept or refuse a request with a valid signature.

    Args:
        state: state of the queue.
        config: configuration of the queue.
        tenant: tenant of the request.
        request: the request.
        unix_s: current time.
    """
    entry = RequestEntry(unix_s=unix_s, tenant=tenant, request=request)
    try:
        if request.sent_unix_s > unix_s + _MOST_AHEAD_S:
            raise QueueRequestError(
                f"its time is {request.sent_unix_s - unix_s:.0f} s in the future",
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
    except Exception as error:  # an error concerns this request only
        message = error if isinstance(error, GeoRayError) else InvariantError(repr(error))
        refused = {"code": message.code, "refused": message.message[:_MAX_MESSAGE]}
        return [entry.model_copy(update={**refused, "request": _named(request)})]
    return [entry]


def _named(request: AnyRequest) -> AnyRequest:
    """The request without the configuration of a refused job, which would fill the journal."""
    if not isinstance(request, SubmitRequest):
        return request
    spec = request.job.spec
    one = spec.model_copy(update={"regions": dict([next(iter(spec.regions.items()))])})
    bare: dict[str, object] = {"config": {}, "working_dir": None, "spec": one}
    return request.model_copy(update={"job": request.job.model_copy(update=bare)})


def _check_written(entry: RequestEntry) -> None:
    """Reject a request that is too large to store."""
    entries: list[AnyEntry] = [entry]
    if len(pack(ENTRIES, entries)) > MOST_JOB_BYTES:
        raise QueueRequestError(
            "its configuration is too large",
            fix=f"A stored job has at most {MOST_JOB_BYTES} bytes, compressed.",
        )


def _check_submit(
    state: QueueState, config: QueueConfig, tenant: str, request: SubmitRequest
) -> None:
    job, quota = request.job, config.tenants[tenant]
    if job.name in state.jobs:
        raise QueueRequestError(f"job {job.name} exists already")
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
    if quota.max_value is not None and job.value.value > quota.max_value:
        raise TenantQuotaError(
            f"tenant {tenant} may give a job a value of {quota.max_value:g}, not of "
            f"{job.value.value:g}"
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
    """Keys of a configuration that determine its resource requests."""

    regions: tuple[RegionConfig, ...]
    data: _DataSize = _DataSize()


def _check_spec(job: JobRequest) -> None:
    """Reject a job whose specification differs from its configuration.

    The tenant provides both. The configuration is what runs, so capacity and quotas must use its
    values.
    """
    spec = job.spec
    try:
        config = _Taken.model_validate_json(json.dumps(job.config))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise QueueRequestError(
            f"the configuration of job {job.name} is invalid: {where}: {first['msg']}"
        ) from None
    needs = {each.name: RegionNeeds.of(each, config.data.batch_size) for each in config.regions}
    if any(each.copies > 1 or each.label != each.name for each in config.regions):
        raise QueueRequestError(
            f"job {job.name}: regions of a queued job must be distinct regions of its cluster"
        )
    if needs.keys() != spec.regions.keys() or len(needs) < len(config.regions):
        raise QueueRequestError(
            f"job {job.name} declares the regions {', '.join(spec.regions)}; its "
            f"configuration has {', '.join(each.name for each in config.regions)}"
        )
    for name, real in needs.items():
        for key, value in real.model_dump().items():
            said = getattr(spec.regions[name], key)
            if said != value:
                raise QueueRequestError(
                    f"job {job.name} declares {key} {said:g} in region {name}, but its "
                    f"configuration takes {value:g}",
                    fix="Submit it with `geo-ray queue submit`, which derives these numbers.",
                )


def _check_code(job: JobRequest, tenant: str, quota: TenantConfig) -> None:
    """Reject code from outside the tenant's directory."""
    path, root = job.working_dir, quota.working_dirs
    if path is None:
        return
    if root is None:
        raise QueueDeniedError(
            f"jobs of tenant {tenant} may not bring code",
            fix="Let the queue's operator set tenants.NAME.working_dirs.",
        )
    if ".." in path.split("/") or not Path(path).is_relative_to(root):
        raise QueueDeniedError(
            f"the code of tenant {tenant} must lie below {root}, but {path} does not"
        )


def _check_size(config: QueueConfig, request: SubmitRequest) -> None:
    """Reject a job that can never fit, if the configuration sets the capacity."""
    spec = request.job.spec
    for name in spec.regions if not spec.anywhere else ():
        region, needs = config.regions[name], spec.regions[name]
        cpus, gpus = region.cpus, region.gpus
        if region.machines is not None:
            cpus, gpus = region.machines.cpus * region.machines.cap, None
        machine = region.machines
        if machine is not None and (
            needs.machine_gpus > machine.gpus
            or needs.machine_cpus > machine.cpus
            or needs.machines_of(machine.cpus, machine.gpus) > machine.cap
        ):
            raise QueueRequestError(
                f"job {request.job.name} does not fit the machines of {name}: its group has "
                f"{needs.machines} parts of {needs.machine_gpus:g} GPUs and "
                f"{needs.machine_cpus:g} CPUs, the queue {machine.cap} of {machine.gpus:g} and "
                f"{machine.cpus:g}"
            )
        if cpus is not None and needs.cpus_of(1) > cpus:
            raise QueueRequestError(
                f"job {request.job.name} is larger than the cluster: a worker and the servers in "
                f"{name} need {needs.cpus_of(1):g} CPUs, but the queue has {cpus:g} there"
            )
        if gpus is not None and needs.gpus > gpus:
            raise QueueRequestError(
                f"job {request.job.name} is larger than the cluster: a worker in {name} needs "
                f"{needs.gpus:g} GPUs, but the queue has {gpus:g} there"
            )


def _job_of(state: QueueState, config: QueueConfig, tenant: str, name: str) -> QueuedJob:
    job = state.jobs.get(name)
    if job is None:
        raise QueueRequestError(f"unknown job {name}")
    if job.end is not None:
        raise QueueRequestError(f"job {name} has ended: {job.end.outcome}")
    if job.tenant != tenant and not config.tenants[tenant].operator:
        raise QueueDeniedError(f"job {name} belongs to tenant {job.tenant}, not {tenant}")
    return job


def _check_move(state: QueueState, config: QueueConfig, tenant: str, request: MoveRequest) -> None:
    job, tenant_config = _job_of(state, config, tenant, request.job), config.tenants[tenant]
    most = config.tenants[job.tenant].max_value if job.tenant in config.tenants else None
    asked = None if request.value is None else request.value.value
    if asked is not None and most is not None and asked > most:
        raise TenantQuotaError(f"tenant {job.tenant} may give a job a value of {most:g}")
    if request.position is None:
        if request.value is None:
            raise QueueRequestError("neither a position nor a value is given")
        return
    if request.position == "before" and request.before == request.job:
        raise QueueRequestError(f"job {request.job} cannot be before itself")
    if request.position == "before":
        _living(state, request.before)
    if tenant_config.operator or request.position == "last":
        return
    passed = [each for each in _passed(state, job, request) if each.tenant != job.tenant]
    if passed:
        raise QueueDeniedError(
            f"job {job.name} would pass {passed[0].name} of tenant {passed[0].tenant}"
        )


def _living(state: QueueState, name: str | None) -> QueuedJob:
    job = None if name is None else state.jobs.get(name)
    if job is None or job.end is not None:
        raise QueueRequestError(f"no waiting or running job is named {name}")
    return job


def _passed(state: QueueState, job: QueuedJob, request: MoveRequest) -> list[QueuedJob]:
    order = [each for each in state.living() if each.order < job.order]
    if request.position == "first":
        return order
    target = _living(state, request.before)
    return [each for each in order if each.order >= target.order]


def _cancelled(job: QueuedJob, tenant: str, unix_s: float) -> list[AnyEntry]:
    message = f"by tenant {tenant}"
    if job.attempt is None:
        return [EndedEntry(unix_s=unix_s, job=job.name, outcome="cancelled", message=message)]
    return [LeaveEntry(unix_s=unix_s, job=job.name, why="cancelled", message=message)]
