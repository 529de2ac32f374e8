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

from geo_ray.cloud.autoscaler.pools import cool_down, did_not_join, gave, joined, learn, price_of
from geo_ray.cloud.autoscaler.state import (
    AutoscalerMemory,
    InstanceState,
    ManagedInstance,
    PendingLaunch,
    outstanding,
    pool_key,
    taken_in,
    unbooked_unix_s,
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

GroupWay = Literal["alone", "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""``alone``: each bundle for itself, as tasks and actors are. Else all of a group or none of it, as
placement groups of Ray's: STRICT_PACK on one machine, STRICT_SPREAD on one each. PACK and SPREAD
only say what is liked better, and are placed as well in any other way."""

_GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class LabelWanted:
    """What a label of the machine must be.

    Attributes:
        key: of the label.
        values: one of these, or none of them.
        is_in: whether one of them.
    """

    key: str
    values: tuple[str, ...]
    is_in: bool = True

    def suits(self, labels: Mapping[str, str]) -> bool:
        """Return whether a machine's labels do; one that is not known of it speaks for it."""
        value = labels.get(self.key)
        return value is None or (value in self.values) is self.is_in


@dataclass(frozen=True, slots=True)
class PendingBundle:
    """What one bundle of a placement group, a task or an actor waits for.

    Attributes:
        resources: by Ray's names.
        labels: of the machine.
        count: how many are like this.
        is_whole: whether it takes a whole machine, whatever that has.
    """

    resources: Mapping[str, float]
    labels: tuple[LabelWanted, ...] = ()
    count: int = 1
    is_whole: bool = False

    def regions(self) -> frozenset[str]:
        """Return the regions that it may be in; none: it names none."""
        wanted = [each for each in self.labels if each.key == REGION_LABEL and each.is_in]
        if not wanted:
            return frozenset()
        return frozenset.intersection(*(frozenset(each.values) for each in wanted))

    def suits(self, labels: Mapping[str, str]) -> bool:
        """Return whether it may be on a machine with these labels."""
        return all(each.suits(labels) for each in self.labels)


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """Bundles that wait together.

    Attributes:
        bundles: those that have no place.
        way: how they may lie.
    """

    bundles: tuple[PendingBundle, ...]
    way: GroupWay = "alone"

    def items(self) -> tuple[PendingBundle, ...]:
        """Return what is placed as one: of STRICT_PACK all bundles together."""
        if self.way != "STRICT_PACK":
            return self.bundles
        total: dict[str, float] = {}
        labels: dict[LabelWanted, None] = {}
        for bundle in self.bundles:
            labels |= dict.fromkeys(bundle.labels)
            for name, amount in bundle.resources.items():
                total[name] = total.get(name, 0.0) + amount * bundle.count
        return (PendingBundle(total, tuple(labels)),)


def amounts_text(resources: Mapping[str, float]) -> str:
    """Return amounts as people write them."""
    found = [
        f"{amount / _GB:.3g} GB {name}" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if amount > 0
    ]
    return ", ".join(found) or "nothing"


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """The node of a machine.

    Attributes:
        is_ready: whether it is part of the cluster and could compute.
        is_busy: whether anything runs there; unknown counts as busy.
        leaves_unix_s: when it will be gone, as it is being drained, whoever told it to; infinity:
            nobody said when. None: it is not.
        resources: that it has in all; empty: not known.
    """

    is_ready: bool
    is_busy: bool = True
    leaves_unix_s: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)


NO_NODE = NodeSeen(is_ready=False, is_busy=False)


@dataclass(frozen=True, slots=True)
class RegionOutage:
    """A region of a cloud does not answer.

    Attributes:
        since_unix_s: when it first did not.
        reason: why, as far as is known.
    """

    since_unix_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Observed:
    """What the policy decides on.

    Attributes:
        now_unix_s: when.
        machines: of the cluster, as the clouds list them; None: nothing is known, since Ray could
            not be asked for their nodes.
        nodes: by machine id; a machine without a node is not there.
        availabilities: by pool, as far as they are known.
        failures: of launches, each told at least once.
        left_s: seconds that the rest of the job takes with the speed of the target; None: it has
            no known end. 0: it is over; another one may begin.
        pending: what waits for a place.
        unreachable: by the cloud's name, regions that did not answer; what runs there is not known.
        is_need_known: whether the job said how much is left of it, and Ray what waits.
        is_released: whether the cluster's owner has given up all machines.
    """

    now_unix_s: float
    machines: tuple[Machine, ...] | None
    nodes: Mapping[str, NodeSeen] = field(default_factory=dict)
    availabilities: Mapping[Pool, Availability] = field(default_factory=dict)
    failures: tuple[LaunchFailure, ...] = ()
    left_s: float | None = None
    pending: tuple[PendingGroup, ...] = ()
    unreachable: Mapping[str, RegionOutage] = field(default_factory=dict)
    is_need_known: bool = True
    is_released: bool = False

    def node(self, machine_id: str) -> NodeSeen:
        """Return the node of a machine."""
        return self.nodes.get(machine_id, NO_NODE)


_ALIVE = (MachineState.PENDING, MachineState.RUNNING)
_NOTICE_S = 900.0  # no cloud says it earlier; a later end may have been set by hand
NOTICE = "the cloud takes it back"
DRAINED = "its node is being drained"
LIFE = "it ends by itself soon"
NO_NODE_CAME = "its node is not there"
UNWANTED = "nobody waits for it any more"
HEAD = "the head"
REPLACED = (NOTICE, DRAINED, LIFE)
"""Why a machine goes whatever runs there: another one takes its place."""


class StateUpdater:
    """One look, taken into the memory.

    Args:
        config: of the autoscaler.
        target: what should run.
        memory: is changed.
        observed: what is seen.
        prefix: of the ids of the autoscaler's own requests.
    """

    def __init__(
        self,
        config: AutoscaleConfig,
        target: ClusterTarget,
        memory: AutoscalerMemory,
        observed: Observed,
        prefix: str,
    ) -> None:
        self._config, self._target, self._memory = config, target, memory
        self._observed, self._now_s, self._prefix = observed, observed.now_unix_s, prefix

    def apply(self) -> None:
        """Change the memory."""
        for pool in self._target.pools():
            self._memory.pool(pool)  # a quota is of all zones, those without a price included
        for pool, availability in self._observed.availabilities.items():
            if availability.usd_per_hour is not None:
                self._memory.pool(pool).usd_per_hour = availability.usd_per_hour
        self._hold_back()
        self._take_resources()
        self._take_failures()
        self._take_machines()
        for machine_id in list(self._memory.instances):
            instance = self._memory.instances[machine_id]
            self._book(instance, instance.seen_unix_s)
        self._take_heads()
        self._give_up_pending_launches()

    def _hold_back(self) -> None:
        """Let nothing be noted for later than now: that was by a clock that was ahead."""
        for instance in (*self._memory.instances.values(), *self._memory.heads.values()):
            instance.paid_unix_s = min(instance.paid_unix_s, self._now_s)
            instance.seen_unix_s = min(instance.seen_unix_s, self._now_s)
            instance.node_unix_s = min(instance.node_unix_s, self._now_s)
            if instance.idle_unix_s is not None:
                instance.idle_unix_s = min(instance.idle_unix_s, self._now_s)

    def _take_resources(self) -> None:
        """Note what machines of a type have, the least of those that are there now."""
        found: dict[str, dict[str, float]] = {}
        for machine in self._observed.machines or ():
            has = self._observed.node(machine.id).resources
            is_own = (machine.request_id or "").startswith(self._prefix)
            if not has or not is_own:
                continue  # Ray's head offers nothing of what its machine has
            least = found.setdefault(machine.pool.type, dict(has))
            for name in list(least):
                least[name] = min(least[name], has.get(name, 0.0))
        self._memory.resources |= found

    # ------------------------------------------------------------------ launches

    def _take_failures(self) -> None:
        for failure in self._observed.failures:
            pending_launch = self._memory.pending_launches.get(failure.request_id)
            if failure.kind is LaunchFailureKind.THROTTLED:
                continue
            if failure.machine_id is not None:
                self._did_not_start(failure.machine_id, pending_launch, failure.kind)
            elif pending_launch is not None and failure.missing > pending_launch.failed:
                pending_launch.failed = failure.missing
                self._leave_alone(pending_launch.request.pool, failure.kind)

    def _did_not_start(
        self, machine_id: str, pending_launch: PendingLaunch | None, failure_kind: LaunchFailureKind
    ) -> None:
        """A machine that was accepted will not come; it is told again and again."""
        instance = self._memory.instances.get(machine_id)
        is_new = pending_launch is not None and machine_id not in pending_launch.ended
        if pending_launch is not None and is_new:
            pending_launch.ended += (machine_id,)
        if instance is not None:
            self._memory.remove(instance)
            self._leave_alone(instance.machine.pool, failure_kind)
        elif pending_launch is not None and is_new:
            self._leave_alone(pending_launch.request.pool, failure_kind)

    def _give_up_pending_launches(self) -> None:
        for request_id in list(self._memory.pending_launches):
            pending_launch = self._memory.pending_launches[request_id]
            missing = outstanding(self._memory, pending_launch)
            is_unreachable = pending_launch.request.pool.region in self._observed.unreachable
            if missing > 0 and not is_unreachable and self._is_hopeless(pending_launch):
                self._memory.pool(pending_launch.request.pool).until_unix_s = (
                    self._now_s + self._config.retry.longest_s
                )
                missing = 0
            if missing <= 0:
                del self._memory.pending_launches[request_id]

    def _is_hopeless(self, pending_launch: PendingLaunch) -> bool:
        """Return whether it was sent often enough: the time in which nobody looked is no sign."""
        retry = self._config.retry
        waited_s = max(0.0, min(retry.resend_s, self._now_s - pending_launch.sent_unix_s))
        return (pending_launch.sends - 1) * retry.resend_s + waited_s >= retry.give_up_s

    def _leave_alone(self, pool: Pool, failure_kind: LaunchFailureKind) -> None:
        cool_down(self._memory, pool, failure_kind, self._now_s, self._config.retry)

    # ------------------------------------------------------------------ machines

    def _take_machines(self) -> None:
        for listed in self._observed.machines or ():
            machine = self._counted(listed)
            known = self._memory.instances.get(machine.id)
            if machine.state not in _ALIVE:
                if known is not None:
                    self._is_gone(known, self._now_s)
                else:
                    self._has_ended(machine)
            elif known is not None:
                self._look_at(known, machine)
            elif self._is_wanted(machine):
                self._welcome(machine)
            elif not (machine.request_id or "").startswith(self._prefix):
                continue
            elif machine.pool.region in self._memory.unreached:
                self._memory.instances[machine.id] = taken_in(self._memory, machine, self._now_s)
                self._look_at(self._memory.instances[machine.id], machine)
            else:
                self._turn_away(machine)
        unreachable = self._observed.unreachable
        self._memory.unreached = tuple(
            each for each in self._memory.unreached if each in unreachable
        )
        for instance in list(self._memory.instances.values()):
            if instance.machine.pool.region in unreachable:
                self._goes_on(instance)
            elif self._now_s - instance.seen_unix_s >= self._config.retry.missing_s:
                self._is_gone(instance, instance.seen_unix_s)

    def _turn_away(self, machine: Machine) -> None:
        """Let a machine end that nobody waits for; it costs until it has, whatever the cloud says.

        What it has cost before is not booked: it may be in the books already, where lists had
        lost it for a while, or be an earlier cluster's of the name.
        """
        now_s = self._now_s
        instance = ManagedInstance(
            machine, UNWANTED, 0.0, now_s, now_s, now_s, InstanceState.REQUESTED
        )
        instance.terminate(UNWANTED, now_s)
        self._memory.instances[machine.id] = instance

    def _goes_on(self, instance: ManagedInstance) -> None:
        """Take a machine of a silent region to run on: it is paid, and no time runs against it."""
        passed_s = max(0.0, self._now_s - instance.seen_unix_s)
        if not instance.is_ready:
            instance.node_unix_s += passed_s
        if instance.idle_unix_s is not None:
            instance.idle_unix_s += passed_s
        instance.seen_unix_s = self._now_s

    def _counted(self, machine: Machine) -> Machine:
        """Return a machine with the pool that it counts to.

        Where the target names no zones the cloud has chosen one; prices, refusals and preemptions
        are those of the pool that is asked, in whichever zone its machines are.
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

    def _welcome(self, machine: Machine) -> None:
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
        self._look_at(instance, machine)

    def _look_at(self, instance: ManagedInstance, machine: Machine) -> None:
        is_notice = self._is_notice(instance, machine)
        instance.machine, instance.seen_unix_s = machine, self._now_s
        if self._observed.node(machine.id).is_ready:
            if not instance.has_joined:
                joined(self._memory, machine.pool)
                gave(self._memory, machine.pool, instance.node_unix_s)
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
                cool_down(
                    self._memory, machine.pool, LaunchFailureKind.SOLD_OUT, self._now_s, retry
                )
            else:
                self._did_not_join(instance)

    def _did_not_join(self, instance: ManagedInstance) -> None:
        """Count a machine whose node never came against its pool, and its cost for itself."""
        machine, retry = instance.machine, self._config.retry
        did_not_join(self._memory, machine.pool, machine.request_id, self._now_s, retry)
        self._book(instance, instance.seen_unix_s)
        region = machine.labels.get(REGION_LABEL, "")
        self._memory.ledger.move(region, instance.reason, NO_NODE_CAME, instance.starting)
        instance.reason = NO_NODE_CAME

    def _is_notice(self, instance: ManagedInstance, machine: Machine) -> bool:
        """Return whether the cloud has said that it takes a machine back.

        Some tell it to the machine alone, whose agent then drains its node; some show an earlier
        end than the one that it was rented with.
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
        own_s -= self._config.retry.give_up_s  # it may have been sent that much later
        return left_s <= self._config.lead_s and machine.ends_unix_s < own_s

    def _is_gone(self, instance: ManagedInstance, when_unix_s: float) -> None:
        self._book(instance, when_unix_s)
        pool = instance.machine.pool
        has_run = instance.machine.state is MachineState.RUNNING
        if instance.stays and not instance.has_joined and has_run:
            self._did_not_join(instance)
        if instance.stays and pool.market is Market.SPOT:
            learn(self._memory.pool(pool), self._now_s, 0.0, 1)
        self._has_ended(instance.machine)
        self._memory.remove(instance)

    def _has_ended(self, machine: Machine) -> None:
        """Note that a machine is not waited for any more, if it still is."""
        pending_launch = self._memory.pending_launches.get(machine.request_id or "")
        if pending_launch is not None and machine.id not in pending_launch.ended:
            pending_launch.ended += (machine.id,)

    def _take_heads(self) -> None:
        """Count what Ray's head costs; nothing else is decided about it.

        It counts from its start, also before there was an autoscaler. One that no list has any
        more is forgotten when another one is there: as long as none is, it is the machine that
        this runs on.
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
                    since_s = unbooked_unix_s(self._memory, machine, self._now_s)
                    ready, now_s = InstanceState.READY, self._now_s
                    known = ManagedInstance(machine, HEAD, usd, since_s, now_s, now_s, ready, ready)
                    heads[machine.id] = known
                if known is not None:
                    known.seen_unix_s = self._now_s
            elif known is not None:
                self._book(known, self._now_s)
                del heads[machine.id]
        for machine_id, instance in list(heads.items()):
            self._book(instance, instance.seen_unix_s)
            is_missing = self._now_s - instance.seen_unix_s >= self._config.retry.missing_s
            if is_missing and alive - {machine_id}:
                del heads[machine_id]

    # ------------------------------------------------------------------ dollars

    def _book(self, instance: ManagedInstance, until_unix_s: float) -> None:
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


def burn_usd_per_hour(memory: AutoscalerMemory, target: ClusterTarget, now_unix_s: float) -> float:
    """Return what all machines cost per hour, the head and those on their way included."""
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
