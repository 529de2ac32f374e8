"""Hierarchical frequency aggregation: frequent averages of workers, rare averages of regions.

Idea: each worker trains ``k1`` local steps, then the region's workers are averaged; after ``k2``
such averages the regions are averaged over the WAN. Both levels are plain model averaging, at two
frequencies: one WAN exchange per ``k1 * k2`` steps.

Rule: every k1 steps of its workers ``w_r <- w_r - mean_w(w_r - w_rw)``; every k2 of those
``w <- w - outer(sum_r q_r (w - w_r))``.

When: many workers per region, a fast LAN and a slow WAN. With one worker per region and k1 = 1 it
is `diloco` with interval k2.

A step of the run (`train.steps`) is one average inside a region, that is k1 batches per worker.

Source: HFA of the GeoMX project (there ``K1`` 20 and ``K2`` 10), reconstructed from its description
and released code. The outer optimizer and weights by samples are ours.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from geo_ray.strategies import local_steps
from geo_ray.strategies.base import LocalSteps, Rounds
from geo_ray.strategies.outer import OuterConfig, OuterSgd, outer_round
from geo_ray.strategies.state import AveragerState, RegionState, Reply, Update
from geo_ray.strategies.traits import (
    AveragerTraits,
    ExchangeTraits,
    RegionTraits,
    RoundMean,
    Traits,
    Weights,
)


class Hfa(LocalSteps, Rounds):
    """Configuration and rule of `hfa`."""

    kind: Literal["hfa"] = "hfa"
    k1: int = Field(4, ge=1, description="local steps of a worker between two averages in a region")
    k2: int = Field(4, ge=1, description="averages in a region between two exchanges over the WAN")
    weights: Weights = Field(
        "samples",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
    )
    outer: OuterConfig = Field(
        OuterSgd(), description="outer optimizer, applied to the mean change of the regions"
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(blocking="always", every=self.k2, last="rest"),
            region=RegionTraits(
                worker_steps=self.k1, eval_params=local_steps.ANCHOR, in_pieces=True
            ),
            averager=AveragerTraits(
                plain_outer=self.outer.plain, round_mean=RoundMean(weights=self.weights)
            ),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Apply the workers' mean change, which is not a gradient."""
        local_steps.anchor(region)
        if grad_P is not None:
            region.params_P.sub_(grad_P)

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with the outer model's change once every region has reported."""
        return outer_round(averager, updates, self.weights, self.outer)
