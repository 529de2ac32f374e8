"""What should run: for each region so much speed, of such machines, until then, for so much."""

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
    """A type of machine that does for a region.

    Attributes:
        type: the cloud's name.
        rows_per_s: that one computes.
        cap: most of them.
        markets: how it may be rented.
        age_tiers: what older ones pay.
        list_usd_per_hour: on demand as the book of prices has it, where the cloud quotes none.
    """

    type: str
    rows_per_s: float
    cap: int
    markets: tuple[Market, ...] = (Market.ON_DEMAND, Market.SPOT)
    age_tiers: tuple[AgeTier, ...] = ()
    list_usd_per_hour: float | None = None

    def age_factor(self, age_h: float, hours: float = 1.0) -> float:
        """Return the share of its price that a machine of an age pays in the next hours."""
        if not self.age_tiers or hours <= 0:
            return 1.0
        return billed_hours(hours, self.age_tiers, max(0.0, age_h)) / hours


@dataclass(frozen=True, slots=True)
class RegionTarget:
    """What one region of the run needs.

    Attributes:
        name: the run's name of it.
        at: the cloud's name of it.
        rows_per_s: of its workers together; 0: none.
        kinds: machines for workers.
        server: machine for parameter server and bridge; None: on a worker's.
        zones: of the cloud; ``(None,)`` where it chooses.
        floor: machines of the region that must not be on the spot market: all servers, and where
            there is no server of its own, one worker's machine.
    """

    name: str
    at: str
    rows_per_s: float
    kinds: tuple[MachineKind, ...]
    server: MachineKind | None = None
    zones: tuple[str | None, ...] = (None,)
    floor: int = 1

    def kind(self, type_: str, role: str) -> MachineKind | None:
        """Return the kind of a machine that does a role; None: it is not wanted any more."""
        kinds = self.kinds if role == "worker" else (self.server,) if self.server else ()
        return next((kind for kind in kinds if kind.type == type_), None)

    def pools(self, kinds: Sequence[MachineKind]) -> list[tuple[MachineKind, Pool]]:
        """Return every place where machines of some kinds could come from."""
        return [
            (kind, Pool(self.at, zone, kind.type, market))
            for kind in kinds
            for market in kind.markets
            for zone in self.zones
        ]

    def labels(self, pool: Pool, role: MachineRole) -> Mapping[str, str]:
        """Return the labels of a node on such a machine."""
        return {
            REGION_LABEL: self.name,
            TYPE_LABEL: pool.type,
            MARKET_LABEL: pool.market.value.replace("_", "-"),
            ROLE_LABEL: role,
        }


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """The machine of Ray's head, which others rent and end: it is paid all the same.

    Attributes:
        pool: as it was asked for.
        kind: of machine, for its price.
    """

    pool: Pool
    kind: MachineKind


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """What the whole cluster needs.

    Attributes:
        regions: of the run.
        deadline_unix_s: when the job must be done; None: whenever.
        budget_usd: most that its machines may cost; None: no bound.
        preemptions_per_h: of a spot machine, as assumed before any was seen.
        lost_s: of the work of all that each takes.
        head: whose cost is counted, too; None: there is none, or somebody else pays it.
        compute_fraction: share of the job's time that faster machines shorten.
    """

    regions: tuple[RegionTarget, ...]
    deadline_unix_s: float | None = None
    budget_usd: float | None = None
    preemptions_per_h: float = 0.05
    lost_s: float = 180.0
    head: HeadTarget | None = None
    compute_fraction: float = 1.0

    def region(self, name: str) -> RegionTarget | None:
        """Return a region by the run's name of it."""
        return next((each for each in self.regions if each.name == name), None)

    def kind_of(self, machine: Machine) -> MachineKind | None:
        """Return the kind of a machine; None: it is not wanted any more."""
        role = machine.labels.get(ROLE_LABEL, "worker")
        if role == HEAD_ROLE:
            return None if self.head is None else self.head.kind
        region = self.region(machine.labels.get(REGION_LABEL, ""))
        return None if region is None else region.kind(machine.pool.type, role)

    def pools(self) -> list[Pool]:
        """Return every pool whose price is to be known, each once; the head's, too."""
        found: dict[Pool, None] = {} if self.head is None else {self.head.pool: None}
        for region in self.regions:
            servers = (region.server,) if region.server else ()
            for _, pool in region.pools((*region.kinds, *servers)):
                found[pool] = None
        return list(found)
