"""Room on sites, and where a number of workers and their parameter servers go.

A job goes to one site if it fits on one: the one that it leaves fullest (best fit). Else to as few
as it needs, those with most room first, of one region if it has the room: its workers in its data's
regions by its shares, and its parameter servers where its workers are, as far as there is room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from geo_ray.scheduling.model.allocation import Allocation, counts_of
from geo_ray.scheduling.model.cluster import Floats, SharedCluster
from geo_ray.scheduling.model.job import ClusterJob

_EPS = 1e-9


class SiteRoom:
    """What is free in a slot; see the module's docstring."""

    def __init__(self, cluster: SharedCluster, capacity_SR: Floats) -> None:
        self.cluster = cluster
        self.free_SR = capacity_SR.copy()
        self.capacity_SR = capacity_SR

    def take(self, job: ClusterJob, allocation: Allocation, times: int = 1) -> None:
        """Take what an allocation needs; -1 times gives it back."""
        for site, count in allocation.workers:
            self.free_SR[site] -= times * count * job.demands.worker_R
        for site, count in allocation.servers:
            self.free_SR[site] -= times * count * job.demands.server_R

    def fits(self, job: ClusterJob, allocation: Allocation) -> bool:
        """Return whether there is room for an allocation as it is."""
        need: dict[int, Floats] = {}
        for site, count in allocation.workers:
            need[site] = need.get(site, 0.0) + count * job.demands.worker_R
        for site, count in allocation.servers:
            need[site] = need.get(site, 0.0) + count * job.demands.server_R
        return all((self.free_SR[site] + _EPS >= units_R).all() for site, units_R in need.items())

    def place(self, job: ClusterJob, workers: int, batch: int | None = None) -> Allocation | None:
        """Return where so many workers would go; None if they do not fit. Takes nothing.

        Args:
            job: whose.
            workers: how many.
            batch: of the allocation; None: the job's own.
        """
        batch = job.speed.batch.rows if batch is None else batch
        split = split_workers(job, workers)
        workers = sum(split.values())
        if workers > min(job.demands.most_workers, batch):
            return None
        servers = job.demands.servers(workers)
        allowed_S = job.may_work_S(self.cluster)
        if len(job.data) < 2:
            one = self._one_site(job, workers, servers, allowed_S)
            if one is not None:
                return Allocation(((one, workers),), ((one, servers),), batch)
        if not job.data and len(self.cluster.net.names) > 1:
            for region in self._emptiest_regions():
                found = self._spread(job, {region: workers}, servers, batch)
                if found is not None:
                    return found
        return self._spread(job, split, servers, batch)

    def _emptiest_regions(self) -> list[int]:
        regions = range(len(self.cluster.net.names))
        share_S = _fullest(self.free_SR, self.capacity_SR)
        free = [float(share_S[self.cluster.region_S == region].sum()) for region in regions]
        return sorted(regions, key=lambda region: -free[region])

    def most_that_fit(self, job: ClusterJob, workers: int) -> int:
        """Return the workers that there is room for: as many, or half, or half of that; at least 1.

        A job whose owner asked for more than a whole cluster has would wait for ever.
        """
        while workers > 1 and self.place(job, workers) is None:
            workers //= 2
        return workers

    def _one_site(
        self, job: ClusterJob, workers: int, servers: int, allowed_S: np.ndarray
    ) -> int | None:
        need_R = job.demands.units_R(workers, servers)
        fits_S = allowed_S & (self.free_SR + _EPS >= need_R).all(axis=1)
        if not fits_S.any():
            return None
        share_S = _fullest(self.free_SR - need_R, self.capacity_SR)
        return int(np.where(fits_S, share_S, np.inf).argmin())

    def _spread(
        self, job: ClusterJob, wanted: Mapping[int | None, int], servers: int, batch: int
    ) -> Allocation | None:
        free_SR = self.free_SR.copy()
        of_workers: dict[int, int] = {}
        order = np.argsort(-_fullest(free_SR, self.capacity_SR), kind="stable")
        for region, count in wanted.items():
            there = order if region is None else order[self.cluster.region_S[order] == region]
            rooms = rooms_of(free_SR[there], job.demands.worker_R)
            if not fill(there, rooms, count, of_workers):
                return None
        for site, count in of_workers.items():
            free_SR[site] -= count * job.demands.worker_R
        own = np.array(sorted(of_workers, key=lambda site: -of_workers[site]), dtype=np.int64)
        rest = order[~np.isin(order, own)]
        is_near = np.isin(self.cluster.region_S[rest], self.cluster.region_S[own])
        at = np.concatenate([own, rest[is_near], rest[~is_near]])
        of_servers: dict[int, int] = {}
        if not fill(at, rooms_of(free_SR[at], job.demands.server_R), servers, of_servers):
            # Workers have filled their sites; leave room for the servers, which go first then.
            return self._servers_first(job, wanted, servers, batch, order)
        return Allocation(counts_of(of_workers), counts_of(of_servers), batch)

    def _servers_first(
        self,
        job: ClusterJob,
        wanted: Mapping[int | None, int],
        servers: int,
        batch: int,
        order: np.ndarray,
    ) -> Allocation | None:
        free_SR = self.free_SR.copy()
        wanted_regions = [region for region in wanted if region is not None]
        is_near = np.isin(self.cluster.region_S[order], wanted_regions)
        order = np.concatenate([order[is_near], order[~is_near]])
        of_servers: dict[int, int] = {}
        if not fill(order, rooms_of(free_SR[order], job.demands.server_R), servers, of_servers):
            return None
        for site, count in of_servers.items():
            free_SR[site] -= count * job.demands.server_R
        of_workers: dict[int, int] = {}
        for region, count in wanted.items():
            there = order if region is None else order[self.cluster.region_S[order] == region]
            if not fill(there, rooms_of(free_SR[there], job.demands.worker_R), count, of_workers):
                return None
        return Allocation(counts_of(of_workers), counts_of(of_servers), batch)


