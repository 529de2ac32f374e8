"""Rules for the steps that a job needs with another batch than the configured one, one per class.

- `fixed`: the same rows in all, so steps go by ``B0 / B``. It is the default, and the only choice
  while the batch is fixed; it assumes nothing.
- `pollux`: rows are used less well by large batches, ``efficiency = (phi + B0) / (phi + B)`` with
  the measured noise scale ``phi = tr(Sigma) / |G|^2``; the learning rate is scaled by AdaScale's
  gain. When the rate is tuned for the configured batch.
- `scavenger`: epochs lie on a line in ``1 / sqrt(B)``, fitted to runs of this job that reached its
  target. When the rate is not scaled, and two runs are known.

`pollux` predicts more epochs for large batches, `scavenger` often fewer: the former is for a rate
that is tuned for each batch, the latter for one that is not.

Source: Pollux (OSDI 2021), the form with phi derived from AdaptDL's code; AdaScale's gain;
Scavenger (arXiv 2303.06659), whose noise is a line in ``1 / sqrt(B)``.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from geo_ray.config.base import StrictModel
from geo_ray.errors import ExtrapolationError, ProfileError
from geo_ray.planning.model.noise import Noise


class FixedProgress(StrictModel):
    """The rule of the same number of rows for every batch."""

    kind: Literal["fixed"] = "fixed"

    def steps(self, base_steps: float, base_rows: int, rows: int, noise: Noise | None) -> float:
        """Return the number of steps of ``rows`` rows.

        Args:
            base_steps: steps with the configured batch.
            base_rows: rows of such a step.
            rows: rows of a step.
            noise: not used.
        """
        return base_steps * base_rows / rows

    def gain(self, base_rows: int, rows: int, noise: Noise | None) -> float:
        """Return the factor on the learning rate, which is 1."""
        return 1.0


class PolluxProgress(StrictModel):
    """See the module's docstring."""

    kind: Literal["pollux"] = "pollux"

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

    rows: int = Field(ge=1, description="of a step, all regions together")
    steps: float = Field(gt=0, description="until the target")


class ScavengerProgress(StrictModel):
    """See the module's docstring."""

    kind: Literal["scavenger"] = "scavenger"
    runs: tuple[Reached, ...] = Field(min_length=2, description="with different batches")
    extrapolate: bool = Field(False, description="go beyond the batches of `runs`")

    @model_validator(mode="after")
    def _two_batches(self) -> Self:
        if len({run.rows for run in self.runs}) < 2:
            raise ValueError("runs: two different batches are needed for a line")
        return self

    def steps(self, base_steps: float, base_rows: int, rows: int, noise: Noise | None) -> float:
        """Return the number of steps of ``rows`` rows; the configured steps do not count.

        Raises:
            ExtrapolationError: the batch is beyond those of the runs.
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
        """Return the factor on the learning rate, which is 1, as in its runs."""
        return 1.0


AnyProgress = Annotated[
    FixedProgress | PolluxProgress | ScavengerProgress, Field(discriminator="kind")
]
