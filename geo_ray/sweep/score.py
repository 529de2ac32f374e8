"""Scores of a trial: numbers to minimize, also defined for failed trials.

`TrialWatch` follows the events of one run and gives its standing at every evaluation.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.timing import HOUR_S
from geo_ray.sweep.search_config import ObjectiveName, PricesConfig
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Summary, Target
from geo_ray.telemetry.totals import SentUntil

UNREACHED: Final = 1e9
"""Offset of a run that did not reach its target, plus its relative distance."""

FAILED: Final = 1e12
"""Score of a failed or diverged trial: above all others."""

_MOST_GAP: Final = 100.0
_LEAST: Final = 1e-12
_LAST_STEPS: Final = 5
_EXPLODED: Final = 1.5
"""Factor of the first step's loss above which the mean loss of the last steps counts as diverged,
whatever the noise of a batch."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a run at an evaluation.

    Attributes:
        time_s: time since its start, virtual if simulated.
        samples: samples of all regions.
        usd: cost; NaN without prices.
        value: newest value of the metric; None: not evaluated, or not finite.
        reached_s: time at which the target was reached; None: not yet.
        reached_usd: cost at that time.
        ended: whether the run has ended.
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
    """The metric of a search.

    Attributes:
        metric: name of the metric.
        grows: whether higher values are better.
        target: target value, or None.
    """

    metric: str
    grows: bool
    target: float | None

    @classmethod
    def of(cls, target: Target | None) -> Goal:
        """Return the target's metric; without a target the loss."""
        if target is None:
            return cls("loss", False, None)
        return cls(target.metric, target.direction == "at_least", target.value)

    def behind(self, value: float | None) -> float:
        """Return the metric as a number to minimize; a missing value is above all others."""
        if value is None or not math.isfinite(value):
            return FAILED
        return -value if self.grows else value

    def gap(self, value: float | None) -> float:
        """Return the relative distance of a value from the target; 0 at and beyond it."""
        if self.target is None:
            return 0.0
        if value is None or not math.isfinite(value):
            return _MOST_GAP
        away = self.target - value if self.grows else value - self.target
        return min(_MOST_GAP, max(0.0, away / max(abs(self.target), _LEAST)))


def score(objective: ObjectiveName, standing: Standing, goal: Goal) -> float:
    """Return one objective of a run, finite.

    ``time_to_target``: seconds to it. ``usd``: cost until it; without a target that of the whole
    run. ``loss``: the metric, negative if higher values are better. Runs that have not reached the
    target, or their end, rank after all that have, the nearest first.
    """
    if objective == "loss":
        return goal.behind(standing.value)
    if goal.target is None and objective == "usd":
        return standing.usd if standing.ended else UNREACHED
    reached = standing.reached_s if objective == "time_to_target" else standing.reached_usd
    return UNREACHED * (1 + goal.gap(standing.value)) if reached is None else reached


