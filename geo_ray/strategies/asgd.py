"""Asynchronous SGD between regions: every local update is sent separately.

Idea: each region applies its own gradients at once and sends every one of them; the others apply
them on arrival. It is `asgd_ga` with an interval of 1, and the baseline of the literature.

Rule: ``w_i <- w_i - u`` in the own region, ``w_j <- w_j - u`` (or ``u / M``) in all others.

When: as a baseline; on links that carry a message per step without effort.
``wait: always`` (the default) waits for each transfer, as a blocking sender does;
``when_busy`` overlaps one transfer with one step.

Source: asynchronous SGD over parameter servers in its plainest form; with plain SGD and all
messages drained, all replicas agree to rounding.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.strategies import additive
from geo_ray.strategies.additive import Additive
from geo_ray.strategies.state import Outgoing, RegionState, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, Traits


class Asgd(Additive):
    """Configuration and rule of `asgd`."""

    kind: Literal["asgd"] = "asgd"
    wait: Literal["always", "when_busy"] = Field(
        "always",
        description="always: wait for every exchange; when_busy: overlap one exchange with one "
        "step",
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(blocking=additive.BLOCKING[self.wait], every=1, last="always"),
            averager=AveragerTraits(
                adds_up=self.combine,
                bound=self.staleness.bound,
                releases=True,
                frees=True,
            ),
        )

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Send this step's change."""
        return additive.outgoing(region, 1, self.wait)
