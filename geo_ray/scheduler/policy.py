"""What a policy sees in a slot, and what it answers.

A policy is a frozen configuration; `begin` gives a scheduler, which remembers what it has promised.
Neither has a clock, a socket or Ray: the history that is replayed here and a live queue ask the
same object.
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
    """A job that has come and has not ended.

    Attributes:
        job: the job.
        rows_left: of its work.
        service_s: seconds of accelerators (or of workers, if it has none) that it has had.
        had: in the slot before; None: nothing.
        waited_slots: that it had nothing in.
    """

    job: ClusterJob
    rows_left: float
    service_s: float = 0.0
    had: Allocation | None = None
    waited_slots: int = 0


@dataclass(frozen=True, eq=False)
class SlotView:
    """A slot's beginning.

    Attributes:
        slot: its number.
        arrived: jobs that came with it, in their order.
        active: all that have come and not ended, by id, in the order of arrival.
        capacity_SR: what there is in this slot.
        gone: jobs that were there and are not any more, otherwise than by running to their planned
            end: cancelled, or faster than they were said to be.
        admitted: jobs that were taken on before; of those that arrive, they come again as others
            than they were, and are not turned away for what they are worth by now.
        lost: jobs that lost what they had since the slot before, through no fault of their own:
            they keep their place before others.
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
    """The answer.

    Attributes:
        allocations: of this slot, by job.
        admissions: what was decided for good.
    """

    allocations: Mapping[str, Allocation]
    admissions: Sequence[Admission] = ()


class SlotScheduler(Protocol):
    """What a policy is while a history or a queue goes on."""

    def decide(self, view: SlotView) -> SlotDecision:
        """Decide who has what in the slot that begins."""
        ...


class SchedulingPolicy(Protocol):
    """A frozen configuration of a way to schedule.

    Attributes:
        change_s: seconds that a running job loses when what it has changes.
    """

    @property
    def change_s(self) -> float:
        """See the class."""
        ...

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """Return what decides, slot by slot.

        Args:
            cluster: what there is; of spot sites only the present slot may be looked at.
            seed: of all that is left to chance.
        """
        ...
