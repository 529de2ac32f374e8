"""The ``strategy`` section with ``kind: auto``: what may be given up for time.

It is no strategy: `geo_ray.api.auto` puts the strategy that it chooses in its place, before the
tree is validated.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from geo_ray.config.annotations import Also
from geo_ray.config.base import StrictModel


class AutoConfig(StrictModel):
    """Strategy, interval and codec are chosen from measured links and steps."""

    kind: Literal["auto"] = "auto"
    loss_budget: float = Field(
        0.02, gt=0, lt=1, description="relative loss that may be paid for time"
    )
    links: str = Field("links.json", description="what `geo-ray probe` measured, if not emulated")
    step_s: float | None = Field(
        None, gt=0, description="seconds of a step; null: measured here on the task's own data"
    )


OR_AUTO: Final = Also(
    AutoConfig, "which only `geo-ray train`, `simulate` and `config show` replace by a strategy"
)
"""Mark of the section that may be written as `AutoConfig`."""
