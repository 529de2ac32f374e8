"""The reconcile loop: observe, decide, persist, act.

The loop may die at any point. A decision is persisted before it is executed, and every action is
idempotent: a launch has a request id, and a termination names its machine. A restarted or new
autoscaler therefore finds unfinished actions in the journal, resends requests without a listed
machine, and ends machines that nothing needs. Only the holder of the lease acts.

An error in one region affects only that region.

The time of day may be changed, for example by NTP after the start. The loop also reads a monotonic
clock. If the two disagree, the iteration is skipped; if they still disagree at the next one, stored
times are shifted with the clock. So no machine is charged or late for hours that did not pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol, TypeVar

from geo_ray.base.errors import (
    ClusterError,
    GeoRayError,
    ProviderRefusedError,
    RegionsUnreachableError,
)
from geo_ray.cloud.autoscaler.actions import Action, Drain, End, Launch
from geo_ray.cloud.autoscaler.journal import Journal
from geo_ray.cloud.autoscaler.observation import (
    Observed,
    ObservedNode,
    PendingGroup,
    RegionOutage,
    burn_usd_per_hour,
)
from geo_ray.cloud.autoscaler.policy import UNKNOWN, AutoscalePolicy, Decided, RequiredSpeed
from geo_ray.cloud.autoscaler.state import AutoscalerState, set_with_clock
from geo_ray.cloud.autoscaler.target import ClusterTarget
from geo_ray.cloud.provider import (
    Availability,
    LaunchFailure,
    LaunchFailureKind,
    Machine,
    MachineProvider,
    Pool,
)
from geo_ray.runs.lease import Fence

_SET_S: Final = 1.0
T = TypeVar("T")
_log = logging.getLogger(__name__)


class ClusterNodes(Protocol):
    """Nodes of the cluster: their load, and how to drain them."""

    def observe(self, machines: Sequence[Machine]) -> dict[str, ObservedNode]:
        """Return the nodes by machine id; machines without a node are omitted."""

    def drain(self, machine: Machine, reason: str, until_unix_s: float) -> None:
        """Drain a node: nothing new starts there."""

    def end_idle(self, machine: Machine, reason: str) -> bool:
        """Terminate a node unless anything runs there.

        Returns:
            Whether the node is idle: it terminates or does not exist.
        """

    def pending(self) -> tuple[PendingGroup, ...]:
        """Return the pending demand."""


class WorkLeft(Protocol):
    """The remaining work of a job."""

    @property
    def is_released(self) -> bool:
        """Whether the owner of the cluster has released all machines."""

    def left_s(self) -> float | None:
        """Return the remaining seconds with the target's machines; see `Observed`."""


@dataclass(frozen=True, slots=True)
class TickResult:
    """Result of one iteration.

    Attributes:
        decided: the decision.
        observed: its observations.
        errors: failed steps, which are retried.
    """

    decided: Decided
    observed: Observed
    errors: tuple[str, ...] = ()


