"""Bin packing of pending work on machines at hand and on machines that could be rented.

First fit decreasing: the largest bundles first, each on the first machine with capacity.
Machines at hand are filled one after the other. For the largest bundle left, one machine is
rented: of those it fits on, the one that takes most pending work for its price. A group that
must be placed together is placed as a whole or rents nothing. `infeasible` says why a bundle
cannot fit on any machine.
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
class Room:
    """A machine that is there or on its way, with nothing on it.

    Attributes:
        key: names it.
        region: of the run.
        labels: of its node.
        resources: that are free there.
    """

    key: str
    region: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RoomOffer:
    """Machines that could be rented.

    Attributes:
        room: each of them.
        usd_per_hour: of one.
        most: how many.
        is_safe: whether they are not on the spot market.
    """

    room: Room
    usd_per_hour: float
    most: int
    is_safe: bool = True


@dataclass(slots=True)
class Packed:
    """What came of it.

    Attributes:
        used: by group, the keys of the rooms at hand that it has places in.
        rented: by the key of an offer, how many machines.
        missed: numbers of the groups of which something has no place.
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
        """Whole machines first, then the largest."""
        return not self.bundle.is_whole, -self.size


@dataclass(slots=True)
class _Filling:
    """One machine while it is filled."""

    room: Room
    free: dict[str, float]
    groups: set[int] = field(default_factory=set)
    is_full: bool = False

    @classmethod
    def of(cls, room: Room) -> _Filling:
        return cls(room, dict(room.resources))

    def fill(self, items: Sequence[_Item], *, is_trial: bool = False) -> float:
        """Take what has room, in order; return how much that was."""
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
        if self.is_full or item.left <= 0 or not item.bundle.suits(self.room.labels):
            return 0
        if item.bundle.is_whole:
            return 0 if self.groups else 1
        if item.is_apart:
            return int(item.group not in self.groups and _times(item.bundle, self.free) >= 1)
        return min(item.left, _times(item.bundle, self.free))


def pack(
    groups: Sequence[PendingGroup],
    rooms: Sequence[Room],
    offers: Sequence[RoomOffer],
    on_demand_first: frozenset[str] = frozenset(),
) -> Packed:
    """Return where what waits has places.

    Args:
        groups: what waits.
        rooms: machines at hand, in the order in which they are filled.
        offers: what could be rented.
        on_demand_first: regions whose next machine is not on the spot market, if there is such a
            one.
    """
    items = _items(groups, [*rooms, *(offer.room for offer in offers)])
    dropped: set[int] = set()
    while True:
        mine = [item for item in items if item.group not in dropped]
        found = _packed(mine, rooms, offers, on_demand_first)
        if found.missed:
            # Once more, those first that fit on few machines: else others may be in their way.
            mine.sort(key=lambda item: sum(fits(item.bundle, each.room) for each in offers))
            again = _packed(mine, rooms, offers, on_demand_first)
            found = again if len(again.missed) < len(found.missed) else found
        failed = _batched(groups, found.missed)
        if not failed:
            found.missed |= dropped
            return found
        dropped |= {failed[-1]} if len(dropped) < _TRIES else set(failed)


def _size(bundle: PendingBundle) -> float:
    return sum(bundle.resources.values())


def largest_of(bundle: PendingBundle, rooms: Sequence[Room]) -> Room | None:
    """Return the machine of which a bundle would take the least; None: no label suits."""
    suit = [room for room in rooms if bundle.suits(room.labels)]
    return min(suit, key=lambda room: _share(bundle, room.resources), default=None)


def fits(bundle: PendingBundle, room: Room) -> bool:
    """Return whether a machine with nothing on it takes one of a bundle."""
    return bundle.suits(room.labels) and (bundle.is_whole or _times(bundle, room.resources) >= 1)


def _items(groups: Sequence[PendingGroup], rooms: Sequence[Room]) -> list[_Item]:
    """Return what is to be placed, the largest first."""
    most: dict[str, float] = {}
    for room in rooms:
        for name, amount in room.resources.items():
            most[name] = max(most.get(name, 0.0), amount)
    found = []
    for number, group in enumerate(groups):
        for bundle in group.items():
            size = 1.0 if bundle.is_whole else min(1.0, _share(bundle, most))
            found.append(_Item(number, bundle, group.way == "STRICT_SPREAD", size))
    found.sort(key=attrgetter("turn"))
    return found


