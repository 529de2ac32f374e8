"""A job of a shared cluster: its work, what it needs, how fast it is, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from geo_ray.scheduling.model.allocation import Allocation
from geo_ray.scheduling.model.cluster import Floats, SharedCluster
from geo_ray.scheduling.model.speed import JobSpeed, counted_workers, link_used
from geo_ray.scheduling.model.utility import SigmoidUtility


@dataclass(frozen=True, eq=False)
class JobDemands:
    """What a job's processes need.

    Attributes:
        worker_R: of each resource for a worker.
        server_R: the same for a parameter server.
        workers_per_server: at most.
        most_workers: at most; no more than rows of its batch.
        wanted_workers: what its owner asked for; policies that do not choose a number give that.
    """

    worker_R: Floats
    server_R: Floats
    workers_per_server: int
    most_workers: int
    wanted_workers: int

    def servers(self, workers: int) -> int:
        """Return the parameter servers that so many workers need."""
        return math.ceil(workers / self.workers_per_server)

    def units_R(self, workers: float, servers: float) -> Floats:
        """Return what so many need of each resource."""
        return np.asarray(self.worker_R * workers + self.server_R * servers)


@dataclass(frozen=True, eq=False)
class ClusterJob:
    """See the module's docstring.

    Attributes:
        id: its name.
        arrival_slot: before which nobody knows of it.
        rows: of work, in steps of its own batch.
        demands: what its processes need.
        speed: how fast it is.
        utility: what it is worth.
        data: share of its data by number of region: rows are computed where they lie; empty: they
            lie everywhere.
        tenant: whose it is.
    """

    id: str
    arrival_slot: int
    rows: float
    demands: JobDemands
    speed: JobSpeed
    utility: SigmoidUtility
    data: Mapping[int, float] = field(default_factory=dict)
    tenant: str = ""

    def may_work_S(self, cluster: SharedCluster) -> np.ndarray:
        """Return the sites where it may have workers, bool (S,)."""
        if not self.data:
            return np.ones(len(cluster.sites), dtype=bool)
        return np.isin(cluster.region_S, list(self.data))

    def rows_per_s(self, cluster: SharedCluster, allocation: Allocation) -> float:
        """Return its progress per second with what it has."""
        workers = counted_workers(cluster, allocation, self.data)
        servers = allocation.num_servers
        if workers == 0 or servers == 0:
            return 0.0
        link = link_used(cluster, allocation)
        return float(self.speed.rows_per_s(workers, servers, allocation.batch, link))

    def usd_per_s(self, cluster: SharedCluster, allocation: Allocation, slot: int) -> float:
        """Return what it costs per second: resources, and egress as it trains."""
        return self.machines_usd_per_s(cluster, allocation, slot) + self.egress_usd_per_s(
            cluster, allocation
        )

    def machines_usd_per_s(
        self, cluster: SharedCluster, allocation: Allocation, slot: int
    ) -> float:
        """Return what its resources cost per second."""
        usd_per_h_SR = cluster.usd_per_h_TSR[slot]
        per_h = 0.0
        for counts, units_R in (
            (allocation.workers, self.demands.worker_R),
            (allocation.servers, self.demands.server_R),
        ):
            for site, count in counts:
                per_h += count * float(usd_per_h_SR[site] @ units_R)
        return per_h / 3600.0

    def egress_usd_per_s(self, cluster: SharedCluster, allocation: Allocation) -> float:
        """Return what its exchanges cost per second.

        Each region sends one update to each parameter server elsewhere, of the part of the model
        that lies there, and gets it back.
        """
        per_gb = cluster.net.usd_per_gb_GG
        servers = allocation.num_servers
        if len(allocation.sites) == 1 or not servers or not allocation.num_workers:
            return 0.0
        usd = 0.0
        for here in {cluster.sites[site].region for site, _ in allocation.workers}:
            for other, count in allocation.servers:
                there = cluster.sites[other].region
                usd += count / servers * (per_gb[here, there] + per_gb[there, here])
        usd *= self.speed.model_bytes * 1e-9
        if usd == 0.0:
            return 0.0
        workers = max(1, counted_workers(cluster, allocation, self.data))
        link = link_used(cluster, allocation)
        pace_s = float(self.speed.pace_s(workers, servers, allocation.batch, link))
        return usd / pace_s / self.speed.timing.every
