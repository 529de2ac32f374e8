"""Asynchronous SGD with gradient accumulation: send the sum of ``interval`` local updates.

Idea: a region applies its own gradients at once and accumulates their effect. Every f steps the sum
is sent, and the answer contains the changes of the other regions since the last one. A region never
waits for the training of another one, and for the link only if configured.

Rule: with ``u_t`` the change that the inner optimizer makes at step t (``eta * g_t`` for plain
SGD), ``A_i = sum of u_t since the last message`` is sent, and every other region does
``w_j <- w_j - A_i``.
``combine: mean`` scales each region's own change, here and elsewhere, by 1/M, so that one gradient
has the same total weight as in averaging; ``sum`` applies each in full everywhere.

When: regions of unequal speed, links too slow for a message per step, and a model that tolerates
stale gradients. ``wait`` applies when a message is due: ``always`` waits for the answer;
``when_busy`` continues to train, but waits if the previous message is still open; ``never``
continues and lets the sum grow, so the interval adapts to the link.

Source: ASGD-GA of Cloudless-Training (arXiv 2303.05330) by name, from its abstract; the rule is
reconstructed. Sending the optimizer's change instead of the raw gradient sum is ours: for plain
SGD it is the same, and momentum or AdamW do not take a sum of gradients for one gradient.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.strategies import additive
from geo_ray.strategies.additive import Additive
from geo_ray.strategies.state import Outgoing, RegionState, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits


class AsgdGa(Additive):
    """Configuration and rule of `asgd_ga`."""

    kind: Literal["asgd_ga"] = "asgd_ga"
    interval: int = Field(8, ge=1, description="local steps between two messages")
    wait: additive.WaitRule = Field(
        "never",
        description="always: wait for every exchange; when_busy: wait only while the previous "
        "one is open; never: let the sum grow while the link is busy",
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                blocking=additive.BLOCKING[self.wait],
                every=self.interval,
                last="always",
                interval=self.interval,
                adjustable_interval=True,
            ),
            region=RegionTraits(local_optimizer=True),
            averager=AveragerTraits(
                adds_up=self.combine,
                bound=self.staleness.bound,
                releases=True,
                frees=True,
            ),
        )

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Send the accumulated change when due."""
        return additive.outgoing(region, self.interval, self.wait)

    def is_quiet(self, region: RegionState) -> bool:
        """See `Strategy.is_quiet`."""
        return not region.is_due(self.interval) or (region.link_busy and self.wait == "never")
