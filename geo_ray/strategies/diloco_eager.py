"""DiLoCo with eager updates: the newest own change, the others' previous ones, and no waiting.

Idea: at a sync a region knows the mean of all changes of the previous round, and its own change of
this one. It replaces its own part of the mean by the new change, takes the outer step with that,
and continues to train while this round's changes are sent. Unlike in `one_step_delay`, the region
never steps back behind its own work.

Rule: ``D~_i(t) = mean(t-1) + q_i (Delta_i(t) - Delta_i(t-1))``, then the outer optimizer of
`diloco` on ``D~_i`` with a separate state in every region. Regions hold nearly, not exactly, the
same outer parameters until the last exchange, which takes the weighted mean of all.

When: as `one_step_delay`; better with few regions, where a region's own part is large.

Source: "Eager Updates For Overlapped Communication and Computation in DiLoCo" (arXiv 2502.12996),
reconstructed from a summary. The last exchange is ours.

Memory per region: the outer parameters, two changes, the outer state, and the parameters of the
start, from which the last exchange is counted.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from geo_ray.strategies import local_steps
from geo_ray.strategies.base import LocalSteps, Rounds, answer_all, weighted_mean
from geo_ray.strategies.outer import OuterConfig, OuterNesterov, outer_change
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights

_START, _OWN, _MEAN = "start", "own", "mean"
_SHARE, _LAST = "share", "last"


class DiLoCoEager(LocalSteps, Rounds):
    """Configuration and rule of `diloco_eager`."""

    kind: Literal["diloco_eager"] = "diloco_eager"
    interval: int = Field(32, ge=1, description="local steps between two exchanges (H)")
    weights: Weights = Field(
        "samples",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
    )
    outer: OuterConfig = Field(
        OuterNesterov(), description="outer optimizer, applied to the mean change"
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(
                blocking="when_late", every=self.interval, last="always", interval=self.interval
            ),
            region=RegionTraits(local_optimizer=True, eval_params=local_steps.ANCHOR),
            averager=AveragerTraits(plain_outer=self.outer.plain),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Take a local optimizer step."""
        if _START not in region.memory:
            region.memory[_START] = region.params_P.clone()
        region.numbers.pop(_LAST, None)  # saved at its end, and continues after all
        local_steps.step(region, grad_P)

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Every H steps take the outer step with the known changes; then send the own change."""
        if region.since_send < self.interval:
            return None
        if region.link_busy:
            return Wait()
        change_P = local_steps.delta(region)
        self._outer_step(region, change_P)
        region.memory[_OWN] = change_P
        return Outgoing(change_P.clone(), wait=False)

    def is_quiet(self, region: RegionState) -> bool:
        """See `Strategy.is_quiet`."""
        return region.since_send < self.interval

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Keep the mean until the next sync; the last one is the common model."""
        if region.numbers.get(_LAST):
            anchor_P = local_steps.anchor(region)
            anchor_P.copy_(region.memory[_START]).sub_(reply.payload_P)
            region.params_P.copy_(anchor_P)
            if reply.continues:  # another final update follows
                del region.numbers[_LAST]
            return
        region.memory[_MEAN] = reply.payload_P.clone()
        region.numbers[_SHARE] = reply.own_weight

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the change since the start of the run, once, for the mean of all regions."""
        if region.numbers.get(_LAST):
            return None
        if _MEAN in region.memory:
            self._outer_step(region, local_steps.delta(region))
        region.numbers[_LAST] = 1.0
        start_P = region.memory.setdefault(_START, region.params_P.clone())
        return Outgoing(start_P - region.params_P, wait=True)

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with the mean and their weight in it, once every region has reported."""
        mean_P = weighted_mean(updates, self.weights)
        return answer_all(averager, updates, mean_P, self.weights)

    def _outer_step(self, region: RegionState, change_P: Tensor) -> None:
        """Step with the last round's mean, in which this region's part is replaced."""
        mean_P = region.memory.pop(_MEAN, None)
        own_P = region.memory.pop(_OWN, None)
        if mean_P is None or own_P is None:  # the first sync: only the own change is known
            eager_P = change_P
        else:
            eager_P = mean_P + (change_P - own_P) * region.numbers[_SHARE]
        anchor_P = local_steps.anchor(region).sub_(outer_change(self.outer, region, eager_P))
        region.params_P.copy_(anchor_P)
