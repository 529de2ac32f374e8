"""Gradient noise, and the number of steps for another batch size; one rule per class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from geo_ray.base.errors import ExtrapolationError, ProfileError
from geo_ray.base.model import StrictModel


@dataclass(frozen=True, slots=True)
class Noise:
    """A measurement of gradient noise.

    Attributes:
        grad_sq: |G|^2, smoothed; zero or negative while noise dominates.
        trace: tr(Sigma) of one row, smoothed.
        rows: rows behind the measured mean.
        workers: number of compared gradients.
        count: measurements behind the smoothed values.
    """

    grad_sq: float
    trace: float
    rows: int
    workers: int
    count: int

    @property
    def b_simple(self) -> float:
        """Rows at which noise and gradient balance; infinite if ``grad_sq`` is not positive."""
        return max(0.0, self.trace) / self.grad_sq if self.grad_sq > 0 else math.inf

    def gamma(self, batch: int, workers: int) -> float:
        """Return the mean squared norm of workers' gradients over that of their mean.

        1 to ``workers``.

        Args:
            batch: rows of a step.
            workers: number of workers that share them evenly.
        """
        noise = self.b_simple / batch
        return (1 + workers * noise) / (1 + noise) if math.isfinite(noise) else float(workers)

    def efficiency(self, batch: int, base: int) -> float:
        """Return the progress per row with ``batch`` rows per step, relative to ``base`` rows."""
        noise = self.b_simple
        return (noise + base) / (noise + batch) if math.isfinite(noise) else 1.0

    def gain(self, batch: int, base: int) -> float:
        """Return the number of steps of ``base`` rows that one step of ``batch`` rows replaces."""
        noise = self.b_simple
        if not math.isfinite(noise):
            return batch / base
        return (noise / base + 1) / (noise / batch + 1)


class FixedProgress(StrictModel):
    """Rule: every batch size needs the same number of rows."""

    kind: Literal["fixed"] = Field("fixed", description="the same number of rows for every batch")

    def steps(self, base_steps: float, base_rows: int, rows: int, noise: Noise | None) -> float:
        """Return the number of steps of ``rows`` rows.

        Args:
            base_steps: steps with the configured batch.
            base_rows: rows of such a step.
            rows: rows of a step.
            noise: ignored.
        """
        return base_steps * base_rows / rows

    def gain(self, base_rows: int, rows: int, noise: Noise | None) -> float:
        """Return the factor on the learning rate, which is 1."""
        return 1.0


class PolluxProgress(StrictModel):
    """Number of steps for another batch size than the configured one.

    - `fixed`: the total number of rows is constant, so steps scale with ``B0 / B``. It is the
    default, and makes no assumption.
    - `pollux`: large batches use rows less efficiently, ``efficiency = (phi + B0) / (phi + B)``
    with the measured noise scale ``phi = tr(Sigma) / |G|^2``; the learning rate is scaled by
    AdaScale's gain. When: the rate is tuned for the configured batch.
    - `scavenger`: epochs are linear in ``1 / sqrt(B)``, fitted to runs of this job that reached its
    target. When: the rate is not scaled, and two runs are available.

    `pollux` predicts more epochs for large batches, `scavenger` often fewer: the former assumes a
    rate tuned for each batch, the latter a constant one.

    Source: Pollux (OSDI 2021), with phi as in AdaptDL's code; AdaScale's gain; Scavenger (arXiv
    2303.06659), whose noise is linear in ``1 / sqrt(B)``.
    """

    kind: Literal["pollux"] = Field("pollux", description="by the measured gradient noise")

    def steps(self, base_steps: float, base_rows: int, rows: int, noise: Noise | None) -> float:
        """Return the number of steps of ``rows`` rows; arguments as for `FixedProgress.steps`.

        Raises:
            ProfileError: the noise was not measured.
        """
        return base_steps / self.gain(base_rows, rows, noise)

    def gain(self, base_rows: int, rows: int, noise: Noise | None) -> float:
        """Return the factor on the learning rate of plain SGD.

        Raises:
            ProfileError: the noise was not measured.
        """
        if noise is None:
            raise ProfileError(
                "plan.progress: pollux needs the gradient noise, which was not measured",
                fix="Run `geo-ray profile` with two workers in a region, or use kind fixed.",
            )
        return noise.gain(rows, base_rows)


class Reached(StrictModel):
    """A run that reached its target."""

    rows: int = Field(ge=1, description="rows of a step, all regions together")
    steps: float = Field(gt=0, description="steps until the target")


class ScavengerProgress(StrictModel):
    """Number of steps for another batch size, from earlier runs; see `PolluxProgress`.

    - `fixed`: the same rows in all, so steps go by ``B0 / B``. It is the default, and the only
      choice while the batch is fixed; it assumes nothing.
    - `pollux`: rows are used less well by large batches, ``efficiency = (phi + B0) / (phi + B)``
      with the measured noise scale ``phi = tr(Sigma) / |G|^2``; the learning rate is scaled by
      AdaScale's gain. When the rate is tuned for the configured batch.
    - `scavenger`: epochs lie on a line in ``1 / sqrt(B)``, fitted to runs of this job that reached
      its target. When the rate is not scaled, and two runs are known.

    `pollux` predicts more epochs for large batches, `scavenger` often fewer: the former is for a
    rate that is tuned for each batch, the latter for one that is not.

    Source: Pollux (OSDI 2021), the form with phi derived from AdaptDL's code; AdaScale's gain;
    Scavenger (arXiv 2303.06659), whose noise is a line in ``1 / sqrt(B)``.
    """

    kind: Literal["scavenger"] = Field(
        "scavenger", description="by a line fitted to runs that reached the target"
    )
    runs: tuple[Reached, ...] = Field(min_length=2, description="runs with different batches")
    extrapolate: bool = Field(False, description="allow batches beyond those of `runs`")

    @model_validator(mode="after")
    def _two_batches(self) -> Self:
        if len({run.rows for run in self.runs}) < 2:
            raise ValueError("runs: two different batches are needed for a line")
        return self

    def steps(self, base_steps: float, base_rows: int, rows: int, noise: Noise | None) -> float:
        """Return the number of steps of ``rows`` rows; the configured steps are ignored.

        Raises:
            ExtrapolationError: the batch is outside the range of the runs.
        """
        low, high = min(r.rows for r in self.runs), max(r.rows for r in self.runs)
        if not low <= rows <= high and not self.extrapolate:
            raise ExtrapolationError(
                f"plan.progress: a batch of {rows:g} rows; its runs have {low} to {high}",
                fix="Add a run with such a batch, or set plan.progress.extrapolate.",
            )
        inverse = np.array([run.rows**-0.5 for run in self.runs])
        work = np.array([run.rows * run.steps for run in self.runs])
        slope, base = np.polyfit(inverse, work, 1)
        return max(1.0, float(base + slope * rows**-0.5) / rows)

    def gain(self, base_rows: int, rows: int, noise: Noise | None) -> float:
        """Return the factor on the learning rate, which is 1, as in the runs."""
        return 1.0


AnyProgress = Annotated[
    FixedProgress | PolluxProgress | ScavengerProgress, Field(discriminator="kind")
]
