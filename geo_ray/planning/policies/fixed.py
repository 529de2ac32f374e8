"""`fixed`: plans given machines, priced and timed like every other plan.

When: to see what today's configuration costs, or to compare a plan with a guess.
"""

from __future__ import annotations

from collections.abc import Mapping

from geo_ray.errors import PlanInfeasibleError
from geo_ray.planning.model.predict import plan_of
from geo_ray.planning.plan import Plan
from geo_ray.planning.request import Request
from geo_ray.planning.search.fleet import RegionFleet
from geo_ray.planning.search.search import Search

Kind = tuple[str, str]
"""Type and market."""

Counts = Mapping[str, Mapping[Kind, int]]
"""Region -> kind -> how many."""


def fixed(request: Request, counts: Counts) -> Plan:
    """Return the plan of given machines, with the request's first averager, interval and codec.

    Args:
        request: the question; its limits are not looked at.
        counts: machines by region.

    Raises:
        PlanInfeasibleError: a region has none, or more than its cap, or of a kind it does not have.
    """
    search = Search(request.work, request.fleets(), request.options())
    picks = [fleet.pick(_counts_of(fleet, counts.get(fleet.name, {}))) for fleet in search.fleets]
    found = search.complete(picks, search.options[0])
    return plan_of(request, found, "fixed", 0.0, "as it was asked for")


def _counts_of(fleet: RegionFleet, wanted: Mapping[Kind, int]) -> list[int]:
    """Return how many of each offer; of one kind those that come first, which run already."""
    kinds: list[Kind] = [(offer.type, offer.market) for offer in fleet.offers]
    caps = dict.fromkeys(kinds, 0)
    for kind, offer in zip(kinds, fleet.offers, strict=True):
        caps[kind] += offer.cap
    for kind, count in wanted.items():
        if kind not in caps:
            known = ", ".join(f"{type_} {market}" for type_, market in caps)
            raise PlanInfeasibleError(
                f"region '{fleet.name}' has no {kind[0]} {kind[1]}; it has {known}",
                fix=f"Name one of them, or add it to plan.regions.{fleet.name}.machines.",
            )
        if count > caps[kind]:
            raise PlanInfeasibleError(
                f"region '{fleet.name}': {count} of {kind[0]} {kind[1]}, and the cap is "
                f"{caps[kind]}",
                fix=f"Lower `count`, or raise `cap`, in plan.regions.{fleet.name}.machines.",
            )
    left, found = dict(wanted), []
    for kind, offer in zip(kinds, fleet.offers, strict=True):
        found.append(min(left.get(kind, 0), offer.cap))
        left[kind] = left.get(kind, 0) - found[-1]
    if not any(found):
        raise PlanInfeasibleError(
            f"region '{fleet.name}' has data and no machine is named for it",
            fix=f"Say how many there are: `count` in plan.regions.{fleet.name}.machines.",
        )
    return found
