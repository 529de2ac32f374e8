"""A job on simulated machines: how fast it goes with those that are there, and what changes cost.

Its rows are split over regions that wait for each other, so it goes as fast as the region that has
least of what it needs, and not at all where a region has no server. Work is counted in seconds with
the target's machines. Whoever comes or goes stands all still for a moment; a machine that goes
without having been drained loses what it computed since the last exchange, and its replacement's
start is waited for by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from geo_ray.autoscale.demand.pending import PendingGroup
from geo_ray.autoscale.observed import NodeSeen
from geo_ray.autoscale.replay.sim_cloud import SimMachine, SimulatedCloud
from geo_ray.autoscale.target import REGION_LABEL, ROLE_LABEL, ClusterTarget, RegionTarget
from geo_ray.clock import VirtualClock
from geo_ray.providers.base import Machine


@dataclass(frozen=True, slots=True)
class SimJob:
    """The job.

    Attributes:
        work_s: that it takes with the target's machines.
        join_s: from a running machine to a node that computes.
        change_s: that all stand still when somebody comes or goes.
        lost_s: of work that goes with a machine that was not drained.
        leave_s: from the order to leave until nothing runs there.
        most_speed: more machines make it this many times as fast at most.
    """

    work_s: float
    join_s: float = 60.0
    change_s: float = 5.0
    lost_s: float = 60.0
    leave_s: float = 20.0
    most_speed: float = 2.0


@dataclass(slots=True)
class SimWorld:
    """See the module's docstring; `ClusterNodes` and `WorkLeft` for the autoscaler.

    Attributes:
        target: what the job wants.
        job: the job.
        cloud: its machines.
        clock: the time.
        done_s: work that is done.
        finished_unix_s: when all was; None: it is not.
    """

    target: ClusterTarget
    job: SimJob
    cloud: SimulatedCloud
    clock: VirtualClock
    done_s: float = 0.0
    finished_unix_s: float | None = None
    _team: frozenset[str] = frozenset()
    _left_unix_s: dict[str, float] = field(default_factory=dict)
    _stands_s: float = 0.0

    # ------------------------------------------------------------------ for the autoscaler

    def seen(self, machines: Sequence[Machine]) -> dict[str, NodeSeen]:
        """See `ClusterNodes.seen`."""
        now_s = self.clock.now_s()
        found = {}
        for machine in machines:
            each = self.cloud.machines[machine.id]
            if each.ended_unix_s is None and self._has_joined(each, now_s):
                left_s = self._left_unix_s.get(machine.id)
                busy = self.finished_unix_s is None and (left_s is None or now_s < left_s)
                found[machine.id] = NodeSeen(is_ready=True, is_busy=busy, leaves_unix_s=left_s)
        return found

    def drain(self, machine: Machine, reason: str, until_unix_s: float) -> None:
        """See `ClusterNodes.drain`."""
        gone_s = min(self.clock.now_s() + self.job.leave_s, until_unix_s)
        self._left_unix_s.setdefault(machine.id, gone_s)

    def end_idle(self, machine: Machine, reason: str) -> bool:
        """See `ClusterNodes.end_idle`."""
        node = self.seen([machine]).get(machine.id)
        return node is None or not node.is_busy

    def pending(self) -> tuple[PendingGroup, ...]:
        """See `ClusterNodes.pending`."""
        return ()

    @property
    def is_released(self) -> bool:
        """See `WorkLeft`: machines are given up with the end of the job."""
        return self.finished_unix_s is not None

    def left_s(self) -> float | None:
        """See `WorkLeft.left_s`."""
        return self.job.work_s - self.done_s

    # ------------------------------------------------------------------ time passes

    def advance_to_s(self, when_s: float) -> None:
        """Let the job go on until then."""
        passed_s = when_s - self.clock.now_s()
        speed = 0.0 if self.finished_unix_s is not None else self._speed()
        stands_s = min(passed_s, self._stands_s)
        self._stands_s -= stands_s
        done_s = (passed_s - stands_s) * speed
        left_s = self.job.work_s - self.done_s
        if self.finished_unix_s is None and speed and done_s >= left_s:
            self.finished_unix_s = self.clock.now_s() + stands_s + left_s / speed
            done_s = left_s
        self.done_s += done_s
        self.clock.advance_to_s(when_s)

    def roll_back_s(self, work_s: float) -> None:
        """Lose some work."""
        self.done_s = max(0.0, self.done_s - work_s)

    def computing(self, region: str, role: str) -> list[SimMachine]:
        """Return the machines that compute now."""
        now_s = self.clock.now_s()
        return [
            each
            for each in self.cloud.alive()
            if each.machine.labels.get(REGION_LABEL) == region
            and each.machine.labels.get(ROLE_LABEL) == role
            and self._has_joined(each, now_s)
            and now_s < self._left_unix_s.get(each.machine.id, float("inf"))
        ]

    def _speed(self) -> float:
        team: set[str] = set()
        shares = [self._share(region, team) for region in self.target.regions]
        now = frozenset(team)
        if now != self._team:
            for machine_id in self._team - now:
                if machine_id not in self._left_unix_s:
                    self.roll_back_s(self.job.lost_s)
            self._stands_s = self.job.change_s
            self._team = now
        return min(self.job.most_speed, *shares)

    def _share(self, region: RegionTarget, team: set[str]) -> float:
        workers = self.computing(region.name, "worker")
        servers = self.computing(region.name, "server") if region.server else []
        team.update(each.machine.id for each in (*workers, *servers))
        if region.server and not servers:
            return 0.0
        speeds = {kind.type: kind.rows_per_s for kind in region.kinds}
        return sum(speeds[each.machine.pool.type] for each in workers) / region.rows_per_s

    def _has_joined(self, each: SimMachine, now_s: float) -> bool:
        start_s = self.cloud.temper.start_s + self.job.join_s
        return now_s - each.machine.launched_unix_s >= start_s
