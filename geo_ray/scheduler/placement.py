"""Placement helpers shared by policies: free capacity of sites, and placement of workers.

A job is placed on one site if it fits (best fit), else on as few sites as possible, those with the
most capacity first, in one region if possible: workers in proportion to the data of each region,
parameter servers next to the workers. Other helpers add workers one by one (DRF, Optimus), or
choose workers and batch of every job again in each slot (ONES, Pollux).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from operator import itemgetter

import numpy as np

from geo_ray.scheduler.cluster import Allocation, Floats, SharedCluster, counts_of
from geo_ray.scheduler.job import ClusterJob, LinkUsed
from geo_ray.scheduler.policy import JobProgress, SlotView

_EPS = 1e-9


class SiteCapacity:
    """Free capacity of a slot; see the module."""

    def __init__(self, cluster: SharedCluster, capacity_SR: Floats) -> None:
        self.cluster = cluster
        self.free_SR = capacity_SR.copy()
        self.capacity_SR = capacity_SR

    def take(self, job: ClusterJob, allocation: Allocation, times: int = 1) -> None:
        """Subtract an allocation; -1 times adds it back."""
        for site, count in allocation.workers:
            self.free_SR[site] -= times * count * job.demands.worker_R
        for site, count in allocation.servers:
            self.free_SR[site] -= times * count * job.demands.server_R

    def fits(self, job: ClusterJob, allocation: Allocation) -> bool:
        """Return whether an allocation fits."""
        need: dict[int, Floats] = {}
        for site, count in allocation.workers:
            need[site] = need.get(site, 0.0) + count * job.demands.worker_R
        for site, count in allocation.servers:
            need[site] = need.get(site, 0.0) + count * job.demands.server_R
        return all((self.free_SR[site] + _EPS >= units_R).all() for site, units_R in need.items())

    def place(self, job: ClusterJob, workers: int, batch: int | None = None) -> Allocation | None:
        """Return an allocation for a number of workers; None if they do not fit. Changes nothing.

        Args:
            job: the job.
            workers: number of workers.
            batch: batch of the allocation; None: the job's own.
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
        fraction_S = _fullest(self.free_SR, self.capacity_SR)
        free = [float(fraction_S[self.cluster.region_S == region].sum()) for region in regions]
        return sorted(regions, key=free.__getitem__, reverse=True)

    def most_that_fit(self, job: ClusterJob, workers: int) -> int:
        """Return the largest number of workers that fits.

        ``workers``, half of it, and so on; at least 1.

        Otherwise a job that requests more than the whole cluster would wait forever.
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
        fraction_S = _fullest(self.free_SR - need_R, self.capacity_SR)
        return int(np.where(fits_S, fraction_S, np.inf).argmin())

    def _spread(
        self, job: ClusterJob, wanted: Mapping[int | None, int], servers: int, batch: int
    ) -> Allocation | None:
        free_SR = self.free_SR.copy()
        of_workers: dict[int, int] = {}
        order = np.argsort(-_fullest(free_SR, self.capacity_SR), kind="stable")
        for region, count in wanted.items():
            there = order if region is None else order[self.cluster.region_S[order] == region]
            capacities = capacities_of(free_SR[there], job.demands.worker_R)
            if not fill(there, capacities, count, of_workers):
                return None
        for site, count in of_workers.items():
            free_SR[site] -= count * job.demands.worker_R
        own = np.array(sorted(of_workers, key=of_workers.__getitem__, reverse=True), dtype=np.int64)
        rest = order[~np.isin(order, own)]
        is_near = np.isin(self.cluster.region_S[rest], self.cluster.region_S[own])
        at = np.concatenate([own, rest[is_near], rest[~is_near]])
        of_servers: dict[int, int] = {}
        if not fill(at, capacities_of(free_SR[at], job.demands.server_R), servers, of_servers):
            # Workers have filled their sites: place the servers first.
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
        if not fill(
            order, capacities_of(free_SR[order], job.demands.server_R), servers, of_servers
        ):
            return None
        for site, count in of_servers.items():
            free_SR[site] -= count * job.demands.server_R
        of_workers: dict[int, int] = {}
        for region, count in wanted.items():
            there = order if region is None else order[self.cluster.region_S[order] == region]
            if not fill(
                there, capacities_of(free_SR[there], job.demands.worker_R), count, of_workers
            ):
                return None
        return Allocation(counts_of(of_workers), counts_of(of_servers), batch)


def split_workers(job: ClusterJob, workers: int) -> dict[int | None, int]:
    """Return the workers of each region, proportional to its data, rounded up; None: any region.

    Each region with data gets at least one. Rounding never exceeds the batch.
    """
    if not job.data:
        return {None: workers}
    if len(job.data) == 1:
        return {next(iter(job.data)): workers}
    return {
        region: max(1, math.ceil(fraction * workers - _EPS))
        for region, fraction in job.data.items()
    }


def capacities_of(free_SR: Floats, need_R: Floats) -> np.ndarray:
    """Return how many such processes fit on each site."""
    asked = need_R > 0
    if not asked.any():
        return np.full(len(free_SR), 1_000_000)
    capacities = np.floor((free_SR[:, asked] + _EPS) / need_R[asked]).min(axis=1)
    return np.asarray(np.maximum(0, capacities).astype(np.int64))


def fill(sites: np.ndarray, capacities: np.ndarray, count: int, into: dict[int, int]) -> bool:
    """Place a number of processes on sites in order; return whether all fit."""
    total = np.cumsum(capacities)
    if count and (not len(total) or total[-1] < count):
        return False
    left = count
    for place in range(int(np.searchsorted(total, count)) + 1 if count else 0):
        here = int(min(left, capacities[place]))
        if here:
            site = int(sites[place])
            into[site] = into.get(site, 0) + here
            left -= here
    return True


def _fullest(free_SR: Floats, capacity_SR: Floats) -> Floats:
    """Return the mean free fraction of each site's resources."""
    there_SR = capacity_SR > 0
    fraction_SR = np.divide(free_SR, capacity_SR, out=np.zeros_like(free_SR), where=there_SR)
    return np.asarray(fraction_SR.sum(axis=1) / np.maximum(1, there_SR.sum(axis=1)))


