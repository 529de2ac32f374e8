"""From outcomes to a table: which learning rate is best for each variant, and what that came to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from geo_ray.comparison.outcome import Outcome
from geo_ray.observe.metrics.summary import Target


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several runs, the least and the largest; NaN if none has a value."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """A variant with its best learning rate.

    Attributes:
        label: the variant.
        rate: factor on the learning rate.
        lr: that learning rate; NaN if it is not known.
        runs: how many there are, and how many of them reached the target.
        reached: see ``runs``.
        to_target_s: seconds to the target, where it was reached.
        to_target_samples: the same in training samples.
        seconds: of a whole run.
        rounds: exchanges.
        wan_bytes: between regions.
        idle_share: of the regions' time.
        final: the metric at the end.
        usd: what a run costs until the target or its end; NaN without prices.
    """

    label: str
    rate: float
    lr: float
    runs: int
    reached: int
    to_target_s: Spread
    to_target_samples: Spread
    seconds: Spread
    rounds: Spread
    wan_bytes: Spread
    idle_share: Spread
    final: Spread
    usd: Spread


def goal_of(target: Target | None, outcomes: Sequence[Outcome]) -> tuple[str | None, bool]:
    """The metric that the comparison goes by, and whether more of it is better.

    The target's; without one the loss, or else the task's first metric, of which more is better.
    """
    if target is not None:
        return target.metric, target.direction == "at_least"
    names = [name for outcome in outcomes for name in outcome.eval]
    if "loss" in names:
        return "loss", False
    return (names[0] if names else None), True


def best_rate(outcomes: Sequence[Outcome], target: Target | None) -> float:
    """The learning rate of the best tuning runs of one variant.

    First the one that reaches the target soonest; of those that do not, the one with the best
    metric at its end; runs that failed come last.
    """
    goal = goal_of(target, outcomes)
    by_rate: dict[float, list[Outcome]] = {}
    for outcome in outcomes:
        by_rate.setdefault(outcome.rate, []).append(outcome)

    def merit(rate: float) -> tuple[float, float, float]:
        runs = by_rate[rate]
        times_s = [math.inf if r.time_to_target_s is None else r.time_to_target_s for r in runs]
        values = [_badness(run, *goal) for run in runs]
        return statistics.median(times_s), statistics.median(values), abs(math.log(rate))

    return min(by_rate, key=merit)


def row_of(outcomes: Sequence[Outcome], target: Target | None) -> Row:
    """Several seeds of one variant with one learning rate."""
    metric, _ = goal_of(target, outcomes)
    ended = [outcome for outcome in outcomes if outcome.failed is None]
    reached = [outcome for outcome in ended if outcome.time_to_target_s is not None]
    finals = [outcome.eval.get(metric) if metric else None for outcome in ended]
    return Row(
        label=outcomes[0].label,
        rate=outcomes[0].rate,
        lr=math.nan if outcomes[0].lr is None else outcomes[0].lr,
        runs=len(outcomes),
        reached=len(reached),
        to_target_s=spread([outcome.time_to_target_s for outcome in reached]),
        to_target_samples=spread([outcome.samples_to_target for outcome in reached]),
        seconds=spread([outcome.seconds for outcome in ended]),
        rounds=spread([outcome.rounds for outcome in ended]),
        wan_bytes=spread([outcome.wan_bytes for outcome in ended]),
        idle_share=spread([outcome.idle_share for outcome in ended]),
        final=spread(finals),
        usd=spread([outcome.usd for outcome in ended]),
    )


def ordered(rows: Sequence[Row], *, grows: bool) -> list[Row]:
    """Best first: most runs that reached the target, then the shortest time, then the metric.

    If no run reached a target, the metric ranks the rows, and time ranks those at the top that the
    metric does not tell apart: each of them is within noise of all others.

    Args:
        rows: in any order.
        grows: whether more of the metric is better.
    """
    sign = -1.0 if grows else 1.0

    def place(row: Row) -> tuple[float, float, float]:
        final = _last(sign * row.final.median)
        return -row.reached / row.runs, _last(row.to_target_s.median), final

    found = sorted(rows, key=place)
    if found[0].reached:
        return found
    alike = 1
    while alike < len(found) and all(
        standing(found[alike], other) == "within noise" for other in found[:alike]
    ):
        alike += 1
    return sorted(found[:alike], key=lambda row: _last(row.seconds.median)) + found[alike:]


Standing = Literal["best", "within noise", "behind", "one run"]


def standing(row: Row, best: Row) -> Standing:
    """What the runs say about a row and the best one.

    They are within noise if the ranges overlap of what ranks them: the seconds to the target,
    without an upper end where a run did not reach it, or the final metric if no run of both did.
    One run of each says nothing about noise.
    """
    if row is best:
        return "best"
    if max(row.runs, best.runs) == 1:
        return "one run"
    ranges = [
        (each.to_target_s.low, each.to_target_s.high if each.reached == each.runs else math.inf)
        if each.reached
        else (math.inf, math.inf)
        for each in (row, best)
    ]
    if not row.reached and not best.reached:
        ranges = [(each.final.low, each.final.high) for each in (row, best)]
    (low, high), (best_low, best_high) = ranges
    return "within noise" if low <= best_high and best_low <= high else "behind"


def spread(values: Sequence[float | None]) -> Spread:
    """Of the values that there are."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Spread(math.nan, math.nan, math.nan)
    return Spread(statistics.median(known), min(known), max(known))


def _badness(outcome: Outcome, metric: str | None, grows: bool) -> float:
    value = outcome.eval.get(metric) if metric else None
    if value is None or outcome.failed is not None:
        return math.inf
    return -value if grows else value


def _last(value: float) -> float:
    return math.inf if math.isnan(value) else value
