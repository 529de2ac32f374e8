"""Fully synchronous SGD over all sites: one large batch per round.

Idea: every site computes ``accumulate`` gradients at the same parameters. Their mean over all sites
is one gradient of a very large batch, which every site applies with its own copy of the same
optimizer. No gradient is stale and models do not drift, so this strategy is the reference for
accuracy. It is also the slowest, because each round waits for the slowest site and link.

Rule: ``g = sum_i q_i (1/K) sum_k g_ik(w)``; every site applies ``g`` once.

When: as the reference for other strategies. With ``accumulate`` 1 it is `bsp`.

Source: FedSSGD is a baseline in FedGSync's evaluation; the rule is textbook synchronous SGD,
reconstructed from the name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from geo_ray.strategies.base import GradientRounds
from geo_ray.strategies.local_steps import add_gradient, take_mean
from geo_ray.strategies.state import Outgoing, RegionState
from geo_ray.strategies.traits import ExchangeTraits, Traits, Weights


class FedSsgd(GradientRounds):
    """Configuration and rule of `fedssgd`."""

    kind: Literal["fedssgd"] = "fedssgd"
    accumulate: int = Field(
        1, ge=1, description="gradients of a site per round, at the same parameters"
    )
    weights: Weights = Field(
        "samples",
        description="weight of a site: uniform is 1/M, samples is its fraction of the rows",
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(blocking="always", every=self.accumulate, last="rest"),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Accumulate the gradient; parameters do not change."""
        add_gradient(region, grad_P)

    def after_step(self, region: RegionState) -> Outgoing | None:
        """Send the mean gradient and wait."""
        if region.since_send < self.accumulate:
            return None
        return Outgoing(take_mean(region), wait=True)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Apply the accumulated gradient if the run ends within a round."""
        return None if region.since_send == 0 else Outgoing(take_mean(region), wait=True)
