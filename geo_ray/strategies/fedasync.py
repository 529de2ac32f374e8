"""FedAsync: every arriving model is mixed into the global one, with less weight if it is old.

Idea: a region trains, sends its model, receives the present global one, and continues. The averager
moves the global model towards each arriving model, by a fraction that falls with its age.

Rule: ``G <- (1 - a_s) G + a_s w_i`` with ``a_s = alpha * factor(lag)``.

When: as the plain asynchronous baseline; many sites of little weight each. The global model
forgets: with M sites an update has faded to ``(1 - alpha)^M`` once all have reported, so ``alpha``
should fall with M. `async_local_sgd` adds changes up instead.

Failures: as `async_local_sgd`.

Source: FedAsync (arXiv 1903.03934), reconstructed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.strategies import global_model, local_steps
from geo_ray.strategies.base import LocalSteps
from geo_ray.strategies.global_model import OneByOne, Staleness
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights


class FedAsync(LocalSteps, OneByOne):
    """Configuration and rule of `fedasync`."""

    kind: Literal["fedasync"] = "fedasync"
    interval: int = Field(8, ge=1, description="local steps between two exchanges")
    by_speed: bool = Field(
        False, description="slower regions take fewer local steps, in proportion to their speed"
    )
    alpha: float = Field(
        0.6,
        gt=0,
        le=1,
        description="weight of a fresh model in the global one; lower it for many sites",
    )
    weights: Weights = Field("uniform", description="weight of an update: uniform, or by its rows")
    staleness: Staleness = Staleness(weight="poly")

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                blocking="always",
                every=self.interval,
                last="always",
                by_speed=self.by_speed,
                interval=self.interval,
                adjustable_interval=not self.by_speed,
            ),
            region=RegionTraits(eval_params=local_steps.ANCHOR),
            averager=AveragerTraits(
                bound=self.staleness.bound,
                releases=True,
                frees=True,
            ),
        )

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Mix the model into the global one; answer its sender with the global model's change."""
        global_model.note_speed(averager, update)
        if update.num_samples > 0:
            fraction = self.alpha * self.staleness.factor(update.lag)
            if self.weights == "samples":
                fraction = min(1.0, fraction * global_model.relative_rows(averager, update.region))
            # G - w_i: what the region did, less what G has moved since the region knew it.
            away_P = update.payload_P - global_model.unheard(averager, update)
            global_model.publish(averager, away_P.mul_(fraction))
        return self.answers(averager, update)

    def answer(self, averager: AveragerState, update: Update) -> Reply:
        """Answer with the global model's change."""
        return global_model.answer(averager, update, self.interval if self.by_speed else None)
