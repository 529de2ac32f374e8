"""Small networks in the shapes of AlexNet, VGG-11 and GoogLeNet, on handwritten digits.

What counts for the benchmark is where the parameters are: in the first two nearly all are in fully
connected layers, in the last nearly all in convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
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
from geo_ray.data.tasks.digits import Digits

SIDE = 8


class Shapes:
    """Ten-class image classification."""

    class Options(StrictModel):
        """Options of `Shapes`."""

        shape: Literal["alexnet", "vgg", "googlenet"] = Field(
            "alexnet", description="Which network it is like."
        )

    columns: Mapping[str, str] = {"image": f"float32[{SIDE * SIDE}]", "label": "int64"}
    label_column: str | None = "label"

    def __init__(self, options: Options) -> None:
        self._shape = options.shape

    def model(self, seed: int) -> nn.Module:
        """Return the network: (N, 1, 8, 8) -> logits (N, 10)."""
        with seeded(seed):
            network = {"alexnet": alexnet, "vgg": vgg, "googlenet": googlenet}[self._shape]()
            for layer in network.modules():
                if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
                    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                    nn.init.zeros_(layer.bias)
            last = network[-1]
            assert isinstance(last, nn.Linear)
            nn.init.normal_(last.weight, std=0.01)
        return network

    def collate(self, columns: Columns, device: torch.device) -> Labelled:
        """Return images (N, 1, 8, 8) float32 and labels (N,) int64."""
        images = to_tensor(columns["image"], device).view(-1, 1, SIDE, SIDE)
        return Labelled(images, to_tensor(columns["label"], device))

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
        """Return the digits that come with scikit-learn."""
        return Digits(Digits.Options()).dataset(seed)


def conv(inputs: int, outputs: int, kernel: int = 3) -> list[nn.Module]:
    """A convolution as deep networks have it today; the norm lets them learn in few steps."""
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
    return [layer, nn.GroupNorm(1, outputs), nn.ReLU()]


def alexnet() -> nn.Sequential:
    """Five convolutions and three fully connected layers, which have 90 % of 58 k parameters."""
    return nn.Sequential(
        *conv(1, 8, 5),
        nn.MaxPool2d(2),
        *conv(8, 12),
        *conv(12, 12),
        *conv(12, 12),
        *conv(12, 16),
        nn.Flatten(),
        *dense(256, 160, 64),
    )


def vgg() -> nn.Sequential:
    """Eight convolutions of 3x3 and three fully connected layers: 92 % of 62 k parameters."""
    return nn.Sequential(
        *conv(1, 8),
        nn.MaxPool2d(2),
        *conv(8, 8),
        *conv(8, 8),
        *conv(8, 8),
        *conv(8, 8),
        *conv(8, 8),
        *conv(8, 8),
        *conv(8, 16),
        nn.Flatten(),
        *dense(256, 160, 96),
    )


def dense(inputs: int, first: int, second: int) -> list[nn.Module]:
    """The three fully connected layers that both end with."""
    layers = [nn.Linear(inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()]
    return [*layers, nn.Linear(second, 10)]


class Inception(nn.Module):
    """Four branches side by side: 1x1, 3x3 and 5x5 convolutions, and a pool."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        half = width // 2
        self.one = nn.Sequential(*conv(inputs, width, 1))
        self.three = nn.Sequential(*conv(inputs, width, 1), *conv(width, 2 * width))
        self.five = nn.Sequential(*conv(inputs, half, 1), *conv(half, half, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), *conv(inputs, half, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return (N, 4 * width, H, W)."""
        branches = [self.one, self.three, self.five, self.pool]
        return torch.cat([branch(images) for branch in branches], dim=1)


def googlenet() -> nn.Sequential:
    """A stem and three inception modules; 97 % of 21 k parameters in convolutions."""
    return nn.Sequential(
        *conv(1, 12),
        nn.MaxPool2d(2),
        Inception(12, 8),
        Inception(32, 14),
        nn.MaxPool2d(2),
        Inception(56, 20),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(80, 10),
    )