def split_workers(job: ClusterJob, workers: int) -> dict[int | None, int]:
    """Return the workers of each region: by its data's shares, rounded up; None: anywhere.

    At least one for each region that has data; rounding goes no further than the batch allows.
    """
    if not job.data:
        return {None: workers}
    if len(job.data) == 1:
        return {next(iter(job.data)): workers}
    return {region: max(1, math.ceil(share * workers - _EPS)) for region, share in job.data.items()}


def rooms_of(free_SR: Floats, need_R: Floats) -> np.ndarray:
    """Return how many of such a process each site has room for."""
    asked = need_R > 0
    if not asked.any():
        return np.full(len(free_SR), 1_000_000)
    rooms = np.floor((free_SR[:, asked] + _EPS) / need_R[asked]).min(axis=1)
    return np.asarray(np.maximum(0, rooms).astype(np.int64))


def fill(sites: np.ndarray, rooms: np.ndarray, count: int, into: dict[int, int]) -> bool:
    """Put so many on sites in their order; return whether there was room for all."""
    total = np.cumsum(rooms)
    if count and (not len(total) or total[-1] < count):
        return False
    left = count
    for place in range(int(np.searchsorted(total, count)) + 1 if count else 0):
        here = int(min(left, rooms[place]))
        if here:
            site = int(sites[place])
            into[site] = into.get(site, 0) + here
            left -= here
    return True


def _fullest(free_SR: Floats, capacity_SR: Floats) -> Floats:
    """Return the mean share that is free of what each site has."""
    there_SR = capacity_SR > 0
    share_SR = np.divide(free_SR, capacity_SR, out=np.zeros_like(free_SR), where=there_SR)
    return np.asarray(share_SR.sum(axis=1) / np.maximum(1, there_SR.sum(axis=1)))
