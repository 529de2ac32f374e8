"""Decide whether to change the plan in the middle of a job.

Machines that already run are distinguished from those that would be rented.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from geo_ray.base.text import duration_text
from geo_ray.planner.config import Objective
from geo_ray.planner.exchange import NO_LIMITS, Limits
from geo_ray.planner.plan import Plan, RegionPlan
from geo_ray.planner.policies import Kind
from geo_ray.planner.request import Rental, Site

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


def with_running(site: Site, present: RegionPlan, run_h: float) -> Site:
    """Return what a region could keep and rent; what it could keep comes first.

    Args:
        site: as it would be if nothing ran there.
        present: what runs there.
        run_h: age of the run's first machines.
    """
    running = _running(present)
    rentals: list[Rental] = []
    for rental in site.rentals:
        kept = _kept(rental, running.get((rental.type, rental.market), {}), run_h)
        left = max(0, rental.cap - sum(each.cap for each in kept))
        rentals += [*kept, replace(rental, cap=left, since_h=run_h)]
    found = replace(site, rentals=rentals, server_since_h=run_h)
    if site.server is not None and present.server == site.server:
        since_h = present.server_since_h
        usd = partial(site.stands_usd, age_h=_age_h(run_h, since_h))
        found = replace(found, stands_usd=usd, server_since_h=since_h)
    sinces_h = {found.server_since_h, *(rental.since_h for rental in rentals)}
    later_h = {edge_h - _age_h(run_h, since_h) for edge_h in site.edges_h for since_h in sinces_h}
    return replace(found, edges_h=frozenset(edge_h for edge_h in later_h if edge_h > 0))


def counts_of(present: RegionPlan) -> dict[Kind, int]:
    """Return the machines that run, by type and market."""
    return {kind: sum(by_since.values()) for kind, by_since in _running(present).items()}


def _running(present: RegionPlan) -> Mapping[Kind, Mapping[float, int]]:
    """Return how many there are, by when they were rented; a plan has an entry for each batch."""
    found: dict[Kind, dict[float, int]] = defaultdict(lambda: defaultdict(int))
    for each in present.machines:
        found[each.type, each.market][each.since_h] += each.count
    return found


def _kept(rental: Rental, running: Mapping[float, int], run_h: float) -> list[Rental]:
    """Return those that run, the oldest first."""
    return [
        replace(
            rental,
            usd=partial(rental.usd, age_h=_age_h(run_h, since_h)),
            cap=0 if rental.left_out else count,
            since_h=since_h,
        )
        for since_h, count in sorted(running.items())
    ]


def _age_h(run_h: float, since_h: float) -> float:
    return max(0.0, run_h - since_h)
