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

from typing import Literal

from pydantic import Field
from torch import Tensor

from geo_ray.strategies.state import RegionState
from geo_ray.strategies.streamed_fragments import NEXT, StreamedFragments


class DiLoCoStreaming(StreamedFragments):
    """Configuration and rule of `diloco_streaming`."""

    kind: Literal["diloco_streaming"] = "diloco_streaming"
    merge: Literal["mix", "correct"] = Field(
        "mix",
        description="mix: average of local and outer fragment; correct: outer fragment plus the "
        "local steps since sending",
    )
    alpha: float = Field(0.5, ge=0, lt=1, description="mix: weight of the local fragment")

    @property
    def needs_sent(self) -> bool:
        """See `StreamedFragments.needs_sent`."""
        return self.merge == "correct"

    def turn(self, region: RegionState) -> int:
        """See `StreamedFragments.turn`."""
        return int(region.numbers.get(NEXT, 0.0))

    def take_next(self, region: RegionState) -> int:
        """See `StreamedFragments.take_next`; fragments go in turn."""
        number = self.turn(region)
        region.numbers[NEXT] = float((number + 1) % self.fragments)
        return number

    def merge_fragment(self, params_S: Tensor, outer_S: Tensor, sent_S: Tensor | None) -> None:
        """See `StreamedFragments.merge_fragment`."""
        if sent_S is not None:
            params_S.add_(outer_S - sent_S)
        else:
            params_S.lerp_(outer_S, 1.0 - self.alpha)
