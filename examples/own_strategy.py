"""A custom strategy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.strategies.base import Rounds, answer_all, weighted_mean
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update
from geo_ray.strategies.traits import ExchangeTraits, Traits


class Halfway(Rounds):
    """Every few steps each region moves halfway to the mean; the last exchange goes all the way."""

    kind: Literal["halfway"] = "halfway"
    interval: int = Field(4, ge=1, description="local steps between two exchanges")
    fraction: float = Field(0.5, gt=0, le=1, description="how far to move towards the mean")

    @property
    def traits(self) -> Traits:
        """Properties that the rest of geo_ray reads."""
        return Traits(
            in_rounds=True,
            sends="model",
            exchange=ExchangeTraits(
                blocking="always", every=self.interval, last="always", interval=self.interval
            ),
        )

    def after_step(self, region: RegionState) -> Outgoing | None:
        """Send the model every `interval` steps, and wait for the reply."""
        if region.since_send < self.interval:
            return None
        return Outgoing(region.params_P.clone(), wait=True)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Move towards the mean."""
        if reply.final:
            region.params_P.copy_(reply.payload_P)
        else:
            region.params_P.lerp_(reply.payload_P, self.fraction)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the model after the last step, so that all regions become equal."""
        return Outgoing(region.params_P.clone(), wait=True)

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Reply to all regions with the mean."""
        return answer_all(averager, updates, weighted_mean(updates, "uniform"))
