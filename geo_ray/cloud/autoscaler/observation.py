"""Reconcile inputs: pending work, nodes, machines and prices, and how they update the state.

States come from what is listed, never from what was requested. A list may be old: a missing
machine counts as gone only after a while, and a new one counts from when it is listed. Machines
of an unreachable region count as before, at the last price, until it answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from geo_ray.cloud.autoscaler.pools import (
    back_off,
    joined,
    learn,
    price_of,
    record_join_failure,
    record_success,
)
from geo_ray.cloud.autoscaler.state import (
    AutoscalerState,
    InstanceState,
    ManagedInstance,
    PendingLaunch,
    adopted,
    outstanding,
    pool_key,
    uncharged_unix_s,
)
from geo_ray.cloud.autoscaler.target import REGION_LABEL, ROLE_LABEL, ClusterTarget
from geo_ray.cloud.provider import (
    HEAD_ROLE,
    Availability,
    LaunchFailure,
    LaunchFailureKind,
    Machine,
    MachineState,
    Market,
    Pool,
)
from geo_ray.experiment.autoscale import AutoscaleConfig

PlacementStrategy = Literal["independent", "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Placement strategy of a group.

``independent``: each bundle by itself, as for tasks and actors. The others are those of Ray's
placement groups, which are placed completely or not at all: STRICT_PACK on one machine,
STRICT_SPREAD on one machine each. PACK and SPREAD are preferences.
"""

_GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class LabelWanted:
    """Required value of a node label.

    Attributes:
        key: key of the label.
        values: the values.
        is_in: whether the label must have one of the values, or none of them.
    """

    key: str
    values: tuple[str, ...]
    is_in: bool = True

    def suits(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels match; a label that is not set matches."""
        value = labels.get(self.key)
        return value is None or (value in self.values) is self.is_in


@dataclass(frozen=True, slots=True)
class PendingBundle:
    """Demand of one bundle of a placement group, of a task or of an actor.

    Attributes:
        resources: by Ray's resource names.
        labels: required labels of the node.
        count: number of identical bundles.
        is_whole: whether the bundle takes a whole machine of any size.
    """

    resources: Mapping[str, float]
    labels: tuple[LabelWanted, ...] = ()
    count: int = 1
    is_whole: bool = False

    def regions(self) -> frozenset[str]:
        """Return the regions that the labels allow; empty: any region."""
        wanted = [each for each in self.labels if each.key == REGION_LABEL and each.is_in]
        if not wanted:
            return frozenset()
        return frozenset.intersection(*(frozenset(each.values) for each in wanted))

    def suits(self, labels: Mapping[str, str]) -> bool:
        """Return whether a machine with these labels is allowed."""
        return all(each.suits(labels) for each in self.labels)


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """Bundles that are scheduled together.

    Attributes:
        bundles: bundles that are not placed yet.
        strategy: placement strategy.
    """

    bundles: tuple[PendingBundle, ...]
    strategy: PlacementStrategy = "independent"

    def items(self) -> tuple[PendingBundle, ...]:
        """Return the units of placement: for STRICT_PACK, all bundles as one."""
        if self.strategy != "STRICT_PACK":
            return self.bundles
        total: dict[str, float] = {}
        labels: dict[LabelWanted, None] = {}
        for bundle in self.bundles:
            labels |= dict.fromkeys(bundle.labels)
            for name, amount in bundle.resources.items():
                total[name] = total.get(name, 0.0) + amount * bundle.count
        return (PendingBundle(total, tuple(labels)),)


def amounts_text(resources: Mapping[str, float]) -> str:
    """Return resource amounts as text."""
    found = [
        f"{amount / _GB:.3g} GB {name}" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if amount > 0
    ]
    return ", ".join(found) or "nothing"


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """Ray node of a machine.

    Attributes:
        is_ready: whether it is part of the cluster.
        is_busy: whether anything runs there; unknown counts as busy.
        leaves_unix_s: end of its drain; infinity: draining without a deadline; None: not draining.
        resources: total resources; empty: unknown.
    """

    is_ready: bool
    is_busy: bool = True
    leaves_unix_s: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)


NO_NODE = ObservedNode(is_ready=False, is_busy=False)


@dataclass(frozen=True, slots=True)
class RegionOutage:
    """A region of a cloud that does not answer.

    Attributes:
        since_unix_s: time of the first failed request.
        reason: reason of the failure, if known.
    """

    since_unix_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations that the policy decides on.

    Attributes:
        now_unix_s: time of the observation.
        machines: machines of the cluster as listed; None: unknown, because the nodes could not be
            read from Ray.
        nodes: by machine id; machines without a node are missing.
        availabilities: known quotes by pool.
        failures: failed launches; each is reported at least once.
        left_s: remaining seconds of the job at the target's speed; None: unknown; 0: the job is
            over and another one may begin.
        pending: pending demand.
        unreachable: outages by cloud region; the state of their machines is unknown.
        is_need_known: whether remaining work and pending demand could be read.
        is_released: whether the owner of the cluster has released all machines.
    """

    now_unix_s: float
    machines: tuple[Machine, ...] | None
    nodes: Mapping[str, ObservedNode] = field(default_factory=dict)
    availabilities: Mapping[Pool, Availability] = field(default_factory=dict)
    failures: tuple[LaunchFailure, ...] = ()
    left_s: float | None = None
    pending: tuple[PendingGroup, ...] = ()
    unreachable: Mapping[str, RegionOutage] = field(default_factory=dict)
    is_need_known: bool = True
    is_released: bool = False

    def node(self, machine_id: str) -> ObservedNode:
        """Return the node of a machine."""
        return self.nodes.get(machine_id, NO_NODE)


_ALIVE = (MachineState.PENDING, MachineState.RUNNING)
_NOTICE_S = 900.0
"""Longest notice of a reclaim; an end moved forward earlier than that was moved by a user."""

NOTICE = "the cloud reclaims it"
DRAINED = "its node is being drained"
LIFE = "its maximum life ends soon"
NO_NODE_CAME = "its node did not join"
UNWANTED = "it is no longer needed"
HEAD = "the head"
REPLACED = (NOTICE, DRAINED, LIFE)
"""Reasons that end a machine even while it is busy: a replacement is launched."""


class StateUpdater:
    """Applies observations to the state.

    Args:
        config: configuration of the autoscaler.
        target: what should run.
        memory: state; modified.
        observed: observations.
        prefix: prefix of the ids of the autoscaler's own requests.
    """

    def __init__(
        self,
        config: AutoscaleConfig,
        target: ClusterTarget,
        memory: AutoscalerState,
        observed: Observed,
        prefix: str,
    ) -> None:
        self._config, self._target, self._memory = config, target, memory
        self._observed, self._now_s, self._prefix = observed, observed.now_unix_s, prefix

    def apply(self) -> None:
        """Update the state."""
        for pool in self._target.pools():
            self._memory.pool(pool)  # quotas cover all zones, including those without a price
        for pool, availability in self._observed.availabilities.items():
            if availability.usd_per_hour is not None:
                self._memory.pool(pool).usd_per_hour = availability.usd_per_hour
        self._clamp_times()
        self._apply_resources()
        self._apply_failures()
        self._apply_machines()
        for machine_id in list(self._memory.instances):
            instance = self._memory.instances[machine_id]
            self._charge(instance, instance.observed_unix_s)
        self._apply_heads()
        self._give_up_pending_launches()

    def _clamp_times(self) -> None:
        """Clamp stored times to now: later ones come from a clock that was ahead."""
        for instance in (*self._memory.instances.values(), *self._memory.heads.values()):
            instance.paid_unix_s = min(instance.paid_unix_s, self._now_s)
            instance.observed_unix_s = min(instance.observed_unix_s, self._now_s)
            instance.node_unix_s = min(instance.node_unix_s, self._now_s)
            if instance.idle_unix_s is not None:
                instance.idle_unix_s = min(instance.idle_unix_s, self._now_s)

    def _apply_resources(self) -> None:
        """Record the resources of each machine type: the minimum over the current machines."""
        found: dict[str, dict[str, float]] = {}
        for machine in self._observed.machines or ():
            has = self._observed.node(machine.id).resources
            is_own = (machine.request_id or "").startswith(self._prefix)
            if not has or not is_own:
                continue  # the head offers no resources of its machine to Ray
            least = found.setdefault(machine.pool.type, dict(has))
            for name in list(least):
                least[name] = min(least[name], has.get(name, 0.0))
        self._memory.resources |= found

    # ------------------------------------------------------------------ launches

    def _apply_failures(self) -> None:
        for failure in self._observed.failures:
            pending_launch = self._memory.pending_launches.get(failure.request_id)
            if failure.kind is LaunchFailureKind.THROTTLED:
                continue
            if failure.machine_id is not None:
                self._did_not_start(failure.machine_id, pending_launch, failure.kind)
            elif pending_launch is not None and failure.missing > pending_launch.failed:
                pending_launch.failed = failure.missing
                self._back_off(pending_launch.request.pool, failure.kind)

    def _did_not_start(
        self, machine_id: str, pending_launch: PendingLaunch | None, failure_kind: LaunchFailureKind
    ) -> None:
        """Record that a launch was accepted and its machine failed to start; reports may repeat."""
        instance = self._memory.instances.get(machine_id)
        is_new = pending_launch is not None and machine_id not in pending_launch.ended
        if pending_launch is not None and is_new:
            pending_launch.ended += (machine_id,)
        if instance is not None:
            self._memory.remove(instance)
            self._back_off(instance.machine.pool, failure_kind)
        elif pending_launch is not None and is_new:
            self._back_off(pending_launch.request.pool, failure_kind)

    def _give_up_pending_launches(self) -> None:
        for request_id in list(self._memory.pending_launches):
            pending_launch = self._memory.pending_launches[request_id]
            missing = outstanding(self._memory, pending_launch)
            is_unreachable = pending_launch.request.pool.region in self._observed.unreachable
            if missing > 0 and not is_unreachable and self._is_abandoned(pending_launch):
                self._memory.pool(pending_launch.request.pool).until_unix_s = (
                    self._now_s + self._config.retry.longest_s
                )
                missing = 0
            if missing <= 0:
                del self._memory.pending_launches[request_id]

    def _is_abandoned(self, pending_launch: PendingLaunch) -> bool:
        """Return whether it was resent for long enough; time without iterations does not count."""
        retry = self._config.retry
        waited_s = max(0.0, min(retry.resend_s, self._now_s - pending_launch.sent_unix_s))
        return (pending_launch.sends - 1) * retry.resend_s + waited_s >= retry.give_up_s

    def _back_off(self, pool: Pool, failure_kind: LaunchFailureKind) -> None:
        back_off(self._memory, pool, failure_kind, self._now_s, self._config.retry)

    # ------------------------------------------------------------------ machines

    def _apply_machines(self) -> None:
        for listed in self._observed.machines or ():
            machine = self._counted(listed)
            known = self._memory.instances.get(machine.id)
            if machine.state not in _ALIVE:
                if known is not None:
                    self._is_gone(known, self._now_s)
                else:
                    self._has_ended(machine)
            elif known is not None:
                self._update_machine(known, machine)
            elif self._is_wanted(machine):
                self._add_machine(machine)
            elif not (machine.request_id or "").startswith(self._prefix):
                continue
            elif machine.pool.region in self._memory.unreached:
                self._memory.instances[machine.id] = adopted(self._memory, machine, self._now_s)
                self._update_machine(self._memory.instances[machine.id], machine)
            else:
                self._reject(machine)
        unreachable = self._observed.unreachable
        self._memory.unreached = tuple(
            each for each in self._memory.unreached if each in unreachable
        )
        for instance in list(self._memory.instances.values()):
            if instance.machine.pool.region in unreachable:
                self._assume_running(instance)
            elif self._now_s - instance.observed_unix_s >= self._config.retry.missing_s:
                self._is_gone(instance, instance.observed_unix_s)

    def _reject(self, machine: Machine) -> None:
        """Terminate a machine that is not needed; it is charged until it has ended.

        Its earlier cost is not charged: it may be in the ledger already, or belong to an earlier
        cluster of the name.
        """
        now_s = self._now_s
        instance = ManagedInstance(
            machine, UNWANTED, 0.0, now_s, now_s, now_s, InstanceState.REQUESTED
        )
        instance.terminate(UNWANTED, now_s)
        self._memory.instances[machine.id] = instance

    def _assume_running(self, instance: ManagedInstance) -> None:
        """Assume that a machine of an unreachable region continues to run.

        It is charged, and its timeouts pause.
        """
        passed_s = max(0.0, self._now_s - instance.observed_unix_s)
        if not instance.is_ready:
            instance.node_unix_s += passed_s
        if instance.idle_unix_s is not None:
            instance.idle_unix_s += passed_s
        instance.observed_unix_s = self._now_s

    def _counted(self, machine: Machine) -> Machine:
        """Return a machine with the pool that it counts towards.

        If the target names no zones, the cloud has chosen one. Prices, refusals and preemptions
        count towards the requested pool, in all its zones.
        """
        known = self._memory.instances.get(machine.id)
        pending_launch = self._memory.pending_launches.get(machine.request_id or "")
        region = self._target.region(machine.labels.get(REGION_LABEL, ""))
        zones: tuple[str | None, ...] = () if region is None else region.zones
        zone = machine.pool.zone
        if zone in zones:
            return machine
        if None in zones:
            zone = None
        elif known is not None:
            zone = known.machine.pool.zone
        elif pending_launch is not None:
            zone = pending_launch.request.pool.zone
        return replace(machine, pool=replace(machine.pool, zone=zone))

    def _is_wanted(self, machine: Machine) -> bool:
        pending_launch = self._memory.pending_launches.get(machine.request_id or "")
        if pending_launch is None:
            return False
        came = sum(
            d.machine.request_id == machine.request_id for d in self._memory.instances.values()
        )
        others = [each for each in pending_launch.ended if each != machine.id]
        return came + len(others) < pending_launch.request.count

    def _add_machine(self, machine: Machine) -> None:
        pending_launch = self._memory.pending_launches[machine.request_id or ""]
        since_s = min(machine.launched_unix_s, self._now_s)
        instance = ManagedInstance(
            machine,
            pending_launch.reason,
            pending_launch.usd_per_hour,
            since_s,
            self._now_s,
            self._now_s,
        )
        self._memory.instances[machine.id] = instance
        pending_launch.ended = tuple(each for each in pending_launch.ended if each != machine.id)
        self._update_machine(instance, machine)

    def _update_machine(self, instance: ManagedInstance, machine: Machine) -> None:
        is_notice = self._is_notice(instance, machine)
        instance.machine, instance.observed_unix_s = machine, self._now_s
        if self._observed.node(machine.id).is_ready:
            if not instance.has_joined:
                joined(self._memory, machine.pool)
                record_success(self._memory, machine.pool, instance.node_unix_s)
            if not instance.is_ready:
                instance.apply("join", self._now_s)
        elif instance.is_ready:
            instance.apply("disconnect", self._now_s)
        if not (instance.stays or instance.state is InstanceState.LEAVING):
            return
        leaves_s = self._observed.node(machine.id).leaves_unix_s
        ends_s = machine.ends_unix_s
        if leaves_s is not None:
            ends_s = min(leaves_s, math.inf if ends_s is None else ends_s)
            instance.machine = replace(machine, ends_unix_s=ends_s if ends_s < math.inf else None)
        if is_notice:
            if instance.leaves_for != NOTICE:
                learn(self._memory.pool(machine.pool), self._now_s, 0.0, 1)
            instance.leave(NOTICE)
        elif leaves_s is not None:
            instance.leave(DRAINED)
        elif ends_s is not None and ends_s - self._now_s <= self._config.lead_s:
            instance.leave(LIFE)
        elif (
            not instance.is_ready
            and self._now_s - instance.node_unix_s >= self._config.retry.join_s
        ):
            instance.terminate(NO_NODE_CAME, self._now_s)
            if instance.has_joined:
                retry = self._config.retry
                back_off(self._memory, machine.pool, LaunchFailureKind.SOLD_OUT, self._now_s, retry)
            else:
                self._did_not_join(instance)

    def _did_not_join(self, instance: ManagedInstance) -> None:
        """Count a machine whose node never joined as a failure of its pool.

        Its cost is recorded under the reason `NO_NODE_CAME`.
        """
        machine, retry = instance.machine, self._config.retry
        record_join_failure(self._memory, machine.pool, machine.request_id, self._now_s, retry)
        self._charge(instance, instance.observed_unix_s)
        region = machine.labels.get(REGION_LABEL, "")
        self._memory.ledger.move(region, instance.reason, NO_NODE_CAME, instance.starting)
        instance.reason = NO_NODE_CAME

    def _is_notice(self, instance: ManagedInstance, machine: Machine) -> bool:
        """Return whether the cloud has announced that it reclaims a machine.

        Some clouds notify only the machine, whose agent then drains its node; others list an
        earlier end than the requested one.
        """
        if machine.pool.market is not Market.SPOT:
            return False
        if self._observed.node(machine.id).leaves_unix_s is not None:
            return True
        if machine.ends_unix_s is None:
            return False
        left_s = machine.ends_unix_s - self._now_s
        before_s = instance.machine.ends_unix_s
        if before_s is not None and machine.ends_unix_s < before_s and left_s <= _NOTICE_S:
            return True
        own_s = machine.launched_unix_s + self._config.life_h * 3600
        own_s -= self._config.retry.give_up_s  # longest time between record and request
        return left_s <= self._config.lead_s and machine.ends_unix_s < own_s

    def _is_gone(self, instance: ManagedInstance, when_unix_s: float) -> None:
        self._charge(instance, when_unix_s)
        pool = instance.machine.pool
        has_run = instance.machine.state is MachineState.RUNNING
        if instance.stays and not instance.has_joined and has_run:
            self._did_not_join(instance)
        if instance.stays and pool.market is Market.SPOT:
            learn(self._memory.pool(pool), self._now_s, 0.0, 1)
        self._has_ended(instance.machine)
        self._memory.remove(instance)

    def _has_ended(self, machine: Machine) -> None:
        """Record that a requested machine has ended."""
        pending_launch = self._memory.pending_launches.get(machine.request_id or "")
        if pending_launch is not None and machine.id not in pending_launch.ended:
            pending_launch.ended += (machine.id,)

    def _apply_heads(self) -> None:
        """Charge the machine of the Ray head; nothing else is decided about it.

        It is charged from its start, which may precede the autoscaler. A head that is no longer
        listed is kept until another head is listed, since this process runs on a head.
        """
        head, heads = self._target.head, self._memory.heads
        if head is None:
            return
        alive = set()
        for listed in self._observed.machines or ():
            if listed.labels.get(ROLE_LABEL) != HEAD_ROLE:
                continue
            machine = replace(listed, pool=head.pool)  # the cloud may have chosen the zone
            known = heads.get(machine.id)
            usd = price_of(self._memory, head.pool, head.kind)
            if machine.state in _ALIVE:
                alive.add(machine.id)
                if known is None and usd is not None:
                    since_s = uncharged_unix_s(self._memory, machine, self._now_s)
                    ready, now_s = InstanceState.READY, self._now_s
                    known = ManagedInstance(machine, HEAD, usd, since_s, now_s, now_s, ready, ready)
                    heads[machine.id] = known
                if known is not None:
                    known.observed_unix_s = self._now_s
            elif known is not None:
                self._charge(known, self._now_s)
                del heads[machine.id]
        for machine_id, instance in list(heads.items()):
            self._charge(instance, instance.observed_unix_s)
            is_missing = self._now_s - instance.observed_unix_s >= self._config.retry.missing_s
            if is_missing and alive - {machine_id}:
                del heads[machine_id]

    # ------------------------------------------------------------------ dollars

    def _charge(self, instance: ManagedInstance, until_unix_s: float) -> None:
        hours = (until_unix_s - instance.paid_unix_s) / 3600.0
        if hours <= 0:
            return
        machine = instance.machine
        kind = self._target.kind_of(machine)
        age_h = (instance.paid_unix_s - machine.launched_unix_s) / 3600.0
        factor = 1.0 if kind is None else kind.age_factor(age_h, hours)
        now_usd = price_of(self._memory, machine.pool, kind)
        paid = (instance.usd_per_hour if now_usd is None else now_usd) * factor * hours
        quoted = instance.usd_per_hour * factor * hours
        region = machine.labels.get(REGION_LABEL, "")
        self._memory.ledger.add(region, instance.reason, hours, quoted, paid)
        if not instance.has_joined:
            instance.starting.machine_h += hours
            instance.starting.quoted_usd += quoted
            instance.starting.paid_usd += paid
        instance.paid_unix_s = until_unix_s
        if machine.pool.market is Market.SPOT:
            learn(self._memory.pool(machine.pool), self._now_s, hours)


def burn_usd_per_hour(memory: AutoscalerState, target: ClusterTarget, now_unix_s: float) -> float:
    """Return the hourly cost of all machines, including the head and requested ones."""
    total = 0.0
    for instance in (*memory.instances.values(), *memory.heads.values()):
        machine = instance.machine
        kind = target.kind_of(machine)
        usd = price_of(memory, machine.pool, kind)
        age_h = (now_unix_s - machine.launched_unix_s) / 3600.0
        factor = kind.age_factor(age_h) if kind else 1.0
        total += (instance.usd_per_hour if usd is None else usd) * factor
    for pending_launch in memory.pending_launches.values():
        record = memory.pools.get(pool_key(pending_launch.request.pool))
        usd = record.usd_per_hour if record else None
        total += max(0, outstanding(memory, pending_launch)) * (
            pending_launch.usd_per_hour if usd is None else usd
        )
    return total
