"""Dominant resource fairness.

Idea: the dominant share of a user is that of the resource that it uses most; equal dominant shares
cannot be gained by misreporting. Rule: in each slot, worker after worker goes to the job with
the smallest dominant share that can still grow. When: all jobs are equally important. Source:
the baseline of the PD-ORS evaluation, as in Yarn and Mesos; reconstructed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from geo_ray.scheduler.cluster import SharedCluster
from geo_ray.scheduler.placement import GrowingJob, SiteCapacity, whole
from geo_ray.scheduler.policy import SlotDecision, SlotScheduler, SlotView


@dataclass(frozen=True, slots=True)
class DrfPolicy:
    """DRF; see the module.

    Attributes:
        change_s: seconds lost by a job whose allocation changes.
    """

    change_s: float = 30.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        del seed  # deterministic
        return _Drf(cluster)


class _Drf:
    def __init__(self, cluster: SharedCluster) -> None:
        self._cluster = cluster

    def decide(self, view: SlotView) -> SlotDecision:
        capacity = SiteCapacity(self._cluster, view.capacity_SR)
        total_R = np.maximum(1e-9, view.capacity_SR.sum(axis=0))
        jobs = {name: GrowingJob(each.job, capacity) for name, each in view.active.items()}
        waiting = [(0.0, place, name) for place, name in enumerate(jobs)]
        while waiting:
            _, place, name = heapq.heappop(waiting)
            if jobs[name].grow():
                fraction = float((jobs[name].units_R() / total_R).max())
                heapq.heappush(waiting, (fraction, place, name))
        return SlotDecision(whole(jobs))
