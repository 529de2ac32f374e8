"""ESync: every site trains until just before the slowest arrives, so that no site waits.

Idea: in a round of local training the slowest site takes ``slowest_steps`` steps, and every other
one as many as fit into the time that the slowest needs to compute and to send. All arrive together;
fast sites train instead of waiting.

Rule: ``T = max_i (slowest_steps * c_i + x_i)``; ``k_i = floor((T - x_i) / c_i)``, between 1 and
``max_steps``, with c the duration of a local step and x that of an exchange, both as last measured.
Then ``w <- w - outer(mean_i (w - w_i))``, uniform by default whatever the number of steps.

When: sites of unequal speed and a link that is not the bottleneck. Many local steps of a fast site
between two rounds drift; limit them with ``max_steps`` if the sites' data differ.

Durations are measured by each site's own clock, so clocks need not agree. The answer of a round
carries the budget of the next: no question per mini-batch. The first round has ``slowest_steps``
for all sites, because nothing is measured yet.

Failures: a site whose link is down holds the round until the link is back, or until a deadline ends
the run; a round closes without a site that is lost, if the run continues (`members.min`). A site
that becomes slower makes one round late; the next has the new duration.

Source: ESync (Li et al., IEEE Transactions on Services Computing), reconstructed from its public
description and released code. Budgets per round, transfer time and the outer optimizer are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from pydantic import Field

from geo_ray.strategies import local_steps
from geo_ray.strategies.base import LocalSteps, Rounds
from geo_ray.strategies.outer import OuterConfig, OuterSgd, outer_round
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights

_ROUNDING: Final = 1e-9  # fraction of a step, for a whole number that just fits


class ESync(LocalSteps, Rounds):
    """Configuration and rule of `esync`."""

    kind: Literal["esync"] = "esync"
    slowest_steps: int = Field(1, ge=1, description="local steps of the slowest site in a round")
    max_steps: int = Field(
        1000, ge=1, description="largest number of local steps of a site in a round; limits drift"
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
            exchange=ExchangeTraits(blocking="always", every=self.slowest_steps, last="rest"),
            region=RegionTraits(ends_by_total_rows=True, eval_params=local_steps.ANCHOR),
            averager=AveragerTraits(plain_outer=self.outer.plain),
        )

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all, each with its budget, once every site has reported."""
        budgets = self.budgets(updates)
        replies = outer_round(averager, updates, self.weights, self.outer)
        return [replace(reply, steps=budgets[reply.to]) for reply in replies]

    def budgets(self, updates: Sequence[Update]) -> dict[str, int]:
        """Return the local steps of each site so that all arrive together."""
        if any(update.step_s <= 0 for update in updates):
            return {update.region: self.slowest_steps for update in updates}
        until_s = max(self.slowest_steps * u.step_s + u.exchange_s for u in updates)
        feasible = {
            u.region: math.floor((until_s - u.exchange_s) / u.step_s + _ROUNDING) for u in updates
        }
        return {name: min(self.max_steps, max(1, steps)) for name, steps in feasible.items()}
