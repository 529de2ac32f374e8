"""The autoscaler as a detached actor on the cluster's head, and its view of Ray's nodes.

Ray restarts the actor when it dies; the state is in the journal. A lease prevents two autoscalers
from acting at the same time, for example on the head of another cluster, or where Ray declared an
actor dead that was only paused.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import ray
from ray.util import list_named_actors

from geo_ray.base.errors import ClusterError, GeoRayError, LeaseLostError, RegionsUnreachableError
from geo_ray.cloud.autoscaler.actions import ActionReport, AutoscalerStatus, action_report
from geo_ray.cloud.autoscaler.journal import Journal, read_target_override, write_target_override
from geo_ray.cloud.autoscaler.journal_read import (
    SpentRecord,
    SpentRecorder,
    all_spent,
    memory_of,
    put_aside,
    read_spent,
)
from geo_ray.cloud.autoscaler.observation import (
    LabelWanted,
    ObservedNode,
    PendingBundle,
    PendingGroup,
    PlacementStrategy,
)
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.reconcile import Reconciler, TickResult
from geo_ray.cloud.autoscaler.run_work import NamedRun, RunWork
from geo_ray.cloud.autoscaler.state import AutoscalerState
from geo_ray.cloud.autoscaler.target import ClusterTarget
from geo_ray.cloud.provider import Machine, MachineProvider
from geo_ray.experiment.autoscale import AutoscaleConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.detached import NAME_PREFIX, Handle, ServedRegions, detached_actor
from geo_ray.ray_cluster.labels import MACHINE_LABEL, NODE_LABEL, REGION_LABEL
from geo_ray.runs.lease import LeaseKeeper, LeaseSeeker
from geo_ray.storage.conditional_store import ConditionalStore

_PLACEMENT_STRATEGIES: Final[Mapping[str, PlacementStrategy]] = {
    "PACK": "PACK",
    "SPREAD": "SPREAD",
    "STRICT_PACK": "STRICT_PACK",
    "STRICT_SPREAD": "STRICT_SPREAD",
}
_GIVEN: Final = {MACHINE_LABEL, NODE_LABEL}


class RayNodes:
    """See `ClusterNodes`."""

    def observe(self, machines: Sequence[Machine]) -> dict[str, ObservedNode]:
        """See `ClusterNodes.observe`."""
        try:
            living = _living()
            uses = ray_internals.node_uses()
            leaves_ms = ray_internals.draining_nodes()
        except Exception as error:  # without the nodes, no decision is possible
            raise ClusterError(f"cannot list the nodes of Ray: {error}") from error
        found = {}
        for machine in machines:
            for node_id in _of(machine, living):
                leaves_s = None
                if node_id in leaves_ms:  # 0: no deadline was given
                    leaves_s = leaves_ms[node_id] / 1000 or math.inf
                use = uses.get(node_id)
                found[machine.id] = (
                    ObservedNode(is_ready=True, leaves_unix_s=leaves_s)
                    if use is None
                    else ObservedNode(True, use.is_busy, leaves_s, use.resources)
                )
        return found

    def drain(self, machine: Machine, reason: str, until_unix_s: float) -> None:
        """See `ClusterNodes.drain`."""
        try:
            for node_id in _of(machine, _living()):
                ray_internals.drain_node(node_id, reason, int(until_unix_s * 1000))
        except Exception as error:  # see `observe`
            raise ClusterError(f"Ray cannot drain {machine.id}: {error}") from error

    def end_idle(self, machine: Machine, reason: str) -> bool:
        """See `ClusterNodes.end_idle`."""
        try:
            mine = _of(machine, _living())
            return all(ray_internals.drain_node(one, reason, 0, only_idle=True) for one in mine)
        except Exception as error:  # see `observe`
            raise ClusterError(f"Ray cannot terminate {machine.id}: {error}") from error

    def pending(self) -> tuple[PendingGroup, ...]:
        """See `ClusterNodes.pending`. Demand that is bound to one node is excluded."""
        try:
            waiting = ray_internals.pending_bundles()
        except Exception as error:  # see `observe`
            raise ClusterError(f"cannot read pending demand from Ray: {error}") from error
        found = []
        for strategy, wanted in waiting:
            bundles = tuple(
                PendingBundle(resources, tuple(LabelWanted(*each) for each in labels), count)
                for resources, labels, count in wanted
            )
            if not any(each.key in _GIVEN for bundle in bundles for each in bundle.labels):
                found.append(
                    PendingGroup(bundles, _PLACEMENT_STRATEGIES.get(strategy, "independent"))
                )
        return tuple(found)


def _living() -> list[tuple[str, str, Mapping[str, str]]]:
    """Return the live nodes: hexadecimal id, address and labels."""
    return [
        (node["NodeID"], node["NodeManagerAddress"], node.get("Labels", {}))
        for node in ray_internals.nodes()
        if node.get("Alive")
    ]


def _of(machine: Machine, living: Sequence[tuple[str, str, Mapping[str, str]]]) -> list[str]:
    return [
        node_id
        for node_id, address, labels in living
        if labels.get(REGION_LABEL) == machine.labels.get(REGION_LABEL)
        and (
            labels[MACHINE_LABEL] == machine.id
            if MACHINE_LABEL in labels
            else address == machine.address
        )
    ]


_KEPT: Final = 200
_NOTES: Final = 20
_AGAIN_S: Final = 2.0
_MADE: Final = "#"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AutoscaleOrder:
    """Specification of an autoscaler.

    Attributes:
        cluster: name of the cluster, a tag of all its machines.
        provider: the clouds.
        store: store of the lease and the journal of this cluster.
        config: configuration of the autoscaler.
        target: what should run.
        run: run that the cluster serves; None: an open-ended cluster for any job.
        made: how many clusters of this name were created; distinguishes autoscalers of earlier
            ones.
        id: unique id of the cluster.
    """

    cluster: str
    provider: MachineProvider
    store: ConditionalStore
    config: AutoscaleConfig
    target: ClusterTarget
    run: NamedRun | None = None
    made: int = 1
    id: str = ""


@dataclass(slots=True)
class EndlessWork:
    """Work without a known end: machines stay until the owner releases them.

    Attributes:
        is_released: whether the owner has released all machines.
    """

    is_released: bool = False

    def left_s(self) -> float | None:
        """See `WorkLeft`."""
        return 0.0 if self.is_released else None


@dataclass(slots=True)
class _ClusterWork:
    """Work that the machines serve: the run, or the target that was set instead."""

    run: RunWork | None
    end: EndlessWork
    is_followed: bool = False

    @property
    def is_released(self) -> bool:
        return self.end.is_released

    def left_s(self) -> float | None:
        if self.is_released or self.is_followed or self.run is None:
            return self.end.left_s()
        return self.run.left_s()

    def notes(self) -> tuple[str, ...]:
        return () if self.run is None or self.is_followed else self.run.notes


@dataclass
class AutoscalerActor:
    """Manages the machines of a cluster in an actor that outlives its creator.

    The actor is detached, runs on the head and is restarted by Ray. Its state is in the journal. A
    lease prevents two autoscalers from acting at the same time: on the head of another cluster, or
    where Ray declared an actor dead that was only paused.

    Attributes:
        order: specification of the autoscaler.
    """

    order: AutoscaleOrder
    _status: AutoscalerStatus = field(default_factory=partial(AutoscalerStatus, False))
    _actions: deque[ActionReport] = field(default_factory=partial(deque, maxlen=_KEPT))
    _wake: threading.Event = field(default_factory=threading.Event)
    _telling: threading.Lock = field(default_factory=threading.Lock)  # serializes status reports
    _target: ClusterTarget | None = None
    _has_recalled: bool = False
    _lost: tuple[str, ...] = ()
    _work: _ClusterWork = field(init=False)
    _spent: SpentRecorder = field(init=False)

    def __post_init__(self) -> None:
        run, idle_s = self.order.run, self.order.config.calm.idle_s
        self._work = _ClusterWork(None if run is None else RunWork(run, idle_s), EndlessWork())
        self._spent = SpentRecorder(self.order.store, self.order.made)
        threading.Thread(target=self._live, name="autoscaler", daemon=True).start()

    def status(self) -> AutoscalerStatus:
        """Status of the cluster."""
        return self._status

    def follow(self, target: ClusterTarget) -> None:
        """Set another target, which persists across restarts. The head stays the same.

        The budget of the cluster applies unless the target has one. The target stays in effect
        until another one is set or the cluster is released, however much is left of the run.

        Raises:
            RunDirectoryError: the target cannot be written.
        """
        with self._telling:
            self._recall()
            if target.budget_usd is None:
                target = replace(target, budget_usd=(self._target or self.order.target).budget_usd)
            self._go_by(target, is_followed=True)

    def allow(self, budget_usd: float | None) -> None:
        """Set the total budget, which persists across restarts. None: no limit.

        Raises:
            RunDirectoryError: the budget cannot be written.
        """
        with self._telling:
            self._recall()
            target = self._target or self.order.target
            if target.budget_usd != budget_usd:
                is_followed = self._work.is_followed
                self._go_by(replace(target, budget_usd=budget_usd), is_followed=is_followed)

    def _go_by(self, target: ClusterTarget, *, is_followed: bool) -> None:
        """Write a target, then apply it, so that a retry after a failed write is not ignored."""
        target = replace(target, head=self.order.target.head)
        write_target_override(
            self.order.store,
            self.order.made,
            partial(replace, target=target, is_followed=is_followed),
        )
        self._target, self._work.is_followed = target, is_followed
        self._wake.set()

    def release(self) -> None:
        """Release the cluster: all machines are drained and ended. Machines of the user stay.

        Raises:
            RunDirectoryError: the release cannot be written.
        """
        self._work.end.is_released = True
        self._wake.set()
        write_target_override(self.order.store, self.order.made, partial(replace, is_over=True))

    def served(self) -> ServedRegions:
        """Regions that machines are launched for, and how long a launch may take."""
        config, target = self.order.config, self._target or self.order.target
        names = () if self._work.is_released else tuple(region.name for region in target.regions)
        return ServedRegions(names, config.start_s + config.retry.join_s)

    # ------------------------------------------------------------------ its life

    def _live(self) -> None:
        while True:
            try:
                self._hold()
            except Exception as error:  # the thread must survive: machines cost money
                message = str(error) if isinstance(error, GeoRayError) else repr(error)
                _log.warning("autoscaler: %s", message)
                self._status = AutoscalerStatus(False, errors=(message,))
                time.sleep(_AGAIN_S)

    def _hold(self) -> None:
        """Hold the lease of the cluster and reconcile until the lease is lost."""
        keeper = LeaseSeeker(self.order.store, self.order.cluster, _log.info).take()
        try:
            self._look_after(keeper)
        finally:
            keeper.close()

    def _look_after(self, keeper: LeaseKeeper) -> None:
        order = self.order
        policy = AutoscalePolicy(order.config, order.cluster, order.id, order.made)
        keeper.check()
        self._mend_journal(policy.prefix)
        nodes = RayNodes()
        loop = Reconciler(
            policy,
            order.target,
            order.provider,
            nodes,
            self._work,
            Journal(order.store, keeper.token),
            order.cluster,
            keeper,
        )
        while True:
            try:
                if not self._has_recalled:
                    with self._telling:
                        self._recall()
                loop.target = self._target or order.target
                self._report(loop.tick(time.time(), _steady_s()))
            except LeaseLostError:
                raise
            except Exception as error:  # the loop continues: machines cost money
                _log.exception("autoscaler: an iteration failed")
                why = f"an iteration failed: {error}"
                self._status = replace(self._status, is_acting=True, errors=(why,))
            self._wake.wait(order.config.every_s)
            self._wake.clear()

    def _recall(self) -> None:
        """Restore the target override that an earlier actor has written."""
        if self._has_recalled:
            return
        override = read_target_override(self.order.store, self.order.made, self._miss)
        if self._target is None and override.target is not None:  # the head may have changed
            self._target = replace(override.target, head=self.order.target.head)
            self._work.is_followed = override.is_followed
        self._work.end.is_released |= override.is_over
        self._has_recalled = True

    def _mend_journal(self, prefix: str) -> None:
        """Rebuild the state from the listed machines if the journal cannot be read."""
        order = self.order
        cost = ""

        def there() -> AutoscalerState:
            nonlocal cost
            now_s = time.time()
            spent, cost = self._spent_before(now_s)
            try:
                found, unreachable = order.provider.list_machines(order.cluster), frozenset[str]()
            except RegionsUnreachableError as error:
                found, unreachable = error.found, frozenset(error.unreachable)
            return memory_of(found, prefix, now_s, unreachable, spent)

        aside = put_aside(order.store, there)
        if aside is not None:
            self._miss(
                f"the journal could not be read and is saved as {aside}; the machines stay, and "
                f"their cost so far is {cost}"
            )

    def _spent_before(self, now_unix_s: float) -> tuple[SpentRecord | None, str]:
        """Return the spend to assume when the journal is unreadable, and its description."""
        order = self.order
        spent = read_spent(order.store, order.made)
        if spent is not None:
            return spent, f"{spent.paid_usd:.4g} USD, as recorded next to the journal"
        with self._telling:
            self._recall()
        budget_usd = (self._target or order.target).budget_usd
        if budget_usd is None:
            return None, "not known"
        return all_spent(order.made, budget_usd, now_unix_s), (
            f"unknown: the whole budget of {budget_usd:.4g} USD counts as spent, and no machines "
            "are launched until `geo-ray up` raises `plan.budget_usd`"
        )

    def _miss(self, what: str) -> None:
        """Report a loss of state for as long as this actor lives."""
        _log.warning("autoscaler: %s", what)
        self._lost = (*self._lost, what)

    def _report(self, result: TickResult) -> None:
        observed, now_s = result.observed, result.observed.now_unix_s
        unreached = [
            instance.machine  # as last listed
            for instance in result.decided.memory.instances.values()
            if instance.machine.pool.region in observed.unreachable
        ]
        for action in result.decided.actions:
            self._actions.append(action_report(action, now_s))
        errors = result.errors
        try:
            self._spent.write(result.decided.memory, now_s)
        except GeoRayError as error:
            errors += (f"the spend is recorded in the journal only: {error}",)
        self._status = AutoscalerStatus(
            True,
            now_s,
            (*(observed.machines or ()), *unreached),
            result.decided.usd_per_hour,
            tuple(result.decided.memory.ledger.by_region_and_reason()),
            observed.left_s,
            tuple(self._actions),
            (*self._lost, *self._work.notes(), *errors),
            result.decided.notes[:_NOTES],
            result.decided.required.saves,
        )


def _steady_s() -> float:
    """Return seconds of a monotonic clock that continues while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def autoscaler_name(cluster: str, made: int = 1) -> str:
    """Return the actor name of the autoscaler of a cluster."""
    return f"{NAME_PREFIX}{cluster}{_MADE}{made}"


