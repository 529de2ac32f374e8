"""One look after the other: observe, decide, write it down, act.

It may die at every point. What was decided is written before it is done, and everything that is
done may be done again: a launch has an id, and an end is of a machine that is to end. So the next
one, or the same one started anew, finds in the journal what was under way, sends again what left no
trace, and ends what nobody waits for. Only who holds the lease acts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from geo_ray.autoscale.actions import Action, Drain, End, Launch
from geo_ray.autoscale.demand.pending import PendingGroup
from geo_ray.autoscale.journal import Journal
from geo_ray.autoscale.observed import NodeSeen, Observed
from geo_ray.autoscale.policy import AutoscalePolicy, Decided
from geo_ray.autoscale.target import ClusterTarget
from geo_ray.errors import ClusterError, GeoRayError, ProviderRefusedError
from geo_ray.providers.base import LaunchFailure, Machine, MachineProvider, Pool, Shortage, Stock

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
        fence: raises `LeaseLostError` if another autoscaler may act.
    """

    policy: AutoscalePolicy
    target: ClusterTarget
    provider: MachineProvider
    nodes: ClusterNodes
    work: WorkLeft
    journal: Journal
    cluster: str
    fence: Callable[[], None]
    _failures: dict[tuple[str, Shortage], LaunchFailure] | None = None
    _stocks: dict[Pool, Stock] | None = None
    _stocks_unix_s: float = 0.0

    def tick(self, now_unix_s: float) -> TickResult:
        """Look once, and do what is to be done.

        Args:
            now_unix_s: the present time.

        Raises:
            LeaseLostError: another autoscaler acts.
            RunDirectoryError: the journal cannot be written; nothing was done.
        """
        self.fence()
        memory = self.journal.read()
        errors: list[str] = []
        observed = self._observe(now_unix_s, errors)
        decided = self.policy.decide(self.target, memory, observed)
        self.journal.write(decided.memory)
        for action in decided.actions:
            self.fence()
            self._attempt(errors, partial(self._act, action, observed))
        return TickResult(decided, observed, tuple(errors))

    # ------------------------------------------------------------------ what is seen

    def _observe(self, now_unix_s: float, errors: list[str]) -> Observed:
        seen = Observed(now_unix_s, None)

        def machines() -> None:
            nonlocal seen
            listed = tuple(self.provider.list_machines(self.cluster))
            seen = replace(seen, machines=listed, nodes=self.nodes.seen(listed))

        def failures() -> None:
            self._keep(self.provider.poll_failures(self.cluster))

        def stocks() -> None:
            due_unix_s = self._stocks_unix_s + self.policy.prices_every_s
            if self._stocks is None or now_unix_s >= due_unix_s:
                found = self.provider.stock(self.target.pools())
                self._stocks = {stock.pool: stock for stock in found}
                self._stocks_unix_s = now_unix_s

        def work() -> None:
            nonlocal seen
            seen = replace(seen, left_s=self.work.left_s())

        def pending() -> None:
            nonlocal seen
            seen = replace(seen, pending=self.nodes.pending())

        # What waits is asked after the nodes: what has found a place meanwhile rents nothing.
        for look in (work, stocks, failures, machines, pending):
            if not self._attempt(errors, look) and look in (work, pending):
                # Whether anything is needed is not known: nothing is decided.
                return replace(seen, machines=None)
        told, self._failures = tuple((self._failures or {}).values()), None
        return replace(seen, stocks=self._stocks or {}, failures=told)

    def _keep(self, failures: Sequence[LaunchFailure]) -> None:
        self._failures = self._failures or {}
        for failure in failures:
            self._failures[failure.request_id, failure.shortage] = failure

    # ------------------------------------------------------------------ what is done

    def _act(self, action: Action, observed: Observed) -> None:
        match action:
            case Launch(request=request):
                try:
                    self._keep(self.provider.launch(request))
                except ProviderRefusedError as error:  # it will never work: another pool may
                    failure = LaunchFailure(
                        request.request_id,
                        request.pool,
                        request.count,
                        Shortage.REFUSED,
                        error.message,
                    )
                    self._keep([failure])
                    raise
            case Drain(machine_id=machine_id, reason=reason, until_unix_s=until_s):
                for machine in observed.machines or ():
                    if machine.id == machine_id:
                        self.nodes.drain(machine, reason, until_s)
            case End(machine_id=machine_id, only_idle=only_idle, reason=reason):
                for machine in observed.machines or ():
                    is_it = only_idle and machine.id == machine_id
                    if is_it and not self.nodes.end_idle(machine, reason):
                        raise ClusterError(f"{machine_id} stays: something began to run there")
                self.provider.terminate([machine_id])

    def _attempt(self, errors: list[str], step: Callable[[], None]) -> bool:
        try:
            step()
        except GeoRayError as error:
            _log.warning("autoscaler: %s", error.message)
            errors.append(str(error))
            return False
        return True
