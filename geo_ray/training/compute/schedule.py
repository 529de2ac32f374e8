"""The learning rate over an optimizer's own steps: warm-up, then decay.

Each optimizer counts the steps that it took, so a region that takes few has a short way along the
curve, and a resumed run goes on where it was. Cosine: Loshchilov and Hutter, "SGDR", 2017, without
restarts.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from geo_ray.config.base import StrictModel


class RateSchedule(StrictModel):
    """Linear warm-up to the rate of the optimizer, then decay to a share of it."""

    kind: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="shape of the decay"
    )
    warmup_steps: int = Field(0, ge=0, description="steps until the full rate")
    steps: int | None = Field(
        None, ge=1, description="steps until the last share; null: as many as the run has"
    )
    last: float = Field(0.1, ge=0, le=1, description="share of the rate that is left at the end")

    def factor(self, taken: int) -> float:
        """What the rate is multiplied by in the step after ``taken`` steps.

        Raises:
            ValueError: if neither the configuration nor `over` said how many steps there are.
        """
        if taken < self.warmup_steps:
            return (taken + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        if self.steps is None:
            raise ValueError("a schedule without steps; see Schedule.over")
        done = min(1.0, (taken - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.last + (1 - self.last) * left

    def over(self, steps: int) -> RateSchedule:
        """The same, ``steps`` long unless it has a length."""
        return self if self.steps is not None else self.model_copy(update={"steps": steps})
