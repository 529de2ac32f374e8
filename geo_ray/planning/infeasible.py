"""Errors for limits that no plan keeps: which limit, by how much, and what would be enough."""

from __future__ import annotations

from collections.abc import Callable

from geo_ray.errors import PlanInfeasibleError
from geo_ray.observe.text import duration_text, enough_text
from geo_ray.planning.model.work import HOUR_S
from geo_ray.planning.plan import Plan
from geo_ray.planning.search.search import Found
from geo_ray.planning.search.ways import SLACK, Limits, Objective

Best = Callable[[Objective, Limits], Found | None]
"""The best choice for an objective within limits."""


def infeasible(limits: Limits, best: Best) -> PlanInfeasibleError:
    """Make the error for limits that nothing keeps.

    Args:
        limits: what was asked for.
        best: the search that found nothing.
    """
    fastest, cheapest = best("time", Limits()), best("cost", Limits())
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
    within = best("cost", Limits(deadline_s=limits.deadline_s))
    near = within or fastest
    return PlanInfeasibleError(
        f"{deadline} and budget {limits.budget_usd:.4g} USD: each can be kept, not both; within "
        f"the deadline the cheapest plan costs {near.usd:.4g} USD",
        fix=f"Set plan.budget_usd to {enough_text(near.usd)}, or plan.deadline_h to "
        f"{enough_text(cheapest.seconds / HOUR_S)}.",
    )


def check_limits(plan: Plan, limits: Limits) -> None:
    """Hold a plan against the limits at its own prices.

    Raises:
        PlanInfeasibleError: it takes longer or costs more than is allowed.
    """
    if plan.total_s > limits.deadline_s * SLACK:
        raise PlanInfeasibleError(
            f"plan.deadline_h {limits.deadline_s / HOUR_S:.4g}: the plan of `{plan.policy}` takes "
            f"{duration_text(plan.total_s)}",
            fix=f"Set plan.deadline_h to {enough_text(plan.total_s / HOUR_S)}, or let "
            "`--policy optimal` look for one that keeps it.",
        )
    if plan.total_usd > limits.budget_usd * SLACK:
        raise PlanInfeasibleError(
            f"budget {limits.budget_usd:.4g} USD: the plan of `{plan.policy}` costs "
            f"{plan.total_usd:.4g} USD",
            fix=f"Set plan.budget_usd to {enough_text(plan.total_usd)}, or let `--policy optimal` "
            "look for one that keeps it.",
        )
