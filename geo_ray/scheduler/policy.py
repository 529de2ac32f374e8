"""Policy interface: the view of a slot and the decision.

A policy is a frozen configuration; `begin` returns a scheduler, which remembers its reservations.
Neither uses a clock, a socket or Ray: replays and the live queue call the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from geo_ray.scheduler.cluster import Allocation, Floats, SharedCluster
from geo_ray.scheduler.job import ClusterJob
from geo_ray.scheduler.schedule import Admission


@dataclass(frozen=True, slots=True)
class JobProgress:
    """State of a submitted job that has not ended.

    Attributes:
        job: the job.
        rows_left: remaining work.
        service_s: attained service in accelerator seconds (worker seconds without accelerators).
        had: allocation in the previous slot; None: none.
        waited_slots: slots without an allocation.
    """

    job: ClusterJob
    rows_left: float
    service_s: float = 0.0
    had: Allocation | None = None
    waited_slots: int = 0


@dataclass(frozen=True, eq=False)
class SlotView:
    """State at the start of a slot.

    Attributes:
        slot: number of the slot.
        arrived: jobs that arrived in it, in order.
        active: all jobs that have not ended, by id, in order of arrival.
        capacity_SR: capacity in this slot.
        gone: jobs that ended other than by their plan: cancelled, or faster than declared.
        admitted: jobs that were admitted before. If one arrives again, its specification has
            changed, and it must not be rejected for its value.
        lost: jobs that lost their allocation since the previous slot without being at fault: they
            keep their priority.
    """

    slot: int
    arrived: Sequence[ClusterJob]
    active: Mapping[str, JobProgress]
    capacity_SR: Floats
    gone: Sequence[str] = ()
    admitted: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class SlotDecision:
    """Decision for a slot.

    Attributes:
        allocations: allocations of this slot, by job.
        admissions: final admission decisions.
    """

    allocations: Mapping[str, Allocation]
    admissions: Sequence[Admission] = ()


class SlotScheduler(Protocol):
    """Scheduler of one replay or queue."""

    def decide(self, view: SlotView) -> SlotDecision:
        """Decide the allocations of the slot that begins."""
        ...


class SchedulingPolicy(Protocol):
    """Frozen configuration of a scheduling policy.

    Attributes:
        change_s: seconds lost by a running job whose allocation changes.
    """

    @property
    def change_s(self) -> float:
        """See the class."""
        ...

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """Return a scheduler.

        Args:
            cluster: the cluster; of spot sites, only the current slot may be read.
            seed: seed of all random choices.
        """
        ...
