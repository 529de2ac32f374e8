"""Gradients that a region adds up before it sends their mean.

Shape legend: P = parameters of the model, or of one shard's slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geo_ray.strategies.base import RegionState

_SUM, _COUNT = "sum", "count"


def add_gradient(region: RegionState, grad_P: Tensor | None) -> None:
    """Count a gradient; one that was refused (None) is none."""
    if grad_P is None:
        return
    if _SUM in region.memory:
        region.memory[_SUM].add_(grad_P)
    else:
        region.memory[_SUM] = grad_P.clone()
    region.numbers[_COUNT] = region.numbers.get(_COUNT, 0.0) + 1.0


def take_mean(region: RegionState) -> Tensor:
    """The mean of what was counted since the last call, or zero, as a tensor of one's own (P,)."""
    count = region.numbers.pop(_COUNT, 0.0)
    sum_P = region.memory.pop(_SUM, None)
    return torch.zeros_like(region.params_P) if sum_P is None else sum_P.div_(count)
