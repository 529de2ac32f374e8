"""Bulk synchronous: every gradient is averaged over all regions before anybody applies it.

Idea: one big data-parallel step over the WAN. All regions hold the same parameters after every
step, so the result is that of one site with all the data; every step pays a full exchange.

Rule: ``g = sum_i q_i g_i``, then every region applies ``g`` with its own copy of one optimizer.

When: as the reference that others are measured against, on fast links, or when staleness is not
tolerated at all.

Source: bulk synchronous parallel data-parallel SGD, as described in any text on the matter; the
weights ``q_i`` are explicit here.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.strategies.base import answer_all, weighted_mean
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RoundMean, Traits, Weights


class Bsp(StrictModel):
    """Configuration and rule of `bsp`."""

    kind: Literal["bsp"] = "bsp"
    weights: Weights = Field("samples", description="weight of a region: 1/M or by its samples")

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(stands_still="always", every=1, last="never"),
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

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Apply the mean gradient, unless every region's was refused."""
        if reply.num_samples > 0:
            region.apply_gradient(reply.payload_P)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Nothing to do: the regions are equal after every step."""
        return None

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Answer all with the mean once every region's gradient is there."""
        updates = averager.gather(update)
        if updates is None:
            return []
        # A refused gradient is none, and not a gradient of zero, whatever the weights.
        used = [u for u in updates if u.num_samples > 0] or updates
        return answer_all(averager, updates, weighted_mean(used, self.weights))
