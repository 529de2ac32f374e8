"""Decides whether to change the plan in the middle of a job.

Limits come first: a plan that exceeds the deadline or the budget of what is left is given up for
one that keeps both, the change included, whatever is gained. Between plans that keep them, the new
one must pay for the change and then gain 5 % of what is left: measured prices, speeds and links
change all the time, and a job that follows every change makes no progress.

Source: the 5 % are those of AdaptDL's and this project's other re-decisions; reconstructed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from geo_ray.observe.text import duration_text
from geo_ray.planning.plan import Plan
from geo_ray.planning.search.ways import NO_LIMITS, Limits, Objective

LEAST_GAIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a new plan.

    Attributes:
        plan: the plan to follow from now on.
        changed: whether it is the new plan.
        gain: share of the rest that the new plan would save, after paying for the change.
        reason: explanation with the numbers.
    """

    plan: Plan
    changed: bool
    gain: float
    reason: str


def replan(
    present: Plan, new: Plan | None, objective: Objective = "cost", limits: Limits = NO_LIMITS
) -> Decision:
    """Keep the present plan or take the new one.

    Args:
        present: as it would go on, with today's measurements, for what is left of the job.
        new: the best one for what is left, its start included, during which nothing is computed
            and its machines, servers and disks are paid; None if none keeps the limits.
        objective: what counts.
        limits: of what is left; one of the two plans keeps them.
    """
    if new is None:
        return Decision(present, False, 0.0, "stays: no other plan keeps deadline and budget")
    before, after, unit = present.total_usd, new.total_usd, "USD"
    if objective == "time":
        before, after, unit = present.total_s, new.total_s, "s"
    gain = 1 - after / before
    numbers = f"{before:.4g} {unit} as it is, {after:.4g} {unit} with the change"
    if not limits.keeps(present.total_s, present.total_usd):
        over = f"{duration_text(present.total_s)} and {present.total_usd:.4g} USD"
        return Decision(new, True, gain, f"changes: {over} as it is exceed the limits; {numbers}")
    if gain < LEAST_GAIN:
        return Decision(present, False, gain, f"stays: {numbers}; {LEAST_GAIN:.0%} is asked")
    return Decision(new, True, gain, f"changes: {numbers}, {gain:.0%} less")
