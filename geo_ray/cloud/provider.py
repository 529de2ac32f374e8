"""The machine provider interface and what its implementations share.

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
    """How a machine is paid; only one on the spot market may be taken back."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"


class MachineState(StrEnum):
    """What the cloud says of a machine."""

    PENDING = "pending"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Pool:
    """Where machines of one kind come from; what is sold out is sold out for a pool.

    Attributes:
        region: the cloud's own name of it.
        zone: None where the provider may choose.
        type: the cloud's name of the machine type.
        market: on demand or spot.
    """

    region: str
    zone: str | None
    type: str
    market: Market


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Machines that are to be; the same request twice makes them once.

    Attributes:
        request_id: chosen by the caller, at most 64 characters; the cloud's idempotency token.
        cluster: name of the cluster, written on every machine so that none is ever lost sight of.
        pool: from where.
        count: how many; fewer may come.
        labels: labels of the Ray nodes that run there, region and role among them.
        ends_unix_s: when the machine ends by itself although nobody asks it to; None: never.
        cluster_id: of the cluster's own, written on every machine, too: two clusters may have one
            name; empty: it has none.
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
    """A machine as the cloud sees it.

    Attributes:
        id: the cloud's name of it.
        request_id: of the launch that made it; None: made by hand.
        pool: where it runs; its zone is known.
        state: as last listed.
        launched_unix_s: since when it is paid.
        address: private address; None until it has one.
        labels: those of its request.
        ends_unix_s: when the cloud takes it back (a notice) or it ends by itself; None: not known.
        cluster_id: that of its request; empty: none, of a cluster or of a maker that has none.
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
    """Why machines did not come, as far as it changes what to do next."""

    SOLD_OUT = "sold_out"  # another pool, this one later
    QUOTA = "quota"  # no more of the kind in the region until somebody raises the limit
    THROTTLED = "throttled"  # the same again, later
    REFUSED = "refused"  # credentials, permissions or a request that can never work


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """Machines of a request that did not come.

    Attributes:
        request_id: of the launch.
        pool: that was asked.
        missing: how many.
        kind: what kind of failure.
        reason: the cloud's code and words, without secrets.
        machine_id: of the one machine that was accepted and could not start; None: they were never
            made.
    """

    request_id: str
    pool: Pool
    missing: int
    kind: LaunchFailureKind
    reason: str
    machine_id: str | None = None


@dataclass(frozen=True, slots=True)
class Availability:
    """What a pool could give now.

    Attributes:
        pool: which.
        usd_per_hour: price of a machine now; None: not for sale there.
        available: machines that could be had, as far as the cloud tells; None: it does not.
        quota_left: further machines that the account may rent; None: not known.
    """

    pool: Pool
    usd_per_hour: float | None
    available: int | None = None
    quota_left: int | None = None


class MachineProvider(Protocol):
    """One cloud account (or this machine) as a source of machines.

    Every call may take seconds, is safe to repeat, and raises an error of the project's tree:
    ``ProviderRefusedError`` names the missing permission, ``ProviderUnreachableError`` says that
    nothing is known of the outcome.
    """

    @property
    def name(self) -> str:
        """Name of the provider: ``local``, ``aws``, ``tencent``."""

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """Return all machines that bear a cluster's name, ended ones as long as it knows them.

        Those of another cluster of that name are among them; `Machine.cluster_id` tells.
        """

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """Ask for machines; what came is seen in the list, what surely will not is returned."""

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """End machines; one that has ended or is not known is no error."""

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """Return launches that failed after they were accepted, each of them once or more."""

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
    """What was read of a machine's tags; a machine may bear wrong ones, since users can edit them.

    Attributes:
        cluster: its cluster; None: not one of geo_ray's.
        cluster_id: which of that name; empty: it is not said.
        request_id: of its launch.
        labels: of its Ray node.
        ends_unix_s: when it ends by itself.
    """

    cluster: str | None = None
    cluster_id: str = ""
    request_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ends_unix_s: float | None = None


def tags_of(request: LaunchRequest) -> dict[str, str]:
    """Return the tags of a request's machines."""
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
    """Return what tags say."""
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
_A_RIGHT: Final = "AuthFailure.UnauthorizedOperation"  # Tencent's, of a right after all
_PERMISSION: Final = re.compile(r"perform:? ([a-z0-9-]+:\w+)|\(([a-z]+:\w+)\)|action ([a-z]+:\w+)")


@contextmanager
def as_provider_errors(permission: str, denied: Callable[[str], bool]) -> Iterator[None]:
    """Turn errors of a cloud's session into those of providers.

    Args:
        permission: what the call needs, named if the cloud itself does not.
        denied: whether a code says that a right is missing.
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
    """Return what a request lacks."""
    return LaunchFailure(request.request_id, request.pool, missing, kind, reason)


def unstarted(
    machine: Machine, request_id: str, kind: LaunchFailureKind, reason: str
) -> LaunchFailure:
    """Return that a machine of a request was accepted and could not start."""
    return LaunchFailure(request_id, machine.pool, 1, kind, reason, machine.id)


ROLE_LABEL: Final = "geo-ray/role"  # also in cloud/autoscaler/target.py, which is above
HEAD_ROLE: Final = "head"
