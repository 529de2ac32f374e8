"""SparseLoCo: long rounds whose changes are sent as a few large elements with error feedback.

Idea: a region's change of H steps is made a hundred times smaller: per chunk of 4096 elements the
64 largest, in two bits each. The rest is kept, decays, and is sent later. There is no outer
momentum: the feedback acts like one. A region whose change is far larger than the others' is
limited to their median norm, so that no single region can carry the model away.

Rule: ``e <- 0.95 e + Delta``; ``q = code(e)``; ``e <- e - q``; ``w <- w - lr * mean_i clip(q_i)``.

When: links of a few Mbit/s and models of many parameters, where `diloco` with int4 still waits. The
codec does the first three parts: set ``codec.up: {kind: chunked_topk}``.

Source: SparseLoCo (arXiv 2508.15706), reconstructed from a reading of its released code.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from geo_ray.strategies import local_steps
from geo_ray.strategies.base import LocalSteps, Rounds, answer_all, weighted_mean
from geo_ray.strategies.outer import OuterConfig, OuterSgd, outer_change
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights


class SparseLoCo(LocalSteps, Rounds):
    """Configuration and rule of `sparseloco`."""

    kind: Literal["sparseloco"] = "sparseloco"
    interval: int = Field(32, ge=1, description="local steps between two exchanges (H)")
    clip: bool = Field(
        True, description="limit each region's change to the median norm of all regions"
    )
    weights: Weights = Field(
        "uniform",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
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
            exchange=ExchangeTraits(
                blocking="always",
                every=self.interval,
                last="rest",
                interval=self.interval,
                adjustable_interval=True,
            ),
            region=RegionTraits(
                local_optimizer=True, eval_params=local_steps.ANCHOR, needs_codec="chunked_topk"
            ),
            averager=AveragerTraits(plain_outer=self.outer.plain),
        )

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with the mean of the clipped changes once every region has reported."""
        used = clipped(updates) if self.clip else updates
        mean_P = weighted_mean(used, self.weights)
        return answer_all(averager, updates, outer_change(self.outer, averager, mean_P))


def clipped(updates: Sequence[Update]) -> list[Update]:
    """Return the updates, limited to the median norm of those that are not zero."""
    norms = [float(torch.linalg.vector_norm(update.payload_P)) for update in updates]
    limit = statistics.median([norm for norm in norms if norm > 0] or [0.0])
    return [
        replace(update, payload_P=update.payload_P * (limit / norm)) if norm > limit else update
        for update, norm in zip(updates, norms, strict=True)
    ]
