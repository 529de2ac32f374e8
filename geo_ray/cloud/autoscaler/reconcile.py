"""One look after the other: observe, decide, write it down, act.

It may die at every point. What was decided is written before it is done, and everything that is
done may be done again: a launch has an id, and an end is of a machine that is to end. So the next
one, or the same one started anew, finds in the journal what was under way, sends again what left no
trace, and ends what nobody waits for. Only who holds the lease acts.

Clouds are asked as far as they answer: what fails in one region is of that region alone.

Times of day may be set, as by NTP after a start. A process has a clock beside that is not: where
the two disagree the look is left out, since it may be for a moment; if they still do at the next
one, what was noted is set with the clock. So no machine pays, or is late, for hours that were not.
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
    NodeSeen,
    Observed,
    PendingGroup,
    RegionOutage,
    burn_usd_per_hour,
)
from geo_ray.cloud.autoscaler.policy import UNKNOWN, AutoscalePolicy, Decided, RunPace
from geo_ray.cloud.autoscaler.state import AutoscalerMemory, set_with_clock
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
    """The nodes of the cluster: what runs there, and how it is told to leave."""

    def seen(self, machines: Sequence[Machine]) -> dict[str, NodeSeen]:
        """Return the nodes of machines, by machine id; a machine without one is left out."""

    def drain(self, machine: Machine, reason: str, until_unix_s: float) -> None:
        """Tell a node that it will be gone; nothing new is started there."""

    def end_idle(self, machine: Machine, reason: str) -> bool:
        """Tell a node to end unless anything runs there.

        Returns:
            Whether nothing does, and nothing will: it ends, or is not there.
        """

    def pending(self) -> tuple[PendingGroup, ...]:
        """Return what waits for a place."""


class WorkLeft(Protocol):
    """The job, as far as machines are concerned."""

    @property
    def is_released(self) -> bool:
        """Whether the cluster's owner has given up all machines."""

    def left_s(self) -> float | None:
        """Return the seconds that the rest takes with the target's machines; see `Observed`."""


@dataclass(frozen=True, slots=True)
class TickResult:
    """What one look came to.

    Attributes:
        decided: what was decided.
        observed: on what.
        errors: of what could not be done; it is tried again.
    """

    decided: Decided
    observed: Observed
    errors: tuple[str, ...] = ()


