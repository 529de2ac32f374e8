"""The inner optimizer beside each shard of parameters: torch's own, on one flat parameter."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.config.base import Model
from geo_ray.errors import CheckpointCorruptError


class Sgd(Model):
    """Plain stochastic gradient descent."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0, description="learning rate")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty")

    def build(self, param: torch.nn.Parameter) -> torch.optim.Optimizer:
        """The torch optimizer over ``param``."""
        return torch.optim.SGD([param], lr=self.lr, weight_decay=self.weight_decay)


class Momentum(Model):
    """SGD with heavy-ball or Nesterov momentum."""

    kind: Literal["momentum"] = "momentum"
    lr: float = Field(0.05, gt=0, description="learning rate")
    momentum: float = Field(0.9, gt=0, lt=1, description="share of the last step that is kept")
    nesterov: bool = Field(False, description="look ahead")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty")

    def build(self, param: torch.nn.Parameter) -> torch.optim.Optimizer:
        """The torch optimizer over ``param``."""
        return torch.optim.SGD(
            [param],
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


class AdamW(Model):
    """AdamW (Loshchilov and Hutter, 2019)."""

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0, description="learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the denominator")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay")

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


class InnerOptimizer:
    """Applies gradients to a flat slice in place and gives its state to checkpoints.

    Args:
        config: which optimizer.
        params_S: fp32 (S,), the live parameters of one shard.
    """

    def __init__(self, config: Sgd | Momentum | AdamW, params_S: Tensor) -> None:
        self._param = torch.nn.Parameter(params_S, requires_grad=True)
        # Parameter() may copy metadata but shares storage: steps land in params_S.
        self._optimizer = config.build(self._param)

    def apply(self, grad_S: Tensor) -> None:
        """One step with ``grad_S`` (S,), which is not changed."""
        self._param.grad = grad_S
        self._optimizer.step()
        self._param.grad = None

    def export(self) -> dict[str, Tensor]:
        """Copies of the optimizer's tensors by name; empty before the first step."""
        state = self._optimizer.state.get(self._param, {})
        return {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}

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
        if tensors:
            self._optimizer.state[self._param] = {k: v.clone() for k, v in tensors.items()}
