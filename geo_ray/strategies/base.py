"""What a strategy is: the rule by which regions that train apart come to one model.

A strategy is a frozen configuration with pure methods. It has no clock, no socket and no Ray, and
keeps nothing itself: what it must remember lies in the `RegionState` beside each region's parameter
server, or in the `AveragerState` of the averager, where checkpoints find it.

Every exchange is one request of a region and one reply of the averager. A region has at most one
request open, which bounds staleness and memory on any link, however slow.

Shape legend: P = parameters of the region's model (or of the slice that one shard holds).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from geo_ray.strategies.state import AveragerState as AveragerState
from geo_ray.strategies.state import Border as Border
from geo_ray.strategies.state import Outgoing as Outgoing
from geo_ray.strategies.state import RegionState as RegionState
from geo_ray.strategies.state import Reply as Reply
from geo_ray.strategies.state import Update as Update
from geo_ray.strategies.state import Wait as Wait
from geo_ray.strategies.state import nothing_carried as nothing_carried
from geo_ray.strategies.traits import Sends as Sends
from geo_ray.strategies.traits import Traits
from geo_ray.strategies.traits import Weights as Weights


class Strategy(Protocol):
    """The methods of a strategy. All are pure in the sense of the module's docstring."""

    @property
    def kind(self) -> str:
        """The strategy's name in configurations, messages and reports."""

    @property
    def traits(self) -> Traits:
        """All that others must know of the strategy."""

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Take in one combined gradient of the region's workers.

        ``grad_P`` is None when every contribution was refused (not finite): parameters stay.
        """

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Decide whether to speak now, and whether to wait for the answer."""

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Merge what came back into ``region.params_P``, in place."""

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """The last word after the last step; None if the regions are equal anyway."""

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """In the averager: take in one update; answer nobody, one region, or all.

        The update's payload is the caller's again once the update is answered: keep a copy.
        """


def shares_of(updates: Sequence[Update], weights: Weights) -> list[float]:
    """Weights in a mean: by region, or by the rows behind each update; alike if none has rows."""
    total = sum(update.num_samples for update in updates)
    if weights == "uniform" or total == 0:
        return [1.0 / len(updates)] * len(updates)
    return [update.num_samples / total for update in updates]


def weighted_mean(updates: Sequence[Update], weights: Weights) -> Tensor:
    """The mean of payloads, summed in the given order so that the result is the same to the bit.

    Args:
        updates: at least one; all payloads of one shape (P,).
        weights: see `shares_of`.

    Returns:
        A new fp32 tensor (P,).
    """
    return mean_by([update.payload_P for update in updates], shares_of(updates, weights))


def mean_by(
    vectors: Sequence[Tensor], shares: Sequence[float], out_P: Tensor | None = None
) -> Tensor:
    """The sum of vectors (P,), each times its share, in the given order; in ``out_P`` or anew."""
    mean_P = torch.mul(vectors[0], shares[0], out=out_P)
    for vector_P, share in zip(vectors[1:], shares[1:], strict=True):
        mean_P.add_(vector_P, alpha=share)
    return mean_P


def answer_all(
    averager: AveragerState,
    updates: Sequence[Update],
    payload_P: Tensor,
    weights: Weights | None = None,
) -> list[Reply]:
    """The same payload to every region of a round, which this commits as one new version.

    Args:
        averager: the averager's state.
        updates: of the round.
        payload_P: the answer.
        weights: what the payload's mean was weighted with, if regions want to know their share.
    """
    averager.version += 1
    total = sum(update.num_samples for update in updates)
    shares = [0.0] * len(updates) if weights is None else shares_of(updates, weights)
    return [
        Reply(
            u.region,
            u.seq,
            averager.version,
            total,
            payload_P,
            u.final,
            fragment=u.fragment,
            share=share,
        )
        for u, share in zip(updates, shares, strict=True)
    ]
