"""Outer optimizers: turn the change that regions propose into a step of the global model.

Regions propose ``Delta = before - after``, a descent direction; the outer optimizer computes
what is subtracted from the outer parameters.

- `sgd`: ``lr * Delta``. With 1 the mean of the regions' models.
- `nesterov`: ``m <- beta * m + Delta``; ``lr * (Delta + beta * m)``. In steady state it goes
  ``lr / (1 - beta)`` times as far as `sgd` with rate 1, so with short intervals lower ``beta``.
- `adam`: Adam (Kingma and Ba, 2015) on Delta as the gradient.

`DelayedNesterov` is for updates that arrive one by one, where momentum at every update would
diverge. Each update is applied at once, and the momentum moves once per ``period`` (N) updates,
by their mean: ``s <- s + g``; on every N-th update ``m <- beta m + s / N``, ``eta (beta m + g /
N)`` is subtracted and ``s <- 0``; on the others ``eta g / N``. N updates together are exactly
one Nesterov step on their mean.

Source: Nesterov as in DiLoCo (arXiv 2311.08105); adaptive outer optimizers as in "Adaptive
Federated Optimization" (Reddi et al., 2021); delayed Nesterov of "Asynchronous Local-SGD
Training for Language Modeling" (arXiv 2401.09135), its variant with c = 0; all reconstructed.

Shape legend: P = parameters of the model, of one shard's slice, or of the fragment that is
exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Protocol, Self

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.strategies.base import answer_all, fractions_of, mean_by
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.strategies.traits import Weights

_PIECE: Final = 2**16  # elements; a few vectors of so many stay in a core's cache


class OuterSgd(StrictModel):
    """A plain step."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(
        1.0, gt=0, le=1e6, description="outer learning rate; 1 gives the mean of the models"
    )

    @property
    def plain(self) -> None:
        """See `AveragerTraits.plain_outer`."""


class OuterNesterov(StrictModel):
    """A step with Nesterov momentum."""

    kind: Literal["nesterov"] = "nesterov"
    lr: float = Field(0.7, gt=0, le=1e6, description="outer learning rate")
    momentum: float = Field(
        0.9, ge=0, lt=1, description="fraction of the momentum retained per step"
    )

    @property
    def plain(self) -> Mapping[str, float | str]:
        """See `AveragerTraits.plain_outer`."""
        return {"kind": "sgd", "lr": 1.0}


class OuterAdam(StrictModel):
    """An adaptive step."""

    kind: Literal["adam"] = "adam"
    lr: float = Field(
        1e-2, gt=0, le=1e6, description="outer learning rate, about the step per parameter"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-3, gt=0, description="added to the denominator")

    @property
    def plain(self) -> None:
        """See `AveragerTraits.plain_outer`: its steps do not grow with the changes."""


OneOuter = OuterSgd | OuterNesterov | OuterAdam
OuterConfig = Annotated[OneOuter, Field(discriminator="kind")]
"""The ``outer`` section of a strategy."""


class OptimizerMemory(Protocol):
    """Holder of the optimizer's state: `RegionState` or `AveragerState`."""

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
    """Make one step of the outer optimizer.

    Args:
        config: optimizer.
        keeper: holds the state, under names that begin with ``key``; changed in place.
        delta_P: proposed change, fp32 (P,).
        key: key of the optimizer, one per fragment for example.
        in_place: whether ``delta_P`` may be overwritten.

    Returns:
        Change to subtract from the outer parameters, fp32 (P,): a new tensor, or ``delta_P``.
    """
    out_P = delta_P if in_place else torch.empty_like(delta_P)
    state = _StepState.next(config, keeper, delta_P, key)
    for piece in _pieces(delta_P):
        state.change(delta_P[piece], piece, out_P[piece])
    return out_P


