"""Tells people how a search goes: a line for every trial that ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from geo_ray.observe.text import duration_text, number_text
from geo_ray.tuning.config import ObjectiveName
from geo_ray.tuning.objective import kind_of
from geo_ray.tuning.watch import score_key

TELL: ContextVar[Callable[[str], None]] = ContextVar("tell", default=lambda _: None)
"""Given each line. Not the callback's own: that is stored with the search, and comes back."""


class ProgressCallback(Callback):
    """A callback of Ray Tune's.

    Args:
        objectives: what is told of a trial.
        wanted: how many trials there will be.
    """

    def __init__(self, objectives: Sequence[ObjectiveName], wanted: int) -> None:
        self._objectives = tuple(objectives)
        self._wanted = wanted
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        # A search that goes on begins to count anew.
        return ProgressCallback, (self._objectives, self._wanted)

    def _begin(self) -> None:
        self._began_s = time.monotonic()
        self._before: int | None = None
        self._done: set[str] = set()
        self._best: float | None = None

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """See Ray."""
        self._ended(trials, trial)

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """See Ray."""
        self._ended(trials, trial)

    def _ended(self, trials: Sequence[Trial], trial: Trial) -> None:
        ended = sum(each.status in (Trial.TERMINATED, Trial.ERROR) for each in trials)
        if self._before is None:
            self._before = max(0, ended - 1)  # of an earlier command, which this one goes on with
        self._done.add(trial.trial_id)
        done = max(self._before + len(self._done), ended)
        spent_s = time.monotonic() - self._began_s
        left_s = spent_s / len(self._done) * (self._wanted - done)
        left = f", about {left_s / 60:.0f} min left" if left_s > 60 else ""
        TELL.get()(f"{done}/{self._wanted}{left}: {trial.trial_id} {self._text(trial)}")

    def _text(self, trial: Trial) -> str:
        told = trial.last_result or {}
        if told.get("status") == "failed" or score_key(self._objectives[0]) not in told:
            why = str(told.get("why") or "its process died").splitlines()[0]
            return f"failed: {why}"
        first = float(told[score_key(self._objectives[0])])
        texts = [score_text(name, float(told[score_key(name)])) for name in self._objectives]
        early = "" if "status" in told else "ended early, "
        if told.get("status") == "diverged":
            return f"diverged, {', '.join(texts)}"
        if "status" in told and (self._best is None or first < self._best):
            self._best = first
            texts.append("the best so far")
        return early + ", ".join(texts)


def score_text(objective: ObjectiveName, value: float) -> str:
    """An objective's number for people."""
    kind = kind_of(value)
    if kind == "failed":
        return "failed"
    if objective == "loss":
        return f"loss {number_text(value)}"
    if kind == "unmet":
        return "target not reached"
    return duration_text(value) if objective == "time_to_target" else f"{number_text(value)} USD"
