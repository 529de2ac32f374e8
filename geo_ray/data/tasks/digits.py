"""Built-in task: real handwritten digits from scikit-learn, small enough for a laptop.

1797 scans of 8x8 pixels by 13 writers (UCI "Optical Recognition of Handwritten Digits").
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

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

_SIDE = 8
_CLASSES = 10
_GREYS = 16.0  # pixels are counts 0..16
_HELDOUT_EVERY = 5


class Digits:
    """Ten-class image classification with a small convolutional network."""

    class Options(StrictModel):
        """Options of `digits`."""

        width: int = Field(
            default=16, ge=2, le=128, description="Channels of the first convolution."
        )

    columns: Mapping[str, str] = {"image": "float32[64]", "label": "int64"}
    label_column: str | None = "label"

    def __init__(self, options: Options) -> None:
        self._width = options.width

    def model(self, seed: int) -> nn.Module:
        """Return the network: (N, 1, 8, 8) -> logits (N, 10); 30 k parameters at width 16."""
        with seeded(seed):
            return _network(self._width)

    def collate(self, columns: Columns, device: torch.device) -> Labelled:
        """Return images (N, 1, 8, 8) float32 in [0, 1] and labels (N,) int64."""
        images = to_tensor(columns["image"], device).view(-1, 1, _SIDE, _SIDE)
        return Labelled(images, to_tensor(columns["label"], device))

    def loss(self, model: nn.Module, batch: Labelled) -> torch.Tensor:
        """Return the mean cross-entropy in nats."""
        return classification_loss(model, batch)

    def evaluate(self, model: nn.Module, batch: Labelled) -> Stats:
        """Return the sums of `classification_stats`."""
        return classification_stats(model, batch)

    def metrics(self, stats: Stats) -> dict[str, float]:
        """Return loss (nats), accuracy, base_rate, recall_mean and recall_least."""
        return classification_metrics(stats)

    def dataset(self, seed: int) -> Dataset:
        """Return 1433 training rows and 364 held-out rows, for any seed.

        Every fifth scan of each class is held out, so both parts have all classes and writers, and
        results of different seeds use the same rows.
        """
        scans = _scans()
        images_NP = (scans[:, :-1] / _GREYS).astype(np.float32)
        labels_N = scans[:, -1].astype(np.int64)
        heldout_N = np.zeros(len(labels_N), dtype=bool)
        for label in range(_CLASSES):
            heldout_N[np.flatnonzero(labels_N == label)[::_HELDOUT_EVERY]] = True
        return Dataset(
            train={"image": images_NP[~heldout_N], "label": labels_N[~heldout_N]},
            heldout={"image": images_NP[heldout_N], "label": labels_N[heldout_N]},
        )


def _scans() -> NDArray[np.float64]:
    """Return the pixels of each scan, and its label in the last column.

    Reads scikit-learn's file without importing scikit-learn, which takes seconds of CPU.
    """
    package = find_spec("sklearn")
    assert package is not None and package.origin, "a dependency"  # noqa: S101
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        scans: NDArray[np.float64] = np.loadtxt(file, delimiter=",")
    return scans


def _network(width: int) -> nn.Module:
    last = nn.Linear(3 * width, _CLASSES)
    network = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (_SIDE // 2) ** 2, 3 * width),
        nn.ReLU(),
        last,
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    nn.init.normal_(last.weight, std=0.01)  # initial predictions are uniform: loss ln 10
    return network
