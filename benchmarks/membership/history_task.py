"""The task of random histories: a linear classifier, whose gradient takes next to no time.

What a history is about is who holds which model when, and not what the model is worth. It has as
many parameters and rows as `digits` of width 2, so its messages are as large and take as long.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from geo_ray.base.model import StrictModel
from geo_ray.base.random_state import seeded
from geo_ray.data.tasks.base import Columns, Dataset, Stats
from geo_ray.data.tasks.classification import (
    Labelled,
    classification_loss,
    classification_metrics,
    classification_stats,
    to_tensor,
)

FEATURES, CLASSES = 139, 4  # 556 parameters: no bias
ROWS, HELDOUT_ROWS = 1433, 364


class Points:
    """Which of a few directions a point lies in most."""

    class Options(StrictModel):
        """Options of `Points`: none."""

    columns: Mapping[str, str] = {"point": f"float32[{FEATURES}]", "label": "int64"}
    label_column: str | None = "label"

    def __init__(self, options: Options) -> None:
        pass

    def model(self, seed: int) -> nn.Module:
        """Return the classifier: (N, FEATURES) -> logits (N, CLASSES)."""
        with seeded(seed):
            return nn.Linear(FEATURES, CLASSES, bias=False)

    def collate(self, columns: Columns, device: torch.device) -> Labelled:
        """Return points (N, FEATURES) float32 and labels (N,) int64."""
        return Labelled(to_tensor(columns["point"], device), to_tensor(columns["label"], device))

    def loss(self, model: nn.Module, batch: Labelled) -> Tensor:
        """Return the mean cross-entropy in nats."""
        return classification_loss(model, batch)

    def evaluate(self, model: nn.Module, batch: Labelled) -> Stats:
        """Return the counts of rows and correct rows and the summed loss."""
        return classification_stats(model, batch)

    def metrics(self, stats: Stats) -> dict[str, float]:
        """Return loss (nats) and accuracy in [0, 1]."""
        return classification_metrics(stats)

    def dataset(self, seed: int) -> Dataset:
        """Return points whose label is the direction that they lie in most."""
        draw = np.random.default_rng(seed)
        points_NF = draw.standard_normal((ROWS + HELDOUT_ROWS, FEATURES)).astype(np.float32)
        directions_FC = draw.standard_normal((FEATURES, CLASSES)).astype(np.float32)
        labels_N = (points_NF @ directions_FC).argmax(axis=1)
        return Dataset(
            train={"point": points_NF[:ROWS], "label": labels_N[:ROWS]},
            heldout={"point": points_NF[ROWS:], "label": labels_N[ROWS:]},
        )
