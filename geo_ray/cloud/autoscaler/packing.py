"""Bin packing of pending demand on existing machines and on machines that can be launched.

Algorithm: first fit decreasing. The largest bundles are placed first, each on the first existing
machine with capacity. For the largest bundle left, one machine is launched: of those that fit,
the one that takes the most pending demand per dollar. A group that must be placed together is
placed completely or launches nothing: ``STRICT_PACK`` as one bundle with the sum of all,
``STRICT_SPREAD`` on different machines. `infeasible` explains why a bundle fits on no machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from geo_ray.cloud.autoscaler.observation import PendingBundle, PendingGroup, amounts_text
from geo_ray.cloud.autoscaler.target import TYPE_LABEL

_LEAST_USD: Final = 1e-9
_LEAST_SIZE: Final = 1e-6
_TRIES: Final = 32
_EPS: Final = 1e-9


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """A machine that exists or was requested, without its load.

    Attributes:
        key: name of the machine.
        region: region of the run.
        labels: labels of its node.
        resources: free resources.
    """

    key: str
    region: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CapacityOffer:
    """Machines that can be launched.

    Attributes:
        capacity: capacity of each.
        usd_per_hour: price of one.
        most: maximum count.
        is_safe: whether they are on demand.
    """

    capacity: MachineCapacity
    usd_per_hour: float
    most: int
    is_safe: bool = True


@dataclass(slots=True)
class Packed:
    """Result of packing.

    Attributes:
        used: by group, keys of existing machines that it uses.
        rented: number of machines by the key of an offer.
        missed: numbers of the groups that were not placed completely.
    """

    used: dict[int, set[str]] = field(default_factory=dict)
    rented: dict[str, int] = field(default_factory=dict)
    missed: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Item:
    group: int
    bundle: PendingBundle
    is_apart: bool
    size: float
    left: int = 0

    @property
    def turn(self) -> tuple[bool, float]:
        """Sort key: whole machines first, then the largest bundles."""
        return not self.bundle.is_whole, -self.size


@dataclass(slots=True)
class _Filling:
    """A machine while it is filled."""

    capacity: MachineCapacity
    free: dict[str, float]
    groups: set[int] = field(default_factory=set)
    is_full: bool = False

    @classmethod
    def of(cls, capacity: MachineCapacity) -> _Filling:
        return cls(capacity, dict(capacity.resources))

    def fill(self, items: Sequence[_Item], *, is_trial: bool = False) -> float:
        """Place items in order as far as they fit; return the total size placed."""
        taken = 0.0
        for item in items:
            count = self._fits(item)
            if count <= 0:
                continue
            taken += count * max(item.size, _LEAST_SIZE)
            for name, amount in item.bundle.resources.items():
                self.free[name] = self.free.get(name, 0.0) - amount * count
            self.groups.add(item.group)
            self.is_full = item.bundle.is_whole
            if not is_trial:
                item.left -= count
        return taken

    def _fits(self, item: _Item) -> int:
        if self.is_full or item.left <= 0 or not item.bundle.suits(self.capacity.labels):
            return 0
        if item.bundle.is_whole:
            return 0 if self.groups else 1
        if item.is_apart:
            return int(item.group not in self.groups and _times(item.bundle, self.free) >= 1)
        return min(item.left, _times(item.bundle, self.free))


def pack(
    groups: Sequence[PendingGroup],
    capacities: Sequence[MachineCapacity],
    offers: Sequence[CapacityOffer],
    on_demand_first: frozenset[str] = frozenset(),
) -> Packed:
    """Pack pending groups on machines.

    Args:
        groups: pending groups.
        capacities: existing machines, in the order in which they are filled.
        offers: machines that can be launched.
        on_demand_first: regions whose next machine must be on demand, if there is such an offer.
    """
    items = _items(groups, [*capacities, *(offer.capacity for offer in offers)])
    dropped: set[int] = set()
    while True:
        mine = [item for item in items if item.group not in dropped]
        found = _packed(mine, capacities, offers, on_demand_first)
        if found.missed:
            # A second pass with the most constrained bundles first, which others may have blocked.
            mine.sort(key=lambda item: sum(fits(item.bundle, each.capacity) for each in offers))
            again = _packed(mine, capacities, offers, on_demand_first)
            found = again if len(again.missed) < len(found.missed) else found
        failed = _batched(groups, found.missed)
        if not failed:
            found.missed |= dropped
            return found
        dropped |= {failed[-1]} if len(dropped) < _TRIES else set(failed)


def _size(bundle: PendingBundle) -> float:
    return sum(bundle.resources.values())


def largest_of(
    bundle: PendingBundle, capacities: Sequence[MachineCapacity]
) -> MachineCapacity | None:
    """Return the machine of which a bundle takes the smallest fraction; None: no labels match."""
    suit = [capacity for capacity in capacities if bundle.suits(capacity.labels)]
    return min(suit, key=lambda capacity: _fraction(bundle, capacity.resources), default=None)


def fits(bundle: PendingBundle, capacity: MachineCapacity) -> bool:
    """Return whether a bundle fits on an empty machine."""
    return bundle.suits(capacity.labels) and (
        bundle.is_whole or _times(bundle, capacity.resources) >= 1
    )


def _items(groups: Sequence[PendingGroup], capacities: Sequence[MachineCapacity]) -> list[_Item]:
    """Return the items to place, largest first."""
    most: dict[str, float] = {}
    for capacity in capacities:
        for name, amount in capacity.resources.items():
            most[name] = max(most.get(name, 0.0), amount)
    found = []
    for number, group in enumerate(groups):
        for bundle in group.items():
            size = 1.0 if bundle.is_whole else min(1.0, _fraction(bundle, most))
            found.append(_Item(number, bundle, group.strategy == "STRICT_SPREAD", size))
    found.sort(key=attrgetter("turn"))
    return found


def _packed(
    items: Sequence[_Item],
    capacities: Sequence[MachineCapacity],
    offers: Sequence[CapacityOffer],
    on_demand_first: frozenset[str],
) -> Packed:
    for item in items:
        item.left = item.bundle.count
    found = Packed()
    for capacity in capacities:
        filling = _Filling.of(capacity)
        filling.fill(items)
        for group in filling.groups:
            found.used.setdefault(group, set()).add(capacity.key)
    unsafe = set(on_demand_first)
    for number, item in enumerate(items):
        while item.left:
            best: tuple[bool, float] | None = None
            chosen = None
            for offer in offers:
                capacity = offer.capacity
                if found.rented.get(capacity.key, 0) >= offer.most or not fits(
                    item.bundle, capacity
                ):
                    continue
                taken = _Filling.of(capacity).fill(items[number:], is_trial=True)
                value = taken / max(offer.usd_per_hour, _LEAST_USD)
                rank = (capacity.region in unsafe and offer.is_safe, value)
                if best is None or rank > best:
                    best, chosen = rank, capacity
            if chosen is None:
                break
            _Filling.of(chosen).fill(items[number:])
            found.rented[chosen.key] = found.rented.get(chosen.key, 0) + 1
            unsafe.discard(chosen.region)
    found.missed = {item.group for item in items if item.left}
    return found


def _batched(groups: Sequence[PendingGroup], missed: set[int]) -> list[int]:
    return sorted(number for number in missed if groups[number].strategy != "independent")


def _times(bundle: PendingBundle, free: Mapping[str, float]) -> int:
    """Return how many copies of a bundle fit."""
    counts = [
        int(free.get(name, 0.0) / amount + _EPS)
        for name, amount in bundle.resources.items()
        if amount > 0
    ]
    return min(counts, default=bundle.count)


def _fraction(bundle: PendingBundle, has: Mapping[str, float]) -> float:
    """Return the fraction of a machine that a bundle takes, by its scarcest resource."""
    return max(
        (
            amount / has[name] if has.get(name) else float("inf")
            for name, amount in bundle.resources.items()
            if amount > 0
        ),
        default=0.0,
    )


def infeasible(group: PendingGroup, catalog: Sequence[CapacityOffer]) -> str | None:
    """Return why a group can never be placed; None: it can.

    Args:
        group: the group.
        catalog: all machines that may ever be launched.
    """
    capacities = [offer.capacity for offer in catalog]
    for bundle in group.bundles:
        if not any(fits(bundle, capacity) for capacity in capacities):
            return _too_large(bundle, catalog)
    if group.strategy == "independent" or not pack([group], (), catalog).missed:
        return None
    count = sum(bundle.count for bundle in group.bundles)
    largest = max(group.bundles, key=_size)
    apart = ", each on its own machine," if group.strategy == "STRICT_SPREAD" else ""
    regions = {name for each in group.bundles for name in each.regions()}
    machines = sum(offer.most for offer in catalog if offer.capacity.region in regions)
    where = ", ".join(sorted(regions))
    return (
        f"a placement group of {count} bundles of up to {amounts_text(largest.resources)}{apart} "
        f"waits in {where} and needs more machines than the {machines} that plan.regions.*.cap "
        "allows there: it launches nothing"
    )


def _too_large(bundle: PendingBundle, catalog: Sequence[CapacityOffer]) -> str:
    regions = bundle.regions()
    there = [offer.capacity for offer in catalog if offer.capacity.region in regions]
    what = f"a bundle of {amounts_text(bundle.resources)}"
    where = ", ".join(sorted(regions))
    largest = largest_of(bundle, there)
    if largest is None:
        wanted = ", ".join(
            f"{each.key} {'in' if each.is_in else 'not in'} {'|'.join(sorted(each.values))}"
            for each in bundle.labels
        )
        return (
            f"{what} waits in {where} for a machine with {wanted}, which no machine there has: "
            "it launches nothing"
        )
    type_ = largest.labels.get(TYPE_LABEL, "")
    return (
        f"{what} waits in {where} and fits on no machine there, the largest of which is {type_} "
        f"with {amounts_text(largest.resources)}: it launches nothing"
    )
