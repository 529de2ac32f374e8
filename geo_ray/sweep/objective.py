"""What a trial is worth: numbers of which less is better, whatever became of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from geo_ray.planner.timing import HOUR_S
from geo_ray.sweep.search_config import ObjectiveName, PricesConfig
from geo_ray.telemetry.summary import Target

UNREACHED: Final = 1e9
"""Time or USD of a run that did not reach its target, times one and how far it was away."""

FAILED: Final = 1e12
"""Any objective of a trial that failed or diverged: behind all others."""

_MOST_GAP: Final = 100.0
_LEAST: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Standing:
    """What a run has come to by now.

    Attributes:
        time_s: since its start, virtual if simulated.
        samples: of all regions.
        usd: so far; NaN without prices.
        value: the newest of the metric that counts; None: not evaluated, or not finite.
        reached_s: when the target was reached; None: not yet.
        reached_usd: what it had cost by then.
        ended: whether it has come to its end.
    """

    time_s: float
    samples: int
    usd: float
    value: float | None
    reached_s: float | None = None
    reached_usd: float | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """The metric that a search goes by.

    Attributes:
        metric: its name.
        grows: whether more is better.
        target: of it; None: there is none.
    """

    metric: str
    grows: bool
    target: float | None

    @classmethod
    def of(cls, target: Target | None) -> Goal:
        """The target's metric; without a target the loss."""
        if target is None:
            return cls("loss", False, None)
        return cls(target.metric, target.direction == "at_least", target.value)

    def behind(self, value: float | None) -> float:
        """The metric so that less is better; a missing one is behind all others."""
        if value is None or not math.isfinite(value):
            return FAILED
        return -value if self.grows else value

    def gap(self, value: float | None) -> float:
        """How far a value is from the target, as a share of it; 0 at and beyond it."""
        if self.target is None:
            return 0.0
        if value is None or not math.isfinite(value):
            return _MOST_GAP
        away = self.target - value if self.grows else value - self.target
        return min(_MOST_GAP, max(0.0, away / max(abs(self.target), _LEAST)))


def score(objective: ObjectiveName, standing: Standing, goal: Goal) -> float:
    """One objective of a run, finite.

    ``time_to_target``: seconds to it. ``usd``: USD to it; without a target those of the whole run.
    ``loss``: the metric, negative if more of it is better. Runs that have not reached the target,
    or their end, come behind all that have, the nearest first.
    """
    if objective == "loss":
        return goal.behind(standing.value)
    if goal.target is None and objective == "usd":
        return standing.usd if standing.ended else UNREACHED
    reached = standing.reached_s if objective == "time_to_target" else standing.reached_usd
    return UNREACHED * (1 + goal.gap(standing.value)) if reached is None else reached


def together(scores: Sequence[float]) -> float:
    """The score of several seeds: their median."""
    return statistics.median(scores)


def usd_of(
    prices: PricesConfig | None,
    workers: Mapping[str, int],
    time_s: float,
    sent_bytes: Mapping[tuple[str, str], float],
) -> float:
    """What a run has cost: workers by the hour, and bytes that left regions; NaN without prices.

    Args:
        prices: per hour and GB.
        workers: how many by region.
        time_s: since its start.
        sent_bytes: by source and destination.
    """
    if prices is None:
        return math.nan
    per_h = sum(prices.worker_usd_per_h[name] * count for name, count in workers.items())
    egress = sum(
        count * 1e-9 * prices.egress_usd_per_gb.get(src, 0.0)
        for (src, _), count in sent_bytes.items()
    )
    return time_s / HOUR_S * per_h + egress


Status = Literal["reached", "ended", "stopped", "diverged", "failed"]


def kind_of(score_value: float) -> Literal["met", "unmet", "failed"]:
    """What a score is: a number to show, or that of a run that came short or failed."""
    if score_value >= FAILED:
        return "failed"
    return "unmet" if score_value >= UNREACHED else "met"
