"""Errors for limits that no plan keeps: which limit, by how much, and what would be enough."""

from __future__ import annotations

import math

from geo_ray.errors import PlanInfeasibleError
from geo_ray.observe.text import duration_text
from geo_ray.planning.model.work import HOUR_S
from geo_ray.planning.plan import Plan
from geo_ray.planning.search.search import Search
from geo_ray.planning.search.ways import Limits

_DIGITS = 3


def at_least(value: float) -> str:
    """Return a number as text, rounded up, so that the printed value is enough."""
    step = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    return f"{math.ceil(value / step) * step:.{_DIGITS + 1}g}"


def infeasible(search: Search, limits: Limits) -> PlanInfeasibleError:
    """Make the error for a search that found nothing within ``limits``."""
    fastest, _ = search.best("time", Limits())
    cheapest, _ = search.best("cost", Limits())
    assert fastest is not None and cheapest is not None, "without limits there is a plan"  # noqa: S101
    deadline = f"deadline {duration_text(limits.deadline_s)}"
    if fastest.seconds > limits.deadline_s:
        return PlanInfeasibleError(
            f"{deadline}: the fastest plan takes {duration_text(fastest.seconds)} and "
            f"{fastest.usd:.4g} USD",
            fix=f"Set plan.deadline_h to {at_least(fastest.seconds / HOUR_S)}, raise caps, or "
            "allow longer intervals and smaller codecs.",
        )
    if cheapest.usd > limits.budget_usd:
        return PlanInfeasibleError(
            f"budget {limits.budget_usd:.4g} USD: the cheapest plan costs {cheapest.usd:.4g} USD "
            f"and takes {duration_text(cheapest.seconds)}",
            fix=f"Set plan.budget_usd to {at_least(cheapest.usd)}, or allow cheaper markets, "
            "longer intervals and smaller codecs.",
        )
    within, _ = search.best("cost", Limits(deadline_s=limits.deadline_s))
    near = within or fastest
    return PlanInfeasibleError(
        f"{deadline} and budget {limits.budget_usd:.4g} USD: each can be kept, not both; within "
        f"the deadline the cheapest plan costs {near.usd:.4g} USD",
        fix=f"Set plan.budget_usd to {at_least(near.usd)}, or plan.deadline_h to "
        f"{at_least(cheapest.seconds / HOUR_S)}.",
    )


def check_limits(plan: Plan, limits: Limits) -> None:
    """For the plan of a policy that does not look at them.

    Raises:
        PlanInfeasibleError: it takes longer or costs more than is allowed.
    """
    if plan.total_s > limits.deadline_s:
        raise PlanInfeasibleError(
            f"deadline {duration_text(limits.deadline_s)}: the plan of `{plan.policy}` takes "
            f"{duration_text(plan.total_s)}",
            fix=f"Set plan.deadline_h to {at_least(plan.total_s / HOUR_S)}, or let "
            "`--policy optimal` look for one that keeps it.",
        )
    if plan.total_usd > limits.budget_usd:
        raise PlanInfeasibleError(
            f"budget {limits.budget_usd:.4g} USD: the plan of `{plan.policy}` costs "
            f"{plan.total_usd:.4g} USD",
            fix=f"Set plan.budget_usd to {at_least(plan.total_usd)}, or let `--policy optimal` "
            "look for one that keeps it.",
        )
