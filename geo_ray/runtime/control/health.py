"""Whether a run is still learning, or has diverged: what its checkpoints say of themselves. Pure.

Idea: a checkpoint of a diverged run is worse than an older one, so a resume goes past it, and it
never pushes out the newest good one.

Rule: a checkpoint is healthy if every number in it is finite, and if the mean training loss since
the checkpoint before is finite and not exploded. It is exploded if it lies above

    best + (first - best) / 2 + |first| / 4

where ``first`` is the mean until the run's first checkpoint and ``best`` the lowest since: half of
what was gained is lost again, with a quarter of the first loss as slack for noise.

Source: our own; the fractions are a choice, made so that noise of the first steps does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class LossHealth:
    """Follows the training loss over all regions from checkpoint to checkpoint.

    Attributes:
        first: mean loss until the first checkpoint; None before.
        best: lowest mean between two checkpoints; None before the first.
    """

    first: float | None = None
    best: float | None = None
    _total: float = 0.0
    _steps: int = 0

    def on_step(self, loss: float | None) -> None:
        """A region has applied a step with this loss; None if none of its rows had one."""
        if loss is not None:
            self._total += loss
            self._steps += 1

    def judge(self) -> bool:
        """A checkpoint is taken: whether the run was healthy since the one before."""
        if not self._steps:
            return True
        mean, self._total, self._steps = self._total / self._steps, 0.0, 0
        if not math.isfinite(mean):
            return False
        if self.first is None or self.best is None:
            self.first = self.best = mean
            return True
        limit = self.best + (self.first - self.best) / 2 + abs(self.first) / 4
        self.best = min(self.best, mean)
        return mean <= limit

    def export(self) -> dict[str, float | None]:
        """Plain values, for a checkpoint's manifest."""
        return {"first": self.first, "best": self.best}

    @classmethod
    def restore(cls, saved: object) -> LossHealth:
        """What `export` gave; a new one if there is none."""
        if not isinstance(saved, Mapping):
            return cls()
        return cls(saved.get("first"), saved.get("best"))
