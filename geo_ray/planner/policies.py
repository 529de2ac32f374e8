"""The planning policies `fixed`, `cloudless` and `optimal`.

The module also creates the errors for limits that no plan meets: which limit, by how much, and a
sufficient value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Final

import numpy as np

from geo_ray.base.errors import PlanInfeasibleError
from geo_ray.base.text import duration_text, enough_text
from geo_ray.planner.exchange import SLACK, Limits
from geo_ray.planner.fleet import RegionFleet
from geo_ray.planner.plan import Plan
from geo_ray.planner.predict import plan_of
from geo_ray.planner.price_brackets import Bracket
from geo_ray.planner.request import Request
from geo_ray.planner.search import BracketSearch, Found, Search
from geo_ray.planner.timing import HOUR_S


def infeasible(limits: Limits, search: Search | BracketSearch) -> PlanInfeasibleError:
    """Create the error for limits that no plan meets.

    Args:
        limits: the limits.
        search: the search without a result.
    """
    fastest, _ = search.best("time", Limits())
    cheapest, _ = search.best("cost", Limits())
    assert fastest is not None and cheapest is not None, "without limits there is a plan"  # noqa: S101
    deadline = f"plan.deadline_h {limits.deadline_s / HOUR_S:.4g}"
    if fastest.seconds > limits.deadline_s * SLACK:
        return PlanInfeasibleError(
            f"{deadline}: the fastest plan takes {duration_text(fastest.seconds)} and "
            f"{fastest.usd:.4g} USD",
            fix=f"Set plan.deadline_h to {enough_text(fastest.seconds / HOUR_S)}, raise caps, or "
            "allow longer intervals and smaller codecs.",
        )
    if cheapest.usd > limits.budget_usd * SLACK:
        return PlanInfeasibleError(
            f"budget {limits.budget_usd:.4g} USD: the cheapest plan costs {cheapest.usd:.4g} USD "
            f"and takes {duration_text(cheapest.seconds)}",
            fix=f"Set plan.budget_usd to {enough_text(cheapest.usd)}, or allow cheaper markets, "
            "longer intervals and smaller codecs.",
        )
    within, _ = search.best("cost", Limits(deadline_s=limits.deadline_s))
    near = within or fastest
    return PlanInfeasibleError(
        f"{deadline} and budget {limits.budget_usd:.4g} USD: each can be met alone, but not both; "
        f"within the deadline the cheapest plan costs {near.usd:.4g} USD",
        fix=f"Set plan.budget_usd to {enough_text(near.usd)}, or plan.deadline_h to "
        f"{enough_text(cheapest.seconds / HOUR_S)}.",
    )


def check_limits(plan: Plan, limits: Limits) -> None:
    """Check a plan against the limits, at its own prices.

    Raises:
        PlanInfeasibleError: it exceeds a limit.
    """
    if plan.total_s > limits.deadline_s * SLACK:
        raise PlanInfeasibleError(
            f"plan.deadline_h {limits.deadline_s / HOUR_S:.4g}: the plan of `{plan.policy}` takes "
            f"{duration_text(plan.total_s)}",
            fix=f"Set plan.deadline_h to {enough_text(plan.total_s / HOUR_S)}, or let "
            "`--policy optimal` search for one that meets it.",
        )
    if plan.total_usd > limits.budget_usd * SLACK:
        raise PlanInfeasibleError(
            f"budget {limits.budget_usd:.4g} USD: the plan of `{plan.policy}` costs "
            f"{plan.total_usd:.4g} USD",
            fix=f"Set plan.budget_usd to {enough_text(plan.total_usd)}, or let `--policy optimal` "
            "search for one that meets it.",
        )


Kind = tuple[str, str]
"""Machine type and market."""

Counts = Mapping[str, Mapping[Kind, int]]
"""Region -> kind -> count."""


def fixed(request: Request, counts: Counts) -> Plan:
    """Return the plan of given machines.

    It uses the first averager, interval and codec of the request.

    Args:
        request: the request; its limits are ignored.
        counts: machines by region.

    Raises:
        PlanInfeasibleError: a region has no machines, more than its cap, or an unavailable kind.
    """
    request = request.by_interval()[0]
    search = Search(request.work, request.fleets(), request.options())
    picks = [fleet.pick(_counts_of(fleet, counts.get(fleet.name, {}))) for fleet in search.fleets]
    found = search.complete(picks, search.options[0])
    return plan_of(request, found, "fixed", 0.0, "as requested")


def _counts_of(fleet: RegionFleet, wanted: Mapping[Kind, int]) -> list[int]:
    """Return the count of each offer; of one kind, running machines come first."""
    kinds: list[Kind] = [(offer.type, offer.market) for offer in fleet.offers]
    caps, together = dict.fromkeys(kinds, 0), fleet.gang or 1
    for kind, offer in zip(kinds, fleet.offers, strict=True):
        caps[kind] += offer.cap * together
    if fleet.gang and sorted(filter(None, wanted.values())) not in ([], [fleet.gang]):
        raise PlanInfeasibleError(
            f"region '{fleet.name}': its group has {fleet.gang} machines of one type",
            fix=f"Set `count` to {fleet.gang} for one type, in plan.regions.{fleet.name}.machines.",
        )
    for kind, count in wanted.items():
        if kind not in caps:
            known = ", ".join(f"{type_} {market}" for type_, market in caps)
            raise PlanInfeasibleError(
                f"region '{fleet.name}' has no {kind[0]} {kind[1]}; it has {known}",
                fix=f"Choose one of them, or add it to plan.regions.{fleet.name}.machines.",
            )
        if count > caps[kind]:
            raise PlanInfeasibleError(
                f"region '{fleet.name}': {count} of {kind[0]} {kind[1]}, but the cap is "
                f"{caps[kind]}",
                fix=f"Lower `count`, or raise `cap`, in plan.regions.{fleet.name}.machines.",
            )
    left, found = dict(wanted), []
    for kind, offer in zip(kinds, fleet.offers, strict=True):
        found.append(min(left.get(kind, 0) // together, offer.cap))
        left[kind] = left.get(kind, 0) - found[-1] * together
    if not any(found):
        raise PlanInfeasibleError(
            f"region '{fleet.name}' has data but no machines",
            fix=f"Set `count` in plan.regions.{fleet.name}.machines.",
        )
    return found


def cloudless(request: Request) -> Plan:
    """Plan that right-sizes all regions to the straggler.

    Raises:
        PlanInfeasibleError: a region has data but no available machines.
    """
    search = _at_length(request)
    whole = [fleet.everything() for fleet in search.fleets]
    option = search.options[0]
    most = search.complete(whole, option)
    limits_s = search.option_set([option]).limits_s(most.step_time_s)
    picks = [
        whole[i] if i == most.straggler else fleet.cheapest(limits_s[i]) or whole[i]
        for i, fleet in enumerate(search.fleets)
    ]
    found = search.complete(picks, option)
    name = search.fleets[most.straggler].name
    reason = f"{name} is the straggler and gets all its machines; the others get enough to keep up"
    return plan_of(request, found, "cloudless", 0.0, reason)


def everything(request: Request) -> Plan:
    """Plan with all available machines, the baseline of `cloudless`.

    Raises:
        PlanInfeasibleError: a region has data but no available machines.
    """
    search = _at_length(request)
    picks = [fleet.everything() for fleet in search.fleets]
    found = search.complete(picks, search.options[0])
    return plan_of(request, found, "everything", 0.0, "every region gets all its machines")


def _at_length(request: Request) -> Search:
    """Return the search at prices for about the length of the job."""
    hours, request = 1.0, request.by_interval()[0]
    for _ in range(2):
        length = Bracket.at(hours)
        search = Search(request.work, request.fleets(length), request.options(length), length)
        picks = [fleet.everything() for fleet in search.fleets]
        hours = search.complete(picks, search.options[0]).seconds / HOUR_S
    return search


_NODES: Final = 2_000  # of the trees of all regions, per pace, with a coarse gap
_OPENED: Final = 100  # intervals of paces, with a coarse gap
_OPENED_WITHOUT_LAN: Final = 500
_FINE, _COARSE = 1e-4, 1e-2
_FASTER: Final = 1 / SLACK / SLACK
_POINTS: Final = 32  # on the Pareto front


def optimal(request: Request, gap: float | None = None) -> Plan:
    """Return the best plan within the limits.

    Args:
        request: the request.
        gap: accepted relative distance to the optimum; None: 0.01 %.

    Raises:
        PlanInfeasibleError: no plan meets the limits; the message names the limit and the nearest
            plan.
    """
    search = _search(request, gap)
    found, lower = search.best(request.objective, request.limits)
    if found is None:
        raise infeasible(request.limits, search)
    value = found.value(request.objective)[0]
    proven = max(0.0, 1 - lower / value) if value > 0 else 0.0
    plan = plan_of(request, found, "optimal", proven, _reason(search, found))
    check_limits(plan, request.limits)
    return plan


def front(request: Request) -> list[Plan]:
    """Return the Pareto front in time and money, from fast to cheap, with reasons.

    Raises:
        PlanInfeasibleError: as for `optimal`.
    """
    search, limits = _search(request, None), request.limits
    chosen, _ = search.best(request.objective, limits)
    if chosen is None:
        raise infeasible(limits, search)
    retained = _not_beaten([chosen, *_walk(search, limits)])
    plans = []
    for index, found in enumerate(retained):
        if index == 0:
            reason = "the fastest"
        else:
            faster = retained[index - 1]
            reason = (
                f"{1 - found.usd / faster.usd:.0%} cheaper than the next faster plan, "
                f"{found.seconds / faster.seconds - 1:.0%} slower"
            )
        if found is chosen:
            reason = f"chosen (objective: {request.objective}); {reason}"
        plans.append(plan_of(request, found, "optimal", 0.0, reason))
    return plans


def _walk(search: BracketSearch, limits: Limits) -> list[Found]:
    """Return the points of the front, slowest first."""
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
    """Return the nondominated choices in time and money, from fast to cheap."""
    retained: list[Found] = []
    for found in sorted(met, key=attrgetter("seconds", "usd")):
        if not retained or found.usd < retained[-1].usd / SLACK:
            retained.append(found)
    return retained


def _search(request: Request, gap: float | None) -> BracketSearch:
    gap = _FINE if gap is None else gap
    effort = 1 if gap >= _COARSE else 8
    # exact search is fast if no machine slows another one down
    has_lan = any(rental.lan_s > 0 for site in request.sites for rental in site.rentals)
    opened = effort * (_OPENED if has_lan else _OPENED_WITHOUT_LAN)
    return BracketSearch(request, gap, effort * _NODES // len(request.sites), opened)


def _reason(search: BracketSearch, found: Found) -> str:
    request, name = search.request, search.request.sites[found.straggler].name
    whole = everything(request)
    exchange = (
        "" if len(request.sites) < 2 else f" with exchanges as configured, {_exchange(whole)}"
    )
    text = (
        f"{name} sets the pace with {found.picks[found.straggler].step_s:.3g} s per "
        f"step; every other region has the cheapest machines that keep up. All available machines"
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
