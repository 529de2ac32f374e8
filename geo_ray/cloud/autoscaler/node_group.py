"""Decisions for one node group: the machines of one role in one region.

Rules:

1. Too few machines: add the cheapest ones that meet the need, first of those that were to leave.

2. Enough machines: check at intervals whether others save enough to pay for the change. New
machines come first; a replaced one leaves once they work.

3. Too many machines for a while: drain the most expensive.

`cheapest_cover` of the planner chooses the machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from geo_ray.cloud.autoscaler.actions import Alternative
from geo_ray.cloud.autoscaler.observation import LIFE
from geo_ray.cloud.autoscaler.pools import Losses, PoolOffer, alternatives_of, price_of
from geo_ray.cloud.autoscaler.state import (
    AutoscalerState,
    InstanceState,
    ManagedInstance,
    PendingLaunch,
    outstanding,
)
from geo_ray.cloud.autoscaler.target import MachineKind, MachineRole
from geo_ray.cloud.provider import Market, Pool
from geo_ray.experiment.autoscale import AutoscaleConfig
from geo_ray.planner.cover import SHORT, Cover, cheapest_cover


@dataclass(frozen=True, slots=True)
class CoverItem:
    """Identical machines.

    Attributes:
        rows_per_s: speed of one.
        usd_per_hour: price of one.
        most: maximum count.
    """

    rows_per_s: float
    usd_per_hour: float
    most: int = 1


def cheapest_machines(items: Sequence[CoverItem], rows_per_s: float) -> list[int]:
    """Return the count of each item; all of them if that is not enough."""
    if rows_per_s <= 0 or not items:
        return [0] * len(items)
    most = [max(0, item.most) for item in items]
    cover = Cover.of_rate(
        [item.usd_per_hour for item in items],
        [item.rows_per_s for item in items],
        most,
        rows_per_s,
    )
    counts_I = cheapest_cover(cover).counts_I
    return [int(count) for count in (cover.cap_I if counts_I is None else counts_I)]


ENOUGH = 1 - 1.2 * SHORT  # of the required speed

CHEAPER = "cheaper machines replace it"
TOO_MANY = "surplus machine"
DEADLINE = "the deadline leaves no time for a preemption"
_LEAVE_LATER = (CHEAPER, TOO_MANY, DEADLINE, LIFE)


@dataclass(frozen=True, slots=True)
class NodeGroupSpec:
    """Need for machines of one role in one region.

    Attributes:
        region: region of the run.
        role: role of the machines.
        rows_per_s: required total speed; a server counts as 1.
        kinds: suitable kinds of machines.
        floor: minimum number of on-demand machines.
        only_on_demand: whether spot machines are excluded.
        reason: why the need differs from the plan; empty: it does not.
    """

    region: str
    role: MachineRole
    rows_per_s: float
    kinds: tuple[MachineKind, ...]
    floor: int = 0
    only_on_demand: bool = False
    reason: str = ""

    def speed(self, pool: Pool) -> float:
        """Return the contribution of a machine; 0: unsuitable."""
        if self.only_on_demand and pool.market is Market.SPOT:
            return 0.0
        return next((kind.rows_per_s for kind in self.kinds if kind.type == pool.type), 0.0)


@dataclass(frozen=True, slots=True)
class NodeGroupState:
    """Machines of a node group.

    Attributes:
        rows_per_s: speed of the machines that stay and of requested ones.
        is_quiet: whether all machines work and none was launched or drained since `calm.dwell_s`.
        is_empty: whether there are neither machines nor requests.
    """

    rows_per_s: float
    is_quiet: bool
    is_empty: bool


@dataclass(slots=True)
class NodeGroupChoice:
    """Decision for a node group.

    Attributes:
        launches: machines by pool, each with its reason and price.
        drains: machines that leave now, each with its reason.
        withdraws: whether all pending requests are withdrawn.
        alternatives: all scored pools; empty if none was considered.
    """

    launches: dict[Pool, tuple[int, str, float]] = field(default_factory=dict)
    drains: list[tuple[ManagedInstance, str]] = field(default_factory=list)
    withdraws: bool = False
    alternatives: tuple[Alternative, ...] = ()


def exchange_markup(config: AutoscaleConfig, left_s: float | None) -> float | None:
    """Return the price factor for machines that replace others.

    New machines are paid while they start, and a replacement must save `calm.least_gain`.

    Args:
        config: configuration of the autoscaler.
        left_s: remaining seconds of the job; None: unknown.

    Returns:
        None if the job ends before a replacement could pay off.
    """
    horizon_s = config.calm.horizon_s if left_s is None else min(config.calm.horizon_s, left_s)
    if horizon_s <= config.start_s:
        return None
    return (1 + config.start_s / horizon_s) / (1 - config.calm.least_gain)


class NodeGroupPolicy:
    """Decides for one node group.

    Args:
        config: configuration of the autoscaler.
        memory: state; pending terminations and the region's last launch change.
        node_group: the need.
        offers: available pools, best first.
        losses: cost of a preemption.
        now_unix_s: current time.
    """

    def __init__(
        self,
        config: AutoscaleConfig,
        memory: AutoscalerState,
        node_group: NodeGroupSpec,
        offers: Sequence[PoolOffer],
        losses: Losses,
        now_unix_s: float,
    ) -> None:
        self._config, self._memory, self._node_group = config, memory, node_group
        self._losses, self._now_s = losses, now_unix_s
        self._offers = [offer for offer in offers if node_group.speed(offer.pool) > 0]
        self._record = memory.region(f"{node_group.region}/{node_group.role}")
        self._choice = NodeGroupChoice()

    def decide(
        self,
        instances: Sequence[ManagedInstance],
        pending_launches: Sequence[PendingLaunch],
        left_s: float | None,
    ) -> NodeGroupChoice:
        """Return the decision.

        Args:
            instances: machines of the node group.
            pending_launches: its requests.
            left_s: remaining seconds of the job; None: unknown.
        """
        node_group = self._node_group
        for instance in instances:
            instance.idle_unix_s = None  # the plan needs it: earlier idle time does not count
        if node_group.rows_per_s <= 0:
            self._record.surplus_unix_s = None
            self._drain_all(instances)
            self._choice.withdraws = True
            return self._choice
        for instance in instances:
            if instance.stays and node_group.speed(instance.machine.pool) <= 0:
                instance.leave(DEADLINE if node_group.only_on_demand else TOO_MANY)
        coming = self._coming(pending_launches)
        self._add_floor_machines(instances, coming)
        have = sum(self._speed(instance) for instance in instances if instance.stays)
        have += sum(node_group.speed(pool) * count for pool, count in coming.items())
        if have < node_group.rows_per_s * ENOUGH:
            self._record.surplus_unix_s = None
            self._add_machines(instances, node_group.rows_per_s - have)
        else:
            self._replace(instances, bool(coming), left_s)
        self._let_go(instances)
        return self._choice

    # ------------------------------------------------------------------ what a speed costs

    def state(
        self, instances: Sequence[ManagedInstance], pending_launches: Sequence[PendingLaunch]
    ) -> NodeGroupState:
        """Return the machines of the node group."""
        steady = [instance for instance in instances if instance.stays]
        coming = self._coming(pending_launches)
        rows_per_s = sum(self._speed(instance) for instance in steady)
        rows_per_s += sum(self._node_group.speed(pool) * count for pool, count in coming.items())
        is_quiet = not coming and self._is_quiet(instances)
        return NodeGroupState(rows_per_s, is_quiet, not instances and not coming)

    def cost(
        self,
        instances: Sequence[ManagedInstance],
        pending_launches: Sequence[PendingLaunch],
        rows_per_s: float,
        markup: float | None,
    ) -> tuple[float, float]:
        """Return USD per hour and rows/s of the cheapest machines that reach a speed.

        The machines of the floor are excluded from the price, since they run at any speed.

        Args:
            instances: machines of the node group.
            pending_launches: its requests.
            rows_per_s: required speed.
            markup: price factor of replacements; None: all existing machines stay.
        """
        steady = [
            instance for instance in instances if instance.stays and self._speed(instance) > 0
        ]
        floor = self._floor_of(steady)
        have = sum(self._speed(instance) for instance in floor)
        first = next((o for o in self._offers if _is_safe(o.pool) and o.most > 0), None)
        if len(floor) < self._node_group.floor and first is not None and not pending_launches:
            have += self._node_group.speed(first.pool)
        free = [instance for instance in steady if not any(instance is each for each in floor)]
        retained = [self._item(instance) for instance in free] if markup is None else []
        for pool, count in self._coming(pending_launches).items():
            usd = price_of(self._memory, pool, None) or 0.0
            retained.append(CoverItem(self._node_group.speed(pool), usd, count))
        usd = sum(item.usd_per_hour * item.most for item in retained)
        have += sum(item.rows_per_s * item.most for item in retained)
        free = [] if markup is None else free
        choices = [self._item(instance) for instance in free] + [
            CoverItem(self._node_group.speed(o.pool), o.full_usd_per_hour * (markup or 1.0), o.most)
            for o in self._offers
        ]
        for item, count in zip(choices, cheapest_machines(choices, rows_per_s - have), strict=True):
            usd += item.usd_per_hour * count
            have += item.rows_per_s * count
        return usd, have

    def _is_quiet(self, instances: Sequence[ManagedInstance]) -> bool:
        return (
            all(instance.state is InstanceState.READY for instance in instances)
            and self._now_s - self._record.moved_unix_s >= self._config.calm.dwell_s
        )

    # ------------------------------------------------------------------ too little

    def _coming(self, pending_launches: Sequence[PendingLaunch]) -> dict[Pool, int]:
        found: dict[Pool, int] = {}
        for pending_launch in pending_launches:
            missing = outstanding(self._memory, pending_launch)
            if missing > 0:
                pool = pending_launch.request.pool
                found[pool] = found.get(pool, 0) + missing
        return found

    def _add_floor_machines(
        self, instances: Sequence[ManagedInstance], coming: dict[Pool, int]
    ) -> None:
        """Launch the on-demand machines of the floor first; they count towards the speed."""
        have = sum(d.stays and _is_safe(d.machine.pool) for d in instances)
        have += sum(count for pool, count in coming.items() if _is_safe(pool))
        for instance in self._returning(instances):
            if have < self._node_group.floor and _is_safe(instance.machine.pool):
                instance.keep()
                have += 1
        for offer in self._offers:
            if have >= self._node_group.floor:
                return
            if _is_safe(offer.pool):
                count = min(self._node_group.floor - have, self._left(offer))
                self._launch(offer, count)
                if count > 0:
                    coming[offer.pool] = coming.get(offer.pool, 0) + count
                    have += count

    def _add_machines(self, instances: Sequence[ManagedInstance], rows_per_s: float) -> None:
        returning = self._returning(instances)
        items = [self._item(instance) for instance in returning] + [
            CoverItem(self._node_group.speed(o.pool), o.full_usd_per_hour, self._left(o))
            for o in self._offers
        ]
        counts = cheapest_machines(items, rows_per_s)
        for instance, count in zip(returning, counts, strict=False):
            if count:
                instance.keep()
        for offer, count in zip(self._offers, counts[len(returning) :], strict=True):
            self._launch(offer, count)
        self._show()

    def _returning(self, instances: Sequence[ManagedInstance]) -> list[ManagedInstance]:
        """Return machines that waited for a replacement and may stay instead."""
        return [
            instance
            for instance in instances
            if instance.state is InstanceState.LEAVING
            and instance.leaves_for in (CHEAPER, TOO_MANY, DEADLINE)
            and self._speed(instance) > 0
        ]

    # ------------------------------------------------------------------ enough

    def _replace(
        self, instances: Sequence[ManagedInstance], is_coming: bool, left_s: float | None
    ) -> None:
        steady = [instance for instance in instances if instance.stays]
        is_quiet = not is_coming and self._is_quiet(instances)
        markup = exchange_markup(self._config, left_s)
        offers = self._offers if is_quiet and markup is not None else []
        spare = sum(self._speed(d) for d in steady) - self._node_group.rows_per_s * ENOUGH
        if not offers and spare < min((self._speed(d) for d in steady), default=0.0):
            self._record.surplus_unix_s = None
            return
        retained = self._floor_of(steady)
        free = [instance for instance in steady if not any(instance is each for each in retained)]
        need = self._node_group.rows_per_s - sum(self._speed(instance) for instance in retained)
        items = [self._item(instance) for instance in free] + [
            CoverItem(
                self._node_group.speed(o.pool), o.full_usd_per_hour * (markup or 1.0), self._left(o)
            )
            for o in offers
        ]
        counts = cheapest_machines(items, need)
        rented = counts[len(free) :]
        leaving = [instance for instance, count in zip(free, counts, strict=False) if not count]
        if any(rented):
            for offer, count in zip(offers, rented, strict=True):
                self._launch(offer, count, CHEAPER)
            self._show()
        elif not self._is_lasting_surplus(bool(leaving)):
            return
        self._record.surplus_unix_s = None
        for instance in leaving:
            instance.leave(CHEAPER if any(rented) else TOO_MANY)

    def _is_lasting_surplus(self, is_too_much: bool) -> bool:
        """Return whether there is a surplus that has lasted for a while."""
        since_s = self._record.surplus_unix_s
        if not is_too_much:
            self._record.surplus_unix_s = None
        elif since_s is None:
            self._record.surplus_unix_s = self._now_s
        elif self._now_s - since_s >= self._config.calm.idle_s:
            self._record.surplus_unix_s = None
            return True
        return False

    def _floor_of(self, steady: Sequence[ManagedInstance]) -> list[ManagedInstance]:
        safe = [instance for instance in steady if _is_safe(instance.machine.pool)]
        return sorted(safe, key=self._usd_per_hour)[: self._node_group.floor]

    # ------------------------------------------------------------------ too much

    def _let_go(self, instances: Sequence[ManagedInstance]) -> None:
        """Drain the machines that must leave, as far as the others suffice."""
        able = sum(self._speed(d) for d in instances if _stays_or_waits(d) and _computes(d))
        waiting = [d for d in instances if d.state is InstanceState.LEAVING]
        waiting.sort(key=self._usd_per_speed, reverse=True)
        for instance in waiting:
            reason = instance.leaves_for
            mine = self._speed(instance) if _computes(instance) else 0.0
            must = reason not in _LEAVE_LATER
            if must or able - mine >= self._node_group.rows_per_s * ENOUGH:
                able -= mine
                self._choice.drains.append((instance, reason))

    def _drain_all(self, instances: Sequence[ManagedInstance]) -> None:
        for instance in instances:
            if _stays_or_waits(instance):
                self._choice.drains.append((instance, self._node_group.reason or TOO_MANY))

    # ------------------------------------------------------------------ parts

    def _speed(self, instance: ManagedInstance) -> float:
        return self._node_group.speed(instance.machine.pool)

    def _usd_per_hour(self, instance: ManagedInstance) -> float:
        return self._item(instance).usd_per_hour

    def _usd_per_speed(self, instance: ManagedInstance) -> float:
        return self._usd_per_hour(instance) / max(self._speed(instance), 1e-9)

    def _item(self, instance: ManagedInstance) -> CoverItem:
        pool = instance.machine.pool
        kind = next((each for each in self._node_group.kinds if each.type == pool.type), None)
        usd = price_of(self._memory, pool, kind)
        usd = instance.usd_per_hour if usd is None else usd
        if kind is not None:
            age_h = (self._now_s - instance.machine.launched_unix_s) / 3600.0
            usd *= kind.age_factor(age_h, self._config.calm.horizon_s / 3600.0)
        rate = self._losses.rate_per_h(self._memory, pool)
        return CoverItem(self._speed(instance), self._losses.usd_per_hour(usd, rate))

    def _left(self, offer: PoolOffer) -> int:
        taken = sum(
            count for pool, (count, _, _) in self._choice.launches.items()
            if pool == offer.pool
        )  # fmt: skip
        return max(0, offer.most - taken)

    def _launch(self, offer: PoolOffer, count: int, reason: str = "") -> None:
        if count <= 0 or offer.usd_per_hour is None:
            return
        before = self._choice.launches.get(offer.pool, (0, "", 0.0))[0]
        why = reason or self._node_group.reason or "the plan"
        self._choice.launches[offer.pool] = (before + count, why, offer.usd_per_hour)
        self._record.moved_unix_s = self._now_s
        self._show()

    def _show(self) -> None:
        self._choice.alternatives = alternatives_of(self._offers, self._choice.launches)


def _is_safe(pool: Pool) -> bool:
    return pool.market is Market.ON_DEMAND


def _computes(instance: ManagedInstance) -> bool:
    return instance.is_ready


def _stays_or_waits(instance: ManagedInstance) -> bool:
    return instance.stays or instance.state is InstanceState.LEAVING
