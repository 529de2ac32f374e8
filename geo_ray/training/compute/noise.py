"""Gradient noise, from norms that the parameter server sees anyway: |G|^2 and tr(Sigma).

Idea: the gradients of K workers, each a mean over its own rows, differ only by noise. How much
longer they are than their mean says how much noise one row has.

Rule: gradients ``g_k`` of ``b_k`` rows, ``B = sum b_k``, weights ``w_k = b_k / B``, ``b = B / K``:

    m = sum w_k |g_k|^2           E m = |G|^2 + S / b     (exact for unequal b_k)
    t = |sum w_k g_k|^2           E t = |G|^2 + S / B
    |G|^2 ~ (B t - b m) / (B - b)        S = tr(Sigma) ~ (m - t) / (1 / b - 1 / B)

Both are unbiased, and of a single step mostly noise themselves, so each is smoothed by itself. Only
smoothed values may be divided: a mean of ratios is no ratio of means. Single values may be
negative, and stay so, since what is cut off on one side has a bias.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A, here for
unequal batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

NOISE_EVERY: Final = 16
"""Steps between measurements: the mean's norm is one more pass over the gradient, the only cost."""

_KEEP: Final = 0.99  # of the smoothed value at each measurement; 100 of them count, 1600 steps


@dataclass(frozen=True, slots=True)
class NoiseReading:
    """What is known after one more measurement; the fields of a `noise` event.

    Attributes:
        step: at which it was measured.
        grad_sq: |G|^2, smoothed.
        trace: tr(Sigma) of one row, smoothed.
        rows: behind the measured mean.
        workers: gradients that were compared.
        count: measurements so far.
    """

    step: int
    grad_sq: float
    trace: float
    rows: int
    workers: int
    count: int

    def fields(self) -> dict[str, float | int]:
        """All of it by name."""
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
        """Take in one measurement; see `estimate`.

        Returns:
            False if it is passed over: a number is not finite, or there is only one gradient.
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
        """|G|^2, smoothed; it may be negative while noise is large. NaN before there is any."""
        return self._grad_sq / self._weight if self.count else math.nan

    @property
    def trace(self) -> float:
        """tr(Sigma) of one row, smoothed. NaN before there is any."""
        return self._trace / self._weight if self.count else math.nan

    def reading(self, step: int, rows_and_sq: Sequence[tuple[int, float]]) -> NoiseReading:
        """What is known after the gradients of ``step`` were taken in."""
        rows = sum(count for count, _ in rows_and_sq)
        return NoiseReading(step, self.grad_sq, self.trace, rows, len(rows_and_sq), self.count)

    def export(self) -> dict[str, float | int]:
        """Plain values for a checkpoint."""
        return {"count": self.count, "grad_sq": self._grad_sq, "trace": self._trace}

    def restore(self, data: object) -> None:
        """Become what `export` saved; empty for the checkpoint of an older release."""
        saved = data if isinstance(data, dict) else {}
        self.count = int(saved.get("count", 0))
        self._grad_sq = float(saved.get("grad_sq", 0.0))
        self._trace = float(saved.get("trace", 0.0))

    @property
    def _weight(self) -> float:
        """What the exponential mean has taken in so far; 1 in the end."""
        return 1.0 - _KEEP**self.count
