"""First come, first served.

Idea: the default of Hadoop and Spark. Rule: the earliest job gets its requested workers (fewer if
the whole cluster has fewer) and keeps them until it ends; while it does not fit, all later jobs
wait. If its capacity is reclaimed (spot machines), it waits again, at the head. When: as a
baseline, or if order must be respected. Source: the baseline of the PD-ORS evaluation;
reconstructed.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_ray.scheduler.cluster import Allocation, SharedCluster
from geo_ray.scheduler.placement import SiteCapacity
from geo_ray.scheduler.policy import SlotDecision, SlotScheduler, SlotView


@dataclass(frozen=True, slots=True)
class FifoPolicy:
    """FIFO; see the module.

    Attributes:
        change_s: seconds lost by a job that must be placed again.
    """

    change_s: float = 30.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        del seed  # deterministic
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
