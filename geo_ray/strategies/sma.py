"""Synchronous model averaging between parameter servers, every ``interval`` local steps.

Idea: regions train locally for f steps, then wait for the weighted mean of their models and
continue from it. Traffic per step falls by f. The cost is a barrier, and drift between regions.

Rule: every f steps ``w <- sum_i q_i w_i`` in every region, with ``q_i = 1/M`` or by samples.

When: regions of about equal speed, a slow link, and the need for one model that is equal in all
regions after every round.

Source: the "inter-PS model averaging" of Cloudless-Training (arXiv 2303.05330), named in its
abstract; the rule is reconstructed. With ``interval`` 1 and plain SGD it equals synchronous data
parallelism.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.strategies.base import Rounds, answer_all, weighted_mean
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import (
    AveragerTraits,
    ExchangeTraits,
    RegionTraits,
    RoundMean,
    Traits,
    Weights,
)


class Sma(Rounds):
    """Configuration and rule of `sma`."""

    kind: Literal["sma"] = "sma"
    interval: int = Field(8, ge=1, description="local steps between two averages")
    weights: Weights = Field(
        "samples",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="model",
            exchange=ExchangeTraits(
                blocking="always",
                every=self.interval,
                last="rest",
                interval=self.interval,
                adjustable_interval=True,
            ),
            region=RegionTraits(local_optimizer=True),
            averager=AveragerTraits(round_mean=RoundMean(weights=self.weights, is_answer=True)),
        )

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Every ``interval`` steps, send the model and wait for the mean."""
        if not region.is_due(self.interval):
            return None
        return Outgoing(region.params_P.clone(), wait=True)

    def is_quiet(self, region: RegionState) -> bool:
        """See `Strategy.is_quiet`."""
        return not region.is_due(self.interval)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Continue from the mean."""
        region.params_P.copy_(reply.payload_P)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Average once more, unless the last step ended a round."""
        if region.since_send == 0:
            return None
        return Outgoing(region.params_P.clone(), wait=True)

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with the mean once every region's model has arrived."""
        return answer_all(averager, updates, weighted_mean(updates, self.weights))
