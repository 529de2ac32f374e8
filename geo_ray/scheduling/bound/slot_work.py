"""What a job can do in one slot at most, and what a part of its work costs there at least.

Sites are taken together, but workers are whole: with ``w`` of them a job is as fast as inside one
site only if one site has room for them and their parameter servers, else as over the best link that
it could have. Batches of elastic jobs are the best that it may have. Slots may be mixed (half of
one with three workers, half with nothing), so that the cost of work in a slot is the lower convex
hull of what each number of workers does and costs.

Valid for schedules with as many parameter servers as the workers need, which all policies make.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.scheduling.model.cluster import Floats, SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.speed import LinkUsed

_BATCHES: Final = 512
_EPS: Final = 1e-12


@dataclass(frozen=True, eq=False)
class SlotWork:
    """What each number of workers does in a whole slot; those that another beats are left out.

    Attributes:
        part_W: of the job's work, ascending.
        units_WR: of each resource.
    """

    part_W: Floats
    units_WR: Floats


@dataclass(frozen=True, slots=True)
class WorkPiece:
    """A piece of a slot's work: going from one number of workers to a larger one.

    Attributes:
        cost: of a unit of work.
        part: of the job's work.
        less: place of the smaller number in `SlotWork`; -1: no worker.
        more: place of the larger number.
    """

    cost: float
    part: float
    less: int
    more: int


def slot_work(cluster: SharedCluster, job: ClusterJob) -> SlotWork:
    """Return what a job can do in a slot."""
    demands = job.demands
    workers_W = np.arange(1, min(demands.most_workers, job.speed.batch.most_rows) + 1)
    servers_W = -(-workers_W // demands.workers_per_server)
    units_WR = workers_W[:, None] * demands.worker_R + servers_W[:, None] * demands.server_R
    most_SR = cluster.capacity_TSR.max(axis=0)
    within_WSR = units_WR[:, None, :] <= most_SR[job.may_work_S(cluster)] + 1e-9
    fits_W = within_WSR.all(axis=2).any(axis=1) & (len(job.data) <= 1)
    inside = LinkUsed(float(cluster.inside_mbps_S.max()), is_inside=True)
    per_s_W = np.maximum(
        np.where(fits_W, _fastest_W(job, workers_W, servers_W, inside), 0.0),
        _fastest_W(job, workers_W, servers_W, _best_link(cluster, job)),
    )
    part_W = per_s_W * cluster.slot_s / job.rows
    kept = _not_beaten(part_W, units_WR)
    return SlotWork(part_W[kept], units_WR[kept])


def _best_link(cluster: SharedCluster, job: ClusterJob) -> LinkUsed:
    """Return what no link between two sites is better than that the job could have."""
    net = cluster.net
    both_GG, rtt_GG = np.minimum(net.mbps_GG, net.mbps_GG.T), net.rtt_s_GG
    if not job.data:
        return LinkUsed(float(both_GG.max()), False, float(rtt_GG.min()))
    # Every region with data has workers, and some region the parameter servers.
    homes = list(job.data)
    return LinkUsed(
        float(both_GG[homes].min(axis=0).max()), False, float(rtt_GG[homes].max(axis=0).min())
    )


def _fastest_W(
    job: ClusterJob, workers_W: NDArray[np.int64], servers_W: NDArray[np.int64], link: LinkUsed
) -> Floats:
    """Return rows per second with each number of workers, at the best batch."""
    limits, speed = job.speed.batch, job.speed
    sizes = np.unique(np.geomspace(limits.rows, limits.most_rows, _BATCHES).round())
    best_W = np.zeros(len(workers_W))
    for least, above in pairwise([*map(int, sizes), limits.most_rows + 1]):
        # Of all batches from `least` on, below `above`: progress of the largest, time of the least.
        progress = (above - 1) * limits.efficiency(above - 1)
        pace_W = speed.pace_s(workers_W, servers_W, least, link)
        if job.data:
            # Workers whom the shares of its data leave idle do not count, their servers do.
            pace_W = np.array([
                speed.pace_s(workers_W[: n + 1], servers, least, link).min()
                for n, servers in enumerate(servers_W)
            ])  # fmt: skip
        best_W = np.maximum(best_W, np.where(workers_W < above, progress / pace_W, 0.0))
    return best_W


def _not_beaten(part_W: Floats, units_WR: Floats) -> NDArray[np.int64]:
    """Return who does something that nobody does with less, ascending by work."""
    kept: list[int] = []
    for place in np.lexsort((units_WR.sum(axis=1), -part_W)):
        if part_W[place] > _EPS and not any(
            (units_WR[other] <= units_WR[place]).all() for other in kept
        ):
            kept.append(int(place))
    return np.array(kept[::-1], dtype=np.int64)


def cheapest_pieces(work: SlotWork, cost_W: Floats) -> list[WorkPiece]:
    """Return a slot's work in pieces, the cheapest first: the lower hull of cost over work.

    Args:
        work: what each number of workers does.
        cost_W: of each for a whole slot.
    """
    hull = [(0.0, 0.0, -1)]
    for place, (part, cost) in enumerate(zip(work.part_W.tolist(), cost_W.tolist(), strict=True)):
        while len(hull) > 1 and cost <= hull[-1][1]:
            hull.pop()
        if part <= hull[-1][0] + _EPS:
            continue
        while len(hull) > 1:
            (part_1, cost_1, _), (part_2, cost_2, _) = hull[-2:]
            if (cost_2 - cost_1) * (part - part_1) < (cost - cost_1) * (part_2 - part_1):
                break
            hull.pop()
        hull.append((part, cost, place))
    return [
        WorkPiece((more[1] - less[1]) / (more[0] - less[0]), more[0] - less[0], less[2], more[2])
        for less, more in pairwise(hull)
    ]
