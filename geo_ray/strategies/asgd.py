"""Asynchronous SGD between regions: every local update is sent by itself.

Idea: each region applies its own gradients at once and sends every one of them; the others apply
them when they arrive. It is `asgd_ga` with an interval of 1, and the baseline of the literature.

Rule: ``w_i <- w_i - u`` at home, ``w_j <- w_j - u`` (or ``u / M``) everywhere else.

When: as a baseline; on links that carry a message per step without effort.
``wait: always`` (the default) pays for each transfer in full, as a sender that blocks does;
``when_busy`` overlaps one transfer with one step.

Source: asynchronous SGD over parameter servers in its plainest form; with plain SGD and all
messages drained, all replicas agree to rounding.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.strategies import additive, global_model
from geo_ray.strategies.global_model import Staleness
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import AveragerTraits, Combine, ExchangeTraits, Traits


class Asgd(StrictModel):
    """Configuration and rule of `asgd`."""

    kind: Literal["asgd"] = "asgd"
    wait: Literal["always", "when_busy"] = Field(
        "always", description="stand still for every transfer, or overlap one with one step"
    )
    combine: Combine = Field("mean", description="total weight of a gradient: 1/M or 1")
    staleness: Staleness = Staleness()

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                stands_still=additive.STANDS_STILL[self.wait], every=1, last="always"
            ),
            averager=AveragerTraits(
                adds_up=self.combine,
                bound=self.staleness.bound,
                on_release=self.on_release,
                on_finished=self.on_finished,
            ),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """A local optimizer step."""
        additive.step(region, grad_P)

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Send this step's change."""
        return additive.outgoing(region, 1, self.wait)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Apply what the others did."""
        additive.merge(region, reply)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """A last message, so that what the others sent in the meantime arrives."""
        return additive.take(region, wait=True)

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Put the change into every other region's outbox; answer with the sender's."""
        weight = self.staleness.factor(global_model.lag_of(averager, update))
        additive.take_in(averager, update, self.combine, weight)
        return self.staleness.answers(averager, update, additive.answer)

    def on_release(self, averager: AveragerState) -> list[Reply]:
        """Answer whoever waits for the slowest."""
        return global_model.release(averager, additive.answer)

    def on_finished(self, averager: AveragerState) -> list[Reply]:
        """Answer whom only who has finished held up."""
        return self.staleness.free(averager, additive.answer)
