"""Ten-class image classification on MNIST or CIFAR-10 files that the user has downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import nn

from geo_ray.config.base import StrictModel
from geo_ray.errors import ShardEmptyError, TaskLoadError
from geo_ray.tasks.base import Columns, Dataset, Stats
from geo_ray.tasks.classification import (
    Labelled,
    classification_loss,
    classification_metrics,
    classification_stats,
)
from geo_ray.tasks.images_formats import Bytes, read_cifar10, read_mnist
from geo_ray.tasks.models.images import lenet, resnet18
from geo_ray.tasks.seeding import seeded
from geo_ray.tasks.tensors import to_tensor


class Format(NamedTuple):
    """A kind of image: channels, side in pixels, and the pixels' mean and deviation in [0, 1]."""

    channels: int
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


FORMATS: Mapping[str, Format] = {
    "mnist": Format(1, 28, (0.1307,), (0.3081,)),
    "cifar10": Format(3, 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}

_WHAT_TO_PUT = {
    "mnist": "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and"
    " t10k-labels-idx1-ubyte (each plain or .gz)",
    "cifar10": "data_batch_1.bin to data_batch_5.bin and test_batch.bin (the binary version)",
}


class Images:
    """Image classification with LeNet or ResNet-18. Pixels are normalised, not augmented."""

    class Options(StrictModel):
        """Options of `images`."""

        model: Literal["lenet", "resnet18"] = Field(default="lenet", description="The network.")
        format: Literal["mnist", "cifar10"] = Field(
            default="mnist", description="Shape of the images and format of the files."
        )
        directory: str | None = Field(
            default=None,
            description="Where the publisher's files lie, relative to the working directory; only"
            " needed where shards are written.",
        )
        width: int = Field(
            default=64, ge=1, le=1024, description="Channels of ResNet-18's first stage."
        )

    label_column: str | None = "label"

    def __init__(self, options: Options) -> None:
        self._options = options
        self._format = FORMATS[options.format]
        pixels = self._format.channels * self._format.side**2
        self.columns: Mapping[str, str] = {"image": f"uint8[{pixels}]", "label": "int64"}

    def model(self, seed: int) -> nn.Module:
        """Return the network: (N, channels, side, side) float32 -> logits (N, 10)."""
        with seeded(seed):
            if self._options.model == "lenet":
                return lenet(self._format.channels, self._format.side)
            return resnet18(self._format.channels, self._options.width)

    def collate(self, columns: Columns, device: torch.device) -> Labelled:
        """Return normalised images (N, channels, side, side) float32 and labels (N,) int64."""
        channels, side, mean, std = self._format
        images = to_tensor(columns["image"], device).view(-1, channels, side, side)
        mean_C11 = torch.tensor(mean, device=device).view(-1, 1, 1)
        std_C11 = torch.tensor(std, device=device).view(-1, 1, 1)
        scaled = (images.float() / 255 - mean_C11) / std_C11
        return Labelled(scaled, to_tensor(columns["label"], device))

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
        """Return the publisher's training and test rows, whatever the seed.

        Raises:
            TaskLoadError: no directory was given, or a file is missing; says what to put where.
            DataError: a file is malformed.
        """
        kind, given = self._options.format, self._options.directory
        if given is None:
            raise TaskLoadError(
                f"task images with format {kind} has no data: option 'directory' is not set",
                fix=f"Put {_WHAT_TO_PUT[kind]} into a directory and name it: directory: PATH.",
            )
        directory = Path(given)
        if not directory.is_dir():
            raise TaskLoadError(
                f"option 'directory' of task images: {directory.absolute()} is no directory",
                fix=f"Create it and put {_WHAT_TO_PUT[kind]} there.",
            )
        if kind == "mnist":
            train, heldout = read_mnist(directory, "train"), read_mnist(directory, "t10k")
        else:
            train, heldout = read_cifar10(directory, "train"), read_cifar10(directory, "test")
        if not len(train[1]) or not len(heldout[1]):
            raise ShardEmptyError(
                f"the image files in {directory} hold no rows",
                fix="Download the files again; both parts must have images.",
            )
        return Dataset(train=_columns(*train), heldout=_columns(*heldout))


def _columns(images: Bytes, labels: Bytes) -> Columns:
    return {"image": np.ascontiguousarray(images), "label": labels.astype(np.int64)}