def _packed(
    items: Sequence[_Item],
    rooms: Sequence[Room],
    offers: Sequence[RoomOffer],
    on_demand_first: frozenset[str],
) -> Packed:
    for item in items:
        item.left = item.bundle.count
    found = Packed()
    for room in rooms:
        filling = _Filling.of(room)
        filling.fill(items)
        for group in filling.groups:
            found.used.setdefault(group, set()).add(room.key)
    unsafe = set(on_demand_first)
    for number, item in enumerate(items):
        while item.left:
            best: tuple[bool, float] | None = None
            chosen = None
            for offer in offers:
                room = offer.room
                if found.rented.get(room.key, 0) >= offer.most or not fits(item.bundle, room):
                    continue
                taken = _Filling.of(room).fill(items[number:], is_trial=True)
                worth = taken / max(offer.usd_per_hour, _LEAST_USD)
                rank = (room.region in unsafe and offer.is_safe, worth)
                if best is None or rank > best:
                    best, chosen = rank, room
            if chosen is None:
                break
            _Filling.of(chosen).fill(items[number:])
            found.rented[chosen.key] = found.rented.get(chosen.key, 0) + 1
            unsafe.discard(chosen.region)
    found.missed = {item.group for item in items if item.left}
    return found


def _batched(groups: Sequence[PendingGroup], missed: set[int]) -> list[int]:
    return sorted(number for number in missed if groups[number].way != "alone")


def _times(bundle: PendingBundle, free: Mapping[str, float]) -> int:
    """Return how many of a bundle have room."""
    counts = [
        int(free.get(name, 0.0) / amount + _EPS)
        for name, amount in bundle.resources.items()
        if amount > 0
    ]
    return min(counts, default=bundle.count)


def _share(bundle: PendingBundle, has: Mapping[str, float]) -> float:
    """Return the share of a machine that a bundle takes of what it takes most of."""
    return max(
        (
            amount / has[name] if has.get(name) else float("inf")
            for name, amount in bundle.resources.items()
            if amount > 0
        ),
        default=0.0,
    )


def infeasible(group: PendingGroup, catalog: Sequence[RoomOffer]) -> str | None:
    """Return why a group has no place; None: it could have one.

    Args:
        group: what waits.
        catalog: all machines that may ever be rented.
    """
    rooms = [offer.room for offer in catalog]
    for bundle in group.bundles:
        if not any(fits(bundle, room) for room in rooms):
            return _too_large(bundle, catalog)
    if group.way == "alone" or not pack([group], (), catalog).missed:
        return None
    count = sum(bundle.count for bundle in group.bundles)
    largest = max(group.bundles, key=_size)
    apart = ", each on a machine of its own," if group.way == "STRICT_SPREAD" else ""
    regions = {name for each in group.bundles for name in each.regions()}
    machines = sum(offer.most for offer in catalog if offer.room.region in regions)
    where = ", ".join(sorted(regions))
    return (
        f"a placement group of {count} bundles of up to {amounts_text(largest.resources)}{apart} "
        f"waits in {where} and needs more machines than the {machines} that plan.regions.*.cap "
        "allows there: nothing is rented for it"
    )


def _too_large(bundle: PendingBundle, catalog: Sequence[RoomOffer]) -> str:
    regions = bundle.regions()
    there = [offer.room for offer in catalog if offer.room.region in regions]
    what = f"a bundle of {amounts_text(bundle.resources)}"
    where = ", ".join(sorted(regions))
    largest = largest_of(bundle, there)
    if largest is None:
        wanted = ", ".join(
            f"{each.key} {'in' if each.is_in else 'not in'} {'|'.join(sorted(each.values))}"
            for each in bundle.labels
        )
        return (
            f"{what} waits in {where} for a machine with {wanted}, and none there could have that: "
            "nothing is rented for it"
        )
    type_ = largest.labels.get(TYPE_LABEL, "")
    return (
        f"{what} waits in {where} and fits on no machine there, the largest of which is {type_} "
        f"with {amounts_text(largest.resources)}: nothing is rented for it"
    )
