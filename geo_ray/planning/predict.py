"""A choice of machines and exchanges, as a plan with every second and dollar in a named term."""

from __future__ import annotations

from collections import defaultdict

from geo_ray.planning.plan import Machines, Plan, RegionPlan, shares
from geo_ray.planning.request import Request, Site
from geo_ray.planning.search import Found
from geo_ray.planning.work import HOUR_S


def plan_of(request: Request, found: Found, policy: str, gap: float, reason: str) -> Plan:
    """The plan that a choice stands for.

    Args:
        request: what was asked.
        found: the choice.
        policy: who made it.
        gap: share by which another could be better at most.
        reason: why this one.
    """
    seconds = _seconds(request, found)
    hours = sum(seconds.values()) / HOUR_S
    regions, usd = [], defaultdict[str, float](float)
    for site, pick in zip(request.sites, found.picks, strict=True):
        chosen = [(r, n) for r, n in zip(site.rentals, pick.counts, strict=True) if n]
        speeds = [r.rows_per_s * (1 - r.lost_share) for r, n in chosen for _ in range(n)]
        rows = shares(max(len(speeds), round(request.work.share(site.name))), speeds)
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
                        usd_per_h=cost / hours,
                    )
                )
            at += count
            usd[f"machines {rental.market}"] += count * cost * (1 - rental.lost_share)
            if rental.lost_share:
                usd["work lost to preemption"] += count * cost * rental.lost_share
        regions.append(RegionPlan(region=site.name, machines=tuple(machines), step_s=pick.step_s))
        usd["servers and disks"] += site.stands_usd(hours)
    usd["egress"] = request.work.rounds(found.option.interval) * found.option.exchange.usd
    return Plan(
        policy=policy,
        regions=tuple(regions),
        averager=found.option.exchange.averager,
        interval=found.option.interval,
        codec=found.option.exchange.codec,
        steps=request.work.steps,
        seconds=seconds,
        usd={name: value for name, value in usd.items() if value},
        gap=gap,
        reason=reason,
    )


def _seconds(request: Request, found: Found) -> dict[str, float]:
    """By term, of the slowest region."""
    work, option = request.work, found.option
    index = max(range(len(found.picks)), key=lambda i: found.picks[i].step_s)
    site, pick = request.sites[index], found.picks[index]
    terms = {
        "start": work.startup_s,
        "compute": work.steps * _compute_s(site, pick.step_s, sum(pick.counts)),
        "inside the region": work.steps * (site.fixed_s + site.lan_s * sum(pick.counts)),
        "between regions": work.wan_s(found.step_s, option.interval, option.exchange.seconds),
    }
    return {name: value for name, value in terms.items() if value}


def _compute_s(site: Site, step_s: float, machines: int) -> float:
    return step_s - site.fixed_s - site.lan_s * machines


def _runs(values: list[int]) -> list[tuple[int, int]]:
    """Value and how often, for every run of equal values, largest first."""
    counts: dict[int, int] = {}
    for value in sorted(values, reverse=True):
        counts[value] = counts.get(value, 0) + 1
    return list(counts.items())
