"""Follows a search: tells people of every trial that ends, and writes it down."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from geo_ray.observe.text import duration_text, number_text
from geo_ray.tuning.config import ObjectiveName
from geo_ray.tuning.ended import add_ended, key_of, plain_report
from geo_ray.tuning.objective import kind_of
from geo_ray.tuning.watch import score_key

TELL: ContextVar[Callable[[str], None]] = ContextVar("tell", default=lambda _: None)
"""Given each line. Not the callback's own: that is stored with the search, and comes back."""


class ProgressCallback(Callback):
    """A callback of Ray Tune's.

    Args:
        objectives: what is told of a trial.
        wanted: how many trials there will be.
        path: where trials that end are written down; see `ended`.
        known: keys of trials that had ended before, and only repeat their reports.
    """

    def __init__(
        self,
        objectives: Sequence[ObjectiveName],
        wanted: int,
        path: Path,
        known: Collection[str] = (),
    ) -> None:
        self._objectives = tuple(objectives)
        self._wanted = wanted
        self._path, self._known = path, frozenset(known)
        self._reports: dict[str, list[dict[str, Any]]] = {}
        self._began_s = time.monotonic()
        self._done: set[str] = set()
        self._best: float | None = None

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """See Ray."""
        self._reports.setdefault(trial.trial_id, []).append(plain_report(result))

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """See Ray."""
        reports = self._reports.pop(trial.trial_id, [])
        if key_of(trial.config) in self._known:
            self._note_best(trial)
            return
        if reports:
            add_ended(self._path, trial.config, reports)
        self._ended(trials, trial)

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """See Ray."""
        self._ended(trials, trial)

    def _ended(self, trials: Sequence[Trial], trial: Trial) -> None:
        ended = {each.trial_id for each in trials if each.status in (Trial.TERMINATED, Trial.ERROR)}
        self._done.add(trial.trial_id)
        done = len(ended | {trial.trial_id})
        spent_s = time.monotonic() - self._began_s
        left_s = spent_s / len(self._done) * (self._wanted - done)
        left = f", about {left_s / 60:.0f} min left" if left_s > 60 else ""
        TELL.get()(f"{done}/{self._wanted}{left}: {trial.trial_id} {self._text(trial)}")

    def _text(self, trial: Trial) -> str:
        told = trial.last_result or {}
        if told.get("status") == "failed" or score_key(self._objectives[0]) not in told:
            why = str(told.get("why") or "its process died").splitlines()[0]
            return f"failed: {why}"
        texts = [score_text(name, float(told[score_key(name)])) for name in self._objectives]
        early = "" if "status" in told else "ended early, "
        if told.get("status") == "diverged":
            return f"diverged, {', '.join(texts)}"
        if self._note_best(trial):
            texts.append("the best so far")
        return early + ", ".join(texts)

    def _note_best(self, trial: Trial) -> bool:
        """Whether a trial is better than those before it; it is the best then."""
        told = trial.last_result or {}
        score = told.get(score_key(self._objectives[0]))
        if told.get("status", "failed") in ("failed", "diverged") or score is None:
            return False
        if self._best is not None and float(score) >= self._best:
            return False
        self._best = float(score)
        return True


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
