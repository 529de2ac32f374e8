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

from geo_ray.errors import PlanInfeasibleError
from geo_ray.planning.plan import Plan
from geo_ray.planning.predict import plan_of
from geo_ray.planning.request import Request
from geo_ray.planning.search import Found, Search
from geo_ray.planning.ways import Limits
from geo_ray.planning.work import HOUR_S

_REPEATS: Final = 4
_SAME: Final = 1e-3
_NODES: Final = 2_000  # of the trees of all regions, per pace, where the gap is coarse
_OPENED: Final = 100  # intervals of paces, likewise
_MANY: Final = 200  # rentals
_FINE, _COARSE = 1e-4, 1e-2
_FIRST_HOURS: Final = 1.0


def optimal(request: Request, gap: float | None = None) -> Plan:
    """The best plan within the limits.

    Args:
        request: the question.
        gap: share of the objective that is not worth looking for; None for a hundredth of a
            percent, or one percent where there is much to choose from.

    Raises:
        PlanInfeasibleError: no plan keeps the limits; names which one, and the nearest plan.
    """
    search, found, proven = _searched(request, _usual_gap(request) if gap is None else gap)
    return plan_of(request, found, "optimal", proven, _reason(request, found, search))


def front(request: Request) -> list[Plan]:
    """Plans that no other beats in both time and money, from fast to cheap, each with a reason.

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
            raise _infeasible(search, request)
        now_hours, repeat = found.seconds / HOUR_S, repeat + 1
        if repeat == _REPEATS or not _dearer_or_cheaper(request, hours, now_hours):
            return search, found, proven
        hours = now_hours


def _dearer_or_cheaper(request: Request, hours: float, now_hours: float) -> bool:
    """Whether anything has another mean price per hour in so many hours."""
    costs = [rental.usd for site in request.sites for rental in site.rentals]
    costs += [site.stands_usd for site in request.sites]
    return any(
        abs(usd(now_hours) / now_hours - usd(hours) / hours) > _SAME * usd(hours) / hours
        for usd in costs
    )


def _infeasible(search: Search, request: Request) -> PlanInfeasibleError:
    limits = request.limits
    fastest, _ = search.best("time", Limits())
    cheapest, _ = search.best("cost", Limits())
    assert fastest is not None and cheapest is not None, "without limits there is a plan"  # noqa: S101
    if fastest.seconds > limits.deadline_s:
        return PlanInfeasibleError(
            f"deadline {limits.deadline_s:.4g} s: the fastest plan takes {fastest.seconds:.4g} s "
            f"and {fastest.usd:.4g} USD",
            fix=f"Allow {fastest.seconds:.4g} s, raise caps, or let the interval be longer.",
        )
    if cheapest.usd > limits.budget_usd:
        return PlanInfeasibleError(
            f"budget {limits.budget_usd:.4g} USD: the cheapest plan costs {cheapest.usd:.4g} USD "
            f"and takes {cheapest.seconds:.4g} s",
            fix=f"Allow {cheapest.usd:.4g} USD, or cheaper markets and codecs.",
        )
    within, _ = search.best("cost", Limits(deadline_s=limits.deadline_s))
    near = within or fastest
    return PlanInfeasibleError(
        f"deadline {limits.deadline_s:.4g} s and budget {limits.budget_usd:.4g} USD: each can be "
        f"kept, not both; within the deadline the cheapest plan costs {near.usd:.4g} USD",
        fix=f"Allow {near.usd:.4g} USD, or more time.",
    )


def _reason(request: Request, found: Found, search: Search) -> str:
    everything = search.complete([fleet.everything() for fleet in search.fleets], found.option)
    index = found.straggler
    text = (
        f"{search.fleets[index].name} sets the pace with {found.picks[index].step_s:.3g} s per "
        f"step; every other region has the cheapest machines that keep up. Renting all that is "
        f"offered would cost {everything.usd:.4g} USD and take {everything.seconds:.4g} s."
    )
    one = found.option.exchange
    if len(search.fleets) > 1:
        egress = request.work.rounds(found.option.interval) * one.usd
        text += (
            f" The averager in {one.averager} with {one.codec or 'no codec'} every "
            f"{found.option.interval} steps needs {one.seconds:.3g} s and {one.usd:.3g} USD per "
            f"exchange, {egress:.3g} USD in all."
        )
    if not math.isinf(request.limits.deadline_s):
        text += f" It is within the deadline by {request.limits.deadline_s - found.seconds:.3g} s."
    return text
