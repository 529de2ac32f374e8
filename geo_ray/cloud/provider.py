"""The machine provider interface and shared parts of its implementations.

A provider only acts and observes; the autoscaler decides what should run. Clouds are eventually
consistent: a machine that was just launched may be missing from a list for a while, and a reply
may come twice, late or never. Therefore the caller chooses the identity of a launch, and the
state of a machine is what a later list says, never what was requested. Also here: the tags that
carry a machine's cluster, request, labels and end, and the classification of a cloud's error
codes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from geo_ray.base.errors import (
    CloudError,
    CloudUnreachableError,
    ProviderRefusedError,
    ProviderUnreachableError,
)


class Market(StrEnum):
    """Market of a machine, which sets its price; only spot machines may be preempted."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"


class MachineState(StrEnum):
    """State of a machine as listed by the cloud."""

    PENDING = "pending"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Pool:
    """A source of machines of one type; capacity is per pool.

    Attributes:
        region: region name in the cloud.
        zone: zone; None: the provider chooses.
        type: machine type name in the cloud.
        market: on demand or spot.
    """

    region: str
    zone: str | None
    type: str
    market: Market


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Request for machines; a repeated request launches nothing twice.

    Attributes:
        request_id: chosen by the caller, at most 64 characters; the cloud's idempotency token.
        cluster: name of the cluster, a tag of every machine.
        pool: the pool.
        count: number of machines; fewer may be launched.
        labels: labels of the Ray nodes that run there, region and role among them.
        ends_unix_s: when the machine ends by itself; None: never.
        cluster_id: unique id of the cluster, also a tag, since two clusters may share a name;
            empty: none.
    """

    request_id: str
    cluster: str
    pool: Pool
    count: int
    labels: Mapping[str, str] = field(default_factory=dict)
    ends_unix_s: float | None = None
    cluster_id: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as listed by the cloud.

    Attributes:
        id: id in the cloud.
        request_id: id of its launch request; None: launched by hand.
        pool: its pool, with the zone.
        state: as last listed.
        launched_unix_s: start of its cost.
        address: private address; None until it has one.
        labels: labels of its request.
        ends_unix_s: when it is preempted (with a notice) or ends by itself; None: unknown.
        cluster_id: id of its cluster; empty: none.
    """

    id: str
    request_id: str | None
    pool: Pool
    state: MachineState
    launched_unix_s: float
    address: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ends_unix_s: float | None = None
    cluster_id: str = ""


class LaunchFailureKind(StrEnum):
    """Kind of a launch failure, as far as it determines the next action."""

    SOLD_OUT = "sold_out"  # try another pool, and this one later
    QUOTA = "quota"  # no more machines of the type in the region until the limit is raised
    THROTTLED = "throttled"  # retry later
    REFUSED = "refused"  # credentials, permissions, or a request that can never succeed


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """Machines of a request that were not launched.

    Attributes:
        request_id: id of the request.
        pool: requested pool.
        missing: number of machines.
        kind: kind of failure.
        reason: error code and message of the cloud, without secrets.
        machine_id: id of a machine that was accepted but did not start; None: no machine was
            created.
    """

    request_id: str
    pool: Pool
    missing: int
    kind: LaunchFailureKind
    reason: str
    machine_id: str | None = None


@dataclass(frozen=True, slots=True)
class Availability:
    """Price and capacity of a pool.

    Attributes:
        pool: the pool.
        usd_per_hour: current price of a machine; None: the pool does not offer it.
        available: available machines; None: the cloud does not report it.
        quota_left: remaining quota of the account; None: unknown.
    """

    pool: Pool
    usd_per_hour: float | None
    available: int | None = None
    quota_left: int | None = None


class MachineProvider(Protocol):
    """A cloud account, or this machine, as a source of machines.

    Every call may take seconds and is safe to repeat. ``ProviderRefusedError`` names a missing
    permission; ``ProviderUnreachableError`` means that the outcome is unknown.
    """

    @property
    def name(self) -> str:
        """Name of the provider: ``local``, ``aws``, ``tencent``."""

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """Return all machines with a cluster's tag, including ended ones while they are listed.

        Machines of another cluster of that name are included; compare `Machine.cluster_id`.
        """

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """Launch machines. Returns known failures; launched machines appear in lists."""

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """Terminate machines. Ended and unknown ids are ignored."""

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """Return launches that failed after they were accepted; each is reported at least once."""

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        """Return price, availability and quota of pools, in their order."""


