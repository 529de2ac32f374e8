"""Every choice of machines and exchanges, priced one by one, where there are few enough of them.

Where strategies never stand still or go by speed, how often a region exchanges depends on how fast
its machines are, so faster machines may be cheaper in all, and neither the price nor the time of a
choice rises with its pace. There the search by paces finds a good choice and a bound that is below
the best one; going through all of them is exact.

Shape legend: N = choices of machines; R = regions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from geo_ray.planning.search.fleet import Pick, RegionFleet
from geo_ray.planning.search.pool import RentalPool
from geo_ray.planning.search.ways import SLACK, Limits, Objective, Option, Ways
from geo_ray.planning.search.whole_cover import Floats

# Choices times ways times regions, in each of the searches; age tiers and fronts need many.
_MOST: Final = 200_000


class _Machines(NamedTuple):
    """All choices of machines: seconds of steps, and of each choice dollars, workers and stall."""

    step_s_NR: Floats
    usd_per_h_N: Floats
    workers_N: Floats
    stall_N: Floats


def best_of_all(
    fleets: Sequence[RegionFleet],
    ways: Ways,
    pool: RentalPool,
    objective: Objective,
    limits: Limits,
) -> tuple[tuple[Pick, ...], Option] | None:
    """Return the best choice; the best that keeps no limit if none does.

    Args:
        fleets: of all regions.
        ways: to exchange.
        pool: the same fleets together.
        objective: what counts; the other measure breaks ties.
        limits: to keep.

    Returns:
        None if there are too many choices to go through.
    """
    most = _MOST // (len(fleets) * len(ways.options))
    picks = []
    for fleet in fleets:
        there = fleet.choices(most)
        if there is None or not there:
            return None
        most //= len(there)
        picks.append(there)
    shape = tuple(map(len, picks))
    machines = _machines(fleets, picks, pool)
    best, least = (0, 0), (math.inf, math.inf, math.inf)
    for k, option in enumerate(ways.options):
        seconds_N, usd_N = _values(ways, option, machines)
        first_N, second_N = (usd_N, seconds_N) if objective == "cost" else (seconds_N, usd_N)
        broken_N = (seconds_N > limits.deadline_s * SLACK) | (usd_N > limits.budget_usd * SLACK)
        n = int(np.lexsort((second_N, first_N, broken_N))[0])
        value = float(broken_N[n]), float(first_N[n]), float(second_N[n])
        if value < least:
            best, least = (k, n), value
    indices = np.unravel_index(best[1], shape)
    chosen = tuple(there[int(i)] for there, i in zip(picks, indices, strict=True))
    return chosen, ways.options[best[0]]


def _machines(
    fleets: Sequence[RegionFleet], picks: Sequence[Sequence[Pick]], pool: RentalPool
) -> _Machines:
    def of_all(values: Sequence[Sequence[float]]) -> Floats:
        return np.stack([each.ravel() for each in np.meshgrid(*values, indexing="ij")], axis=-1)

    spots_NR = of_all(
        [[fleet.spots(p.counts) for p in there] for fleet, there in zip(fleets, picks, strict=True)]
    )
    spots_N = spots_NR.sum(axis=1) if pool.together else spots_NR.max(axis=1)
    stalls = np.array([pool.stall(spots) for spots in range(int(spots_N.max()) + 1)])
    return _Machines(
        of_all([[pick.step_s for pick in there] for there in picks]),
        of_all([[pick.usd_per_h for pick in there] for there in picks]).sum(axis=1),
        of_all([[sum(pick.counts) for pick in there] for there in picks]).sum(axis=1),
        stalls[spots_N.astype(int)],
    )


def _values(ways: Ways, option: Option, machines: _Machines) -> tuple[Floats, Floats]:
    """Return seconds and dollars of each choice with one way to exchange."""
    work, one, timing = ways.work, option.exchange, option.timing
    exchange_s_R, step_s_NR = np.array(one.seconds_by_region), machines.step_s_NR
    lines = [first * exchange_s_R + share * step_s_NR for first, share in timing.lines(work.steps)]
    paces_NR = np.max(lines, axis=0)
    if timing.is_of_machines:
        paces_NR = paces_NR + timing.more_s_R(work.steps, step_s_NR, exchange_s_R) / work.steps
    start_s_N = work.startup_s + work.worker_start_s * machines.workers_N
    trained_s_N = work.steps * paces_NR.max(axis=1) * machines.stall_N
    seconds_N = start_s_N + work.evaluations_s + trained_s_N + option.last_s
    counts_NR = timing.counts_R(work.steps, step_s_NR, exchange_s_R)
    egress_N = counts_NR @ np.array(one.usd_by_region)
    if option.last is not None:
        egress_N = egress_N + option.last.usd
    hourly_N = machines.usd_per_h_N + option.usd_per_h
    return seconds_N, ways.bracket.billed_h_K(seconds_N) * hourly_N + egress_N
