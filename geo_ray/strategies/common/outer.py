"""The outer optimizer: what the averager makes of the change that regions propose.

One implementation for every strategy that has one. Regions propose ``Delta = before - after``, a
descent direction; the outer optimizer says what is subtracted from the outer parameters.

- `sgd`: ``lr * Delta``. With 1 the mean of the regions' models.
- `nesterov`: ``m <- beta * m + Delta``; ``lr * (Delta + beta * m)``. In steady state it goes
  ``lr / (1 - beta)`` times as far as `sgd` with rate 1, so with short intervals lower ``beta``.
- `adam`: Adam (Kingma and Ba, 2015) on Delta as the gradient.

Source: Nesterov as in DiLoCo (arXiv 2311.08105); adaptive outer optimizers as in "Adaptive
Federated Optimization" (Reddi et al., 2021); both reconstructed.

Shape legend: P = parameters of the model, or of the fragment that is exchanged.
"""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.config.base import StrictModel
from geo_ray.strategies.base import AveragerState, Reply, Update, Weights, answer_all, weighted_mean


class OuterSgd(StrictModel):
    """A plain step."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(
        1.0, gt=0, le=1e6, description="outer learning rate; 1: the mean of the models"
    )


class OuterNesterov(StrictModel):
    """A step with Nesterov momentum."""

    kind: Literal["nesterov"] = "nesterov"
    lr: float = Field(0.7, gt=0, le=1e6, description="outer learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the last step that is kept")


class OuterAdam(StrictModel):
    """An adaptive step."""

    kind: Literal["adam"] = "adam"
    lr: float = Field(
        1e-2, gt=0, le=1e6, description="outer learning rate: about the step per parameter"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-3, gt=0, description="added to the denominator")


OneOuter = OuterSgd | OuterNesterov | OuterAdam
OuterConfig = Annotated[OneOuter, Field(discriminator="kind")]
"""The ``outer`` section of a strategy."""


class OptimizerMemory(Protocol):
    """Where the optimizer's state lies: `RegionState` or `AveragerState`."""

    memory: dict[str, Tensor]
    numbers: dict[str, float]


def outer_change(
    config: OneOuter,
    keeper: OptimizerMemory,
    delta_P: Tensor,
    key: str = "outer",
    *,
    in_place: bool = False,
) -> Tensor:
    """One step of the outer optimizer.

    Args:
        config: which.
        keeper: has its state, under names that begin with ``key``; changed in place.
        delta_P: the proposed change, fp32 (P,).
        key: one per independent optimizer (per fragment, say).
        in_place: ``delta_P`` may be overwritten; without, it stays as it is.

    Returns:
        What is to be subtracted from the outer parameters, fp32 (P,): a new tensor, or ``delta_P``.
    """
    out_P = delta_P if in_place else torch.empty_like(delta_P)
    if isinstance(config, OuterSgd):
        return torch.mul(delta_P, config.lr, out=out_P)
    moment_P = _state(keeper, f"{key}/m", delta_P)
    if isinstance(config, OuterNesterov):
        moment_P.mul_(config.momentum).add_(delta_P)
        return torch.add(delta_P, moment_P, alpha=config.momentum, out=out_P).mul_(config.lr)
    square_P = _state(keeper, f"{key}/v", delta_P)
    count = keeper.numbers.get(f"{key}/t", 0.0) + 1.0
    keeper.numbers[f"{key}/t"] = count
    moment_P.lerp_(delta_P, 1.0 - config.beta1)
    square_P.mul_(config.beta2).addcmul_(delta_P, delta_P, value=1.0 - config.beta2)
    root_P = torch.div(square_P, 1.0 - config.beta2**count, out=out_P).sqrt_().add_(config.eps)
    return torch.div(moment_P, root_P, out=root_P).mul_(config.lr / (1.0 - config.beta1**count))


def outer_round(
    averager: AveragerState, update: Update, weights: Weights, config: OneOuter, key: str = "outer"
) -> list[Reply]:
    """Once every region has spoken: the outer optimizer's change of the mean, to all of them."""
    updates = averager.gather(update)
    if updates is None:
        return []
    mean_P = weighted_mean(updates, weights)
    # In the mean's place: new memory for a large model costs more than the step.
    change_P = outer_change(config, averager, mean_P, key, in_place=True)
    return answer_all(averager, updates, change_P)


def _state(keeper: OptimizerMemory, name: str, like_P: Tensor) -> Tensor:
    if name not in keeper.memory:
        keeper.memory[name] = torch.zeros_like(like_P)
    return keeper.memory[name]
