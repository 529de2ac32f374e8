"""Inner optimizers of a shard on one flat parameter, and their learning rate schedule.

The functions behind torch's optimizers are called directly with state kept here: the first
`torch.optim` object of a process would import PyTorch's compiler (820 modules). Each optimizer
counts its own steps, so a resumed run continues on its curve. Cosine decay: Loshchilov and
Hutter, "SGDR" (2017), without restarts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from geo_ray.base.errors import CheckpointCorruptError
from geo_ray.base.model import StrictModel
from geo_ray.training.parameters import GroupPiece


class RateSchedule(StrictModel):
    """Linear warm-up to the rate of the optimizer, then decay to a fraction of it."""

    kind: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="shape of the decay"
    )
    warmup_steps: int = Field(0, ge=0, description="steps until the full rate")
    steps: int | None = Field(
        None, ge=1, description="steps until the last fraction; null: all steps of the run"
    )
    last: float = Field(0.1, ge=0, le=1, description="fraction of the rate at the end")

    def factor(self, taken: int) -> float:
        """Return the factor on the rate in the step after ``taken`` steps.

        Raises:
            ValueError: neither the configuration nor `over` gave the number of steps.
        """
        if taken < self.warmup_steps:
            return (taken + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        if self.steps is None:
            raise ValueError("a schedule without steps; see RateSchedule.over")
        done = min(1.0, (taken - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.last + (1 - self.last) * left

    def over(self, steps: int) -> RateSchedule:
        """Return the schedule with a length of ``steps``, unless it has one."""
        return self if self.steps is not None else self.model_copy(update={"steps": steps})


@dataclass(slots=True)
class OptimizerGroup:
    """Parameters with one rate and one decay; torch's functions change both first in place.

    Attributes:
        params: fp32 vectors.
        states: tensors of the optimizer by name, for each of them; empty before the first step.
        lr: learning rate.
        weight_decay: its weight decay.
    """

    params: list[Tensor]
    states: list[dict[str, Tensor]]
    lr: float
    weight_decay: float


class Sgd(StrictModel):
    """Plain stochastic gradient descent."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0, le=1e6, description="learning rate")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    @property
    def has_momentum(self) -> bool:
        """Whether a step repeats a fraction of earlier steps."""
        return False

    def step(self, group: OptimizerGroup, grads: list[Tensor]) -> None:
        """Make one step with the gradients of the group's parameters."""
        _sgd(group, grads, [None] * len(grads), momentum=0.0, nesterov=False)


