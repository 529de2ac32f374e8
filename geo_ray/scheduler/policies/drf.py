"""Dominant resource fairness.

Idea: a user's share is that of the resource it has most of; equal shares cannot be gained by lying.
Rule: in each slot, worker after worker goes to the job with the smallest dominant share that can
still grow. When: no job counts more than another. Source: the baseline of PD-ORS's evaluation, as
in Yarn and Mesos; reconstructed.
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
    """See the module's docstring.

    Attributes:
        change_s: what a job loses when its share changes.
    """

    change_s: float = 30.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        del seed  # nothing is left to chance
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
