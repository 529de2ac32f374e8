"""A task that remembers the rows of every batch, for a loop that repeats its training."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

import geo_ray
from geo_ray.data.tasks import classification

BATCHES: list[classification.Labelled] = []


class Recorded:
    Options, label_column = geo_ray.Options, "label"
    columns: ClassVar = {"x": "float32", "label": "int64"}
    evaluate = staticmethod(classification.classification_stats)
    metrics = staticmethod(classification.classification_metrics)

    def __init__(self, options: geo_ray.Options) -> None:
        pass

    def model(self, seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 3))

    def collate(self, columns: dict[str, Tensor], device: torch.device) -> classification.Labelled:
        x, label = (torch.as_tensor(columns[name]) for name in self.columns)
        return classification.Labelled(x[:, None], label)

    def loss(self, model: nn.Module, batch: classification.Labelled) -> Tensor:
        BATCHES.append(batch)
        return classification.classification_loss(model, batch)
