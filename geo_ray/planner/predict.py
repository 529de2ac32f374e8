"""Creates a plan from a choice, with every second and dollar in a named term.

It also gives the expected range of time and cost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from geo_ray.planner.cover import split_rows
from geo_ray.planner.plan import Machines, Plan, PlannedLoss, RegionPlan
from geo_ray.planner.request import Request
from geo_ray.planner.search import Found
from geo_ray.planner.timing import HOUR_S
from geo_ray.transport.links import LinkTable

PREEMPTIONS: Final = "preemptions"
_ROUNDING: Final = 1e-9  # fraction of the total time by which a difference of sums may be off


def plan_of(request: Request, found: Found, policy: str, gap: float, reason: str) -> Plan:
    """Return the plan of a choice.

    Args:
        request: the request.
        found: the choice.
        policy: name of the policy.
        gap: maximum relative distance to the optimum.
        reason: why the plan was chosen.
    """
    request = request.at(found.option.interval)
    seconds = _seconds(request, found)
    total_s = sum(seconds.values())
    hours, lost_fraction = total_s / HOUR_S, seconds.get(PREEMPTIONS, 0.0) / total_s
    regions, usd = [], defaultdict[str, float](float)
    for site, pick in zip(request.sites, found.picks, strict=True):
        together = site.gang or 1
        pairs = zip(site.rentals, pick.counts, strict=True)
        chosen = [(rental, n * together) for rental, n in pairs if n]
        speeds = [r.rows_per_s for r, n in chosen for _ in range(n)]
        max_rows = [r.max_rows for r, n in chosen for _ in range(n)]
        rows = split_rows(max(len(speeds), request.work.region_rows(site.name)), speeds, max_rows)
        machines, at = [], 0
        for rental, count in chosen:
            cost = rental.usd(hours)
            for each, same in _runs(rows[at : at + count]):
                machines.append(
                    Machines(
                        type=rental.type,
                        market=rental.market,
                        count=same,
                        rows=each,
                        workers=min(rental.workers, each),
                        rows_per_s=rental.rows_per_s,
                        usd_per_h=cost / hours,
                        since_h=rental.since_h,
                    )
                )
            at += count
            usd[f"machines {rental.market}"] += count * cost * (1 - lost_fraction)
            usd["work lost to preemption"] += count * cost * lost_fraction
        fixed_usd = site.fixed_usd(hours)
        regions.append(
            RegionPlan(
                region=site.name,
                machines=tuple(machines),
                step_s=pick.step_s,
                fixed_s=site.fixed_s + site.lan_s(pick.counts),
                fixed_usd_per_h=fixed_usd / hours,
                server=site.server,
                server_since_h=site.server_since_h,
            )
        )
        usd["servers and disks"] += fixed_usd
    option, averager = found.option, found.option.exchange.averager
    usd["egress"] = found.egress_usd
    prices = defaultdict[str, dict[str, float]](dict)
    for (src, dst), price in request.usd_per_gb.items():
        if averager in (src, dst):
            prices[src][dst] = price
    return Plan(
        policy=policy,
        regions=tuple(regions),
        averager=averager,
        interval=option.interval,
        codec=option.exchange.codec,
        steps=request.work.steps,
        loss=_loss(request, option.interval, option.exchange.codec),
        usd_per_gb=dict(prices),
        seconds=seconds,
        usd={name: value for name, value in usd.items() if value},
        gap=gap,
        reason=reason,
    )


def _loss(request: Request, interval: int, codec: str | None) -> PlannedLoss:
    expected = request.loss_of(interval, codec)
    measured = request.loss.is_measured
    return PlannedLoss(expected=None if math.isinf(expected) else expected, measured=measured)


def _seconds(request: Request, found: Found) -> dict[str, float]:
    """Seconds by term, of the slowest region."""
    work, option = request.work, found.option
    site, pick = request.sites[found.straggler], found.picks[found.straggler]
    workers = sum(sum(each.counts) for each in found.picks)
    inside_s = site.fixed_s + site.lan_s(pick.counts)
    terms = {
        "start": work.start_s(workers),
        "compute": work.steps * (pick.step_s - inside_s),
        "inside the region": work.steps * inside_s,
        "last exchange": option.last_s,
        PREEMPTIONS: work.steps * found.step_time_s * (found.stall - 1),
        "evaluations": work.evaluations_s,
    }
    between_s = found.seconds - sum(terms.values())
    terms["between regions"] = between_s if between_s > _ROUNDING * found.seconds else 0.0
    return {name: value for name, value in terms.items() if value}


def _runs(values: list[int]) -> list[tuple[int, int]]:
    """Return each distinct value and its count, largest first."""
    counts: dict[int, int] = {}
    for value in sorted(values, reverse=True):
        counts[value] = counts.get(value, 0) + 1
    return list(counts.items())


_WIDTH: Final = 2.0
_MAD_TO_SD: Final = 1.4826  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Unsure:
    """Relative errors.

    Attributes:
        steps: of a step's time; None: not measured.
        links: of the goodput of the worst link with the averager.
    """

    steps: float | None
    links: float


def link_error(links: LinkTable, averager: str) -> float:
    """Return the largest relative deviation among the links with ``averager``."""
    return max(
        (
            _MAD_TO_SD * record.goodput_mad_mbps / record.goodput_mbps
            for record in links.links
            if averager in record.pair and record.goodput_mbps > 0
        ),
        default=0.0,
    )


def with_range(plan: Plan, unsure: Unsure) -> Plan:
    """Return the plan with `Plan.seconds_range` and `Plan.usd_range`."""
    own_s = plan.seconds.get("compute", 0.0) + plan.seconds.get("inside the region", 0.0)
    wan_s = plan.seconds.get("between regions", 0.0) + plan.seconds.get("last exchange", 0.0)
    off_s = math.hypot(_WIDTH * (unsure.steps or 0.0) * own_s, _WIDTH * unsure.links * wan_s)
    hourly = plan.usd_per_h + plan.fixed_usd_per_h
    lost_usd = plan.usd.get(
        "work lost to preemption", 0.0
    )  # lost work may be between zero and twice the estimate
    off_usd = math.hypot(off_s / HOUR_S * hourly, lost_usd)
    notes = plan.notes
    if unsure.steps is None:
        notes = (*notes, "speeds were configured, not measured: the range excludes their error")
    return plan.model_copy(
        update={
            "seconds_range": _around(plan.total_s, off_s),
            "usd_range": _around(plan.total_usd, off_usd),
            "notes": notes,
        }
    )


def _around(value: float, off: float) -> tuple[float, float]:
    return max(0.0, value - off), value + off
