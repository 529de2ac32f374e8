"""Bulk synchronous SGD: every gradient is averaged over all regions before it is applied.

Idea: one data-parallel step over the WAN. All regions hold the same parameters after every step, so
the result is that of one site with all the data. Every step pays a full exchange.

Rule: ``g = sum_i q_i g_i``; every region applies ``g`` with its own copy of one optimizer.

When: as the reference for other strategies, on fast links, or when staleness is not tolerated.

Source: textbook bulk synchronous data-parallel SGD; the weights ``q_i`` are explicit here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from geo_ray.strategies.base import GradientRounds
from geo_ray.strategies.state import Outgoing, RegionState, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RoundMean, Traits


class Bsp(GradientRounds):
    """Configuration and rule of `bsp`."""

    kind: Literal["bsp"] = "bsp"

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(blocking="always", every=1, last="never"),
            averager=AveragerTraits(
                round_mean=RoundMean(weights=self.weights, is_answer=True, skips_refused=True),
                mean_gradient=self.weights == "samples",
            ),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Keep the gradient; it is applied only as part of the mean."""
        region.memory["grad"] = (
            torch.zeros_like(region.params_P) if grad_P is None else grad_P.clone()
        )

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Send the gradient and wait."""
        return Outgoing(region.memory.pop("grad"), wait=True)