def outer_round(
    averager: AveragerState,
    updates: Sequence[Update],
    weights: Weights,
    config: OneOuter,
    key: str = "outer",
) -> list[Reply]:
    """Answer all updates of a round with the outer optimizer's change of their mean."""
    fractions, first_P = fractions_of(updates, weights), updates[0].payload_P
    if averager.reuses_updates:
        change_P = first_P
    elif first_P.device.type == "cpu":
        change_P = averager.allocate(first_P.numel())
    else:
        change_P = torch.empty_like(first_P)
    state = _StepState.next(config, averager, first_P, key)
    for piece in _pieces(first_P):  # each goes through memory once
        parts = [update.payload_P[piece] for update in updates]
        mean = mean_by(parts, fractions, change_P[piece])
        state.change(mean, piece, mean)
    return answer_all(averager, updates, change_P)


def _pieces(vector_P: Tensor) -> Iterator[slice]:
    """Return the pieces of a vector, so that several operations on a piece find it in the cache.

    All but the last are whole numbers of the widest registers: the bits are those of one piece.
    """
    return (slice(at, at + _PIECE) for at in range(0, vector_P.numel(), _PIECE))


@dataclass(frozen=True, slots=True)
class _StepState:
    """State of one step of the outer optimizer, without the proposed change.

    Attributes:
        config: optimizer.
        moment_P: first moment; None for `sgd`.
        square_P: second moment; only for `adam`.
        count: steps including this one, for `adam`.
    """

    config: OneOuter
    moment_P: Tensor
    square_P: Tensor
    count: float

    @classmethod
    def next(cls, config: OneOuter, keeper: OptimizerMemory, like_P: Tensor, key: str) -> Self:
        """The next step's, which are ``keeper``'s own."""
        names = [] if isinstance(config, OuterSgd) else ["m"]
        count = 0.0
        if isinstance(config, OuterAdam):
            names = ["m", "v"]
            count = keeper.numbers.get(f"{key}/t", 0.0) + 1.0
            keeper.numbers[f"{key}/t"] = count
        found = [_state(keeper, f"{key}/{name}", like_P) for name in names]
        nothing = [torch.empty(0)] * (2 - len(found))
        moment_P, square_P = [*found, *nothing]
        return cls(config, moment_P, square_P, count)

    def change(self, delta: Tensor, piece: slice, out: Tensor) -> None:
        """Compute one piece of the change to subtract into ``out``, which may be ``delta``."""
        config = self.config
        if isinstance(config, OuterSgd):
            torch.mul(delta, config.lr, out=out)
            return
        moment = self.moment_P[piece]
        if isinstance(config, OuterNesterov):
            moment.mul_(config.momentum).add_(delta)
            torch.add(delta, moment, alpha=config.momentum, out=out).mul_(config.lr)
            return
        square, count = self.square_P[piece], self.count
        moment.lerp_(delta, 1.0 - config.beta1)
        square.mul_(config.beta2).addcmul_(delta, delta, value=1.0 - config.beta2)
        root = torch.div(square, 1.0 - config.beta2**count, out=out).sqrt_().add_(config.eps)
        torch.div(moment, root, out=root).mul_(config.lr / (1.0 - config.beta1**count))


def _state(keeper: OptimizerMemory, name: str, like_P: Tensor) -> Tensor:
    if name not in keeper.memory:
        keeper.memory[name] = torch.zeros_like(like_P)
    return keeper.memory[name]


class DelayedNesterov(StrictModel):
    """An outer optimizer for asynchronous updates."""

    lr: float = Field(0.7, gt=0, le=1e6, description="outer learning rate")
    momentum: float = Field(
        0.9, ge=0, lt=1, description="fraction of the momentum retained per step"
    )
    period: int | None = Field(
        None, ge=1, description="updates per momentum step (N); null: the number of senders"
    )

    @property
    def plain(self) -> Mapping[str, float | str] | None:
        """See `AveragerTraits.plain_outer`."""
        return {"lr": 1.0, "momentum": 0.0} if self.momentum > 0 else None

    def change(self, keeper: OptimizerMemory, delta_P: Tensor, senders: int, key: str) -> Tensor:
        """Return the change to subtract for one update.

        Args:
            keeper: holds the state, under names that begin with ``key``; changed in place.
            delta_P: update's change, fp32 (P,); read-only.
            senders: number of sending regions.
            key: key of the optimizer.

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
