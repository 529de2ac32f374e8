"""NBSync: local training continues during the whole exchange of a round.

Idea: when the outer model of a round arrives, a site sends its change since the last one, takes the
new model, and continues to train. No site waits: a fast site takes as many steps as fit into a
round, a slow one at least one. Each outer model depends on the two before it: it is the newer one,
moved by the changes that began at the older one.

Rule: ``D_i = base_i - x_i``; ``G <- G - outer(mean_i D_i)`` once all N have arrived; at the end of
the next step each site sends its new ``D_i`` and sets ``x_i = base_i = G`` (``merge: overwrite``),
or keeps its own progress, ``x_i = G - D_i`` (``correct``).

When: sites of unequal speed and a link that takes as long as computing. A round lasts about
``max(slowest step, transfer)`` instead of their sum. If the sites' data differ, limit the steps of
fast sites with ``max_local_steps``; they wait when they reach it.

Failures: a site whose link is down holds the round until the link is back, or until a deadline ends
the run; the others train up to their limit meanwhile. A round closes without a site that is lost,
if the run continues (`members.min`).

Source: NBSync of the GeoMX authors, reconstructed from its abstract and the recursion of the
released code. That code counts the very first change twice, this does not; `correct`, the limit,
weights and the outer optimizer are ours.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.strategies import local_steps
from geo_ray.strategies import local_steps as local
from geo_ray.strategies.base import Overlapped
from geo_ray.strategies.outer import OuterConfig, OuterSgd, outer_round
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights


class NbSync(Overlapped):
    """Configuration and rule of `nbsync`."""

    kind: Literal["nbsync"] = "nbsync"
    max_local_steps: int = Field(
        150, ge=1, description="largest number of local steps of a site in a round; limits drift"
    )
    weights: Weights = Field(
        "uniform",
        description="weight of a site: uniform is 1/M, samples is its fraction of the rows",
    )
    outer: OuterConfig = Field(
        OuterSgd(), description="outer optimizer, applied to the mean change"
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(blocking="when_late", every=1, last="always"),
            region=RegionTraits(
                local_optimizer=True, ends_by_total_rows=True, eval_params=local.ANCHOR
            ),
            averager=AveragerTraits(plain_outer=self.outer.plain),
        )

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Turn as soon as the answer has arrived; wait only at the limit of local steps."""
        if region.link_busy:
            return Wait() if region.since_send >= self.max_local_steps else None
        return local_steps.turn(region, self.merge)

    def is_quiet(self, region: RegionState) -> bool:
        """See `Strategy.is_quiet`."""
        return region.link_busy and region.since_send < self.max_local_steps

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with the outer model's change once every site has reported."""
        return outer_round(averager, updates, self.weights, self.outer)