@dataclass(slots=True)
class Reconciler:
    """See the module's docstring.

    Attributes:
        policy: decides.
        target: what should run; may be exchanged between two looks.
        provider: the clouds.
        nodes: of the cluster.
        work: the job.
        journal: what is remembered.
        cluster: the name that all machines bear.
        fence: of the lease that allows this autoscaler to act.
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
    _looked: tuple[float, float] | None = None  # when the last look was, by both clocks
    _is_set: bool = False  # whether they disagreed then

    def tick(self, now_unix_s: float, steady_s: float | None = None) -> TickResult:
        """Look once, and do what is to be done.

        Args:
            now_unix_s: the present time.
            steady_s: the same by a clock that is never set; None: there is none.

        Raises:
            LeaseLostError: another autoscaler acts.
            RunDirectoryError: the journal cannot be written; nothing was done.
        """
        self.fence.check()
        memory = self.journal.read()
        errors: list[str] = []
        set_s = self._set_s(now_unix_s, steady_s)
        if set_s:
            errors.append(f"the clock was set by {set_s:+.0f} s since the last look")
        self._is_set = bool(set_s) and not self._is_set
        if self._is_set:
            burn = burn_usd_per_hour(memory, self.target, now_unix_s)
            nothing = Decided(memory, (), RunPace(0.0, reason=UNKNOWN), burn)
            return TickResult(nothing, Observed(now_unix_s, None), tuple(errors))
        memory = set_with_clock(memory, set_s) if set_s else memory
        observed = self._observe(now_unix_s, memory, errors)
        decided = self.policy.decide(self.target, memory, observed)
        self.journal.write(decided.memory)
        self._looked = None if steady_s is None else (now_unix_s, steady_s)
        if observed.machines is not None:
            self._failures.clear()  # they are in the journal
        for action in decided.actions:
            self.fence.check()
            self._attempt(errors, partial(self._act, action, decided.memory))
        return TickResult(decided, observed, tuple(errors))

    def _set_s(self, now_unix_s: float, steady_s: float | None) -> float:
        """Return by how much the clock was set since the last look that counted."""
        if steady_s is None or self._looked is None:
            return 0.0
        before_unix_s, before_s = self._looked
        set_s = (now_unix_s - before_unix_s) - (steady_s - before_s)
        return set_s if abs(set_s) >= _SET_S else 0.0

    # ------------------------------------------------------------------ what is seen

    def _observe(self, now_unix_s: float, memory: AutoscalerMemory, errors: list[str]) -> Observed:
        seen = Observed(now_unix_s, None, is_released=self.work.is_released)
        everywhere = _regions(self.target, memory)

        def work() -> None:
            nonlocal seen
            seen = replace(seen, left_s=self.work.left_s())

        def machines() -> None:
            nonlocal seen
            found, why = _asked(partial(self.provider.list_machines, self.cluster), everywhere)
            self._unreachable = {
                name: replace(
                    self._unreachable.get(name, RegionOutage(now_unix_s, "")), reason=reason
                )
                for name, reason in why.items()
            }
            errors.extend(
                f"{name} has not answered for {now_unix_s - outage.since_unix_s:.0f} s, so "
                f"nothing is rented or ended there: {outage.reason}"
                for name, outage in sorted(self._unreachable.items())
            )
            seen = replace(seen, unreachable=self._unreachable)
            seen = replace(seen, nodes=self.nodes.seen(found), machines=found)

        def pending() -> None:
            nonlocal seen
            seen = replace(seen, pending=self.nodes.pending())

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
                f"{name} does not tell what failed: {why[name]}"
                for name in sorted(why.keys() - self._unreachable.keys())
            )

        # What waits is asked after the nodes: what has found a place meanwhile rents nothing.
        # Failures after machines: what is listed as ended is known to have failed, if it has.
        for look in (work, machines, pending, availabilities, failures):
            if not self._attempt(errors, look) and look in (work, pending):
                seen = replace(seen, is_need_known=False)  # the rest is: what it costs, above all
        return replace(
            seen, availabilities=self._availabilities, failures=tuple(self._failures.values())
        )

    def _keep(self, failures: Sequence[LaunchFailure]) -> None:
        for failure in failures:
            key = (failure.request_id, failure.kind, failure.machine_id)
            self._failures[key] = failure

    # ------------------------------------------------------------------ what is done

    def _act(self, action: Action, memory: AutoscalerMemory) -> None:
        match action:
            case Launch(request=request):
                try:
                    self._keep(self.provider.launch(request))
                except ProviderRefusedError as error:  # it will never work: another pool may
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
                        raise ClusterError(f"{machine_id} stays: something began to run there")
                self.provider.terminate([machine_id])

    def _attempt(self, errors: list[str], step: Callable[[], None]) -> bool:
        try:
            step()
        except GeoRayError as error:
            _log.warning("autoscaler: %s", error.message)
            errors.append(str(error))
            return False
        except Exception as error:  # whatever it is: it must not keep the rest from being done
            _log.exception("autoscaler: a part of a look failed")
            errors.append(f"{type(error).__name__}: {error}")
            return False
        return True


def _asked(
    ask: Callable[[], Sequence[T]], everywhere: Sequence[str]
) -> tuple[tuple[T, ...], Mapping[str, str]]:
    """Ask the clouds; return what was answered, and why regions that did not answer have not."""
    try:
        return tuple(ask()), {}
    except RegionsUnreachableError as error:
        return error.found, error.unreachable
    except GeoRayError as error:
        return (), dict.fromkeys(everywhere, error.message)


def _regions(target: ClusterTarget, memory: AutoscalerMemory) -> list[str]:
    """Return the clouds' names of all regions where anything is, or could be."""
    found = {pool.region for pool in target.pools()} | {region.at for region in target.regions}
    found |= {instance.machine.pool.region for instance in memory.instances.values()}
    found |= {
        pending_launch.request.pool.region for pending_launch in memory.pending_launches.values()
    }
    return sorted(found)