class Momentum(StrictModel):
    """SGD with heavy-ball or Nesterov momentum."""

    kind: Literal["momentum"] = "momentum"
    lr: float = Field(0.05, gt=0, le=1e6, description="learning rate")
    momentum: float = Field(
        0.9, gt=0, lt=1, description="fraction of the last step in the next one"
    )
    nesterov: bool = Field(False, description="look ahead")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    @property
    def has_momentum(self) -> bool:
        """Whether a step repeats a fraction of earlier steps."""
        return True

    def step(self, group: OptimizerGroup, grads: list[Tensor]) -> None:
        """Make one step with the gradients of the group's parameters."""
        retained = [state.get("momentum_buffer") for state in group.states]
        _sgd(group, grads, retained, momentum=self.momentum, nesterov=self.nesterov)
        for state, buffer in zip(group.states, retained, strict=True):
            if buffer is not None:
                state["momentum_buffer"] = buffer


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

    @property
    def has_momentum(self) -> bool:
        """Whether a step repeats a fraction of earlier steps."""
        return self.beta1 > 0

    def step(self, group: OptimizerGroup, grads: list[Tensor]) -> None:
        """Make one fused step with the gradients of the group's parameters."""
        for param, state in zip(group.params, group.states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        adamw(
            group.params,
            grads,
            [state["exp_avg"] for state in group.states],
            [state["exp_avg_sq"] for state in group.states],
            [],
            [state["step"] for state in group.states],
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=group.lr,
            weight_decay=group.weight_decay,
            eps=self.eps,
            maximize=False,
        )


def _sgd(
    group: OptimizerGroup,
    grads: list[Tensor],
    retained: list[Tensor | None],
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    sgd(
        group.params,
        grads,
        retained,
        weight_decay=group.weight_decay,
        momentum=momentum,
        lr=group.lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
    )


OneOptimizer = Sgd | Momentum | AdamW
OptimizerConfig = Annotated[OneOptimizer, Field(discriminator="kind")]
"""The ``optimizer`` section of a configuration."""

_TAKEN = "schedule_steps"  # how many steps a scheduled optimizer took, among its tensors


def lasting(optimizer: OneOptimizer, steps: int) -> OneOptimizer:
    """Return the optimizer with its schedule set to ``steps``, if the schedule has no length."""
    if optimizer.schedule is None:
        return optimizer
    return optimizer.model_copy(update={"schedule": optimizer.schedule.over(steps)})


class InnerOptimizer:
    """Applies gradients to a flat slice in place; its state is part of checkpoints.

    Attributes:
        taken: steps so far; counted only for a schedule.
        rate: factor on the learning rate in the next steps.
        lr: learning rate of the last step, without the factors of groups; None before it.

    Args:
        config: optimizer; its schedule has a length (`lasting`).
        params_S: fp32 (S,), live parameters of one shard.
        pieces: pieces of the slice, for parameter groups; the state in checkpoints is the same.
    """

    def __init__(
        self, config: OneOptimizer, params_S: Tensor, pieces: Sequence[GroupPiece] = ()
    ) -> None:
        whole = (GroupPiece(0, params_S.numel(), (1.0, 1.0, 1.0)),)
        self._params_S = params_S
        self._parts = [_Part(params_S, piece) for piece in pieces or whole]
        factors = list(dict.fromkeys(part.piece.factors for part in self._parts))
        self._config = config
        self._groups = [
            (
                OptimizerGroup(
                    [part.param for part in parts],
                    [part.state for part in parts],
                    config.lr * rate,
                    config.weight_decay * decay,
                ),
                parts,
            )
            for rate, decay, fraction in factors
            if (parts := [p for p in self._parts if p.piece.factors == (rate, decay, fraction)])
        ]
        self._rates = [(config.lr * rate, schedule) for rate, _, schedule in factors]
        self._schedule = config.schedule
        self.taken = 0
        self.rate = 1.0
        self.lr: float | None = None

    def apply(self, grad_S: Tensor) -> None:
        """Make one step with ``grad_S`` (S,), which is read-only."""
        factor = 1.0
        if self._schedule is not None:
            factor = self._schedule.factor(self.taken)
            self.taken += 1
        self.lr = self._config.lr * factor * self.rate
        for (group, _), (lr, fraction) in zip(self._groups, self._rates, strict=True):
            group.lr = (
                lr * (factor if fraction == 1.0 else 1.0 + fraction * (factor - 1.0)) * self.rate
            )
        with torch.no_grad():
            for group, parts in self._groups:
                self._config.step(group, [part.take(grad_S) for part in parts])
        for part in self._parts:
            part.give()

    def live(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the optimizer's tensors by name, and copies that never change.

        For parameter groups, torch has one tensor per parameter, which are joined in copies. Both
        results are empty before the first step.
        """
        own: dict[str, Tensor] = {}
        retained: dict[str, Tensor] = {}
        for part in self._parts:
            for key, value in part.state.items():
                if len(self._parts) == 1 and part.piece.block is None:
                    own[key] = value
                    continue
                if not value.dim():
                    retained[key] = value.clone()
                    continue
                if key not in retained:
                    retained[key] = torch.empty_like(self._params_S)
                part.own(retained[key]).copy_(part.inside(value))
        if self._schedule is not None:
            retained[_TAKEN] = torch.tensor(self.taken)
        return own, retained

    def export(self) -> dict[str, Tensor]:
        """Return copies of the state."""
        own, retained = self.live()
        return retained | {key: value.clone() for key, value in own.items()}

    def restore(self, tensors: dict[str, Tensor], *, given: bool = False) -> None:
        """Restore the result of `export`.

        Args:
            tensors: tensors by name.
            given: the optimizer may use the tensors without copying them.

        Raises:
            CheckpointCorruptError: a tensor does not fit the parameters.
        """
        for name, value in tensors.items():
            if value.dim() and value.shape != self._params_S.shape:
                raise CheckpointCorruptError(
                    f"optimizer state '{name}' has shape {tuple(value.shape)}, "
                    f"the shard has {tuple(self._params_S.shape)}"
                )
        self.taken = int(tensors[_TAKEN]) if _TAKEN in tensors else 0
        retained = {name: value for name, value in tensors.items() if name != _TAKEN}
        for part in self._parts:
            part.state.clear()
            for name, value in retained.items():
                part.state[name] = (
                    part.taken(value, given=given and len(self._parts) == 1)
                    if value.dim()
                    else value.clone()
                )


class _Part:
    """A parameter of the optimizer's: a view of the slice, or a buffer for a block of it."""

    def __init__(self, params_S: Tensor, piece: GroupPiece) -> None:
        self.piece = piece
        self.state: dict[str, Tensor] = {}
        self._params = self.own(params_S)
        self.param = self._params if piece.block is None else torch.zeros(piece.block[0])

    def own(self, vector_S: Tensor) -> Tensor:
        """Return the part's elements of the slice."""
        return vector_S[self.piece.start : self.piece.stop]

    def inside(self, values: Tensor) -> Tensor:
        """Return the part's elements of a tensor shaped like its parameter."""
        at = 0 if self.piece.block is None else self.piece.block[1]
        return values[at : at + self.piece.stop - self.piece.start]

    def taken(self, vector_S: Tensor, *, given: bool) -> Tensor:
        """Return the part's elements, shaped like its parameter; possibly without a copy."""
        return vector_S if given and self.piece.block is None else self.spread(vector_S)

    def spread(self, vector_S: Tensor) -> Tensor:
        """A copy of its elements of the slice, like its parameter."""
        if self.piece.block is None:
            return self.own(vector_S).clone()
        values = torch.zeros(self.piece.block[0])
        self.inside(values).copy_(self.own(vector_S))
        return values

    def take(self, grad_S: Tensor) -> Tensor:
        """Before a step: its gradient."""
        if self.piece.block is None:
            return self.own(grad_S)
        self.inside(self.param).copy_(self._params)
        return self.spread(grad_S)

    def give(self) -> None:
        """Copy elements back that `taken` copied."""
        if self.piece.block is not None:
            self._params.copy_(self.inside(self.param))
