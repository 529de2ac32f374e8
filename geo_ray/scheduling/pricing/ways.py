"""Where a job could run in a slot: the ways that its workers and parameter servers may lie apart.

*Inside*: all on one site. Else a *spread*: workers on some sites, parameter servers on some, with
the slowest link between them. In a cluster of one region there is one spread, everything. With
regions there is one for each region by itself, and, for each region that may have the parameter
servers and each speed of a link to it, one of all regions that are at least so near.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from geo_ray.scheduling.model.cluster import SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.speed import LinkUsed


@dataclass(frozen=True, eq=False)
class SpreadWay:
    """A way to lie apart.

    Attributes:
        workers: numbers of the sites that may have workers.
        servers: of those that may have parameter servers.
        link: the slowest between them.
        server_region: the only region of the parameter servers.
    """

    workers: np.ndarray
    servers: np.ndarray
    link: LinkUsed
    server_region: int


def spread_ways(cluster: SharedCluster, job: ClusterJob, most: int) -> list[SpreadWay]:
    """Return the ways to spread, fastest links first, at most ``most`` with distinct sites.

    Args:
        cluster: the cluster.
        job: the job; its workers are where its data are.
        most: of ways; those with the slowest links are left out.
    """
    net, region_S = cluster.net, cluster.region_S
    both_GG = np.minimum(net.mbps_GG, net.mbps_GG.T)
    regions = range(len(net.names))
    allowed_S = job.may_work_S(cluster)
    homes = list(job.data) if job.data else list(regions)
    found: list[SpreadWay] = []
    for anchor in regions:
        servers = np.flatnonzero(region_S == anchor)
        for mbps in sorted({float(both_GG[home, anchor]) for home in homes}, reverse=True):
            near = [home for home in homes if both_GG[home, anchor] >= mbps]
            if len(job.data) > 1 and len(near) < len(job.data):
                continue
            workers = np.flatnonzero(allowed_S & np.isin(region_S, near))
            rtt_s = float(net.rtt_s_GG[near, anchor].max())
            if len(workers) and len(servers):
                found.append(SpreadWay(workers, servers, LinkUsed(mbps, False, rtt_s), anchor))
    found.sort(key=lambda way: -way.link.mbps)
    if not job.data or len(job.data) < 2:
        return found[:most]
    # Links inside a region come first, and there may be many: those of the data's regions matter.
    near_data = [way for way in found if way.server_region in job.data]
    rest = [way for way in found if way.server_region not in job.data]
    return (near_data + rest)[:most]
