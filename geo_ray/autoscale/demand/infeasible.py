"""Why something that waits could have no place, whatever is rented: in words for people."""

from __future__ import annotations

from collections.abc import Sequence

from geo_ray.autoscale.demand.packing import RoomOffer, fits, largest_of, pack
from geo_ray.autoscale.demand.pending import PendingBundle, PendingGroup, amounts_text
from geo_ray.autoscale.target import TYPE_LABEL


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
    largest = max(group.bundles, key=lambda each: sum(each.resources.values()))
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
