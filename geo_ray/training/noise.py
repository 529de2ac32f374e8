"""Gradient noise from norms that servers and averager already have: ``|G|^2`` and ``tr(Sigma)``.

For gradients ``g_k`` of ``b_k`` rows with ``B = sum b_k``, ``w_k = b_k / B``, ``b = B / K``:
``m = sum w_k |g_k|^2``, ``t = |sum w_k g_k|^2``, ``|G|^2 ~ (B t - b m) / (B - b)``, ``tr(Sigma)
~ (m - t) / (1 / b - 1 / B)``. Both are unbiased and smoothed separately; only smoothed values
are divided.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A, here
for unequal batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from geo_ray.base.types import StepReport
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.training.parameters import square_norm
from geo_ray.training.shard import Contribution

NOISE_EVERY: Final = 16
"""Steps between measurements: the mean's norm is one more pass over the gradient, the only cost."""

_KEEP: Final = 0.99  # of the smoothed value at each measurement; 100 of them count, 1600 steps


@dataclass(frozen=True, slots=True)
class NoiseReading:
    """Estimate after one more measurement; the fields of a `noise` event.

    Attributes:
        step: step of the measurement.
        grad_sq: |G|^2, smoothed.
        trace: tr(Sigma) of one row, smoothed.
        rows: rows behind the measured mean.
        workers: number of compared gradients.
        count: measurements so far.
    """

    step: int
    grad_sq: float
    trace: float
    rows: int
    workers: int
    count: int

    def fields(self) -> dict[str, float | int]:
        """Return all fields by name."""
        return asdict(self)


def estimate(rows_and_sq: Sequence[tuple[int, float]], mean_sq: float) -> tuple[float, float]:
    """|G|^2 and tr(Sigma) of one step alone; see the module's docstring.

    Args:
        rows_and_sq: rows and squared norm of each gradient; two at least.
        mean_sq: squared norm of their mean by rows.
    """
    rows = sum(count for count, _ in rows_and_sq)
    each = rows / len(rows_and_sq)
    own_sq = sum(count * sq for count, sq in rows_and_sq) / rows
    grad_sq = (rows * mean_sq - each * own_sq) / (rows - each)
    return grad_sq, (own_sq - mean_sq) / (1 / each - 1 / rows)


@dataclass(slots=True)
class NoiseMeter:
    """Smooths both values: an exponential mean, corrected for its start.

    Attributes:
        count: measurements so far.
    """

    count: int = 0
    _grad_sq: float = 0.0
    _trace: float = 0.0

    def feed(self, rows_and_sq: Sequence[tuple[int, float]], mean_sq: float) -> bool:
        """Add one measurement; see `estimate`.

        Returns:
            False if it is skipped: a number is not finite, or there is only one gradient.
        """
        if len(rows_and_sq) < 2:
            return False
        grad_sq, trace = estimate(rows_and_sq, mean_sq)
        if not (math.isfinite(grad_sq) and math.isfinite(trace)):
            return False
        self.count += 1
        self._grad_sq = _KEEP * self._grad_sq + (1 - _KEEP) * grad_sq
        self._trace = _KEEP * self._trace + (1 - _KEEP) * trace
        return True

    @property
    def grad_sq(self) -> float:
        """|G|^2, smoothed; may be negative while noise is large. NaN before any measurement."""
        return self._grad_sq / self._weight if self.count else math.nan

    @property
    def trace(self) -> float:
        """tr(Sigma) of one row, smoothed. NaN before the first measurement."""
        return self._trace / self._weight if self.count else math.nan

    def reading(self, step: int, rows_and_sq: Sequence[tuple[int, float]]) -> NoiseReading:
        """Return the estimate after the measurement at ``step``."""
        rows = sum(count for count, _ in rows_and_sq)
        return NoiseReading(step, self.grad_sq, self.trace, rows, len(rows_and_sq), self.count)

    def export(self) -> dict[str, float | int]:
        """Return plain values for a checkpoint."""
        return {"count": self.count, "grad_sq": self._grad_sq, "trace": self._trace}

    def restore(self, data: object) -> None:
        """Restore the result of `export`."""
        saved = data if isinstance(data, dict) else {}
        self.count = int(saved.get("count", 0))
        self._grad_sq = float(saved.get("grad_sq", 0.0))
        self._trace = float(saved.get("trace", 0.0))

    @property
    def _weight(self) -> float:
        """Total weight in the exponential mean; tends to 1."""
        return 1.0 - _KEEP**self.count


@dataclass(slots=True)
class AveragerNoise:
    """The averager's part.

    Attributes:
        meter: smooths.
    """

    meter: NoiseMeter = field(default_factory=NoiseMeter)
    _news: list[NoiseReading] = field(default_factory=list)

    def measured(self, strategy: Strategy, averager: AveragerState, update: Update) -> list[Update]:
        """The whole round that ``update`` completes, if all of it was measured; else nothing."""
        if update.grad_sq is None or not strategy.traits.averager.mean_gradient:
            return []
        there = {**averager.waiting, update.region: update}
        found = [there[name] for name in averager.members if name in there]
        usable = [u for u in found if u.grad_sq is not None and u.num_samples > 0]
        return usable if len(usable) == len(averager.members) > 1 else []

    def take(self, step: int, updates: Sequence[Update], answers: Sequence[Reply]) -> None:
        """Add a round.

        Args:
            step: round's number.
            updates: result of `measured`.
            answers: strategy's answers, which all contain the mean.
        """
        norms = [(u.num_samples, u.grad_sq) for u in updates if u.grad_sq is not None]
        if answers and norms and self.meter.feed(norms, square_norm(answers[0].payload_P)):
            self._news.append(self.meter.reading(step, norms))

    def news(self) -> list[NoiseReading]:
        """Return the readings since the last call, for events."""
        news, self._news = self._news, []
        return news


@dataclass(slots=True)
class RegionNoise:
    """Measures gradient noise in a region.

    A step is measured if its gradients are plain means over separate rows: no coded gradients, no
    changes of workers with local steps, no steps of a single worker in mode ``async``.

    Attributes:
        every: steps between measurements; None for `NOISE_EVERY`.
        meter: smoothed estimate.
    """

    every: int | None = None
    meter: NoiseMeter = field(default_factory=NoiseMeter)
    _mean_sq: float | None = None
    _rows: int = 0

    def norms(
        self, step: int, contributions: Sequence[Contribution], reports: Mapping[int, StepReport]
    ) -> list[tuple[int, float]]:
        """Return rows and squared norm of each gradient in ``step``; empty if it is not measured.

        All regions measure at the same steps, so that the measurements can be combined.
        """
        used = [c for c in contributions if c.num_samples > 0]
        found = [(c.num_samples, reports[c.worker].grad_sq) for c in used if c.weight is None]
        known = [(rows, sq) for rows, sq in found if sq is not None]
        return [] if step % (self.every or NOISE_EVERY) or len(known) < len(used) else known

    def take(
        self, step: int, norms: Sequence[tuple[int, float]], mean_sq: float | None
    ) -> NoiseReading | None:
        """Add the shards' measurement.

        Args:
            step: step.
            norms: result of `norms`.
            mean_sq: squared norm of the mean gradient over all shards; None if not measured.

        Returns:
            New estimate; None if there is none.
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
