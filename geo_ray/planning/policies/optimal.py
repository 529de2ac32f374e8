"""`optimal`: types, counts, markets, averager, interval and codec together, with a proven gap.

When: whenever prices and speeds are known. Unlike `cloudless` it may rent less than the straggler
has, trade machines for egress by a longer interval or a codec, and put the averager where answers
are cheap to send.

Prices that fall with age are taken at the mean of the job's length, and the search is repeated with
the length that it found until that no longer changes anything.
"""

from __future__ import annotations

import math
from typing import Final

from geo_ray.observe.text import duration_text
from geo_ray.planning.infeasible import infeasible
from geo_ray.planning.model.predict import plan_of
from geo_ray.planning.model.work import HOUR_S
from geo_ray.planning.plan import Plan
from geo_ray.planning.request import Request
from geo_ray.planning.search.search import Found, Search

_REPEATS: Final = 4
_SAME: Final = 1e-3
_NODES: Final = 2_000  # of the trees of all regions, per pace, where the gap is coarse
_OPENED: Final = 100  # intervals of paces, likewise
_MANY: Final = 200  # rentals
_FINE, _COARSE = 1e-4, 1e-2
_FIRST_HOURS: Final = 1.0


def optimal(request: Request, gap: float | None = None) -> Plan:
    """Return the best plan within the limits.

    Args:
        request: the request.
        gap: share of the objective within which any plan is good enough; None for a hundredth of a
            percent, or one percent where there are many choices.

    Raises:
        PlanInfeasibleError: no plan keeps the limits; names which one, and the nearest plan.
    """
    search, found, proven = _searched(request, _usual_gap(request) if gap is None else gap)
    return plan_of(request, found, "optimal", proven, _reason(request, found, search))


def front(request: Request) -> list[Plan]:
    """Return the plans that none beats in both time and money, from fast to cheap, with reasons.

    Raises:
        PlanInfeasibleError: as for `optimal`.
    """
    search, best, _ = _searched(request, _usual_gap(request))
    kept = search.front(request.limits)
    plans = []
    for index, found in enumerate(kept):
        if index == 0:
            reason = "the fastest"
        else:
            faster = kept[index - 1]
            reason = (
                f"{1 - found.usd / faster.usd:.0%} cheaper than the next faster plan, "
                f"{found.seconds / faster.seconds - 1:.0%} slower"
            )
        if found.seconds == best.seconds and found.usd == best.usd:
            reason = f"chosen (objective: {request.objective}); {reason}"
        plans.append(plan_of(request, found, "optimal", 0.0, reason))
    return plans


def _usual_gap(request: Request) -> float:
    return _FINE if sum(len(site.rentals) for site in request.sites) <= _MANY else _COARSE


def _searched(request: Request, gap: float) -> tuple[Search, Found, float]:
    hours, repeat = _FIRST_HOURS, 0
    while True:
        effort = 1 if gap >= _COARSE else 8
        fleets = request.fleets(hours, effort * _NODES // len(request.sites))
        search = Search(request.work, fleets, request.options(hours))
        found, proven = search.best(request.objective, request.limits, gap, effort * _OPENED)
        if found is None:
            raise infeasible(search, request.limits)
        now_hours, repeat = found.seconds / HOUR_S, repeat + 1
        if repeat == _REPEATS or not _dearer_or_cheaper(request, hours, now_hours):
            return search, found, proven
        hours = now_hours


def _dearer_or_cheaper(request: Request, hours: float, now_hours: float) -> bool:
    """Return whether any mean price per hour differs for so many hours."""
    costs = [rental.usd for site in request.sites for rental in site.rentals]
    costs += [site.stands_usd for site in request.sites]
    return any(
        abs(usd(now_hours) / now_hours - usd(hours) / hours) > _SAME * usd(hours) / hours
        for usd in costs
    )


def _reason(request: Request, found: Found, search: Search) -> str:
    everything = search.complete([fleet.everything() for fleet in search.fleets], found.option)
    index = found.straggler
    text = (
        f"{search.fleets[index].name} sets the pace with {found.picks[index].step_s:.3g} s per "
        f"step; every other region has the cheapest machines that keep up. Renting all that is "
        f"offered would cost {everything.usd:.4g} USD and take {duration_text(everything.seconds)}."
    )
    one = found.option.exchange
    if len(search.fleets) > 1:
        egress = request.work.rounds(found.option.interval) * one.usd
        text += (
            f" The averager in {one.averager} with {one.codec or 'no codec'} every "
            f"{found.option.interval} steps needs {duration_text(one.seconds)} and "
            f"{one.usd:.3g} USD per exchange, {egress:.3g} USD in all."
        )
    if not math.isinf(request.limits.deadline_s):
        left_s = request.limits.deadline_s - found.seconds
        text += f" It is within the deadline by {duration_text(left_s)}."
    return text
