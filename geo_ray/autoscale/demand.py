"""How many machines what waits for a place would need, region by region.

Bundles are put on machines as they come, the largest first, each on the first machine that has room
(first fit decreasing); those that must be apart get machines of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PendingBundle:
    """What one bundle of a placement group, a task or an actor waits for.

    Attributes:
        region: of its label selector; None: it has none.
        resources: by Ray's names.
        apart: of the group whose bundles must be on machines of their own; empty: of none.
    """

    region: str | None
    resources: Mapping[str, float]
    apart: str = ""


def machines_needed(
    bundles: Sequence[PendingBundle], machine: Mapping[str, Mapping[str, float]]
) -> dict[str, int]:
    """Return by region how many machines the bundles need that no living node has room for.

    Args:
        bundles: that wait.
        machine: by region, what a machine there has; a bundle that is larger, or of a region that
            is not there, is left out: no machine would help it.
    """
    found: dict[str, int] = {}
    for region, has in machine.items():
        mine = [bundle for bundle in bundles if bundle.region == region]
        mine.sort(key=lambda bundle: -max(_share(bundle, has), 0.0))
        rooms: list[dict[str, float]] = []
        tenants: list[set[str]] = []
        for bundle in mine:
            if _share(bundle, has) > 1:
                continue
            for room, groups in zip(rooms, tenants, strict=True):
                fits = all(room.get(k, 0.0) >= v - 1e-9 for k, v in bundle.resources.items())
                if fits and not (bundle.apart and bundle.apart in groups):
                    break
            else:
                rooms.append(room := dict(has))
                tenants.append(groups := set())
            for name, amount in bundle.resources.items():
                room[name] = room.get(name, 0.0) - amount
            if bundle.apart:
                groups.add(bundle.apart)
        if rooms:
            found[region] = len(rooms)
    return found


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