class GrowingJob:
    """A job that receives workers one by one, with the parameter servers that they need.

    A worker goes to a site that the job uses, if it fits; else to a site of the same region; else
    to the site with capacity for most of its workers. A job with data in several regions extends
    the region with the largest deficit.
    """

    def __init__(self, job: ClusterJob, capacity: SiteCapacity) -> None:
        self.job = job
        self.workers = 0
        self._capacity = capacity
        self._of_workers: dict[int, int] = defaultdict(int)
        self._of_servers: dict[int, int] = defaultdict(int)
        self._servers = 0

    @property
    def allocation(self) -> Allocation:
        """Its allocation."""
        batch = self.job.speed.batch.rows
        return Allocation(counts_of(self._of_workers), counts_of(self._of_servers), batch)

    @property
    def is_whole(self) -> bool:
        """Whether every region with data has a worker."""
        return self.workers > 0 and all(self._there(region) for region in self.job.data)

    def units_R(self) -> Floats:
        """Allocated units of each resource."""
        return self.job.demands.units_R(self.workers, self._servers)

    def grow(self) -> bool:
        """Add one worker; return whether it fits."""
        if self.workers >= min(self.job.demands.most_workers, self.job.speed.batch.rows):
            return False
        demands = self.job.demands
        site = self._site(demands.worker_R, for_worker=True)
        if site is None:
            return False
        self._capacity.free_SR[site] -= demands.worker_R
        if demands.servers(self.workers + 1) > self._servers:
            other = self._site(demands.server_R, for_worker=False, near=site)
            if other is None:
                self._capacity.free_SR[site] += demands.worker_R
                return False
            self._capacity.free_SR[other] -= demands.server_R
            self._of_servers[other] += 1
            self._servers += 1
        self._of_workers[site] += 1
        self.workers += 1
        return True

    def give_back(self) -> None:
        """Release the whole allocation."""
        self._capacity.take(self.job, self.allocation, times=-1)
        self.workers = self._servers = 0
        self._of_workers.clear()
        self._of_servers.clear()

    def _there(self, region: int) -> int:
        sites = self._capacity.cluster.sites
        return sum(n for site, n in self._of_workers.items() if sites[site].region == region)

    def _site(self, need_R: Floats, *, for_worker: bool, near: int | None = None) -> int | None:
        own = [*([near] if near is not None else []), *self._of_workers, *self._of_servers]
        region = self._lacking() if for_worker else None
        sites = self._capacity.cluster.sites
        for site in dict.fromkeys(own):
            is_allowed = region is None or sites[site].region == region
            if is_allowed and (self._capacity.free_SR[site] + 1e-9 >= need_R).all():
                return site
        capacities = capacities_of(self._capacity.free_SR, need_R)
        if region is not None:
            capacities = capacities * (self._capacity.cluster.region_S == region)
        elif own:  # stay in the region if possible
            here = capacities * (self._capacity.cluster.region_S == sites[own[0]].region)
            capacities = here if here.any() else capacities
        best = int(capacities.argmax())
        return best if capacities[best] > 0 else None

    def _lacking(self) -> int | None:
        data = self.job.data
        if not data:
            return None
        return min(data, key=lambda region: (self._there(region) / data[region], region))


