"""A shared cluster: sites with resources in each slot, links, prices, and allocations of jobs.

A *site* is the unit in which resources are counted: a machine, as in the papers, or a pool of
machines of a region. Links between regions differ, and traffic costs money. The future capacity of
spot sites is unknown; all else is known in advance.

Shape legend: T = slots, S = sites, R = resources, G = regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.base.errors import ScheduleInputError

Counts = tuple[tuple[int, int], ...]
"""(number of the site, how many), ascending by site; none of them 0."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Allocation of a job in one slot: workers and parameter servers by site, and its batch.

    Attributes:
        workers: workers by site.
        servers: parameter servers by site.
        batch: rows of a step over all workers.
    """

    workers: Counts
    servers: Counts
    batch: int

    @property
    def num_workers(self) -> int:
        """Number of workers on all sites."""
        return sum(count for _, count in self.workers)

    @property
    def num_servers(self) -> int:
        """Number of parameter servers on all sites."""
        return sum(count for _, count in self.servers)

    @property
    def sites(self) -> tuple[int, ...]:
        """Used sites, ascending."""
        return tuple(sorted({site for site, _ in (*self.workers, *self.servers)}))


def counts_of(by_site: dict[int, int]) -> Counts:
    """Return the counts in order, without zero entries."""
    return tuple(sorted((site, count) for site, count in by_site.items() if count))


Floats = NDArray[np.float64]

RESOURCES: Final = ("gpu", "cpu", "memory_gb", "disk_gb")


@dataclass(frozen=True, slots=True)
class ClusterSite:
    """A site of the cluster.

    Attributes:
        name: name of the machine or pool.
        region: index of its region.
        inside_mbps: goodput between a worker and a parameter server on this site.
        spot: whether its capacity may change without notice.
    """

    name: str
    region: int
    inside_mbps: float
    spot: bool = False


@dataclass(frozen=True, eq=False)
class RegionNet:
    """Links and egress prices between regions.

    Attributes:
        names: names of the regions.
        mbps_GG: goodput between two regions; on the diagonal between two sites of a region.
        usd_per_gb_GG: egress price; 0 on the diagonal.
        rtt_s_GG: round-trip times.
    """

    names: tuple[str, ...]
    mbps_GG: Floats
    usd_per_gb_GG: Floats
    rtt_s_GG: Floats


@dataclass(frozen=True, eq=False)
class SharedCluster:
    """A shared cluster: capacity of each site by slot, links and prices.

    See the module for sites. Sites of one region are connected by a LAN; links between regions
    differ, and their traffic costs money. The future capacity of spot sites is unknown; all else is
    known in advance.

    Shape legend: T = slots, S = sites, R = resources, G = regions.

    Attributes:
        sites: all sites.
        resources: names of the resources.
        slot_s: seconds per slot.
        capacity_TSR: capacity in units.
        usd_per_h_TSR: price of a unit per hour.
        net: links between regions.
    """

    sites: tuple[ClusterSite, ...]
    resources: tuple[str, ...]
    slot_s: float
    capacity_TSR: Floats
    usd_per_h_TSR: Floats
    net: RegionNet

    def __post_init__(self) -> None:
        shape = (len(self.capacity_TSR), len(self.sites), len(self.resources))
        regions = len(self.net.names)
        wrong = [
            name
            for name, is_right in (
                ("no site", bool(self.sites)),
                ("no slot", shape[0] > 0 and self.slot_s > 0),
                ("capacities", self.capacity_TSR.shape == shape),
                ("prices", self.usd_per_h_TSR.shape == shape),
                ("links", self.net.mbps_GG.shape == (regions, regions)),
                ("egress", self.net.usd_per_gb_GG.shape == (regions, regions)),
                ("round trips", self.net.rtt_s_GG.shape == (regions, regions)),
                ("a site's region", all(0 <= site.region < regions for site in self.sites)),
            )
            if not is_right
        ]
        if not wrong:
            for name, values in (("capacity", self.capacity_TSR), ("price", self.usd_per_h_TSR)):
                # Long histories repeat one slot: a broadcast array is checked once.
                observed = values[:1] if values.strides[0] == 0 else values
                if not np.isfinite(observed).all() or (observed < 0).any():
                    wrong.append(f"a negative {name}, or one that is not finite")
            if (self.net.mbps_GG <= 0).any() or min(s.inside_mbps for s in self.sites) <= 0:
                wrong.append("a link without goodput")
        if wrong:
            raise ScheduleInputError(f"invalid cluster: {'; '.join(wrong)}")

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.capacity_TSR)

    @cached_property
    def region_S(self) -> NDArray[np.int64]:
        """Region index of each site."""
        return np.array([site.region for site in self.sites], dtype=np.int64)

    @cached_property
    def inside_mbps_S(self) -> Floats:
        """Goodput inside each site."""
        return np.array([site.inside_mbps for site in self.sites])

    @cached_property
    def spot_S(self) -> NDArray[np.bool_]:
        """Which sites are spot."""
        return np.array([site.spot for site in self.sites])

    def foreseen(self, slot: int, window: int) -> tuple[Floats, Floats]:
        """Return the expected capacities and prices of the next slots, as known in ``slot``.

        Args:
            slot: the current slot.
            window: number of slots, including the current one; fewer at the end.
        """
        capacity = self.capacity_TSR[slot : slot + window]
        usd_per_h = self.usd_per_h_TSR[slot : slot + window]
        if self.spot_S.any():
            capacity, usd_per_h = capacity.copy(), usd_per_h.copy()
            capacity[:, self.spot_S] = capacity[0, self.spot_S]
            usd_per_h[:, self.spot_S] = usd_per_h[0, self.spot_S]
        return capacity, usd_per_h


def unit_prices(machine_usd_per_h: float, machine_R: Sequence[float]) -> Floats:
    """Split a machine's price evenly over its resources, per unit of each.

    A job that uses the whole machine thus pays its price, and half of every resource costs half.
    """
    units_R = np.asarray(machine_R, dtype=np.float64)
    there = units_R > 0
    found_R = np.zeros(len(units_R))
    found_R[there] = machine_usd_per_h / there.sum() / units_R[there]
    return found_R