@dataclass(slots=True)
class Reconciler:
    """Runs the reconcile loop; see the module.

    Attributes:
        policy: decides.
        target: what should run; may be replaced between two iterations.
        provider: the clouds.
        nodes: nodes of the cluster.
        work: the job.
        journal: persistent state.
        cluster: name of the cluster, a tag of all its machines.
        fence: fence of the lease of this autoscaler.
    """

    policy: AutoscalePolicy
    target: ClusterTarget
    provider: MachineProvider
    nodes: ClusterNodes
    work: WorkLeft
    journal: Journal
    cluster: str
    fence: Fence
    _failures: dict[tuple[str, LaunchFailureKind, str | None], LaunchFailure] = field(
        default_factory=dict
    )
    _availabilities: dict[Pool, Availability] = field(default_factory=dict)
    _availabilities_unix_s: float = -math.inf
    _unreachable: dict[str, RegionOutage] = field(default_factory=dict)
    _iterated: tuple[float, float] | None = None  # both clocks at the last iteration
    _is_set: bool = False  # whether they disagreed then

    def tick(self, now_unix_s: float, steady_s: float | None = None) -> TickResult:
        """Run one iteration.

        Args:
            now_unix_s: current time.
            steady_s: monotonic time; None: not available.

        Raises:
            LeaseLostError: another autoscaler acts.
            RunDirectoryError: the journal cannot be written; nothing was done.
        """
        self.fence.check()
        memory = self.journal.read()
        errors: list[str] = []
        set_s = self._set_s(now_unix_s, steady_s)
        if set_s:
            errors.append(f"the clock was set by {set_s:+.0f} s since the last iteration")
        self._is_set = bool(set_s) and not self._is_set
        if self._is_set:
            burn = burn_usd_per_hour(memory, self.target, now_unix_s)
            nothing = Decided(memory, (), RequiredSpeed(0.0, reason=UNKNOWN), burn)
            return TickResult(nothing, Observed(now_unix_s, None), tuple(errors))
        memory = set_with_clock(memory, set_s) if set_s else memory
        observed = self._observe(now_unix_s, memory, errors)
        decided = self.policy.decide(self.target, memory, observed)
        self.journal.write(decided.memory)
        self._iterated = None if steady_s is None else (now_unix_s, steady_s)
        if observed.machines is not None:
            self._failures.clear()  # they are in the journal now
        for action in decided.actions:
            self.fence.check()
            self._attempt(errors, partial(self._act, action, decided.memory))
        return TickResult(decided, observed, tuple(errors))

    def _set_s(self, now_unix_s: float, steady_s: float | None) -> float:
        """Return by how much the clock was set since the last valid iteration."""
        if steady_s is None or self._iterated is None:
            return 0.0
        before_unix_s, before_s = self._iterated
        set_s = (now_unix_s - before_unix_s) - (steady_s - before_s)
        return set_s if abs(set_s) >= _SET_S else 0.0

    # ------------------------------------------------------------------ what is seen

    def _observe(self, now_unix_s: float, memory: AutoscalerState, errors: list[str]) -> Observed:
        observed = Observed(now_unix_s, None, is_released=self.work.is_released)
        everywhere = _regions(self.target, memory)

        def work() -> None:
            nonlocal observed
            observed = replace(observed, left_s=self.work.left_s())

        def machines() -> None:
            nonlocal observed
            found, why = _asked(partial(self.provider.list_machines, self.cluster), everywhere)
            self._unreachable = {
                name: replace(
                    self._unreachable.get(name, RegionOutage(now_unix_s, "")), reason=reason
                )
                for name, reason in why.items()
            }
            errors.extend(
                f"{name} has not answered for {now_unix_s - outage.since_unix_s:.0f} s, so "
                f"it makes no changes there: {outage.reason}"
                for name, outage in sorted(self._unreachable.items())
            )
            observed = replace(observed, unreachable=self._unreachable)
            observed = replace(observed, nodes=self.nodes.observe(found), machines=found)

        def pending() -> None:
            nonlocal observed
            observed = replace(observed, pending=self.nodes.pending())

        def availabilities() -> None:
            if 0 <= now_unix_s - self._availabilities_unix_s < self.policy.prices_every_s:
                return
            pools = [each for each in self.target.pools() if each.region not in self._unreachable]
            found, why = _asked(partial(self.provider.availability, pools), everywhere)
            self._availabilities |= {availability.pool: availability for availability in found}
            if found or not why:
                self._availabilities_unix_s = now_unix_s
            errors.extend(f"{name} quotes no prices: {why[name]}" for name in sorted(why))

        def failures() -> None:
            found, why = _asked(partial(self.provider.poll_failures, self.cluster), everywhere)
            self._keep(found)
            errors.extend(
                f"{name} does not report failed launches: {why[name]}"
                for name in sorted(why.keys() - self._unreachable.keys())
            )

        # Pending demand is read after the nodes: what was placed meanwhile launches nothing.
        # Failures are read after the machines: the failure of a machine listed as ended is known.
        for stage in (work, machines, pending, availabilities, failures):
            if not self._attempt(errors, stage) and stage in (work, pending):
                observed = replace(
                    observed, is_need_known=False
                )  # the other observations are valid, costs in particular
        return replace(
            observed, availabilities=self._availabilities, failures=tuple(self._failures.values())
        )

    def _keep(self, failures: Sequence[LaunchFailure]) -> None:
        for failure in failures:
            key = (failure.request_id, failure.kind, failure.machine_id)
            self._failures[key] = failure

    # ------------------------------------------------------------------ what is done

    def _act(self, action: Action, memory: AutoscalerState) -> None:
        match action:
            case Launch(request=request):
                try:
                    self._keep(self.provider.launch(request))
                except ProviderRefusedError as error:  # retrying is useless: use another pool
                    failure = LaunchFailure(
                        request.request_id,
                        request.pool,
                        request.count,
                        LaunchFailureKind.REFUSED,
                        error.message,
                    )
                    self._keep([failure])
                    raise
            case Drain(machine_id=machine_id, reason=reason, until_unix_s=until_s):
                self.nodes.drain(memory.instances[machine_id].machine, reason, until_s)
            case End(machine_id=machine_id, only_idle=only_idle, reason=reason):
                if only_idle:
                    machine = memory.instances[machine_id].machine
                    if not self.nodes.end_idle(machine, reason):
                        raise ClusterError(f"{machine_id} stays because it became busy")
                self.provider.terminate([machine_id])

    def _attempt(self, errors: list[str], step: Callable[[], None]) -> bool:
        try:
            step()
        except GeoRayError as error:
            _log.warning("autoscaler: %s", error.message)
            errors.append(str(error))
            return False
        except Exception as error:  # it must not prevent the other steps
            _log.exception("autoscaler: a step of the iteration failed")
            errors.append(f"{type(error).__name__}: {error}")
            return False
        return True


def _asked(
    ask: Callable[[], Sequence[T]], everywhere: Sequence[str]
) -> tuple[tuple[T, ...], Mapping[str, str]]:
    """Ask the clouds. Return the answers, and the reason for each region without one."""
    try:
        return tuple(ask()), {}
    except RegionsUnreachableError as error:
        return error.found, error.unreachable
    except GeoRayError as error:
        return (), dict.fromkeys(everywhere, error.message)


def _regions(target: ClusterTarget, memory: AutoscalerState) -> list[str]:
    """Return the cloud names of all regions that have, or may have, machines."""
    found = {pool.region for pool in target.pools()} | {region.at for region in target.regions}
    found |= {instance.machine.pool.region for instance in memory.instances.values()}
    found |= {
        pending_launch.request.pool.region for pending_launch in memory.pending_launches.values()
    }
    return sorted(found)
