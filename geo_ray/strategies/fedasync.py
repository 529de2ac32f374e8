"""FedAsync: every arriving model is mixed into the global one, old ones less.

Idea: a region trains, sends its model, gets the global one as it is then, and goes on. The averager
moves the global model towards each model that arrives, by a share that falls with its age.

Rule: ``G <- (1 - a_s) G + a_s w_i`` with ``a_s = alpha * factor(lag)``.

When: as the plain asynchronous baseline; many sites, each of which matters little. The global model
forgets: with M sites an update has faded to ``(1 - alpha)^M`` after everybody has spoken once, so
``alpha`` should fall with M. `async_local_sgd` adds changes up instead.

Trouble: as `async_local_sgd`.

Source: FedAsync (arXiv 1903.03934), reconstructed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.strategies import global_model, local_steps
from geo_ray.strategies import global_model as published
from geo_ray.strategies import global_model as staleness
from geo_ray.strategies.global_model import Staleness
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights


class FedAsync(StrictModel):
    """Configuration and rule of `fedasync`."""

    kind: Literal["fedasync"] = "fedasync"
    interval: int = Field(8, ge=1, description="local steps between two exchanges")
    by_speed: bool = Field(False, description="slower regions take fewer local steps")
    alpha: float = Field(0.6, gt=0, le=1, description="share of a fresh model in the global one")
    weights: Weights = Field("uniform", description="weight of an update: alike, or by its samples")
    staleness: Staleness = Staleness(weight="poly")

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                stands_still="always",
                every=self.interval,
                last="always",
                by_speed=self.by_speed,
                interval=self.interval,
                paced=not self.by_speed,
            ),
            region=RegionTraits(eval_params=local_steps.ANCHOR),
            averager=AveragerTraits(
                bound=self.staleness.bound,
                on_release=self.on_release,
                on_finished=self.on_finished,
            ),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """A local optimizer step."""
        local_steps.step(region, grad_P)

    def after_step(self, region: RegionState) -> Outgoing | None:
        """Every ``interval`` steps or fewer, send what was done and wait for the link."""
        return local_steps.outgoing_when_due(region, self.interval)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Go on from the global model."""
        local_steps.adopt(region, reply)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the rest; the answer comes when all have."""
        return local_steps.outgoing(region)

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Mix the model in; answer its sender with the global one's change."""
        global_model.note_speed(averager, update)
        if update.num_samples > 0:
            share = self.alpha * self.staleness.factor(staleness.lag_of(averager, update))
            if self.weights == "samples":
                share = min(1.0, share * global_model.relative_rows(averager, update.region))
            # G - w_i: what the region did, less what G has moved since the region knew it.
            away_P = update.payload_P - published.unheard(averager, update)
            published.publish(averager, away_P.mul_(share))
        return self.staleness.answers(averager, update, self._answer)

    def on_release(self, averager: AveragerState) -> list[Reply]:
        """Answer whoever waits for the slowest."""
        return staleness.release(averager, self._answer)

    def on_finished(self, averager: AveragerState) -> list[Reply]:
        """Answer whom only who has finished held up."""
        return self.staleness.free(averager, self._answer)

    def _answer(self, averager: AveragerState, update: Update) -> Reply:
        steps = (
            global_model.steps_by_speed(averager, update.region, self.interval)
            if self.by_speed
            else None
        )
        return published.answer(averager, update, steps)
