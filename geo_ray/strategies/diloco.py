"""DiLoCo: many local steps with AdamW, then one outer step with Nesterov momentum.

Idea: regions train apart for H steps, each with its own inner optimizer whose state never travels.
The mean of what they did is a pseudo-gradient, on which the averager takes one step with momentum.
So rounds may be hundreds of steps apart, at a small loss.

Rule: ``Delta = sum_i q_i (w - w_i)``; ``m <- beta m + Delta``; ``w <- w - eta (Delta + beta m)``.
With outer learning rate 1 and no momentum it is `sma`.

``compute_share`` lets H follow the link: see `geo_ray.strategies.common.paced`.

When: regions of about equal speed and a slow link. Defaults (eta 0.7, beta 0.9) are for H from 30
to 500; for small H lower the momentum, since steps add up to ``eta / (1 - beta)``.

Source: DiLoCo (arXiv 2311.08105), reconstructed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import Tensor

from geo_ray.config.base import StrictModel
from geo_ray.strategies.base import (
    AveragerState,
    Outgoing,
    RegionState,
    Reply,
    Update,
    Weights,
)
from geo_ray.strategies.common import local
from geo_ray.strategies.common.outer import OuterConfig, OuterNesterov, outer_round
from geo_ray.strategies.common.paced import paced_interval
from geo_ray.strategies.traits import (
    AveragerTraits,
    ExchangeTraits,
    RegionTraits,
    RoundMean,
    Traits,
)


class DiLoCo(StrictModel):
    """Configuration and rule of `diloco`."""

    kind: Literal["diloco"] = "diloco"
    interval: int = Field(32, ge=1, description="local steps between two exchanges (H)")
    weights: Weights = Field("samples", description="weight of a region: 1/M or by its samples")
    compute_share: float | None = Field(
        None, gt=0, lt=1, description="let H follow the link, so that this share is computing"
    )
    outer: OuterConfig = Field(OuterNesterov(), description="what is made of the mean change")

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        # A pace of its own goes by every update's measurements.
        mean = RoundMean(weights=self.weights) if self.compute_share is None else None
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(
                stands_still="always",
                every=self.interval,
                last="rest",
                interval=self.interval,
                paced=self.compute_share is None,
            ),
            region=RegionTraits(eval_params=local.ANCHOR),
            averager=AveragerTraits(plain_outer=self.outer.plain, round_mean=mean),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """A local optimizer step."""
        local.step(region, grad_P)

    def after_step(self, region: RegionState) -> Outgoing | None:
        """Every H steps, send what was done and wait."""
        return local.outgoing_when_due(region, self.interval)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Go on from the outer model."""
        local.adopt(region, reply)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """The last exchange, unless the last step was one anyway."""
        return local.final_update(region)

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Answer all with the outer model's change once every region is in."""
        updates = [*averager.waiting.values(), update]
        replies = outer_round(averager, update, self.weights, self.outer)
        if not replies or self.compute_share is None:
            return replies
        steps = paced_interval(averager, updates, self.compute_share, self.interval)
        return [replace(reply, steps=steps) for reply in replies]
