"""Follows one run of a trial by its events, and says at each evaluation how it stands."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from geo_ray.config.experiment import Experiment
from geo_ray.observe.events.schema import Event
from geo_ray.observe.events.sent import SentUntil
from geo_ray.observe.metrics.summary import Summary
from geo_ray.tuning.config import ObjectiveName, PricesConfig
from geo_ray.tuning.objective import FAILED, Goal, Standing, score, usd_of

_LAST_STEPS: Final = 5
_EXPLODED: Final = 1.5
"""A mean loss of the last steps above so many times that of the first step is worse than no
training at all, whatever the noise of a batch is."""


class TrialWatch:
    """A sink of events.

    Args:
        experiment: the run.
        prices: of it; None without any.
        tell: hears of the standing at every evaluation of all regions together.
        before: what an earlier stretch of the same run has come to; None: it begins.
    """

    def __init__(
        self,
        experiment: Experiment,
        prices: PricesConfig | None,
        tell: Callable[[Standing, Event], None],
        before: Standing | None = None,
    ) -> None:
        self._target = experiment.train.target
        self._workers = {region.name: region.workers for region in experiment.regions}
        self._prices = prices
        self._tell = tell
        self._before = before or Standing(0.0, 0, 0.0, None)
        self._sent = SentUntil(math.inf)
        self._samples = 0
        self._first_losses: dict[str, float] = {}
        self._last_losses: dict[str, deque[float]] = {}
        self._newest = self._before
        self.goal = Goal.of(self._target)

    @property
    def standing(self) -> Standing:
        """At the newest evaluation."""
        return self._newest

    @property
    def wan_bytes(self) -> float:
        """Between regions so far, of this stretch."""
        return sum(self._sent.by_link().values())

    def feed(self, event: Event) -> None:
        """Take the next event."""
        self._sent.feed(event)
        if event.kind == "step":
            self._samples += event["samples"]
            region, loss = event["region"], event["loss"]
            loss = math.inf if loss is None else float(loss)
            self._first_losses.setdefault(region, loss)
            self._last_losses.setdefault(region, deque(maxlen=_LAST_STEPS)).append(loss)
        elif event.kind == "eval" and event["region"] is None:
            reached = self._target is not None and self._target.reached(event)
            now = self._at(event.t_s, event["metrics"].get(self.goal.metric), reached=reached)
            self._newest = now
            self._tell(now, event)

    @property
    def diverged(self) -> bool:
        """Whether the training loss of a region is not finite, or far above that of step 1."""
        for region, first in self._first_losses.items():
            last = sum(self._last_losses[region]) / len(self._last_losses[region])
            if not math.isfinite(last) or (first > 0 and last > _EXPLODED * first):
                return True
        return False

    def ended(self, summary: Summary) -> Standing:
        """How it stands after its end."""
        value = summary.eval.get(self.goal.metric)
        now = self._at(summary.seconds, value, reached=False)
        self._newest = Standing(
            now.time_s,
            now.samples,
            now.usd,
            now.value,
            now.reached_s,
            now.reached_usd,
            ended=True,
        )
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
    """What Ray Tune is told: flat plain numbers; what is not known is left out."""
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
    """What Ray Tune is told of a trial that failed: numbers behind all others, and why."""
    scores: Mapping[str, float] = {score_key(name): FAILED for name in objectives}
    none_yet = {"time_s": 0.0, "samples": 0}
    return {**none_yet, "behind": FAILED, **scores, "status": "failed", "why": why}


def score_key(objective: ObjectiveName) -> str:
    """The name of an objective's number among those that Ray Tune is told."""
    return f"score_{objective}"
