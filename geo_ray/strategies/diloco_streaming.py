"""Streaming DiLoCo: fragments of the model are sent one after another while training continues.

Idea: the model is cut into F fragments. Every H/F steps the next one is sent, so the link carries a
small message all the time instead of a large one now and then; the peak falls by F. The answer is
merged tau steps later, whenever it arrived: all regions merge at the same step.

Rule: for fragment p at its sync ``Delta_p = outer_p - w_p``; the outer optimizer of `diloco` on the
mean, with a momentum per fragment; tau steps later ``w_p <- alpha w_p + (1 - alpha) outer_p``, or
``w_p <- outer_p + (w_p - w_p when sent)`` (``merge: correct``).

When: the link carries a fragment in tau steps, but not a model in one. A region waits if the answer
is not there after tau steps. ``tau`` must be below H/F, so that one request is open at a time.

Options: ``alpha`` 0.5 keeps half of the local change since sending; a small ``tau`` (up to 5 or 10)
costs little. ``correct`` keeps exactly the steps since sending, which is better if tau is a large
part of H. The last exchange is of the whole model and takes the plain mean.

Source: "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512), reconstructed.
Fragments here are contiguous parts of the flat parameters, not strided groups of layers; `correct`
is ours.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from geo_ray.strategies import local_steps
from geo_ray.strategies.base import LocalSteps, Rounds
from geo_ray.strategies.outer import OuterConfig, OuterNesterov, OuterSgd, outer_round
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights

_PENDING, _NEXT, _SENT = "pending", "next", "sent"


class DiLoCoStreaming(LocalSteps, Rounds):
    """Configuration and rule of `diloco_streaming`."""

    kind: Literal["diloco_streaming"] = "diloco_streaming"
    interval: int = Field(
        32, ge=1, description="local steps between two exchanges of the same fragment (H)"
    )
    fragments: int = Field(4, ge=2, le=256, description="number of parts of the model (F)")
    tau: int = Field(
        2, ge=1, description="local steps during which an exchange runs; below interval / fragments"
    )
    merge: Literal["mix", "correct"] = Field(
        "mix",
        description="mix: average of local and outer fragment; correct: outer fragment plus the "
        "local steps since sending",
    )
    alpha: float = Field(0.5, ge=0, lt=1, description="mix: weight of the local fragment")
    weights: Weights = Field(
        "samples",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
    )
    outer: OuterConfig = Field(
        OuterNesterov(), description="outer optimizer, applied to the mean change"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.tau >= self.interval / self.fragments:
            raise ValueError(
                f"tau: it must be below interval / fragments = {self.interval / self.fragments:g}, "
                "since the answer about a fragment must be merged before the next is sent"
            )
        return self

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(
                blocking="when_late",
                every=self.interval / self.fragments,
                last="always",
                fragments=self.fragments,
                hidden_steps=self.tau,
                interval=self.interval,
            ),
            region=RegionTraits(local_optimizer=True, eval_params=local_steps.ANCHOR),
            averager=AveragerTraits(plain_outer=self.outer.plain),
        )

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Merge tau steps after sending; send the next fragment every H/F steps."""
        anchor_P = local_steps.anchor(region)
        if region.since_send >= self.tau:
            if region.link_busy:
                return Wait()
            self._merge(region)
        number = int(region.numbers.get(_NEXT, 0.0))
        if region.since_send < self._due(region):
            return None
        start, stop = region.fragments[number]
        region.numbers[_NEXT] = float((number + 1) % self.fragments)
        if self.merge == "correct":
            region.memory[_SENT] = region.params_P[start:stop].clone()
        return Outgoing(anchor_P[start:stop] - region.params_P[start:stop], False, number)

    def is_quiet(self, region: RegionState) -> bool:
        """See `Strategy.is_quiet`."""
        merges = region.link_busy or _PENDING in region.memory
        return region.since_send < self._due(region) and not (
            merges and region.since_send >= self.tau
        )

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Keep the answer until tau steps have passed; the last one is merged at once."""
        if reply.fragment == self.fragments:
            local_steps.adopt(region, reply)
        else:
            region.memory[_PENDING] = reply.payload_P.clone()
            region.numbers[_PENDING] = float(reply.fragment)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the rest of all fragments."""
        self._merge(region)
        return Outgoing(local_steps.delta(region), True, self.fragments)

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with a fragment's change once every region has reported."""
        fragment = updates[0].fragment
        if fragment == self.fragments:
            return outer_round(averager, updates, self.weights, OuterSgd())
        return outer_round(averager, updates, self.weights, self.outer, f"outer{fragment}")

    def _due(self, region: RegionState) -> int:
        """Return the steps before the next fragment; over F fragments they add up to H."""
        number = int(region.numbers.get(_NEXT, 0.0))
        ends = [self.interval * n // self.fragments for n in (number, number + 1)]
        return ends[1] - ends[0]

    def _merge(self, region: RegionState) -> None:
        change_S = region.memory.pop(_PENDING, None)
        if change_S is None:
            return
        start, stop = region.fragments[int(region.numbers.pop(_PENDING))]
        outer_S = local_steps.anchor(region)[start:stop].sub_(change_S)
        if self.merge == "correct":
            region.params_P[start:stop].add_(outer_S - region.memory.pop(_SENT))
        else:
            region.params_P[start:stop].lerp_(outer_S, 1.0 - self.alpha)
