"""Combines the regions' evaluations: statistics are added, samples never leave their region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from geo_ray.tasks.base import Stats, Task
from geo_ray.tasks.guard import checked_metrics


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation.

    Attributes:
        step: region steps of the evaluated parameters; the regions' last when `final`.
        region: whose parameters and held-out rows; None for all regions together.
        metrics: the task's metrics.
        samples: held-out rows behind them.
        final: made after the last exchange, when all regions agree.
        one_model: all regions have told that they evaluated the same parameters, or there is one.
        steps: each region's own step.
    """

    step: int
    region: str | None
    metrics: dict[str, float]
    samples: int
    final: bool = False
    one_model: bool = True
    steps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Told:
    stats: Stats
    samples: int
    step: int
    model: str | None


@dataclass(slots=True)
class EvalBoard:
    """Collects one region's statistics after the other.

    Attributes:
        task: turns sums into metrics.
        num_regions: how many belong together.
        intervals: steps between a region's evaluations, by region. Evaluations of the same interval
            belong together: asynchronous regions pass a due step by a push or two. A region that
            is not named is matched by the step itself.
        newest: instead, the newest evaluations of all regions belong together, as soon as each has
            made one; for regions whose numbers of steps have nothing to do with each other.
    """

    task: Task
    num_regions: int
    intervals: Mapping[str, int] = field(default_factory=dict)
    newest: bool = False
    _joined: dict[str, int] = field(default_factory=dict)  # newcomers: their first interval
    _open: dict[tuple[int, bool], dict[str, _Told]] = field(default_factory=dict)

    def add(
        self,
        region: str,
        step: int,
        stats: Stats,
        samples: int,
        *,
        final: bool = False,
        model: str | None = None,
    ) -> list[Evaluation]:
        """Take in one region's statistics.

        Args:
            region: whose.
            step: of the evaluated parameters.
            stats: sums over its held-out rows.
            samples: how many these are.
            final: made after the last exchange.
            model: digest of the evaluated parameters, if it is told.

        Returns:
            Its evaluation, and the combined one if it was the last region of that step (or of
            that interval).
        """
        # After the last exchange all belong together, whatever their step.
        number = 0 if self.newest else step // self.intervals.get(region, 1)
        key = (-1 if final else number, final)
        group = self._open.setdefault(key, {})
        group[region] = _Told(stats, samples, step, model)
        metrics = checked_metrics(self.task, stats)
        done = [Evaluation(step, region, metrics, samples, final, steps={region: step})]
        return done + self._complete([key])

    def admit(self, region: str, step: int) -> None:
        """A region joins that has as many steps behind it: its evaluations count from there on."""
        self._joined[region] = step // self.intervals.get(region, 1)

    def forget(self, region: str) -> list[Evaluation]:
        """Go on without a region; what it has told of open evaluations does not count.

        Returns:
            Combined evaluations that had waited for it alone.
        """
        waiting = [key for key in self._open if len(self._told(key)) < self._wanted(*key)]
        if self._joined.pop(region, None) is None:
            self.num_regions -= 1
        for group in self._open.values():
            group.pop(region, None)
        return self._complete(waiting)

    def _complete(self, keys: Sequence[tuple[int, bool]]) -> list[Evaluation]:
        done = []
        for key in keys:
            group = self._told(key)
            if len(group) != self._wanted(*key):
                continue
            if key[1] or not self.newest:
                del self._open[key]
            if group:  # else all whom it was of are gone
                done.append(self._together(group, final=key[1]))
        return done

    def _told(self, key: tuple[int, bool]) -> dict[str, _Told]:
        """What the regions have told that an evaluation is of."""
        number, final = key
        always = final or self.newest
        told = self._open[key].items()
        return {name: t for name, t in told if always or number > self._joined.get(name, -1)}

    def _wanted(self, number: int, final: bool) -> int:
        """How many regions an evaluation is of."""
        always = final or self.newest
        return self.num_regions + sum(always or number > first for first in self._joined.values())

    def _together(self, group: Mapping[str, _Told], *, final: bool) -> Evaluation:
        ordered = [group[name] for name in sorted(group)]
        total = {n: sum_of([told.stats[n] for told in ordered]) for n in ordered[0].stats}
        rows = sum(told.samples for told in ordered)
        steps = {name: told.step for name, told in sorted(group.items())}
        models = {told.model for told in ordered}
        one_model = len(ordered) == 1 or (len(models) == 1 and None not in models)
        metrics = checked_metrics(self.task, total)
        return Evaluation(max(steps.values()), None, metrics, rows, final, one_model, steps)


def sum_of(
    arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Sum arrays of one shape (K,) in order."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total
