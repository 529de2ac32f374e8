"""The bill of a run that follows a plan, beside what was estimated."""

from __future__ import annotations

from geo_ray.job.rundir import RunDirectory, followed_plan
from geo_ray.observe.metrics.cost import save_cost
from geo_ray.observe.metrics.totals import RunTotals
from geo_ray.planning.actual import Spent, held_against


def account(run: RunDirectory, totals: RunTotals) -> float | None:
    """Write `cost.json` of a run that follows a plan.

    Args:
        run: its directory.
        totals: of all its events.

    Returns:
        What it cost in dollars; None if that is not known, or it follows no plan.

    Raises:
        PlanError: the plan that it follows cannot be read.
        RunDirectoryError: the file cannot be written.
    """
    plan = followed_plan(run)
    if plan is None:
        return None
    cost = held_against(plan, Spent.of(totals))
    save_cost(cost, run.path)
    total = cost.total("USD")
    return None if total is None else total.actual
