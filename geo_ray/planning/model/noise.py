"""What gradient noise implies for batch sizes; values are those of a run's `noise` events.

Idea: a mean over B rows is the true gradient plus noise of variance ``tr(Sigma) / B``. While noise
outweighs the gradient, a larger batch saves as many steps as it costs rows; beyond that it is
wasted. The batch where they balance is ``B_simple = tr(Sigma) / |G|^2``.

Source: B_simple after McCandlish et al. (arXiv 1812.06162). gamma after Scavenger (arXiv
2303.06659), its relation to B_simple derived here. Efficiency after Pollux (OSDI 2021), in the form
of its AdaptDL code; gain after AdaScale, as used there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Noise:
    """A measurement.

    Attributes:
        grad_sq: |G|^2, smoothed; zero or less while there is too much noise to tell.
        trace: tr(Sigma) of one row, smoothed.
        rows: behind the measured mean.
        workers: gradients that were compared.
        count: measurements behind the smoothed values.
    """

    grad_sq: float
    trace: float
    rows: int
    workers: int
    count: int

    @property
    def b_simple(self) -> float:
        """The rows where noise and gradient balance; infinite if ``grad_sq`` is not above zero."""
        return max(0.0, self.trace) / self.grad_sq if self.grad_sq > 0 else math.inf

    def gamma(self, batch: int, workers: int) -> float:
        """Return workers' squared gradient length over that of their mean: 1 to ``workers``.

        Args:
            batch: rows of a step.
            workers: number of workers that share them evenly.
        """
        noise = self.b_simple / batch
        return (1 + workers * noise) / (1 + noise) if math.isfinite(noise) else float(workers)

    def efficiency(self, batch: int, base: int) -> float:
        """Return the progress per row with ``batch`` rows a step, relative to ``base`` rows."""
        noise = self.b_simple
        return (noise + base) / (noise + batch) if math.isfinite(noise) else 1.0

    def gain(self, batch: int, base: int) -> float:
        """Return how many steps of ``base`` rows a step of ``batch`` rows is worth."""
        noise = self.b_simple
        if not math.isfinite(noise):
            return batch / base
        return (noise / base + 1) / (noise / batch + 1)