CLUSTER_TAG: Final = "geo-ray:cluster"
ID_TAG: Final = "geo-ray:cluster-id"
REQUEST_TAG: Final = "geo-ray:request"
ENDS_TAG: Final = "geo-ray:ends-unix-s"
_LABEL: Final = "geo-ray:label:"
_NAME: Final = "Name"


@dataclass(frozen=True, slots=True)
class MachineTags:
    """Content of a machine's tags, which users may have edited.

    Attributes:
        cluster: name of its cluster; None: not launched by geo_ray.
        cluster_id: id of its cluster; empty: unknown.
        request_id: id of its launch request.
        labels: labels of its Ray node.
        ends_unix_s: when it ends by itself.
    """

    cluster: str | None = None
    cluster_id: str = ""
    request_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ends_unix_s: float | None = None


def tags_of(request: LaunchRequest) -> dict[str, str]:
    """Return the tags of the machines of a request."""
    found = {
        _NAME: f"geo-ray {request.cluster}",
        CLUSTER_TAG: request.cluster,
        REQUEST_TAG: request.request_id,
    }
    if request.cluster_id:
        found[ID_TAG] = request.cluster_id
    if request.ends_unix_s is not None:
        found[ENDS_TAG] = f"{request.ends_unix_s:.0f}"
    return found | {f"{_LABEL}{key}": value for key, value in sorted(request.labels.items())}


def read_tags(tags: Mapping[str, str]) -> MachineTags:
    """Parse tags."""
    ends = tags.get(ENDS_TAG, "")
    return MachineTags(
        cluster=tags.get(CLUSTER_TAG),
        cluster_id=tags.get(ID_TAG, ""),
        request_id=tags.get(REQUEST_TAG),
        labels={k.removeprefix(_LABEL): v for k, v in tags.items() if k.startswith(_LABEL)},
        ends_unix_s=float(ends) if ends.isdigit() else None,
    )


_CREDENTIALS: Final = (
    "AuthFailure",
    "ExpiredToken",
    "IncompleteSignature",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
)
_A_RIGHT: Final = "AuthFailure.UnauthorizedOperation"  # Tencent's code for a missing permission
_PERMISSION: Final = re.compile(r"perform:? ([a-z0-9-]+:\w+)|\(([a-z]+:\w+)\)|action ([a-z]+:\w+)")


@contextmanager
def as_provider_errors(permission: str, denied: Callable[[str], bool]) -> Iterator[None]:
    """Turn errors of a cloud API into provider errors.

    Args:
        permission: required permission, named if the cloud does not name one.
        denied: whether an error code means a missing permission.
    """
    try:
        yield
    except (ProviderRefusedError, ProviderUnreachableError):
        raise
    except CloudUnreachableError as error:
        raise ProviderUnreachableError(error.message) from None
    except CloudError as error:
        if error.said.startswith(_CREDENTIALS) and error.said != _A_RIGHT:
            raise ProviderRefusedError(
                error.message,
                fix="Renew the credentials; if they are right, set this machine's clock.",
            ) from None
        if not denied(error.said):
            raise ProviderRefusedError(error.message) from None
        found = _PERMISSION.search(error.message)
        named = next(filter(None, found.groups())) if found else permission
        raise ProviderRefusedError(
            f"{error.message} (missing: {named})",
            fix=(
                f"Give the account or role the permission {named}; "
                f"docs/operations/cloud-accounts.md lists all."
            ),
        ) from None


def failure(
    request: LaunchRequest, missing: int, kind: LaunchFailureKind, reason: str
) -> LaunchFailure:
    """Return the failure of some machines of a request."""
    return LaunchFailure(request.request_id, request.pool, missing, kind, reason)


def unstarted(
    machine: Machine, request_id: str, kind: LaunchFailureKind, reason: str
) -> LaunchFailure:
    """Return the failure of a machine that was accepted but did not start."""
    return LaunchFailure(request_id, machine.pool, 1, kind, reason, machine.id)


ROLE_LABEL: Final = "geo-ray/role"  # same value in cloud/autoscaler/target.py, a higher layer
HEAD_ROLE: Final = "head"