def whole(jobs: Mapping[str, GrowingJob]) -> dict[str, Allocation]:
    """Return the allocations of jobs that can train."""
    return {name: each.allocation for name, each in jobs.items() if each.is_whole}


def most_workers(job: ClusterJob, batch: int) -> int:
    """Return the maximum number of workers with a batch."""
    return min(job.demands.most_workers, batch)


def progress_curve(cluster: SharedCluster, job: ClusterJob, batch: int) -> Floats:
    """Return progress per second by number of workers, from 0. Few workers share a site."""
    most = most_workers(job, batch)
    workers_W = np.arange(1, most + 1)
    servers_W = -(-workers_W // job.demands.workers_per_server)
    link = LinkUsed(float(np.median(cluster.net.mbps_GG.diagonal())), is_inside=False)
    found_W = job.speed.rows_per_s(workers_W, servers_W, batch, link)
    return np.concatenate([[0.0], found_W])


def worker_fractions(view: SlotView) -> Floats:
    """Return the dominant resource fraction of one worker of each active job."""
    total_R = np.maximum(1e-9, view.capacity_SR.sum(axis=0))
    found = []
    for each in view.active.values():
        demands = each.job.demands
        units_R = demands.units_R(1, 1 / demands.workers_per_server)
        found.append(float((units_R / total_R).max()))
    return np.array(found)


def put(
    cluster: SharedCluster,
    view: SlotView,
    wanted: Mapping[str, tuple[int, int]],
) -> dict[str, Allocation]:
    """Place jobs: first those that keep their allocation, then others by size.

    The workers of a job are halved until it fits.

    Args:
        cluster: the cluster.
        view: the slot.
        wanted: workers and batch of each job that should run.
    """
    capacity = SiteCapacity(cluster, view.capacity_SR)
    given: dict[str, Allocation] = {}
    rest: list[tuple[int, JobProgress]] = []
    for name, (workers, batch) in wanted.items():
        each = view.active[name]
        same = (
            each.had is not None
            and each.had.num_workers == workers
            and capacity.fits(each.job, each.had)
        )
        if same and each.had is not None:
            given[name] = Allocation(each.had.workers, each.had.servers, batch)
            capacity.take(each.job, given[name])
        else:
            rest.append((workers, each))
    for count, each in sorted(rest, key=itemgetter(0), reverse=True):
        workers, batch = count, wanted[each.job.id][1]
        while workers > 0:
            found = capacity.place(each.job, workers, batch)
            if found is not None and found.num_workers <= most_workers(each.job, batch):
                capacity.take(each.job, found)
                given[each.job.id] = found
                break
            workers //= 2
    return given
