"""The inner optimizer beside each shard of parameters: torch's own, on one flat parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.config.base import StrictModel
from geo_ray.errors import CheckpointCorruptError
from geo_ray.training.compute.group_pieces import GroupPiece
from geo_ray.training.compute.schedule import RateSchedule


class Sgd(StrictModel):
    """Plain stochastic gradient descent."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0, le=1e6, description="learning rate")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """The torch optimizer over groups of parameters, as torch takes them."""
        return torch.optim.SGD(list(groups), lr=self.lr, weight_decay=self.weight_decay)


class Momentum(StrictModel):
    """SGD with heavy-ball or Nesterov momentum."""

    kind: Literal["momentum"] = "momentum"
    lr: float = Field(0.05, gt=0, le=1e6, description="learning rate")
    momentum: float = Field(0.9, gt=0, lt=1, description="share of the last step that is kept")
    nesterov: bool = Field(False, description="look ahead")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """The torch optimizer over groups of parameters, as torch takes them."""
        return torch.optim.SGD(
            list(groups),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


class AdamW(StrictModel):
    """AdamW (Loshchilov and Hutter, 2019)."""

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0, le=1e6, description="learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the denominator")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """The torch optimizer over groups of parameters; fused, which is one pass over memory."""
        return torch.optim.AdamW(
            list(groups),
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )


OneOptimizer = Sgd | Momentum | AdamW
OptimizerConfig = Annotated[OneOptimizer, Field(discriminator="kind")]
"""The ``optimizer`` section of a configuration."""

_TAKEN = "schedule_steps"  # how many steps a scheduled optimizer took, among its tensors


def lasting(optimizer: OneOptimizer, steps: int) -> OneOptimizer:
    """The same optimizer with a schedule ``steps`` long, if it has one without a length."""
    if optimizer.schedule is None:
        return optimizer
    return optimizer.model_copy(update={"schedule": optimizer.schedule.over(steps)})


class InnerOptimizer:
    """Applies gradients to a flat slice in place and gives its state to checkpoints.

    Attributes:
        taken: steps so far, where a schedule stands; counted only for one.

    Args:
        config: which optimizer; a schedule in it has a length (`lasting`).
        params_S: fp32 (S,), the live parameters of one shard.
        pieces: of the slice, if parameters are in groups; its state in checkpoints is the same.
    """

    def __init__(
        self, config: OneOptimizer, params_S: Tensor, pieces: Sequence[GroupPiece] = ()
    ) -> None:
        whole = (GroupPiece(0, params_S.numel(), (1.0, 1.0, 1.0)),)
        self._params_S = params_S
        self._parts = [_Part(params_S, piece) for piece in pieces or whole]
        factors = list(dict.fromkeys(part.piece.factors for part in self._parts))
        self._optimizer = config.build(
            [
                {
                    "params": [p.param for p in self._parts if p.piece.factors == (rate, decay, s)],
                    "lr": config.lr * rate,
                    "weight_decay": config.weight_decay * decay,
                }
                for rate, decay, s in factors
            ]
        )
        self._rates = [(config.lr * rate, schedule) for rate, _, schedule in factors]
        self._schedule = config.schedule
        self.taken = 0

    def apply(self, grad_S: Tensor) -> None:
        """One step with ``grad_S`` (S,), which is not changed."""
        if self._schedule is not None:
            factor = self._schedule.factor(self.taken)
            for group, (lr, share) in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = lr * (factor if share == 1.0 else 1.0 + share * (factor - 1.0))
            self.taken += 1
        for part in self._parts:
            part.take(grad_S)
        self._optimizer.step()
        for part in self._parts:
            part.give()

    def live(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The optimizer's own tensors by name, and copies that never change.

        Where parameters are in groups, torch keeps a tensor for each: they are joined in copies.
        Both are empty before the first step.
        """
        own: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {}
        for part in self._parts:
            for key, value in self._optimizer.state.get(part.param, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if len(self._parts) == 1 and part.piece.block is None:
                    own[key] = value
                    continue
                if not value.dim():
                    kept[key] = value.clone()
                    continue
                if key not in kept:
                    kept[key] = torch.empty_like(self._params_S)
                part.own(kept[key]).copy_(part.inside(value))
        if self._schedule is not None:
            kept[_TAKEN] = torch.tensor(self.taken)
        return own, kept

    def export(self) -> dict[str, Tensor]:
        """Copies of them all."""
        own, kept = self.live()
        return kept | {key: value.clone() for key, value in own.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `export` gave.

        Raises:
            CheckpointCorruptError: if a tensor does not fit the parameters.
        """
        for name, value in tensors.items():
            if value.dim() and value.shape != self._params_S.shape:
                raise CheckpointCorruptError(
                    f"optimizer state '{name}' has shape {tuple(value.shape)}, "
                    f"the shard has {tuple(self._params_S.shape)}"
                )
        self.taken = int(tensors[_TAKEN]) if _TAKEN in tensors else 0
        kept = {name: value for name, value in tensors.items() if name != _TAKEN}
        for part in self._parts:
            self._optimizer.state.pop(part.param, None)
            if kept:
                self._optimizer.state[part.param] = {
                    name: part.spread(value) if value.dim() else value.clone()
                    for name, value in kept.items()
                }


class _Part:
    """One of torch's parameters: a view of the slice, or a buffer for a block of it."""

    def __init__(self, params_S: Tensor, piece: GroupPiece) -> None:
        self.piece = piece
        self._params = self.own(params_S)
        # Parameter() may copy metadata but shares storage: steps land in the slice.
        values = self._params if piece.block is None else torch.zeros(piece.block[0])
        self.param = torch.nn.Parameter(values, requires_grad=True)

    def own(self, vector_S: Tensor) -> Tensor:
        """Its elements of the slice."""
        return vector_S[self.piece.start : self.piece.stop]

    def inside(self, values: Tensor) -> Tensor:
        """Its elements of a tensor that is like its parameter."""
        at = 0 if self.piece.block is None else self.piece.block[1]
        return values[at : at + self.piece.stop - self.piece.start]

    def spread(self, vector_S: Tensor) -> Tensor:
        """A copy of its elements of the slice, like its parameter."""
        if self.piece.block is None:
            return self.own(vector_S).clone()
        values = torch.zeros(self.piece.block[0])
        self.inside(values).copy_(self.own(vector_S))
        return values

    def take(self, grad_S: Tensor) -> None:
        """Before a step."""
        if self.piece.block is None:
            self.param.grad = self.own(grad_S)
            return
        self.param.grad = self.spread(grad_S)
        self.inside(self.param.data).copy_(self._params)

    def give(self) -> None:
        """After it."""
        self.param.grad = None
        if self.piece.block is not None:
            self._params.copy_(self.inside(self.param.data))
