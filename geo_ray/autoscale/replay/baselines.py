"""Other ways to rent the same machines for the same job, to compare with.

- *On demand*: the cheapest type and zone at the beginning, for ever.
- *Spot*: the same on the spot market; what is taken is asked for again in its own pool, again and
  again, and the rest goes on meanwhile.
- *Zone failover*, SkyPilot's rule: all machines of a region in the cheapest pool, spot or on
  demand; when any is taken, the region's are ended and rented again in the cheapest pool that is
  not that one, the next cheapest if it gives none, and the job goes on from its newest checkpoint.
  Egress is not looked at.

Servers are on demand for all, as for the autoscaler. None of them looks at the deadline.

Source: SkyPilot's managed jobs, strategy EAGER_NEXT_REGION, by its code and documentation; the
choice by price per row, and on demand as the last resort, are in its favour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

from geo_ray.autoscale.replay.sim_cloud import SimMachine
from geo_ray.autoscale.replay.world import SimWorld
from geo_ray.autoscale.target import (
    REGION_LABEL,
    ROLE_LABEL,
    MachineKind,
    MachineRole,
    RegionTarget,
)
from geo_ray.providers.base import LaunchRequest, Market, Pool

CLUSTER = "replay"
CHECKPOINT_S = 600.0

Rule = Callable[[float], None]


@dataclass(slots=True)
class FixedFleet:
    """Machines of one market, chosen once.

    Attributes:
        world: the job and its cloud.
        market: of the workers.
        floor: whether servers are on demand.
    """

    world: SimWorld
    market: Market
    floor: bool = True
    _pools: dict[tuple[str, str], Pool] = field(default_factory=dict)
    _count: int = 0

    def look(self, now_unix_s: float) -> None:
        """Ask for what is missing."""
        for region in self.world.target.regions:
            for role, kind, market in _roles(region, self.market, self.floor):
                place = (region.name, role)
                if place not in self._pools:
                    kinds = region.kinds if role == "worker" else (kind,)
                    self._pools[place] = self._start(region, kinds, market, role, now_unix_s)
                pool = self._pools[place]
                missing = _needed(region, role, pool) - len(_there(self.world, region, role))
                if missing > 0:
                    self._count += 1
                    _rent(self.world, region, role, pool, missing, self._count)

    def _start(
        self,
        region: RegionTarget,
        kinds: Sequence[MachineKind],
        market: Market,
        role: MachineRole,
        now_s: float,
    ) -> Pool:
        """Return the cheapest pool that has enough at the beginning."""
        ranked = _ranked(self.world, region, kinds, (market,), now_s)
        for pool in ranked:
            if self.world.cloud.markets[pool].stock_at(now_s) >= _needed(region, role, pool):
                return pool
        return ranked[0]


@dataclass(slots=True)
class ZoneFailover:
    """SkyPilot's rule; see the module's docstring.

    Attributes:
        world: the job and its cloud.
        floor: whether servers are on demand.
    """

    world: SimWorld
    floor: bool = True
    _pools: dict[tuple[str, str], Pool] = field(default_factory=dict)
    _saved_s: float = 0.0
    _saved_unix_s: float = 0.0
    _count: int = 0

    def look(self, now_unix_s: float) -> None:
        """Replace a region's machines if one was taken."""
        if now_unix_s - self._saved_unix_s >= CHECKPOINT_S:
            self._saved_unix_s, self._saved_s = now_unix_s, self.world.done_s
        for region in self.world.target.regions:
            for role, kind, market in _roles(region, Market.SPOT, self.floor):
                kinds = region.kinds if role == "worker" else (kind,)
                both = (Market.ON_DEMAND,) if market is Market.ON_DEMAND else tuple(Market)
                self._keep(region, role, kinds, both, now_unix_s)

    def _keep(
        self,
        region: RegionTarget,
        role: MachineRole,
        kinds: Sequence[MachineKind],
        markets: Sequence[Market],
        now_s: float,
    ) -> None:
        there, place = _there(self.world, region, role), (region.name, role)
        before = self._pools.get(place)
        if before is not None and len(there) >= _needed(region, role, before):
            return
        if before is not None:
            self.world.cloud.terminate([each.machine.id for each in there])
            if there or self._saved_s < self.world.done_s:
                self.world.roll_back_s(max(0.0, self.world.done_s - self._saved_s))
        for pool in _ranked(self.world, region, kinds, markets, now_s):
            if pool == before:
                continue
            needed = _needed(region, role, pool)
            self._count += 1
            _rent(self.world, region, role, pool, needed, self._count)
            there = _there(self.world, region, role)
            if len(there) >= needed:
                self._pools[place] = pool
                return
            self.world.cloud.terminate([each.machine.id for each in there])


def _roles(
    region: RegionTarget, market: Market, floor: bool
) -> list[tuple[MachineRole, MachineKind, Market]]:
    found: list[tuple[MachineRole, MachineKind, Market]] = []
    if region.server is not None:
        found.append(("server", region.server, Market.ON_DEMAND if floor else market))
    return [*found, ("worker", region.kinds[0], market)]


def _needed(region: RegionTarget, role: MachineRole, pool: Pool) -> int:
    if role == "server":
        return 1
    speeds = {kind.type: kind.rows_per_s for kind in region.kinds}
    return ceil(region.rows_per_s / speeds[pool.type] - 1e-3)


def _ranked(
    world: SimWorld,
    region: RegionTarget,
    kinds: Sequence[MachineKind],
    markets: Sequence[Market],
    now_s: float,
) -> list[Pool]:
    """Return pools by what all machines of the region would cost there per hour."""
    role: MachineRole = "worker" if kinds is region.kinds else "server"
    pools = [pool for kind, pool in region.pools(kinds) if pool.market in markets]
    cost = {
        pool: world.cloud.markets[pool].usd_at(now_s) * _needed(region, role, pool)
        for pool in pools
    }
    return sorted(pools, key=lambda pool: cost[pool])


def _there(world: SimWorld, region: RegionTarget, role: MachineRole) -> list[SimMachine]:
    return [
        each
        for each in world.cloud.alive()
        if each.machine.labels.get(REGION_LABEL) == region.name
        and each.machine.labels.get(ROLE_LABEL) == role
    ]


def _rent(
    world: SimWorld, region: RegionTarget, role: MachineRole, pool: Pool, count: int, number: int
) -> None:
    name = f"{region.name}-{role}-{number}"
    world.cloud.launch(LaunchRequest(name, CLUSTER, pool, count, region.labels(pool, role)))
