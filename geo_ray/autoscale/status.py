"""What an autoscaler has done, and how its cluster stands, for people and commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geo_ray.autoscale.actions import Action, Alternative, Drain, End, Launch
from geo_ray.autoscale.ledger import SpendRow
from geo_ray.providers.base import Machine


@dataclass(frozen=True)
class ActionTold:
    """Something that was done.

    Attributes:
        unix_s: when.
        what: ``launch``, ``drain`` or ``end``, with how many of what.
        region: of the run.
        reason: why.
        alternatives: for a launch: the pools as they were judged, the best first.
    """

    unix_s: float
    what: str
    region: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class AutoscalerStatus:
    """How a cluster stands, for people and commands.

    Attributes:
        is_acting: whether this autoscaler has the lease.
        looked_unix_s: when it last looked; None: not yet.
        machines: of the cluster, as listed; of regions that do not answer as they last were.
        usd_per_hour: what they cost.
        spend: what was spent, by region and reason.
        left_s: how long the rest of the job takes; None: no end is known.
        actions: the newest ones, the oldest first.
        errors: of the last look, with each region that does not answer, for how long, and why.
        notes: what somebody should look at.
        saves: whether runs are to be saved and stopped, as the budget is nearly used up.
    """

    is_acting: bool
    looked_unix_s: float | None = None
    machines: tuple[Machine, ...] = ()
    usd_per_hour: float = 0.0
    spend: tuple[tuple[str, str, SpendRow], ...] = ()
    left_s: float | None = None
    actions: tuple[ActionTold, ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    saves: bool = False


def told(action: Action, now_s: float) -> ActionTold:
    """Return an action that is done now as it is told."""
    match action:
        case Launch(request=request):
            pool = request.pool
            zone = pool.zone or pool.region
            what = f"launch {request.count} x {pool.type} {pool.market.value} in {zone}"
            return ActionTold(now_s, what, action.region, action.reason, action.alternatives)
        case Drain(machine_id=machine_id):
            return ActionTold(now_s, f"drain {machine_id}", action.region, action.reason)
        case End(machine_id=machine_id):
            return ActionTold(now_s, f"end {machine_id}", action.region, action.reason)


def actions_text(actions: Sequence[ActionTold]) -> list[str]:
    """Return actions as lines, a launch with the pools that were judged."""
    lines = []
    for each in actions:
        lines.append(f"{each.region}: {each.what}: {each.reason}")
        for other in each.alternatives:
            usd, score = other.usd_per_hour, other.usd_per_million_rows
            price = "no price" if usd is None else f"{usd:.4g} USD/h"
            rows = "" if score is None else f", {score:.4g} USD per million rows"
            chosen = f" <- {other.chosen}" if other.chosen else ""
            note = f" ({other.note})" if other.note else ""
            zone = other.pool.zone or other.pool.region
            lines.append(
                f"    {zone} {other.pool.type} {other.pool.market.value}: {price}{rows}"
                f"{note}{chosen}"
            )
    return lines
