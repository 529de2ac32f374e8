"""What policies share that choose workers and batch of every job anew in each slot."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from geo_ray.scheduling.model.allocation import Allocation
from geo_ray.scheduling.model.cluster import Floats, SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.speed import LinkUsed
from geo_ray.scheduling.policies.base import JobProgress, SlotView
from geo_ray.scheduling.policies.packing import SiteRoom


def most_workers(job: ClusterJob, batch: int) -> int:
    """Return the most workers with a batch."""
    return min(job.demands.most_workers, batch)


def progress_curve(cluster: SharedCluster, job: ClusterJob, batch: int) -> Floats:
    """Return progress per second by the number of workers, from 0 on, beside each other if few."""
    most = most_workers(job, batch)
    workers_W = np.arange(1, most + 1)
    servers_W = -(-workers_W // job.demands.workers_per_server)
    link = LinkUsed(float(np.median(cluster.net.mbps_GG.diagonal())), is_inside=False)
    found_W = job.speed.rows_per_s(workers_W, servers_W, batch, link)
    return np.concatenate([[0.0], found_W])


def worker_shares(view: SlotView) -> Floats:
    """Return the dominant share of all that there is, of a worker of each active job."""
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
    """Place jobs: those that keep what they have first, others by size, halved until they fit.

    Args:
        cluster: the cluster.
        view: the slot.
        wanted: workers and batch of each job that shall run.
    """
    room = SiteRoom(cluster, view.capacity_SR)
    given: dict[str, Allocation] = {}
    rest: list[tuple[int, JobProgress]] = []
    for name, (workers, batch) in wanted.items():
        each = view.active[name]
        same = (
            each.had is not None
            and each.had.num_workers == workers
            and room.fits(each.job, each.had)
        )
        if same and each.had is not None:
            given[name] = Allocation(each.had.workers, each.had.servers, batch)
            room.take(each.job, given[name])
        else:
            rest.append((workers, each))
    for count, each in sorted(rest, key=lambda pair: -pair[0]):
        workers, batch = count, wanted[each.job.id][1]
        while workers > 0:
            found = room.place(each.job, workers, batch)
            if found is not None and found.num_workers <= most_workers(each.job, batch):
                room.take(each.job, found)
                given[each.job.id] = found
                break
            workers //= 2
    return given
