"""What waits for a place, as it is counted: bundles, and how those of a group may lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from geo_ray.autoscale.target import REGION_LABEL

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
