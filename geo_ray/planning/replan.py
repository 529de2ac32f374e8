"""Decides whether to change the plan in the middle of a job.

The new plan must pay for the change and then gain 5 % of what is left: measured prices, speeds and
links change all the time, and a job that follows every change makes no progress.

Source: the 5 % are those of AdaptDL's and this project's other re-decisions; reconstructed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from geo_ray.planning.model.work import HOUR_S
from geo_ray.planning.plan import Plan
from geo_ray.planning.search.ways import Objective

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


def replan(present: Plan, new: Plan, switch_s: float, objective: Objective = "cost") -> Decision:
    """Keep the present plan or take the new one.

    Args:
        present: as it would go on, with today's measurements, for what is left of the job.
        new: the best one for what is left.
        switch_s: how long the change takes; nothing is computed, and the new machines are paid.
        objective: what counts.
    """
    switch_usd = switch_s / HOUR_S * new.usd_per_h
    if objective == "cost":
        before, after, unit = present.total_usd, new.total_usd + switch_usd, "USD"
    else:
        before, after, unit = present.total_s, new.total_s + switch_s, "s"
    gain = 1 - after / before
    numbers = f"{before:.4g} {unit} as it is, {after:.4g} {unit} with the change"
    if gain < LEAST_GAIN:
        return Decision(present, False, gain, f"stays: {numbers}; {LEAST_GAIN:.0%} is asked")
    return Decision(new, True, gain, f"changes: {numbers}, {gain:.0%} less")
