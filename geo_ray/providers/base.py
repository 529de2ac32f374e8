"""What a cloud must do so that a cluster can be made of its machines.

A provider only acts and observes; what should run is the autoscaler's business. Clouds are
eventually consistent: a machine that was just launched may be missing from a list for a while, an
answer may come twice, late or never. So a launch has an identity that the caller chose, and the
state of a machine is what a later list says, never what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


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


class Shortage(StrEnum):
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
        shortage: what kind of failure.
        reason: the cloud's code and words, without secrets.
        machine_id: of the one machine that was accepted and could not start; None: they were never
            made.
    """

    request_id: str
    pool: Pool
    missing: int
    shortage: Shortage
    reason: str
    machine_id: str | None = None


@dataclass(frozen=True, slots=True)
class Stock:
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

    def stock(self, pools: Sequence[Pool]) -> Sequence[Stock]:
        """Return price, stock and quota of pools, in their order."""
