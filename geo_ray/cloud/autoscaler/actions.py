"""Actions of the autoscaler with reasons and alternatives, and the status it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geo_ray.cloud.autoscaler.state import SpendRow
from geo_ray.cloud.provider import LaunchRequest, Machine, Pool


@dataclass(frozen=True, slots=True)
class Alternative:
    """A pool as it was judged.

    Attributes:
        pool: which.
        usd_per_hour: of one machine; None: no price is known.
        preemptions_per_h: that are expected of one.
        usd_per_million_rows: with what preemptions are expected to cost; None: no price is known.
        chosen: how many machines are taken from there.
        note: why none are, if it could not be taken.
    """

    pool: Pool
    usd_per_hour: float | None
    preemptions_per_h: float
    usd_per_million_rows: float | None
    chosen: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """Machines are to be rented.

    Attributes:
        request: what is sent.
        region: of the run.
        reason: why.
        alternatives: all pools, the best first.
    """

    request: LaunchRequest
    region: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    """A machine is to leave: nothing new is started there, and what runs goes home.

    Attributes:
        machine_id: which.
        region: of the run.
        reason: why.
        until_unix_s: when it will be gone at the latest.
    """

    machine_id: str
    region: str
    reason: str
    until_unix_s: float


@dataclass(frozen=True, slots=True)
class End:
    """A machine is to be given back.

    Attributes:
        machine_id: which.
        region: of the run; empty: not known.
        reason: why.
        only_idle: whether it stays if anything runs there by now.
    """

    machine_id: str
    region: str
    reason: str
    only_idle: bool = False


Action = Launch | Drain | End


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
