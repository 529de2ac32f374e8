"""Actions of the autoscaler with reasons and alternatives, and the status it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geo_ray.cloud.autoscaler.state import SpendRow
from geo_ray.cloud.provider import LaunchRequest, Machine, Pool


@dataclass(frozen=True, slots=True)
class Alternative:
    """A pool and its score for one launch decision.

    Attributes:
        pool: the pool.
        usd_per_hour: price of one machine; None: unknown.
        preemptions_per_h: expected preemptions of one machine.
        usd_per_million_rows: cost with expected preemptions; None: the price is unknown.
        chosen: number of machines to launch in this pool.
        note: why no machine of the pool can be launched, if none can.
    """

    pool: Pool
    usd_per_hour: float | None
    preemptions_per_h: float
    usd_per_million_rows: float | None
    chosen: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launches machines.

    Attributes:
        request: the request to the cloud.
        region: region of the run.
        reason: why the machines are needed.
        alternatives: all pools, best first.
    """

    request: LaunchRequest
    region: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    """Drains a machine: nothing new starts there, and running workers leave in order.

    Attributes:
        machine_id: the machine.
        region: region of the run.
        reason: why the machine leaves.
        until_unix_s: latest time at which it ends.
    """

    machine_id: str
    region: str
    reason: str
    until_unix_s: float


@dataclass(frozen=True, slots=True)
class End:
    """Terminates a machine.

    Attributes:
        machine_id: the machine.
        region: region of the run; empty: unknown.
        reason: why the machine ends.
        only_idle: whether the machine stays if something runs there by then.
    """

    machine_id: str
    region: str
    reason: str
    only_idle: bool = False


Action = Launch | Drain | End


@dataclass(frozen=True)
class ActionReport:
    """An action that was executed.

    Attributes:
        unix_s: time of the action.
        what: ``launch``, ``drain`` or ``end``, with number and kind.
        region: region of the run.
        reason: reason of the action.
        alternatives: for a launch, the scored pools, best first.
    """

    unix_s: float
    what: str
    region: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class AutoscalerStatus:
    """Status of a cluster, for users and commands.

    Attributes:
        is_acting: whether this autoscaler holds the lease.
        iteration_unix_s: time of the last iteration; None: there was none.
        machines: machines of the cluster as listed; those of unreachable regions as last listed.
        usd_per_hour: cost of all machines.
        spend: money spent by region and reason.
        left_s: estimated seconds until the job ends; None: unknown.
        actions: most recent actions, oldest first.
        errors: errors of the last iteration, including each unreachable region with duration and
            reason.
        notes: findings that need the attention of the user.
        saves: whether runs must be saved and stopped because the budget is nearly used up.
    """

    is_acting: bool
    iteration_unix_s: float | None = None
    machines: tuple[Machine, ...] = ()
    usd_per_hour: float = 0.0
    spend: tuple[tuple[str, str, SpendRow], ...] = ()
    left_s: float | None = None
    actions: tuple[ActionReport, ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    saves: bool = False


def action_report(action: Action, now_s: float) -> ActionReport:
    """Return the report of an action executed now."""
    match action:
        case Launch(request=request):
            pool = request.pool
            zone = pool.zone or pool.region
            what = f"launch {request.count} x {pool.type} {pool.market.value} in {zone}"
            return ActionReport(now_s, what, action.region, action.reason, action.alternatives)
        case Drain(machine_id=machine_id):
            return ActionReport(now_s, f"drain {machine_id}", action.region, action.reason)
        case End(machine_id=machine_id):
            return ActionReport(now_s, f"end {machine_id}", action.region, action.reason)


def actions_text(actions: Sequence[ActionReport]) -> list[str]:
    """Return actions as text lines. A launch also lists the scored pools."""
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
