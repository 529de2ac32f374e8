"""Demand-driven decisions: for regions without a planned speed, from pending and running work.

Idea: in regions without a planned speed, pending Ray demand decides how many machines run. Rule:
pending bundles are packed on machines; what does not fit rents new ones. A busy machine is
never replaced for a cheaper one; an idle one leaves after a while. A machine that will end
anyway (notice, end of life) is replaced and then drained. Demand that cannot be placed is
reported with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from geo_ray.cloud.autoscaler.node_group import CHEAPER, DEADLINE, TOO_MANY, NodeGroupChoice
from geo_ray.cloud.autoscaler.observation import (
    LIFE,
    REPLACED,
    UNWANTED,
    LabelWanted,
    Observed,
    ObservedNode,
    PendingBundle,
    PendingGroup,
)
from geo_ray.cloud.autoscaler.packing import (
    CapacityOffer,
    MachineCapacity,
    Packed,
    infeasible,
    pack,
)
from geo_ray.cloud.autoscaler.pools import PoolOffer, alternatives_of
from geo_ray.cloud.autoscaler.state import (
    AutoscalerState,
    InstanceState,
    ManagedInstance,
    PendingLaunch,
    outstanding,
)
from geo_ray.cloud.autoscaler.target import (
    REGION_LABEL,
    ROLE_LABEL,
    TYPE_LABEL,
    MachineRole,
    RegionTarget,
)
from geo_ray.cloud.provider import LaunchRequest, Market, Pool
from geo_ray.experiment.autoscale import AutoscaleConfig

WAITS: Final = "what waits for a place"
_STAY: Final = (CHEAPER, TOO_MANY, DEADLINE)
_ROLES: Final[tuple[MachineRole, ...]] = ("worker", "server")


@dataclass(frozen=True, slots=True)
class DemandRegion:
    """A region without a planned speed.

    Attributes:
        target: target of the region.
        workers: pools for workers, best first.
        servers: pools for the machine of the server.
    """

    target: RegionTarget
    workers: Sequence[PoolOffer]
    servers: Sequence[PoolOffer] = ()


@dataclass(slots=True)
class DemandChoice:
    """Decision for all regions without a planned speed.

    Attributes:
        node_groups: decisions by region and role.
        unneeded: ids of requests that no demand needs.
        notes: demand that cannot be placed, and why.
    """

    node_groups: dict[tuple[str, MachineRole], NodeGroupChoice] = field(default_factory=dict)
    unneeded: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


class DemandKeeper:
    """Decides for regions without a planned speed; see the module.

    Args:
        config: configuration of the autoscaler.
        regions: regions without a planned speed.
        memory: state; pending terminations and idle times change.
        observed: observations.
        only_on_demand: whether spot machines are excluded.
    """

    def __init__(
        self,
        config: AutoscaleConfig,
        regions: Sequence[DemandRegion],
        memory: AutoscalerState,
        observed: Observed,
        *,
        only_on_demand: bool,
    ) -> None:
        self._config, self._regions, self._memory = config, regions, memory
        self._observed, self._now_s = observed, observed.now_unix_s
        self._only_on_demand = only_on_demand
        self._choice = DemandChoice()

    def decide(self) -> DemandChoice:
        """Return the decision."""
        names = {each.target.name for each in self._regions}
        for instance in self._memory.instances.values():
            is_here = _place(instance.machine.labels)[0] in names
            if is_here and _waits(instance) and instance.leaves_for in _STAY:
                instance.keep()  # it was to be replaced or surplus under a plan
        leaving = [
            instance
            for instance in self._memory.instances.values()
            if self._is_replaced(instance, names)
        ]
        groups = [self._replacement(instance) for instance in leaving]
        groups += self._followed(names)
        packed = pack(groups, self._capacities(), self._offers(), self._floors())
        used = {key for keys in packed.used.values() for key in keys}
        for each in self._regions:
            self._keep(each, used, packed)
        self._let_go(leaving, packed)
        return self._choice

    # ------------------------------------------------------------------ what is needed

    def _followed(self, names: set[str]) -> list[PendingGroup]:
        """Return the pending groups of these regions. Infeasible ones become notes."""
        if not self._config.machine_resources:
            return []
        waiting = []
        for group in self._observed.pending:
            mine = [bundle for bundle in group.items() if bundle.regions() & names]
            if mine:
                strategy = "independent" if group.strategy == "STRICT_PACK" else group.strategy
                waiting.append(PendingGroup(tuple(mine), strategy))
        catalog = self._catalog()
        found = []
        for group in waiting:
            known = {offer.capacity.region for offer in catalog}
            if not all(bundle.regions() & known for bundle in group.bundles):
                continue  # the machines there are unknown: such demand is skipped
            why = infeasible(group, catalog)
            if why is None:
                found.append(group)
            elif why not in self._choice.notes:
                self._choice.notes.append(why)
        return found

    def _replacement(self, instance: ManagedInstance) -> PendingGroup:
        """Return a bundle that reserves a replacement: a machine of the same type or larger."""
        region, _ = _place(instance.machine.labels)
        has = self._resources(instance.machine.pool.type)
        larger = [
            type_
            for type_ in self._config.machine_resources
            if has and all(self._resources(type_).get(k, 0.0) >= v for k, v in has.items())
        ]
        types = tuple(dict.fromkeys((instance.machine.pool.type, *larger)))
        labels = (
            LabelWanted(REGION_LABEL, (region,)),
            LabelWanted(TYPE_LABEL, types),
            LabelWanted(ROLE_LABEL, ("worker",)),
        )
        return PendingGroup((PendingBundle({}, labels, is_whole=True),))

    def _is_replaced(self, instance: ManagedInstance, names: set[str]) -> bool:
        region, role = _place(instance.machine.labels)
        return (
            region in names
            and role == "worker"
            and instance.leaves_for in REPLACED
            and _is_at_work(self._node(instance))
            and not self._has_busy_successor(instance)
        )

    def _has_busy_successor(self, instance: ManagedInstance) -> bool:
        """Return whether the replacement of a machine works by now.

        Until then, its capacity is reserved for the replaced machine.
        """
        termination = instance.termination
        name = None if termination is None else termination.successor
        successor = self._memory.instances.get(name or "")
        if successor is None or not successor.stays:
            return False
        return not successor.is_awaited and _is_at_work(self._node(successor))

    def _floors(self) -> frozenset[str]:
        """Return the regions whose next machine must be on demand."""
        found = set()
        for each in self._regions:
            region = each.target
            if region.floor < 1 or region.server is not None:
                continue
            stays = [d.machine.pool for d in self._instances(region, "worker") if d.stays]
            stays += [
                pending_launch.request.pool for pending_launch, _ in self._coming(region, "worker")
            ]
            if not any(pool.market is Market.ON_DEMAND for pool in stays):
                found.add(region.name)
        return frozenset(found)

    # ------------------------------------------------------------------ machines

    def _capacities(self) -> list[MachineCapacity]:
        """Return available capacity: machines, cheapest first, then those not listed yet."""
        found: list[MachineCapacity] = []
        for each in self._regions:
            region = each.target
            if region.server is not None:
                found += self._server_capacity(region)
            free = [d for d in self._instances(region, "worker") if self._has_capacity(d, region)]
            free.sort(key=lambda d: (_is_at_work(self._node(d)), d.usd_per_hour))
            found += [
                self._capacity(
                    instance.machine.id, region, instance.machine.pool, instance.machine.labels
                )
                for instance in free
            ]
            for pending_launch, count in self._coming(region, "worker"):
                request = pending_launch.request
                found += [
                    self._capacity(_coming_key(request, n), region, request.pool, request.labels)
                    for n in range(count)
                ]
        return found

    def _server_capacity(self, region: RegionTarget) -> list[MachineCapacity]:
        """Return the capacity of the server's machine, launched whenever the region has demand."""
        there = [instance for instance in self._instances(region, "server") if instance.stays]
        if region.server is None or any(_is_at_work(self._node(instance)) for instance in there):
            return []
        market = region.server.markets[0] if region.server.markets else Market.ON_DEMAND
        pool = Pool(region.at, region.zones[0], region.server.type, market)
        return [self._capacity(_server_key(region), region, pool, region.labels(pool, "server"))]

    def _has_capacity(self, instance: ManagedInstance, region: RegionTarget) -> bool:
        """Return whether a machine accepts pending work.

        A machine that has become busy since the last iteration counts as well if something waited
        for it: Ray reports loads later than nodes, so that demand may still be listed.
        """
        return (
            instance.stays
            and region.kind(instance.machine.pool.type, "worker") is not None
            and (instance.is_awaited or not _is_at_work(self._node(instance)))
        )

    def _capacity(
        self, key: str, region: RegionTarget, pool: Pool, labels: Mapping[str, str]
    ) -> MachineCapacity:
        return MachineCapacity(key, region.name, labels, self._resources(pool.type))

    def _offers(self) -> list[CapacityOffer]:
        """Return what can be launched now, of machine types with known resources."""
        return [
            CapacityOffer(
                self._capacity(
                    _offer_key(each.target, offer.pool),
                    each.target,
                    offer.pool,
                    each.target.labels(offer.pool, "worker"),
                ),
                offer.full_usd_per_hour,
                offer.most,
                offer.pool.market is Market.ON_DEMAND,
            )
            for each in self._regions
            for offer in self._workers(each)
        ]

    def _workers(self, each: DemandRegion) -> list[PoolOffer]:
        return [offer for offer in each.workers if self._is_rentable(offer)]

    def _is_rentable(self, offer: PoolOffer) -> bool:
        is_safe = offer.pool.market is Market.ON_DEMAND
        return offer.usd_per_hour is not None and (is_safe or not self._only_on_demand)

    def _catalog(self) -> list[CapacityOffer]:
        """Return everything that a region could ever have, ignoring availability and use."""
        found = []
        for each in self._regions:
            region = each.target
            kinds: list[tuple[MachineRole, str, Market, int]] = [
                ("worker", kind.type, market, kind.cap)
                for kind in region.kinds
                for market in kind.markets
                if kind.type in self._config.machine_resources
            ]
            if region.server is not None and kinds:
                kinds += [("server", region.server.type, m, 1) for m in region.server.markets[:1]]
            for role, type_, market, cap in kinds:
                pool = Pool(region.at, None, type_, market)
                key = f"{role} {_offer_key(region, pool)}"
                capacity = self._capacity(key, region, pool, region.labels(pool, role))
                found.append(CapacityOffer(capacity, 1.0, cap))
        return found

    def _resources(self, type_: str) -> Mapping[str, float]:
        """Return the resources of a type as Ray last reported them, else as configured."""
        found = self._memory.resources.get(type_)
        return found or self._config.machine_resources.get(type_, {})

    # ------------------------------------------------------------------ what is done

    def _keep(self, each: DemandRegion, used: set[str], packed: Packed) -> None:
        region = each.target
        choice = self._node_group(region, "worker")
        for offer in self._workers(each):
            count = packed.rented.get(_offer_key(region, offer.pool), 0)
            if count:
                choice.launches[offer.pool] = (count, WAITS, offer.usd_per_hour or 0.0)
        workers = self._instances(region, "worker")
        servers = self._instances(region, "server")
        coming = self._coming(region, "worker")
        unneeded = [
            pending_launch
            for pending_launch, count in coming
            if not any(
                _coming_key(pending_launch.request, number) in used for number in range(count)
            )
        ]
        is_needed = bool(
            choice.launches
            or _server_key(region) in used
            or len(unneeded) < len(coming)
            or any(instance.machine.id in used for instance in workers)
            or any(_is_at_work(self._node(instance)) for instance in (*workers, *servers))
        )
        if is_needed and region.server is not None:
            self._rent_server(each, servers)
        elif not is_needed:
            unneeded += [pending_launch for pending_launch, _ in self._coming(region, "server")]
        self._choice.unneeded |= {pending_launch.request.request_id for pending_launch in unneeded}
        for instance in workers:
            self._watch(instance, is_needed=instance.machine.id in used)
        for instance in servers:
            self._watch(instance, is_needed=is_needed)
        choice.alternatives = alternatives_of(each.workers, choice.launches)

    def _rent_server(self, each: DemandRegion, servers: Sequence[ManagedInstance]) -> None:
        region = each.target
        stays = any(instance.stays for instance in servers)
        if stays or self._coming(region, "server"):
            return
        must_stay = region.floor > 0
        for offer in each.servers:
            is_safe = offer.pool.market is Market.ON_DEMAND
            if offer.most > 0 and self._is_rentable(offer) and (is_safe or not must_stay):
                choice = self._node_group(region, "server")
                choice.launches[offer.pool] = (1, WAITS, offer.usd_per_hour or 0.0)
                choice.alternatives = alternatives_of(each.servers, choice.launches)
                return

    def _watch(self, instance: ManagedInstance, *, is_needed: bool) -> None:
        """Drain machines that were idle for long enough."""
        if not instance.stays:
            return
        is_at_work = _is_at_work(self._node(instance))
        instance.is_awaited = is_needed and not is_at_work
        if is_needed or is_at_work:
            instance.idle_unix_s = None
        elif instance.idle_unix_s is None:
            instance.idle_unix_s = self._now_s
        elif self._now_s - instance.idle_unix_s >= self._config.calm.idle_s:
            instance.release(TOO_MANY, self._now_s)

    def _let_go(self, leaving: Sequence[ManagedInstance], packed: Packed) -> None:
        """Drain machines that will end. At the end of their life they wait for a successor."""
        at_hand = {
            instance.machine.id
            for instance in self._memory.instances.values()
            if self._node(instance).is_ready and instance.stays
        }
        replaced = self._replaced(leaving, packed, at_hand)
        last_s = self._config.drain_s + 2 * self._config.every_s
        for each in self._regions:
            for role in _ROLES:
                instances = self._instances(each.target, role)
                computes = any(instance.machine.id in at_hand for instance in instances)
                for instance in instances:
                    if not _waits(instance):
                        continue
                    ends_s = instance.machine.ends_unix_s
                    is_last = ends_s is not None and ends_s - self._now_s <= last_s
                    may = instance.machine.id in replaced if role == "worker" else computes
                    is_idle = not _is_at_work(self._node(instance))
                    if instance.leaves_for != LIFE or may or is_last or is_idle:
                        drains = self._node_group(each.target, role).drains
                        drains.append((instance, instance.leaves_for))

    def _replaced(
        self, leaving: Sequence[ManagedInstance], packed: Packed, at_hand: set[str]
    ) -> set[str]:
        """Return the machines whose successor works; each successor counts once."""
        taken = {each.termination.successor for each in leaving if each.termination is not None}
        found = set()
        for number, instance in enumerate(leaving):
            if instance.termination is None:
                continue
            if instance.termination.successor not in at_hand:
                free = (packed.used.get(number, set()) & at_hand) - taken
                instance.termination.successor = min(free, default=None)
                taken.add(instance.termination.successor)
            if instance.termination.successor is not None:
                found.add(instance.machine.id)
        return found

    # ------------------------------------------------------------------ parts

    def _node_group(self, region: RegionTarget, role: MachineRole) -> NodeGroupChoice:
        return self._choice.node_groups.setdefault((region.name, role), NodeGroupChoice())

    def _node(self, instance: ManagedInstance) -> ObservedNode:
        return self._observed.node(instance.machine.id)

    def _instances(self, region: RegionTarget, role: MachineRole) -> list[ManagedInstance]:
        return [
            instance
            for instance in self._memory.instances.values()
            if _place(instance.machine.labels) == (region.name, role)
            and instance.reason != UNWANTED
        ]

    def _coming(self, region: RegionTarget, role: MachineRole) -> list[tuple[PendingLaunch, int]]:
        found = []
        for pending_launch in self._memory.pending_launches.values():
            count = outstanding(self._memory, pending_launch)
            if _place(pending_launch.request.labels) == (region.name, role) and count > 0:
                found.append((pending_launch, count))
        return found


def _is_at_work(node: ObservedNode) -> bool:
    return node.is_ready and node.is_busy


def _waits(instance: ManagedInstance) -> bool:
    """Whether it must leave and is not drained yet."""
    return instance.state is InstanceState.LEAVING


def _place(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get(REGION_LABEL, ""), labels.get(ROLE_LABEL, "worker")


def _coming_key(request: LaunchRequest, number: int) -> str:
    return f"{request.request_id}#{number}"


def _server_key(region: RegionTarget) -> str:
    return f"server {region.name}"


def _offer_key(region: RegionTarget, pool: Pool) -> str:
    return f"{region.name} {pool.zone or '*'} {pool.type} {pool.market.value}"
