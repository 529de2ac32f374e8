"""Running statistics made anew: those that the present parameters have over many batches.

The moving average that training keeps lags behind the parameters, and was made with other ones in
every region. Source: Wu and Johnson, "Rethinking 'Batch' in BatchNorm" (2021), section 3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from geo_ray.tasks.base import Batch, Task
from geo_ray.training.compute.carry_layout import CarryLayout


def has_statistics(module: nn.Module) -> bool:
    """Whether a module keeps running statistics, which training changes."""
    was_training = module.training
    try:
        return bool(_layers(module.train()))
    finally:
        module.train(was_training)


def precise_statistics(
    task: Task, module: nn.Module, layout: CarryLayout, batches: Sequence[Batch], into_B: Tensor
) -> None:
    """Leave the statistics over ``batches`` in a vector of carried values.

    Each batch counts the same; variances by the law of total variance. All else in the vector stays
    as it is.

    Args:
        task: its loss is what runs the model.
        module: in training mode, with the parameters that the statistics are about.
        layout: of the vector.
        batches: of one size.
        into_B: uint8 (B,).
    """
    layers = _layers(module)
    if not layers or not batches:
        return
    momenta = [layer.momentum for layer in layers]
    found: list[list[tuple[Tensor, Tensor]]] = []
    try:
        for layer in layers:
            layer.momentum = 1.0  # what is kept is then that of the last batch alone
        for batch in batches:
            task.loss(module, batch)
            found.append([_of(layer) for layer in layers])
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    layout.write(into_B, module)
    for layer, by_batch in zip(layers, zip(*found, strict=True), strict=True):
        means, variances = (torch.stack(part) for part in zip(*by_batch, strict=True))
        mean = means.mean(0)
        layer.get_buffer("running_mean").copy_(mean)
        layer.get_buffer("running_var").copy_((variances + (means - mean).square()).mean(0))
    layout.read_into(module, into_B)


@dataclass(slots=True)
class StatisticsBoard:
    """Puts the regions' statistics of the final parameters together, before they are evaluated.

    Every region's first worker makes them over rows of its own; the final evaluation, and the model
    that is kept, have those over all regions' rows. Nobody trains by then, so nobody is held up.

    Attributes:
        layout: of the vectors.
        rows: of each region's training data, its weight.
    """

    layout: CarryLayout
    rows: Mapping[str, float]
    _told: dict[str, Tensor] = field(default_factory=dict)

    def add(self, region: str, carried_B: Tensor) -> None:
        """A region's carried values, uint8 (B,), with statistics over its own rows."""
        self._told[region] = carried_B

    def take(self, members: Collection[str]) -> dict[str, Tensor]:
        """Each member's own values with statistics over all, once all have told theirs."""
        if not self._told or not set(members) <= set(self._told):
            return {}
        told = {region: self._told[region] for region in members}
        self._told = {}
        return {name: self.layout.with_statistics(name, told, self.rows) for name in told}

    def give_up(self) -> dict[str, Tensor]:
        """What was told, as it was told: others do not come any more."""
        told, self._told = self._told, {}
        return told


def _layers(module: nn.Module) -> list[_NormBase]:
    """Those that training does not hold fixed, as some do for good in their own `train`."""
    kept = [p for p in module.modules() if isinstance(p, _NormBase) and p.running_mean is not None]
    return [layer for layer in kept if layer.training]


def _of(layer: _NormBase) -> tuple[Tensor, Tensor]:
    return layer.get_buffer("running_mean").clone(), layer.get_buffer("running_var").clone()
