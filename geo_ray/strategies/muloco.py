"""MuLoCo: DiLoCo with Muon as the inner optimizer.

Idea: every step of Muon moves all directions of a matrix equally far. The changes of regions then
point in similar directions, and their mean keeps more of each than with AdamW, the more so the more
regions there are. They also lose less by coarse codes.

Rule: that of `diloco` over steps of ``optimizer: {kind: muon}``: ``Delta = sum_i q_i (w - w_i)``;
``m <- beta m + Delta``; ``w <- w - eta (Delta + beta m)``. With ``codec.up`` a region sends
``C(e + Delta_i)`` and keeps ``e <- e + Delta_i - C(e + Delta_i)``, the error feedback of all
codecs.

When: as `diloco`, for models whose parameters are mostly hidden matrices. The defaults (eta 0.7,
beta 0.6, 30 steps) are those of the paper: less momentum than over AdamW, because the changes are
less noisy. A step costs a few matrix products per matrix more.

Source: MuLoCo (arXiv 2505.23725), its abstract and the authors' published code for one worker; the
error feedback is that of its first version with a decay of 1, reconstructed. The paper also streams
fragments: `diloco_streaming` accepts Muon, too.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.strategies import local_steps
from geo_ray.strategies.base import LocalSteps, Rounds
from geo_ray.strategies.outer import OuterConfig, OuterNesterov, outer_round
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.strategies.traits import (
    AveragerTraits,
    ExchangeTraits,
    RegionTraits,
    RoundMean,
    Traits,
    Weights,
)


class MuLoCo(LocalSteps, Rounds):
    """Configuration and rule of `muloco`."""

    kind: Literal["muloco"] = "muloco"
    interval: int = Field(30, ge=1, description="local steps between two exchanges (H)")
    weights: Weights = Field(
        "samples",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
    )
    outer: OuterConfig = Field(
        OuterNesterov(momentum=0.6), description="outer optimizer, applied to the mean change"
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(
                blocking="always",
                every=self.interval,
                last="rest",
                interval=self.interval,
                adjustable_interval=True,
            ),
            region=RegionTraits(
                local_optimizer=True, eval_params=local_steps.ANCHOR, needs_optimizer="muon"
            ),
            averager=AveragerTraits(
                plain_outer=self.outer.plain, round_mean=RoundMean(weights=self.weights)
            ),
        )

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with the outer model's change once every region has reported."""
        return outer_round(averager, updates, self.weights, self.outer)
