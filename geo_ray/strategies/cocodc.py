"""CoCoDC: streamed fragments whose late answers are corrected, the most active fragments first.

Idea: as in `diloco_streaming`, fragments are exchanged while training continues, and an answer is
merged tau steps after sending. Two things are better. The steps made meanwhile are kept, corrected
for the fact that they were made from the region's own parameters and not from the new outer ones.
And a link that is idle part of the time carries more than one exchange per fragment and interval:
the additional ones go to the fragments whose outer parameters change fastest.

Rule: with ``w_s`` the fragment when sent, ``d = w_now - w_s`` and ``G`` the new outer fragment,
``w <- G + d - c * (G - w_s)``, element by element, with ``c = min(1, compensation d*d /
mean(d*d))``: to first order the local steps from ``G`` differ from ``d`` by the Hessian times ``G -
w_s``, and the Hessian's diagonal is estimated by the square of the step, as in `dc_asgd`. There are
``N = max(F, floor(utilization H / tau))`` exchanges in H steps. The averager chooses the next
fragment: one that was not exchanged in the last N exchanges, the oldest first; else the one with
the largest ``|change of G| / exchanges since it was last sent``.

When: links with a delay of several steps, and bandwidth for more than one exchange of the model in
H steps. ``compensation: 0`` keeps the local steps unchanged, as ``merge: correct`` of
`diloco_streaming` does. With ``N = F`` fragments go in turn. The model must not be split into
shards, because the mean is over the fragment.

Source: CoCoDC (arXiv 2504.17672), reconstructed from its abstract and memory. The paper's
correction has a factor in raw units (lambda 0.5, of steps divided by H); dividing by the mean
square makes it independent of the scale of steps. The limit of 1 is ours, and so is that the
averager chooses, so that regions cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from geo_ray.strategies import local_steps
from geo_ray.strategies.base import LocalSteps, Rounds
from geo_ray.strategies.outer import OuterConfig, OuterNesterov, OuterSgd, outer_round
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights

_PENDING, _NEXT, _SENT, _TURN = "pending", "next", "sent", "turn"
_COUNT, _LAST, _SPEED = "count", "last", "speed"


class CoCoDC(LocalSteps, Rounds):
    """Configuration and rule of `cocodc`."""

    kind: Literal["cocodc"] = "cocodc"
    interval: int = Field(
        32, ge=1, description="local steps in which each fragment is exchanged at least once (H)"
    )
    fragments: int = Field(4, ge=2, le=256, description="number of parts of the model (F)")
    tau: int = Field(2, ge=1, description="local steps during which an exchange runs")
    utilization: float = Field(
        0.4,
        ge=0,
        lt=1,
        description="fraction of the time in which an exchange shall run: sets the number of "
        "exchanges per interval, which is at least that of fragments",
    )
    compensation: float = Field(
        0.1, ge=0, description="strength of the correction of local steps; 0: none"
    )
    weights: Weights = Field(
        "samples",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
    )
    outer: OuterConfig = Field(
        OuterNesterov(), description="outer optimizer, applied to the mean change"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.tau >= self.interval / self.exchanges:
            raise ValueError(
                f"tau: it must be below interval / {self.exchanges} exchanges = "
                f"{self.interval / self.exchanges:g}, since the answer about a fragment must be "
                "merged before the next is sent"
            )
        return self

    @property
    def exchanges(self) -> int:
        """Exchanges per interval (N)."""
        return max(self.fragments, math.floor(self.utilization * self.interval / self.tau))

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(
                blocking="when_late",
                every=self.interval / self.exchanges,
                last="always",
                fragments=self.fragments,
                in_turn=self.exchanges == self.fragments,
                hidden_steps=self.tau,
                interval=self.interval,
            ),
            region=RegionTraits(
                local_optimizer=True, whole_model=True, eval_params=local_steps.ANCHOR
            ),
            averager=AveragerTraits(plain_outer=self.outer.plain),
        )

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Merge tau steps after sending; send the chosen fragment N times in H steps."""
        anchor_P = local_steps.anchor(region)
        if region.since_send >= self.tau:
            if region.link_busy:
                return Wait()
            self._merge(region)
        turn = int(region.numbers.get(_TURN, 0.0))
        if region.since_send < self._due(region):
            return None
        region.numbers[_TURN] = float((turn + 1) % self.exchanges)
        number = int(region.numbers.get(_NEXT, 0.0))
        start, stop = region.fragments[number]
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
            region.numbers[_NEXT] = float(reply.next_fragment)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the rest of all fragments."""
        self._merge(region)
        return Outgoing(local_steps.delta(region), True, self.fragments)

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with a fragment's change, and the next fragment, once all have reported."""
        fragment = updates[0].fragment
        if fragment == self.fragments:
            return outer_round(averager, updates, self.weights, OuterSgd())
        replies = outer_round(averager, updates, self.weights, self.outer, f"outer{fragment}")
        chosen = self._choose(averager, fragment, replies[0].payload_P)
        return [replace(reply, next_fragment=chosen) for reply in replies]

    def _choose(self, averager: AveragerState, fragment: int, change_S: Tensor) -> int:
        """Record a fragment's change; return the fragment of the next exchange."""
        numbers = averager.numbers
        count = numbers[_COUNT] = numbers.get(_COUNT, 0.0) + 1.0
        before = numbers.get(f"{_LAST}{fragment}", 0.0)
        norm = float(torch.linalg.vector_norm(change_S))
        numbers[f"{_SPEED}{fragment}"] = norm / (count - before)
        numbers[f"{_LAST}{fragment}"] = count
        last = [numbers.get(f"{_LAST}{n}", 0.0) for n in range(self.fragments)]
        oldest = min(range(self.fragments), key=lambda n: last[n])
        if last[oldest] == 0.0 or count + 1.0 - last[oldest] >= self.exchanges:
            return oldest
        return max(range(self.fragments), key=lambda n: numbers[f"{_SPEED}{n}"])

    def _due(self, region: RegionState) -> int:
        """Return the steps before the next exchange."""
        turn = int(region.numbers.get(_TURN, 0.0))
        ends = [self.interval * n // self.exchanges for n in (turn, turn + 1)]
        return ends[1] - ends[0]

    def _merge(self, region: RegionState) -> None:
        change_S = region.memory.pop(_PENDING, None)
        if change_S is None:
            return
        start, stop = region.fragments[int(region.numbers.pop(_PENDING))]
        outer_S = local_steps.anchor(region)[start:stop].sub_(change_S)
        sent_S, params_S = region.memory.pop(_SENT), region.params_P[start:stop]
        moved_S = outer_S - sent_S
        if self.compensation > 0:
            steps_S = params_S - sent_S
            params_S.sub_(corrected(steps_S, moved_S, self.compensation))
        params_S.add_(moved_S)


def corrected(steps_S: Tensor, moved_S: Tensor, strength: float) -> Tensor:
    """Return what to subtract from local steps, as if they had begun at another place.

    Args:
        steps_S: local steps, fp32 (S,); overwritten.
        moved_S: the other place minus the one where they began.
        strength: fraction of the distance that is undone in the mean over the elements.

    Returns:
        The correction (S,), in the memory of ``steps_S``.
    """
    square_S = steps_S.square_()
    mean = float(square_S.mean()) if square_S.numel() else 0.0
    if mean == 0.0:
        return square_S.zero_()
    return square_S.mul_(strength / mean).clamp_(max=1.0).mul_(moved_S)
