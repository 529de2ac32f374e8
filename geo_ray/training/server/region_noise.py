"""A region's part in measuring gradient noise: which steps are measured, and what came of it.

A step is measured if its gradients are plain means over rows of their own: not coded ones, not what
workers with steps of their own push, not a step of one worker alone in mode ``async``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from geo_ray.training.compute.noise import NOISE_EVERY, NoiseMeter, NoiseReading
from geo_ray.training.server.shard import Contribution
from geo_ray.types import StepReport


@dataclass(slots=True)
class RegionNoise:
    """See the module's docstring.

    Attributes:
        every: steps between measurements; None for `NOISE_EVERY`.
        meter: smooths.
    """

    every: int | None = None
    meter: NoiseMeter = field(default_factory=NoiseMeter)
    _mean_sq: float | None = None
    _rows: int = 0

    def norms(
        self, step: int, contributions: Sequence[Contribution], reports: Mapping[int, StepReport]
    ) -> list[tuple[int, float]]:
        """Rows and squared norm of each gradient in ``step``; empty if it is not to be measured.

        Every region measures at the same steps, so that what they measured can be put together.
        """
        used = [c for c in contributions if c.num_samples > 0]
        found = [(c.num_samples, reports[c.worker].grad_sq) for c in used if c.weight is None]
        known = [(rows, sq) for rows, sq in found if sq is not None]
        return [] if step % (self.every or NOISE_EVERY) or len(known) < len(used) else known

    def take(
        self, step: int, norms: Sequence[tuple[int, float]], mean_sq: float | None
    ) -> NoiseReading | None:
        """Take in what the shards measured.

        Args:
            step: the step.
            norms: of `norms`.
            mean_sq: squared norm of the gradients' mean over all shards; None if not measured.

        Returns:
            What is known now; None if nothing was learnt.
        """
        # The mean of one is that one.
        self._mean_sq = norms[0][1] if len(norms) == 1 else mean_sq
        self._rows = sum(rows for rows, _ in norms)
        if mean_sq is None or not self.meter.feed(norms, mean_sq):
            return None
        return self.meter.reading(step, norms)

    def mean_sq(self, num_samples: int) -> float | None:
        """Squared norm of the last step's gradient, if it was measured and is of so many rows."""
        return self._mean_sq if self._rows == num_samples else None
