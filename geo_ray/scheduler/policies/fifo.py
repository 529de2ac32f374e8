"""First come, first served.

Idea: what Hadoop and Spark do by default. Rule: the job that came first gets the workers that its
owner asked for (fewer if all of the cluster has not so many) and keeps them until it ends; while it
does not fit, all behind it wait. Where less
than it has remains (spot machines that were taken back), it waits at the head again. When: as a
baseline, or where order is a promise. Source: the baseline of PD-ORS's evaluation, reconstructed.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_ray.scheduler.cluster import Allocation, SharedCluster
from geo_ray.scheduler.placement import SiteCapacity
from geo_ray.scheduler.policy import SlotDecision, SlotScheduler, SlotView


@dataclass(frozen=True, slots=True)
class FifoPolicy:
    """See the module's docstring.

    Attributes:
        change_s: what a job loses when it has to be placed anew.
    """

    change_s: float = 30.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        del seed  # nothing is left to chance
        return _Fifo(cluster)


class _Fifo:
    def __init__(self, cluster: SharedCluster) -> None:
        self._cluster = cluster
        self._wanted: dict[str, int] = {}

    def decide(self, view: SlotView) -> SlotDecision:
        capacity = SiteCapacity(self._cluster, view.capacity_SR)
        for job in view.arrived:
            self._wanted[job.id] = capacity.most_that_fit(job, job.demands.wanted_workers)
        given: dict[str, Allocation] = {}
        for name, each in view.active.items():
            if each.had is not None and capacity.fits(each.job, each.had):
                capacity.take(each.job, each.had)
                given[name] = each.had
        for name, each in view.active.items():
            if name in given:
                continue
            found = capacity.place(each.job, self._wanted[name])
            if found is None:
                break
            capacity.take(each.job, found)
            given[name] = found
        return SlotDecision(given)
