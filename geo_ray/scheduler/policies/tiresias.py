"""Tiresias: least attained service first, in two dimensions.

Idea: how long a job will take is not known; who has had little so far is likely to be short. Rule:
service is accelerators times seconds. Jobs are in queues by what they have had, first come first
served inside each; every slot the workers that were asked for are given out in that order, so a job
that has had much stops for one that has not (by checkpoint). A job that has waited ``promote``
times as long as it has run starts over in the first queue. When: durations are unknown and very
uneven. Source: discretised 2D-LAS of Tiresias (NSDI 2019), limits as in its simulator; promotion is
reconstructed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from geo_ray.scheduler.cluster import Allocation, SharedCluster
from geo_ray.scheduler.placement import SiteCapacity
from geo_ray.scheduler.policy import JobProgress, SlotDecision, SlotScheduler, SlotView


@dataclass(frozen=True, slots=True)
class TiresiasPolicy:
    """See the module's docstring.

    Attributes:
        limits_s: of the queues, accelerator seconds.
        promote: see the module's docstring; 0: never.
        change_s: what a job loses when it stops and goes on.
    """

    limits_s: tuple[float, ...] = (3250.0, 7200.0, 18_000.0)
    promote: float = 8.0
    change_s: float = 30.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        del seed  # nothing is left to chance
        return _Tiresias(self, cluster)


class _Tiresias:
    def __init__(self, policy: TiresiasPolicy, cluster: SharedCluster) -> None:
        self._policy, self._cluster = policy, cluster
        self._forgiven_s: dict[str, float] = {}
        self._wanted: dict[str, int] = {}

    def decide(self, view: SlotView) -> SlotDecision:
        capacity = SiteCapacity(self._cluster, view.capacity_SR)
        for job in view.arrived:
            self._wanted[job.id] = capacity.most_that_fit(job, job.demands.wanted_workers)
        order = sorted(view.active.values(), key=self._queue)
        given: dict[str, Allocation] = {}
        for each in order:
            had = each.had
            if had is None or not capacity.fits(each.job, had):
                had = capacity.place(each.job, self._wanted[each.job.id])
            if had is not None:
                capacity.take(each.job, had)
                given[each.job.id] = had
        return SlotDecision(given)

    def _queue(self, each: JobProgress) -> int:
        name, slot_s = each.job.id, self._cluster.slot_s
        own_s = each.service_s - self._forgiven_s.get(name, 0.0)
        ran_s = own_s / max(1, self._wanted[name])
        promote = self._policy.promote
        if promote and 0 < promote * ran_s < each.waited_slots * slot_s:
            self._forgiven_s[name] = each.service_s
            own_s = 0.0
        return bisect_right(self._policy.limits_s, own_s)