def usd_of(
    prices: PricesConfig | None,
    workers: Mapping[str, int],
    time_s: float,
    sent_bytes: Mapping[tuple[str, str], float],
) -> float:
    """Return the cost of a run: workers by the hour, and bytes sent by regions; NaN without prices.

    Args:
        prices: prices per hour and GB.
        workers: number of workers by region.
        time_s: time since its start.
        sent_bytes: bytes by source and destination.
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
    """Return the kind of a score: a value, a missed target, or a failure."""
    if score_value >= FAILED:
        return "failed"
    return "unmet" if score_value >= UNREACHED else "met"


class TrialWatch:
    """Follows the events of a run.

    Args:
        experiment: the run.
        prices: of workers and egress; None without any.
        before: the standing of an earlier segment of the same run; None: the run starts.
    """

    def __init__(
        self,
        experiment: Experiment,
        prices: PricesConfig | None,
        before: Standing | None = None,
    ) -> None:
        self._target = experiment.train.target
        self._workers = {region.name: region.workers for region in experiment.regions}
        self._prices = prices
        self._before = before or Standing(0.0, 0, 0.0, None)
        self._sent = SentUntil(math.inf)
        self._samples = 0
        self._first_losses: dict[str, float] = {}
        self._last_losses: dict[str, deque[float]] = {}
        self._newest = self._before
        self.goal = Goal.of(self._target)

    @property
    def wan_bytes(self) -> float:
        """Return the bytes between regions of this segment."""
        return sum(self._sent.by_link().values())

    def feed(self, event: Event) -> Standing | None:
        """Process the next event; an evaluation of all regions gives a new standing."""
        self._sent.feed(event)
        if event.kind == "step":
            self._samples += event["samples"]
            region, loss = event["region"], event["loss"]
            loss = math.inf if loss is None else float(loss)
            self._first_losses.setdefault(region, loss)
            self._last_losses.setdefault(region, deque(maxlen=_LAST_STEPS)).append(loss)
        elif event.kind == "eval" and event["region"] is None:
            reached = self._target is not None and self._target.reached(event)
            value = event["metrics"].get(self.goal.metric)
            self._newest = self._at(event.t_s, value, reached=reached)
            return self._newest
        return None

    @property
    def diverged(self) -> bool:
        """Return whether a region's training loss is not finite, or far above that of step 1."""
        for region, first in self._first_losses.items():
            last = sum(self._last_losses[region]) / len(self._last_losses[region])
            if not math.isfinite(last) or (first > 0 and last > _EXPLODED * first):
                return True
        return False

    def ended(self, summary: Summary) -> Standing:
        """Give the standing after the end of the run."""
        value = summary.eval.get(self.goal.metric)
        self._newest = replace(self._at(summary.seconds, value, reached=False), ended=True)
        return self._newest

    def _at(self, t_s: float, value: float | None, *, reached: bool) -> Standing:
        before = self._before
        usd = before.usd + usd_of(self._prices, self._workers, t_s, self._sent.by_link())
        time_s = before.time_s + t_s
        known_s, known_usd = self._newest.reached_s, self._newest.reached_usd
        if reached and known_s is None:
            known_s, known_usd = time_s, usd
        return Standing(time_s, before.samples + self._samples, usd, value, known_s, known_usd)


def report_of(
    standing: Standing, goal: Goal, objectives: Sequence[ObjectiveName]
) -> dict[str, Any]:
    """Return a report of a trial: flat plain numbers, without unknown ones."""
    found: dict[str, Any] = {
        "time_s": standing.time_s,
        "samples": standing.samples,
        "usd": standing.usd,
        goal.metric: standing.value,
        "reached_s": standing.reached_s,
        "reached_usd": standing.reached_usd,
    }
    known = {k: v for k, v in found.items() if v is not None and math.isfinite(v)}
    scores = {score_key(name): score(name, standing, goal) for name in objectives}
    return known | {"behind": goal.behind(standing.value)} | scores


def failed_report(objectives: Sequence[ObjectiveName], why: str) -> dict[str, Any]:
    """Return the report of a failed trial: scores above all others, and the reason."""
    scores: Mapping[str, float] = {score_key(name): FAILED for name in objectives}
    none_yet = {"time_s": 0.0, "samples": 0}
    return {**none_yet, "behind": FAILED, **scores, "status": "failed", "why": why}


def final_report(
    ended: Sequence[tuple[Standing, TrialWatch]], objectives: Sequence[ObjectiveName]
) -> dict[str, Any]:
    """Return the last report of a trial: medians over its seeds."""
    goal = ended[0][1].goal
    reports = [report_of(standing, goal, objectives) for standing, _ in ended]
    first = ended[0][0]
    found = reports[0] | {
        score_key(name): statistics.median(score(name, standing, goal) for standing, _ in ended)
        for name in objectives
    }
    for key in ("reached_s", "reached_usd", goal.metric):
        found.pop(key, None)
        if all(key in report for report in reports):
            found[key] = statistics.median(report[key] for report in reports)
    reached = all(standing.reached_s is not None for standing, _ in ended)
    diverged = any(watch.diverged for _, watch in ended)
    return found | {
        # Use those of the first seed, because schedulers require increasing values.
        "time_s": first.time_s,
        "samples": first.samples,
        "wan_bytes": statistics.median(watch.wan_bytes for _, watch in ended),
        "status": "reached" if reached else "diverged" if diverged else "ended",
    }


def score_key(objective: ObjectiveName) -> str:
    """Return the name of an objective's score in a report."""
    return f"score_{objective}"
