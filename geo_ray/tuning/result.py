"""What came of a search: its trials, the best of them, and those that none beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from geo_ray.config.canonical import JSONValue
from geo_ray.tuning.config import ObjectiveName
from geo_ray.tuning.front import front
from geo_ray.tuning.objective import FAILED, Goal, Status, kind_of


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """A trial at one evaluation.

    Attributes:
        time_s: of its run.
        samples: of all regions.
        value: of the metric; None: not finite.
    """

    time_s: float
    samples: int
    value: float | None


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A trial.

    Attributes:
        id: in Ray Tune.
        values: what it had, by key.
        status: how it ended: at its target, at its end, early, with a training loss that had
            exploded, or in an error.
        scores: one per objective; less is better.
        told: the numbers of its newest report.
        points: its evaluations, in order.
        why: what it failed with; "" if it did not.
    """

    id: str
    values: dict[str, JSONValue]
    status: Status
    scores: tuple[float, ...]
    told: dict[str, float] = field(repr=False)
    points: tuple[TrialPoint, ...] = field(repr=False)
    why: str = ""

    @property
    def counts(self) -> bool:
        """Whether it may be the best: it came to an end of its own."""
        return self.status in ("reached", "ended")  # not what diverged, whatever its score


@dataclass(frozen=True, slots=True)
class Tuning:
    """A search that was made, wholly or in part.

    Attributes:
        objectives: what was to be least.
        goal: the metric that it went by.
        rows: its trials, best first.
        base: the trial of the base configuration; None: it was none, or failed.
        wanted: how many trials there were to be.
    """

    objectives: tuple[ObjectiveName, ...]
    goal: Goal
    rows: tuple[TrialRow, ...]
    base: TrialRow | None
    wanted: int

    @property
    def best(self) -> TrialRow | None:
        """The first of them; None if all failed, diverged or were ended early."""
        return next((row for row in self.rows if row.counts), None)

    @property
    def front(self) -> tuple[TrialRow, ...]:
        """Trials that none beats in all objectives; those that came short are not among them."""
        known = [row for row in self.rows if row.counts and _is_met(row)]
        return tuple(known[place] for place in front([row.scores for row in known]))

    @property
    def beats_base(self) -> bool:
        """Whether the best is another trial than the base, and better in the first objective."""
        best, base = self.best, self.base
        if best is None or base is None:
            return True  # there is nothing to beat, or nothing to beat it with
        return best.id != base.id and best.scores[0] < base.scores[0]

    @property
    def gain(self) -> float | None:
        """The base's first objective over the best one's; None where one of them is no number."""
        best = self.best
        if best is None or self.base is None or self.objectives[0] == "loss":
            return None
        ours, theirs = best.scores[0], self.base.scores[0]
        both = kind_of(ours) == kind_of(theirs) == "met" and ours > 0
        return theirs / ours if both else None


def ordered(rows: Sequence[TrialRow]) -> tuple[TrialRow, ...]:
    """Best first: ended ones by their objectives, then stopped, diverged and failed ones."""
    places = {"reached": 0, "ended": 0, "stopped": 1, "diverged": 2, "failed": 3}
    return tuple(sorted(rows, key=lambda row: (places[row.status], row.scores, row.id)))


def _is_met(row: TrialRow) -> bool:
    return all(kind_of(value) == "met" for value in row.scores)


def no_scores(objectives: Sequence[ObjectiveName]) -> tuple[float, ...]:
    """Those of a trial that told nothing."""
    return (FAILED,) * len(objectives)
