"""Which evaluated model is the best one: what the user asks for, and what is known of the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from geo_ray.config.base import StrictModel
from geo_ray.observe.text import number_text


class Best(StrictModel):
    """The best evaluated model of a run."""

    metric: str = Field(description="what it is the best by")
    mode: Literal["min", "max"] = Field(description="whether less or more of the metric is better")
    value: float = Field(description="of the metric")
    step: int = Field(description="region steps of the model")
    region: str | None = Field(
        description="on whose held-out rows it was evaluated; null: on those of all regions"
    )
    samples: int = Field(description="held-out rows behind the metrics")
    metrics: dict[str, float | None] = Field(description="all metrics of its evaluation")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Best:
        """The best that a `best_kept` event tells of; its fields may be more."""
        return cls(**{name: fields[name] for name in cls.model_fields})

    @property
    def text(self) -> str:
        """In a few words, for people."""
        where = "" if self.region is None else f" in {self.region}"
        return f"{self.metric} {number_text(self.value)} at step {self.step:,}{where}"


class KeepBest(StrictModel):
    """By which metric the best evaluated model is kept."""

    metric: str = Field(description="name of the metric, as the task gives it")
    mode: Literal["min", "max"] = Field(description="max for accuracies, min for losses")

    def known(self, best: Best | None) -> Best | None:
        """The best so far, if it was chosen by the same rule."""
        same = best is not None and (best.metric, best.mode) == (self.metric, self.mode)
        return best if same else None

    def is_better(self, value: float | None, best: Best | None) -> bool:
        """Whether an evaluation's value is better than the best so far.

        A value that is not finite never is, and of equal ones the earlier stays.

        Args:
            value: of the metric.
            best: so far; one by another metric or mode does not count.
        """
        if value is None or not math.isfinite(value):
            return False
        known = self.known(best)
        if known is None:
            return True
        return value > known.value if self.mode == "max" else value < known.value
