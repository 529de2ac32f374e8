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
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.base.errors import InvariantError
from geo_ray.strategies.state import AveragerState, RegionState, Reply, Update
from geo_ray.strategies.streamed_fragments import NEXT, StreamedFragments
from geo_ray.strategies.traits import Traits

_TURN = "turn"
_COUNT, _LAST, _SPEED = "count", "last", "speed"


class CoCoDC(StreamedFragments):
    """Configuration and rule of `cocodc`."""

    kind: Literal["cocodc"] = "cocodc"
    interval: int = Field(
        32, ge=1, description="local steps in which each fragment is exchanged at least once (H)"
    )
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

    @property
    def exchanges(self) -> int:
        """Exchanges per interval (N)."""
        return max(self.fragments, math.floor(self.utilization * self.interval / self.tau))

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        found = super().traits
        return replace(found, region=replace(found.region, whole_model=True))

    @property
    def needs_sent(self) -> bool:
        """See `StreamedFragments.needs_sent`."""
        return True

    def turn(self, region: RegionState) -> int:
        """See `StreamedFragments.turn`."""
        return int(region.numbers.get(_TURN, 0.0))

    def take_next(self, region: RegionState) -> int:
        """See `StreamedFragments.take_next`; the averager has chosen the fragment."""
        region.numbers[_TURN] = float((self.turn(region) + 1) % self.exchanges)
        return int(region.numbers.get(NEXT, 0.0))

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """See `StreamedFragments.on_reply`; the answer names the next fragment."""
        super().on_reply(region, reply)
        if reply.fragment != self.fragments:
            region.numbers[NEXT] = float(reply.next_fragment)

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with a fragment's change, and the next fragment, once all have reported."""
        replies = super().on_round(averager, updates)
        fragment = updates[0].fragment
        if fragment == self.fragments:
            return replies
        chosen = self._choose(averager, fragment, replies[0].payload_P)
        return [replace(reply, next_fragment=chosen) for reply in replies]

    def merge_fragment(self, params_S: Tensor, outer_S: Tensor, sent_S: Tensor | None) -> None:
        """See `StreamedFragments.merge_fragment`; keep the steps since sending, corrected."""
        if sent_S is None:
            raise InvariantError("the fragment as it was sent is gone")
        moved_S = outer_S - sent_S
        if self.compensation > 0:
            steps_S = params_S - sent_S
            params_S.sub_(corrected(steps_S, moved_S, self.compensation))
        params_S.add_(moved_S)

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
