"""The target of the autoscaler: required speed, machine types, deadline and budget by region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from geo_ray.cloud.provider import HEAD_ROLE, Machine, Market, Pool
from geo_ray.prices.price import AgeTier, billed_hours

REGION_LABEL: Final = "ray.io/availability-region"
TYPE_LABEL: Final = "ray.io/node-group"
MARKET_LABEL: Final = "ray.io/market-type"
ROLE_LABEL: Final = "geo-ray/role"

MachineRole = Literal["server", "worker"]


@dataclass(frozen=True, slots=True)
class MachineKind:
    """A machine type that suits a region.

    Attributes:
        type: name of the type in the cloud.
        rows_per_s: speed of one machine.
        cap: maximum count.
        markets: markets that it may be launched on.
        age_tiers: price factors of older machines.
        list_usd_per_hour: on-demand price of the price book, used if the cloud quotes none.
    """

    type: str
    rows_per_s: float
    cap: int
    markets: tuple[Market, ...] = (Market.ON_DEMAND, Market.SPOT)
    age_tiers: tuple[AgeTier, ...] = ()
    list_usd_per_hour: float | None = None

    def age_factor(self, age_h: float, hours: float = 1.0) -> float:
        """Return the fraction of its price that a machine of an age pays during the next hours."""
        if not self.age_tiers or hours <= 0:
            return 1.0
        return billed_hours(hours, self.age_tiers, max(0.0, age_h)) / hours


@dataclass(frozen=True, slots=True)
class RegionTarget:
    """Need of one region of the run.

    Attributes:
        name: name of the region in the run.
        at: name of the region in the cloud.
        rows_per_s: required total speed of its workers; 0: none.
        kinds: machine types for workers.
        server: machine type for parameter server and bridge; None: they share a worker's machine.
        zones: zones of the cloud; ``(None,)`` lets the cloud choose.
        floor: number of on-demand machines: all servers, or one worker's machine if the region has
            no separate server.
    """

    name: str
    at: str
    rows_per_s: float
    kinds: tuple[MachineKind, ...]
    server: MachineKind | None = None
    zones: tuple[str | None, ...] = (None,)
    floor: int = 1

    def kind(self, type_: str, role: str) -> MachineKind | None:
        """Return the kind of a machine in a role; None: the target has no such kind."""
        kinds = self.kinds if role == "worker" else (self.server,) if self.server else ()
        return next((kind for kind in kinds if kind.type == type_), None)

    def pools(self, kinds: Sequence[MachineKind]) -> list[tuple[MachineKind, Pool]]:
        """Return every pool that could provide machines of some kinds."""
        return [
            (kind, Pool(self.at, zone, kind.type, market))
            for kind in kinds
            for market in kind.markets
            for zone in self.zones
        ]

    def labels(self, pool: Pool, role: MachineRole) -> Mapping[str, str]:
        """Return the labels of the node of such a machine."""
        return {
            REGION_LABEL: self.name,
            TYPE_LABEL: pool.type,
            MARKET_LABEL: pool.market.value.replace("_", "-"),
            ROLE_LABEL: role,
        }


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """Machine of the Ray head. Another component launches and ends it; its cost counts.

    Attributes:
        pool: the requested pool.
        kind: kind of the machine, for its price.
    """

    pool: Pool
    kind: MachineKind


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """Need of the whole cluster.

    Attributes:
        regions: regions of the run.
        deadline_unix_s: deadline of the job; None: no deadline.
        budget_usd: maximum cost of all machines; None: no limit.
        preemptions_per_h: prior preemptions of a spot machine per hour.
        lost_s: seconds of the work of all machines that a preemption costs.
        head: machine of the head whose cost counts; None: none.
        compute_fraction: fraction of the job's time that faster machines shorten.
    """

    regions: tuple[RegionTarget, ...]
    deadline_unix_s: float | None = None
    budget_usd: float | None = None
    preemptions_per_h: float = 0.05
    lost_s: float = 180.0
    head: HeadTarget | None = None
    compute_fraction: float = 1.0

    def region(self, name: str) -> RegionTarget | None:
        """Return a region by its name in the run."""
        return next((each for each in self.regions if each.name == name), None)

    def kind_of(self, machine: Machine) -> MachineKind | None:
        """Return the kind of a machine; None: the target has no such kind."""
        role = machine.labels.get(ROLE_LABEL, "worker")
        if role == HEAD_ROLE:
            return None if self.head is None else self.head.kind
        region = self.region(machine.labels.get(REGION_LABEL, ""))
        return None if region is None else region.kind(machine.pool.type, role)

    def pools(self) -> list[Pool]:
        """Return every pool whose price is needed, without duplicates.

        That of the head is included.
        """
        found: dict[Pool, None] = {} if self.head is None else {self.head.pool: None}
        for region in self.regions:
            servers = (region.server,) if region.server else ()
            for _, pool in region.pools((*region.kinds, *servers)):
                found[pool] = None
        return list(found)
