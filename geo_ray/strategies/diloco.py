"""DiLoCo: many local steps with AdamW, then one outer step with Nesterov momentum.

Idea: regions train locally for H steps, each with its own inner optimizer, whose state is never
sent. The mean of their changes is a pseudo-gradient, on which the averager takes one step with
momentum. Rounds may therefore be hundreds of steps apart, at a small loss.

Rule: ``Delta = sum_i q_i (w - w_i)``; ``m <- beta m + Delta``; ``w <- w - eta (Delta + beta m)``.
With outer learning rate 1 and no momentum it is `sma`.

``compute_fraction`` adapts H to the link. The averager knows from the updates how long a local step
and an exchange take. The next power of two that spends at least this fraction of a round computing
becomes H, once several rounds in a row asked for the same direction (ours).

When: regions of about equal speed and a slow link. The defaults (eta 0.7, beta 0.9) are for H from
30 to 500; lower the momentum for small H, because steps add up to ``eta / (1 - beta)``.

Source: DiLoCo (arXiv 2311.08105), reconstructed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from pydantic import Field

from geo_ray.strategies import local_steps
from geo_ray.strategies.base import LocalSteps, Rounds
from geo_ray.strategies.outer import OuterConfig, OuterNesterov, outer_round
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.strategies.traits import (
    AveragerTraits,
    ExchangeTraits,
    RegionTraits,
    RoundMean,
    Traits,
    Weights,
)

PATIENCE: Final = 3
_INTERVAL, _VOTES = "adaptive/interval", "adaptive/votes"


def adaptive_interval(
    averager: AveragerState, updates: Sequence[Update], fraction: float, first: int
) -> int:
    """Return the interval of the next round.

    Args:
        averager: stores the present interval.
        updates: of the round that was just closed.
        fraction: fraction of a round that should be spent computing, in (0, 1).
        first: the interval until something was measured.
    """
    present = int(averager.numbers.setdefault(_INTERVAL, float(first)))
    step_s = max(update.step_s for update in updates)
    exchange_s = max(update.exchange_s for update in updates)
    if step_s <= 0 or exchange_s <= 0:
        return present
    least = fraction / (1.0 - fraction) * exchange_s / step_s
    wanted = 2 ** max(0, math.ceil(math.log2(max(1.0, least))))
    votes = averager.numbers.get(_VOTES, 0.0)
    direction = float((wanted > present) - (wanted < present))
    votes = votes + direction if votes * direction >= 0 and direction else direction
    if abs(votes) >= PATIENCE:
        present, votes = wanted, 0.0
    averager.numbers[_INTERVAL], averager.numbers[_VOTES] = float(present), votes
    return present


class DiLoCo(LocalSteps, Rounds):
    """Configuration and rule of `diloco`."""

    kind: Literal["diloco"] = "diloco"
    interval: int = Field(32, ge=1, description="local steps between two exchanges (H)")
    weights: Weights = Field(
        "samples",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
    )
    compute_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="fraction of time that regions shall compute: adapts the interval to the "
        "link; null: fixed interval",
    )
    outer: OuterConfig = Field(
        OuterNesterov(),
        description="outer optimizer, applied to the mean change; its defaults are for "
        "intervals of 30 to 500",
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        # An adaptive interval depends on every update's measurements.
        mean = RoundMean(weights=self.weights) if self.compute_fraction is None else None
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(
                blocking="always",
                every=self.interval,
                last="rest",
                interval=self.interval,
                adjustable_interval=self.compute_fraction is None,
            ),
            region=RegionTraits(
                local_optimizer=True, eval_params=local_steps.ANCHOR, in_pieces=True
            ),
            averager=AveragerTraits(plain_outer=self.outer.plain, round_mean=mean),
        )

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with the outer model's change once every region has reported."""
        replies = outer_round(averager, updates, self.weights, self.outer)
        if self.compute_fraction is None:
            return replies
        steps = adaptive_interval(averager, updates, self.compute_fraction, self.interval)
        return [replace(reply, steps=steps) for reply in replies]
