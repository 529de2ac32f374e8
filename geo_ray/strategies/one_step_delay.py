"""DiLoCo with one round of delay: the exchange of a round overlaps the steps of the next.

Idea: after H steps a region sends its change and continues to train. H steps later the answer is
there; the region takes the outer model, which lacks its last H steps, and sends those. The link has
the time of H steps, and a region waits only if it needs longer.

Rule: at sync t every region sends ``Delta(t)``, and takes the outer model made of all
``Delta(t-1)``; the outer optimizer is that of `diloco`.

When: the transfer of a round is shorter than H steps, but not negligible. A delayed outer momentum
overshoots: the default is 0.5, lower than that of `diloco`.

Source: the asynchronous DiLoCo of PCCL's examples and DiLoCoX (arXiv 2506.21263), reconstructed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.strategies import local_steps
from geo_ray.strategies import local_steps as local
from geo_ray.strategies.base import Overlapped
from geo_ray.strategies.outer import OuterConfig, OuterNesterov, outer_round
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights


class OneStepDelay(Overlapped):
    """Configuration and rule of `one_step_delay`."""

    kind: Literal["one_step_delay"] = "one_step_delay"
    interval: int = Field(32, ge=1, description="local steps between two exchanges (H)")
    weights: Weights = Field(
        "samples",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
    )
    outer: OuterConfig = Field(
        OuterNesterov(momentum=0.5), description="outer optimizer, applied to the mean change"
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(
                blocking="when_late", every=self.interval, last="always", interval=self.interval
            ),
            region=RegionTraits(local_optimizer=True, eval_params=local.ANCHOR),
            averager=AveragerTraits(plain_outer=self.outer.plain),
        )

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Turn every H steps, or when the answer arrives if that is later."""
        if region.since_send < self.interval:
            return None
        return Wait() if region.link_busy else local_steps.turn(region, self.merge)

    def is_quiet(self, region: RegionState) -> bool:
        """See `Strategy.is_quiet`."""
        return region.since_send < self.interval

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with the outer model's change once every region has reported."""
        return outer_round(averager, updates, self.weights, self.outer)
