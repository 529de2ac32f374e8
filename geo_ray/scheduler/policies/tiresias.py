"""Tiresias: least attained service first, in two dimensions.

Idea: durations are unknown; a job with little attained service is likely to be short. Rule: service
is accelerators times seconds. Jobs are in queues by attained service, first come first served
in each. In every slot the requested workers are allocated in that order, so a job with much
service is preempted (by checkpoint) for one with little. A job that has waited ``promote``
times as long as it has run returns to the first queue. When: durations are unknown and very
uneven. Source: discretized 2D-LAS of Tiresias (NSDI 2019), limits as in its simulator;
promotion is reconstructed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from geo_ray.scheduler.cluster import Allocation, SharedCluster
from geo_ray.scheduler.placement import SiteCapacity
from geo_ray.scheduler.policy import JobProgress, SlotDecision, SlotScheduler, SlotView


@dataclass(frozen=True, slots=True)
class TiresiasPolicy:
    """Tiresias; see the module.

    Attributes:
        limits_s: limits of the queues in accelerator seconds.
        promote: see the module; 0: never.
        change_s: seconds lost by a job that is preempted and resumed.
    """

    limits_s: tuple[float, ...] = (3250.0, 7200.0, 18_000.0)
    promote: float = 8.0
    change_s: float = 30.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        del seed  # deterministic
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
