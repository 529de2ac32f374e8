"""Optimus: the next worker goes to the job with the largest marginal gain.

Idea: minimize the mean completion time by marginal gains. Rule: every job first gets one worker,
those with the least remaining work first. Then worker after worker goes to the job with the
largest time saved per dominant resource share, until no job gains or fits. A job whose request
does not fit is skipped (the authors' code stops there). When: jobs differ in progress, and
their speed is known. Source: greedy rule from the code of Optimus (EuroSys 2018); remaining
times come from the planner's speed model, not from fitted loss curves.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from geo_ray.scheduler.cluster import Floats, SharedCluster
from geo_ray.scheduler.job import LinkUsed
from geo_ray.scheduler.placement import GrowingJob, SiteCapacity, whole
from geo_ray.scheduler.policy import JobProgress, SlotDecision, SlotScheduler, SlotView


@dataclass(frozen=True, slots=True)
class OptimusPolicy:
    """Optimus; see the module.

    Attributes:
        change_s: seconds lost by a job whose allocation changes.
    """

    change_s: float = 30.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        del seed  # deterministic
        return _Optimus(cluster)


class _Optimus:
    def __init__(self, cluster: SharedCluster) -> None:
        self._cluster = cluster
        self._link = LinkUsed(float(np.median(cluster.net.mbps_GG)), is_inside=False)
        self._curves: dict[str, Floats] = {}

    def decide(self, view: SlotView) -> SlotDecision:
        capacity = SiteCapacity(self._cluster, view.capacity_SR)
        total_R = np.maximum(1e-9, view.capacity_SR.sum(axis=0))
        jobs: dict[str, GrowingJob] = {}
        waiting: list[tuple[float, int, str]] = []
        self._curves = {name: self._curve(each) for name, each in view.active.items()}
        order = sorted(
            view.active, key=lambda name: view.active[name].rows_left / self._curves[name][0]
        )
        for place, name in enumerate(order):
            grown = GrowingJob(view.active[name].job, capacity)
            while not grown.is_whole and grown.grow():
                pass
            if not grown.is_whole:
                grown.give_back()
                continue
            jobs[name] = grown
            self._push(waiting, view.active[name], grown, place, total_R)
        while waiting:
            _, place, name = heapq.heappop(waiting)
            if jobs[name].grow():
                self._push(waiting, view.active[name], jobs[name], place, total_R)
        return SlotDecision(whole(jobs))

    def _push(
        self,
        waiting: list[tuple[float, int, str]],
        each: JobProgress,
        grown: GrowingJob,
        place: int,
        total_R: Floats,
    ) -> None:
        per_s_W, workers = self._curves[each.job.id], grown.workers
        if workers >= len(per_s_W):
            return
        saved_s = each.rows_left / per_s_W[workers - 1] - each.rows_left / per_s_W[workers]
        demands = each.job.demands
        more = demands.servers(workers + 1) - demands.servers(workers)
        fraction = float((demands.units_R(1, more) / total_R).max())
        if saved_s > 0:
            heapq.heappush(waiting, (-saved_s / fraction, place, each.job.id))

    def _curve(self, each: JobProgress) -> Floats:
        """Return rows per second by number of workers on separate sites."""
        if each.job.id in self._curves:
            return self._curves[each.job.id]
        job = each.job
        workers_W = np.arange(1, min(job.demands.most_workers, job.speed.batch.rows) + 1)
        servers_W = -(-workers_W // job.demands.workers_per_server)
        return job.speed.rows_per_s(workers_W, servers_W, job.speed.batch.rows, self._link)
