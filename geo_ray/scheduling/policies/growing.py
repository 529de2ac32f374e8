"""Giving workers one by one: what DRF and Optimus do, each with its own order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from geo_ray.scheduling.model.allocation import Allocation, counts_of
from geo_ray.scheduling.model.cluster import Floats
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.policies.packing import SiteRoom, rooms_of


class GrowingJob:
    """A job that is given worker after worker, with the parameter servers that they need.

    A worker goes where the job is already, if there is room, else to the site of the same region,
    else of any, that has room for most of its workers; in a job with data in several regions, to
    the region that lacks most.
    """

    def __init__(self, job: ClusterJob, room: SiteRoom) -> None:
        self.job = job
        self.workers = 0
        self._room = room
        self._of_workers: dict[int, int] = defaultdict(int)
        self._of_servers: dict[int, int] = defaultdict(int)
        self._servers = 0

    @property
    def allocation(self) -> Allocation:
        """What it has been given."""
        batch = self.job.speed.batch.rows
        return Allocation(counts_of(self._of_workers), counts_of(self._of_servers), batch)

    @property
    def is_whole(self) -> bool:
        """Whether every region with data has a worker."""
        return self.workers > 0 and all(self._there(region) for region in self.job.data)

    def units_R(self) -> Floats:
        """What it has of each resource."""
        return self.job.demands.units_R(self.workers, self._servers)

    def grow(self) -> bool:
        """Give it one more worker; return whether there was room for it."""
        if self.workers >= min(self.job.demands.most_workers, self.job.speed.batch.rows):
            return False
        demands = self.job.demands
        site = self._site(demands.worker_R, for_worker=True)
        if site is None:
            return False
        self._room.free_SR[site] -= demands.worker_R
        if demands.servers(self.workers + 1) > self._servers:
            other = self._site(demands.server_R, for_worker=False, near=site)
            if other is None:
                self._room.free_SR[site] += demands.worker_R
                return False
            self._room.free_SR[other] -= demands.server_R
            self._of_servers[other] += 1
            self._servers += 1
        self._of_workers[site] += 1
        self.workers += 1
        return True

    def give_back(self) -> None:
        """Return all that it has."""
        self._room.take(self.job, self.allocation, times=-1)
        self.workers = self._servers = 0
        self._of_workers.clear()
        self._of_servers.clear()

    def _there(self, region: int) -> int:
        sites = self._room.cluster.sites
        return sum(n for site, n in self._of_workers.items() if sites[site].region == region)

    def _site(self, need_R: Floats, *, for_worker: bool, near: int | None = None) -> int | None:
        own = [*([near] if near is not None else []), *self._of_workers, *self._of_servers]
        region = self._lacking() if for_worker else None
        sites = self._room.cluster.sites
        for site in dict.fromkeys(own):
            is_allowed = region is None or sites[site].region == region
            if is_allowed and (self._room.free_SR[site] + 1e-9 >= need_R).all():
                return site
        rooms = rooms_of(self._room.free_SR, need_R)
        if region is not None:
            rooms = rooms * (self._room.cluster.region_S == region)
        elif own:  # stay in the region, if there is room
            here = rooms * (self._room.cluster.region_S == sites[own[0]].region)
            rooms = here if here.any() else rooms
        best = int(rooms.argmax())
        return best if rooms[best] > 0 else None

    def _lacking(self) -> int | None:
        data = self.job.data
        if not data:
            return None
        return min(data, key=lambda region: (self._there(region) / data[region], region))


def whole(jobs: Mapping[str, GrowingJob]) -> dict[str, Allocation]:
    """Return what those jobs have that can train."""
    return {name: each.allocation for name, each in jobs.items() if each.is_whole}