def end_autoscalers(cluster: str, namespace: str, but: str | None = None) -> None:
    """Terminate the autoscalers of a cluster on a head that outlives it.

    Args:
        cluster: name of the cluster.
        namespace: Ray namespace of the actors.
        but: name of the actor to spare; None: none.
    """
    for name in _names(cluster, namespace):
        if name != but:
            with suppress(ValueError):  # it has just ended
                ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)


def find_autoscaler(cluster: str, namespace: str) -> Handle:
    """Return the newest autoscaler of clusters of a name.

    Args:
        cluster: name of the cluster.
        namespace: Ray namespace of the actor.

    Raises:
        ValueError: no autoscaler exists.
    """
    names = _names(cluster, namespace)
    if not names:
        raise ValueError(f"cluster {cluster} has no autoscaler")
    return ray.get_actor(names[-1], namespace=namespace)


def _names(cluster: str, namespace: str) -> list[str]:
    """Return the actor names of the autoscalers of a cluster name, newest last."""
    first = autoscaler_name(cluster).rpartition(_MADE)[0]
    query: Any = list_named_actors
    named: list[dict[str, str]] = query(all_namespaces=True)
    found = []
    for each in named:
        own, _, made = each["name"].rpartition(_MADE)
        if each["namespace"] == namespace and own == first and made.isdecimal():
            found.append((int(made), each["name"]))
    return [name for _, name in sorted(found)]


def start_autoscaler(order: AutoscaleOrder, namespace: str, node_id: str | None = None) -> Handle:
    """Start the autoscaler of a cluster, or return the running one.

    Args:
        order: specification of the autoscaler.
        namespace: Ray namespace of the actor.
        node_id: node of the actor; None: the node of this process.
    """
    name = autoscaler_name(order.cluster, order.made)
    return detached_actor(AutoscalerActor, order, name, namespace, node_id)
