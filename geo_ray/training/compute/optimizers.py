"""The inner optimizer beside each shard of parameters: torch's own, on one flat parameter."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.config.base import StrictModel
from geo_ray.errors import CheckpointCorruptError
from geo_ray.training.compute.schedule import RateSchedule


class Sgd(StrictModel):
    """Plain stochastic gradient descent."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0, le=1e6, description="learning rate")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    def build(self, param: torch.nn.Parameter) -> torch.optim.Optimizer:
        """The torch optimizer over ``param``."""
        return torch.optim.SGD([param], lr=self.lr, weight_decay=self.weight_decay)


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

    def build(self, param: torch.nn.Parameter) -> torch.optim.Optimizer:
        """The torch optimizer over ``param``."""
        return torch.optim.SGD(
            [param],
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

    def build(self, param: torch.nn.Parameter) -> torch.optim.Optimizer:
        """The torch optimizer over ``param``; fused, which is one pass over memory."""
        return torch.optim.AdamW(
            [param],
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
    """

    def __init__(self, config: Sgd | Momentum | AdamW, params_S: Tensor) -> None:
        self._param = torch.nn.Parameter(params_S, requires_grad=True)
        # Parameter() may copy metadata but shares storage: steps land in params_S.
        self._optimizer = config.build(self._param)
        self._lr = config.lr
        self._schedule = config.schedule
        self.taken = 0

    def apply(self, grad_S: Tensor) -> None:
        """One step with ``grad_S`` (S,), which is not changed."""
        if self._schedule is not None:
            self._optimizer.param_groups[0]["lr"] = self._lr * self._schedule.factor(self.taken)
            self.taken += 1
        self._param.grad = grad_S
        self._optimizer.step()
        self._param.grad = None

    def live(self) -> dict[str, Tensor]:
        """The optimizer's own tensors by name; empty before the first step."""
        state = self._optimizer.state.get(self._param, {})
        kept = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        if self._schedule is not None:
            kept[_TAKEN] = torch.tensor(self.taken)
        return kept

    def export(self) -> dict[str, Tensor]:
        """Copies of them."""
        return {key: value.clone() for key, value in self.live().items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `export` gave.

        Raises:
            CheckpointCorruptError: if a tensor does not fit the parameters.
        """
        for name, value in tensors.items():
            if value.dim() and value.shape != self._param.shape:
                raise CheckpointCorruptError(
                    f"optimizer state '{name}' has shape {tuple(value.shape)}, "
                    f"the shard has {tuple(self._param.shape)}"
                )
        self._optimizer.state.pop(self._param, None)
        self.taken = int(tensors[_TAKEN]) if _TAKEN in tensors else 0
        kept = {name: value.clone() for name, value in tensors.items() if name != _TAKEN}
        if kept:
            self._optimizer.state[self._param] = kept
