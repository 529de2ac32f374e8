"""`optimal`: types, counts, markets, averager, interval and codec together, with a proven gap.

When: whenever prices and speeds are known. Unlike `cloudless` it may rent less than the straggler
has, trade machines for egress by a longer interval or a codec, and put the averager where answers
are cheap to send.

The front of time and money is walked from the cheapest plan on: the next point is the cheapest plan
that is faster than the last one. If it has too many points, the rest is asked for at even steps.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from geo_ray.observe.text import duration_text
from geo_ray.planning.infeasible import check_limits, infeasible
from geo_ray.planning.model.predict import plan_of
from geo_ray.planning.plan import Plan
from geo_ray.planning.policies.cloudless import everything
from geo_ray.planning.request import Request
from geo_ray.planning.search.bracket_search import BracketSearch
from geo_ray.planning.search.search import Found
from geo_ray.planning.search.ways import SLACK, Limits

_NODES: Final = 2_000  # of the trees of all regions, per pace, where the gap is coarse
_OPENED: Final = 100  # intervals of paces, likewise
_OPENED_WITHOUT_LAN: Final = 500
_FINE, _COARSE = 1e-4, 1e-2
_FASTER: Final = 1 / SLACK / SLACK
_POINTS: Final = 32  # of the front


def optimal(request: Request, gap: float | None = None) -> Plan:
    """Return the best plan within the limits.

    Args:
        request: the request.
        gap: share of the objective within which any plan is good enough; None for a hundredth of a
            percent.

    Raises:
        PlanInfeasibleError: no plan keeps the limits; names which one, and the nearest plan.
    """
    search = _search(request, gap)
    found, lower = search.best(request.objective, request.limits)
    if found is None:
        raise infeasible(request.limits, lambda *asked: search.best(*asked)[0])
    value = found.value(request.objective)[0]
    proven = max(0.0, 1 - lower / value) if value > 0 else 0.0
    plan = plan_of(request, found, "optimal", proven, _reason(search, found))
    check_limits(plan, request.limits)
    return plan


def front(request: Request) -> list[Plan]:
    """Return the plans that none beats in both time and money, from fast to cheap, with reasons.

    Raises:
        PlanInfeasibleError: as for `optimal`.
    """
    search, limits = _search(request, None), request.limits
    chosen, _ = search.best(request.objective, limits)
    if chosen is None:
        raise infeasible(limits, lambda *asked: search.best(*asked)[0])
    kept = _not_beaten([chosen, *_walk(search, limits)])
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
        if found is chosen:
            reason = f"chosen (objective: {request.objective}); {reason}"
        plans.append(plan_of(request, found, "optimal", 0.0, reason))
    return plans


def _walk(search: BracketSearch, limits: Limits) -> list[Found]:
    """Return the points of the front, the slowest first."""
    met: list[Found] = []
    deadline_s = limits.deadline_s
    while len(met) < _POINTS:
        found, _ = search.best("cost", replace(limits, deadline_s=deadline_s))
        if found is None:
            return met
        met.append(found)
        deadline_s = found.seconds * _FASTER
    fastest, _ = search.best("time", limits)
    assert fastest is not None, "one was found"  # noqa: S101
    for at_s in np.geomspace(deadline_s, fastest.seconds, _POINTS).tolist():
        found, _ = search.best("cost", replace(limits, deadline_s=at_s))
        met += [] if found is None else [found]
    return met


def _not_beaten(met: list[Found]) -> list[Found]:
    """Return the choices that none beats in both time and money, from fast to cheap."""
    kept: list[Found] = []
    for found in sorted(met, key=lambda f: (f.seconds, f.usd)):
        if not kept or found.usd < kept[-1].usd / SLACK:
            kept.append(found)
    return kept


def _search(request: Request, gap: float | None) -> BracketSearch:
    gap = _FINE if gap is None else gap
    effort = 1 if gap >= _COARSE else 8
    # A pace is looked into exactly and soon where no machine slows another one down.
    has_lan = any(rental.lan_s > 0 for site in request.sites for rental in site.rentals)
    opened = effort * (_OPENED if has_lan else _OPENED_WITHOUT_LAN)
    return BracketSearch(request, gap, effort * _NODES // len(request.sites), opened)


def _reason(search: BracketSearch, found: Found) -> str:
    request, name = search.request, search.request.sites[found.straggler].name
    whole = everything(request)
    exchange = "" if len(request.sites) < 2 else f" and exchanges as configured, {_exchange(whole)}"
    text = (
        f"{name} sets the pace with {found.picks[found.straggler].step_s:.3g} s per "
        f"step; every other region has the cheapest machines that keep up. All that is offered"
        f"{exchange} (policy `everything`), would cost {whole.total_usd:.2f} USD and take "
        f"{duration_text(whole.total_s)}."
    )
    one = found.option.exchange
    if len(request.sites) > 1:
        text += (
            f" The averager in {one.averager} with {one.codec or 'no codec'} every "
            f"{found.option.interval} steps needs {duration_text(one.seconds)} and "
            f"{one.usd:.3g} USD per exchange, {found.egress_usd:.3g} USD in all."
        )
    if not math.isinf(request.limits.deadline_s):
        left_s = request.limits.deadline_s - found.seconds
        text += f" It is within the deadline by {duration_text(left_s)}."
    return text


def _exchange(plan: Plan) -> str:
    every = "every step" if plan.interval == 1 else f"every {plan.interval} steps"
    return f"{every} with {plan.codec or 'no codec'} and the averager in {plan.averager}"
