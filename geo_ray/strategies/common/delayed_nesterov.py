"""Delayed Nesterov: momentum for updates that come one by one.

Idea: with stale updates, momentum at every update runs away. So every update is applied plainly and
at once, and the momentum moves only once per ``period`` updates, by their mean.

Rule: ``s <- s + g``; on every N-th update ``m <- beta m + s / N``, ``eta (beta m + g / N)`` is
subtracted and ``s <- 0``; on the others ``eta g / N``. N updates together are exactly one Nesterov
step on their mean.

Source: "Asynchronous Local-SGD Training for Language Modeling" (arXiv 2401.09135), its variant with
c = 0; reconstructed.

Shape legend: P = parameters of the model, or of one shard's slice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.config.base import StrictModel
from geo_ray.strategies.common.outer import OptimizerMemory


class DelayedNesterov(StrictModel):
    """An outer optimizer for asynchronous updates."""

    lr: float = Field(0.7, gt=0, le=1e6, description="outer learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the last step that is kept")
    period: int | None = Field(
        None, ge=1, description="updates per step of the momentum (N); null: one per sender"
    )

    @property
    def plain(self) -> Mapping[str, float | str] | None:
        """See `AveragerTraits.plain_outer`."""
        return {"lr": 1.0, "momentum": 0.0} if self.momentum > 0 else None

    def change(self, keeper: OptimizerMemory, delta_P: Tensor, senders: int, key: str) -> Tensor:
        """What is to be subtracted for one update.

        Args:
            keeper: has the state, under names that begin with ``key``; changed in place.
            delta_P: the update's change, fp32 (P,); stays as it is.
            senders: how many send.
            key: one per independent optimizer.

        Returns:
            A new tensor (P,).
        """
        period = senders if self.period is None else self.period
        count = keeper.numbers.get(f"{key}/i", 0.0) + 1.0
        sum_P = keeper.memory.get(f"{key}/s")
        if sum_P is None:
            sum_P = keeper.memory[f"{key}/s"] = torch.zeros_like(delta_P)
        sum_P.add_(delta_P)
        change_P = torch.mul(delta_P, self.lr / period)
        if count >= period:
            moment_P = keeper.memory.get(f"{key}/m")
            if moment_P is None:
                moment_P = keeper.memory[f"{key}/m"] = torch.zeros_like(delta_P)
            moment_P.mul_(self.momentum).add_(sum_P, alpha=1.0 / period)
            change_P.add_(moment_P, alpha=self.lr * self.momentum)
            sum_P.zero_()
            count = 0.0
        keeper.numbers[f"{key}/i"] = count
        return change_P
