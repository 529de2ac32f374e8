"""Delay-compensated ASGD: a late gradient is corrected for the changes since it was computed.

Idea: a region computes a gradient at parameters that differ from the averager's when it arrives. To
first order the right gradient differs by the Hessian times the distance; the Hessian's diagonal is
estimated by the gradient's own square.

Rule: ``g~ = g + lambda g*g*(w_now - w_then)``, element by element, with ``w_then`` the version that
this region received (one per region); then the outer optimizer steps with ``g~``. ``adaptive``
divides lambda by the root of a running mean of ``g*g``.

When: asynchronous SGD whose staleness costs accuracy. Regions send mean gradients of ``interval``
batches at one point, not local steps: a square of a sum of steps would have the wrong unit. The
learning rate is that of ``outer``; ``optimizer`` is not used.

Failures: as `async_local_sgd`.

Source: DC-ASGD (Zheng et al., ICML 2017; arXiv 1609.08326), reconstructed; lambda 0.04 as in
MXNet's optimizer. MXNet stores one earlier version for all, this one per region.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.strategies import global_model, local_steps
from geo_ray.strategies.global_model import OneByOne
from geo_ray.strategies.local_steps import add_gradient, take_mean
from geo_ray.strategies.outer import OuterConfig, OuterSgd, outer_change
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits

_SQUARE = "square"


class DcAsgd(OneByOne):
    """Configuration and rule of `dc_asgd`."""

    kind: Literal["dc_asgd"] = "dc_asgd"
    interval: int = Field(
        1, ge=1, description="gradients per message, computed at the same parameters"
    )
    compensation: float = Field(
        0.04, ge=0, description="lambda, strength of the correction; 0 is plain asynchronous SGD"
    )
    adaptive: bool = Field(
        False, description="divide lambda by the root of the mean square of gradients"
    )
    decay: float = Field(0.95, ge=0, lt=1, description="adaptive: decay of that mean square")
    outer: OuterConfig = Field(
        OuterSgd(lr=0.1), description="optimizer that applies each corrected gradient"
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                blocking="always",
                every=self.interval,
                last="always",
                interval=self.interval,
                adjustable_interval=True,
            ),
            region=RegionTraits(rate_key="strategy.outer.lr"),
            averager=AveragerTraits(
                bound=self.staleness.bound,
                releases=True,
                frees=True,
            ),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Accumulate the gradient; parameters change only by answers."""
        add_gradient(region, grad_P)

    def after_step(self, region: RegionState) -> Outgoing | None:
        """Send the mean gradient and wait for the link."""
        if not region.is_due(self.interval):
            return None
        return Outgoing(take_mean(region), wait=True)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Continue from the outer model."""
        local_steps.adopt(region, reply)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the rest; the answer comes when all regions have."""
        return Outgoing(take_mean(region), wait=True)

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Step with the corrected gradient; answer its sender with the model's change."""
        if update.num_samples > 0:
            factor = self.staleness.factor(update.lag)
            grad_P = self.compensated(
                averager, update.payload_P, global_model.unheard(averager, update)
            )
            global_model.publish(averager, outer_change(self.outer, averager, grad_P.mul_(factor)))
        return self.answers(averager, update)

    def compensated(self, averager: AveragerState, grad_P: Tensor, moved_P: Tensor) -> Tensor:
        """Return the gradient, corrected to first order for the present parameters, a new (P,).

        Args:
            averager: has the running mean square.
            grad_P: the received gradient.
            moved_P: what was subtracted from the parameters since.
        """
        square_P = grad_P * grad_P
        slope_P = square_P * self.compensation
        if self.adaptive:
            mean_P = averager.memory.setdefault(_SQUARE, square_P.clone())
            mean_P.lerp_(square_P, 1.0 - self.decay)
            slope_P.div_(torch.sqrt(mean_P).add_(1e-7))
        return grad_P - slope_P.mul_(moved_P)
