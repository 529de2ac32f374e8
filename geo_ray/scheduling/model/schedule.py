"""A schedule: who had what in which slot, what was done with it, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from geo_ray.scheduling.model.allocation import Allocation
from geo_ray.scheduling.model.cluster import SharedCluster
from geo_ray.scheduling.model.job import ClusterJob


@dataclass(frozen=True, slots=True)
class SlotUse:
    """What a job had in a slot.

    Attributes:
        slot: which.
        job: its id.
        allocation: what it had.
        used_s: seconds that it had it; less than a slot in the one in which it ends.
        lost_s: of these, seconds in which it did not train because its resources changed.
        rows: that it did.
        usd: what that cost, egress included.
    """

    slot: int
    job: str
    allocation: Allocation
    used_s: float
    lost_s: float
    rows: float
    usd: float


@dataclass(frozen=True, slots=True)
class Admission:
    """What was decided about a job when it came.

    Attributes:
        job: its id.
        slot: when.
        is_admitted: or turned away for good.
        payoff: what it is worth beyond what it costs; None: the policy does not ask.
    """

    job: str
    slot: int
    is_admitted: bool
    payoff: float | None = None


@dataclass(frozen=True)
class ClusterSchedule:
    """See the module's docstring.

    Attributes:
        cluster: what there was.
        jobs: by id.
        uses: in the order of slots.
        finished_s: when each job that ended did, from the start of slot 0.
        admissions: in the order in which they were decided.
        decision_s: seconds that deciding took in each slot, for each job that came in it.
    """

    cluster: SharedCluster
    jobs: Mapping[str, ClusterJob]
    uses: tuple[SlotUse, ...]
    finished_s: Mapping[str, float]
    admissions: tuple[Admission, ...] = ()
    decision_s: tuple[float, ...] = field(default=(), compare=False)

    @property
    def usd(self) -> float:
        """What all of it cost."""
        return sum(use.usd for use in self.uses)

    def utility(self, job: str) -> float:
        """Return what a job was worth: 0 if it did not end."""
        if job not in self.finished_s:
            return 0.0
        one = self.jobs[job]
        last = max(0, -(-self.finished_s[job] // self.cluster.slot_s) - 1)
        return one.utility.of(last - one.arrival_slot)

    @property
    def total_utility(self) -> float:
        """What all jobs were worth."""
        return sum(self.utility(job) for job in self.finished_s)
