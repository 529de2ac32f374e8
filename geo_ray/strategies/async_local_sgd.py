"""Asynchronous local SGD: separate exchanges, delayed Nesterov, steps by speed.

Idea: a region trains H steps, sends its change, receives the present outer model, and continues; it
waits for no other region. Two methods make the result as good as that of rounds: momentum that
moves only once per N updates (`geo_ray.strategies.outer`), and local steps in proportion to speed
(``by_speed``), so that updates of slow regions are as fresh as those of fast ones.

Rule: on an update ``g = factor(lag) * rows_i / mean rows * Delta_i``, then delayed Nesterov;
``H_i = max(1, floor(H * v_i / v_fastest))``.

When: regions of unequal speed; links that carry a message per H steps. Inner learning-rate
schedules must follow the run's steps, not a region's.

Failures: an unreachable or departed region simply sends no updates; one that returns receives all
that it missed in one answer. With ``staleness.bound`` the others wait for it.

Source: "Asynchronous Local-SGD Training for Language Modeling" (arXiv 2401.09135), reconstructed.
Weights by samples and the bound are ours.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.strategies import global_model, local_steps
from geo_ray.strategies.base import LocalSteps
from geo_ray.strategies.global_model import OneByOne
from geo_ray.strategies.outer import DelayedNesterov
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights


class AsyncLocalSgd(LocalSteps, OneByOne):
    """Configuration and rule of `async_local_sgd`."""

    kind: Literal["async_local_sgd"] = "async_local_sgd"
    interval: int = Field(32, ge=1, description="local steps of the fastest region (H)")
    by_speed: bool = Field(
        True, description="slower regions take fewer local steps, in proportion to their speed"
    )
    weights: Weights = Field("samples", description="weight of an update: uniform, or by its rows")
    outer: DelayedNesterov = DelayedNesterov()

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                blocking="always",
                every=self.interval,
                last="always",
                by_speed=self.by_speed,
                interval=self.interval,
                adjustable_interval=not self.by_speed,
            ),
            region=RegionTraits(local_optimizer=True, eval_params=local_steps.ANCHOR),
            averager=AveragerTraits(
                plain_outer=self.outer.plain,
                bound=self.staleness.bound,
                releases=True,
                frees=True,
            ),
        )

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Apply the update; answer its sender with the outer model's change."""
        global_model.note_speed(averager, update)
        if update.num_samples > 0:
            weight = self.staleness.factor(update.lag)
            if self.weights == "samples":
                weight *= global_model.relative_rows(averager, update.region)
            change_P = self.outer.change(
                averager, update.payload_P * weight, len(averager.members), "outer"
            )
            global_model.publish(averager, change_P)
        return self.answers(averager, update)

    def answer(self, averager: AveragerState, update: Update) -> Reply:
        """Answer with the global model's change."""
        return global_model.answer(averager, update, self.interval if self.by_speed else None)
