"""Combines the regions' evaluations: statistics are added, samples never leave their region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from geo_ray.errors import ConfigError
from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.summary import Target
from geo_ray.tasks.base import Stats, Task


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation.

    Attributes:
        step: region steps of the evaluated parameters; the regions' last when `final`.
        region: whose parameters and held-out rows; None for all regions together.
        metrics: the task's metrics.
        samples: held-out rows behind them.
        final: made after the last exchange, when all regions agree.
    """

    step: int
    region: str | None
    metrics: dict[str, float]
    samples: int
    final: bool = False


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
    _open: dict[tuple[int, bool], dict[str, tuple[Stats, int, int]]] = field(default_factory=dict)

    def add(
        self, region: str, step: int, stats: Stats, samples: int, *, final: bool = False
    ) -> list[Evaluation]:
        """Take in one region's statistics.

        Returns:
            Its evaluation, and the combined one if it was the last region of that step (or of
            that interval).
        """
        # After the last exchange all belong together, whatever their step.
        number = 0 if self.newest else step // self.intervals.get(region, 1)
        key = (-1 if final else number, final)
        group = self._open.setdefault(key, {})
        group[region] = (stats, samples, step)
        done = [Evaluation(step, region, self.task.metrics(stats), samples, final)]
        return done + self._complete([key])

    def forget(self, region: str) -> list[Evaluation]:
        """Go on without a region; what it has told of open evaluations does not count.

        Returns:
            Combined evaluations that had waited for it alone.
        """
        self.num_regions -= 1
        for group in self._open.values():
            group.pop(region, None)
        return self._complete(list(self._open))

    def _complete(self, keys: Sequence[tuple[int, bool]]) -> list[Evaluation]:
        done = []
        for key in keys:
            group = self._open[key]
            if len(group) == self.num_regions:
                if key[1] or not self.newest:
                    del self._open[key]
                done.append(self._together(group, final=key[1]))
        return done

    def _together(self, group: Mapping[str, tuple[Stats, int, int]], *, final: bool) -> Evaluation:
        ordered = [group[name] for name in sorted(group)]
        names = ordered[0][0]
        total = {name: sum_of([stats[name] for stats, _, _ in ordered]) for name in names}
        rows = sum(samples for _, samples, _ in ordered)
        step = max(step for _, _, step in ordered)
        return Evaluation(step, None, self.task.metrics(total), rows, final)


def sum_of(
    arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Sum arrays of one shape (K,) in order."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def hits(target: Target | None, done: Evaluation, event: Event) -> bool:
    """Whether ``done``, written down as ``event``, reaches the target of the whole run.

    Raises:
        ConfigError: if the task has no such metric.
    """
    if target is None or done.final or done.region is not None:
        return False
    if target.metric not in done.metrics:
        raise ConfigError(
            f"train.target.metric: the task's evaluation has no '{target.metric}'",
            fix=f"Set train.target.metric to {' or '.join(sorted(done.metrics))}.",
        )
    return target.stop and target.reached(event)
