"""Gaia: only significant changes cross the WAN; the others accumulate.

Idea: a region applies its own changes at once. Of its changes since the last message it sends only
the elements that changed by more than a fraction of their value. The rest accumulates until it is
significant. The threshold falls with time, so that late, small changes are sent. The mirror clock
bounds how far regions may be apart.

Rule: with ``A`` the change since it was last sent, element j is sent if ``|A_j| > threshold /
sqrt(t) * |w_j|``, t the region's step. All other regions apply it (``combine: mean``: each counts
1/M everywhere). The mirror clock is ``staleness.bound``: a region that is so many messages ahead of
the slowest waits.

When: models whose changes are sparse (embeddings, click-through). Set ``codec.up: {kind:
nonzeros}`` and the same down, otherwise zeros are sent as numbers. If all elements change alike,
`asgd_ga` with a codec is simpler.

The last exchange sends everything, so that no change is lost and all replicas agree.

Source: Gaia (Hsieh et al., NSDI 2017), reconstructed; its threshold of 1 % as the default. There
changes go from server to server; here through the averager.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from geo_ray.strategies.additive import Additive
from geo_ray.strategies.global_model import Staleness
from geo_ray.strategies.state import Outgoing, RegionState
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, Traits


class Gaia(Additive):
    """Configuration and rule of `gaia`."""

    kind: Literal["gaia"] = "gaia"
    interval: int = Field(
        1, ge=1, description="local steps between two messages; more if the link is busy"
    )
    threshold: float = Field(
        0.01,
        ge=0,
        description="relative change of an element that is significant at step 1; falls with "
        "the root of the step",
    )
    staleness: Staleness = Staleness(bound=8)

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                blocking="never",
                every=self.interval,
                last="always",
                interval=self.interval,
                adjustable_interval=True,
            ),
            averager=AveragerTraits(
                adds_up=self.combine,
                bound=self.staleness.bound,
                releases=True,
                frees=True,
            ),
        )

    def after_step(self, region: RegionState) -> Outgoing | None:
        """Send the significant changes, if the link is free."""
        if not region.is_due(self.interval) or region.link_busy:
            return None
        base_P = region.memory["base"]
        change_P = base_P - region.params_P
        limit_P = region.params_P.abs().mul_(self.threshold / math.sqrt(max(1, region.step)))
        change_P[change_P.abs() <= limit_P] = 0.0
        base_P.sub_(change_P)
        return Outgoing(change_P, wait=False)
