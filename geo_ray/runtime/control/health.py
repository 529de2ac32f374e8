"""Whether a run is still learning, or has diverged: what its checkpoints say of themselves. Pure.

Idea: a checkpoint of a diverged run is worse than an older one, so a resume goes past it, and it
never pushes out the newest good one.

Rule: a checkpoint is healthy if every number in it is finite, at most half of the steps since the
checkpoint before were refused (their loss or gradients were not finite), and the mean training loss
of the others is finite and not exploded. It is exploded if it lies above

    best + (first - best) / 2 + |first| / 4

where ``first`` is the mean until the run's first checkpoint, or until the first refused step after
some loss if that comes before, and ``best`` the lowest since: half of what was gained is lost
again, with a quarter of the first loss as slack for noise. A mean is over at least `MIN_STEPS`
steps: where there are fewer since the checkpoint before, the newest before that count too. Without
a step since the checkpoint before, it is as healthy as that one was.

Source: our own; the fractions are a choice, made so that noise of the first steps does not count.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import cast

from geo_ray.checkpoint.manifest import CheckpointManifest

MIN_STEPS = 50


@dataclass(slots=True)
class LossHealth:
    """Follows the training loss over all regions from checkpoint to checkpoint.

    Attributes:
        first: mean loss until the first checkpoint; None before.
        best: lowest mean between two checkpoints; None before the first.
        healthy: what the last checkpoint was found to be.
    """

    first: float | None = None
    best: float | None = None
    healthy: bool = True
    _total: float = 0.0
    _steps: int = 0
    _refused: int = 0
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=MIN_STEPS))

    def on_step(self, loss: float | None) -> None:
        """A region has applied a step with this loss; None if all of its rows were refused."""
        if loss is not None and math.isfinite(loss):
            self._total += loss
            self._steps += 1
            self._newest.append(loss)
            return
        if self.first is None and self._steps:
            self.first = self.best = self._total / self._steps
        self._refused += 1

    def judge(self) -> bool:
        """A checkpoint is taken: whether the run was healthy since the one before."""
        if self._steps or self._refused:
            self.healthy = self._refused <= self._steps and self._is_learning()
            self._total, self._steps, self._refused = 0.0, 0, 0
        return self.healthy

    def export(self) -> dict[str, float | None]:
        """Plain values, for a checkpoint's manifest."""
        return {"first": self.first, "best": self.best}

    @classmethod
    def restore(cls, manifest: CheckpointManifest) -> LossHealth:
        """As it was at a checkpoint; `export` is its ``loss``."""
        loss = manifest.extra.get("loss")
        if not isinstance(loss, dict):
            return cls(healthy=manifest.healthy)
        first, best = (cast(float | None, loss.get(name)) for name in ("first", "best"))
        return cls(first, best, manifest.healthy)

    def _is_learning(self) -> bool:
        is_long = self._steps >= MIN_STEPS
        mean = self._total / self._steps if is_long else sum(self._newest) / len(self._newest)
        if self.first is None or self.best is None:
            self.first = self.best = mean
        limit = self.best + (self.first - self.best) / 2 + abs(self.first) / 4
        self.best = min(self.best, mean)
        return mean <= limit
