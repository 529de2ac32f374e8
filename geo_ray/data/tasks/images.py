"""Built-in task: image classification on MNIST or CIFAR-10 files downloaded by the user.

Reads MNIST's IDX files (plain or gzip) and CIFAR-10's binary batches; sizes are checked against
the file before memory is allocated. Models: LeNet-5 and ResNet-18 for small images, without
running statistics.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from geo_ray.base.errors import DataError, ShardEmptyError, TaskLoadError
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

Bytes = npt.NDArray[np.uint8]

CLASSES = 10
MNIST_SIDE = 28
CIFAR_PIXELS = 3 * 32 * 32
MAX_BYTES = 1 << 30
_DEFLATE_MAX_RATIO = 1032  # maximum expansion of a deflate stream
_FIX = "Download the file again, and compare its size and digest with the publisher's."


def read_mnist(directory: Path, split: str) -> tuple[Bytes, Bytes]:
    """Return images uint8 (N, 784) and labels uint8 (N,) of "train" or "t10k".

    Raises:
        TaskLoadError: a file is missing.
        DataError: a file contradicts its header, or the two files do not match.
    """
    images_path = _find(directory, f"{split}-images-idx3-ubyte")
    labels_path = _find(directory, f"{split}-labels-idx1-ubyte")
    images = read_idx(images_path, (MNIST_SIDE, MNIST_SIDE))
    labels = read_idx(labels_path, ())
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} has {len(images)} images, {labels_path} has {len(labels)} labels",
            fix=_FIX,
        )
    _check_labels(labels_path, labels)
    return images.reshape(len(images), MNIST_SIDE**2), labels


def read_idx(path: Path, item_shape: Sequence[int]) -> Bytes:
    """Return the array uint8 (N, *item_shape) of an IDX file, plain or gzip by its name.

    Raises:
        DataError: wrong magic, shape or length, damaged compression, or larger than 1 GiB.
    """
    try:
        size_bytes = path.stat().st_size
        if path.suffix != ".gz":
            with path.open("rb") as plain:
                return _read_idx(path, plain, item_shape, size_bytes)
        with gzip.open(path, "rb") as packed:
            limit_bytes = size_bytes * _DEFLATE_MAX_RATIO
            return _read_idx(path, cast(BinaryIO, packed), item_shape, limit_bytes)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}", fix=_FIX) from error


def _read_idx(path: Path, file: BinaryIO, item_shape: Sequence[int], limit_bytes: int) -> Bytes:
    ndim = 1 + len(item_shape)
    header_bytes = 4 + 4 * ndim
    header = file.read(header_bytes)
    if len(header) < header_bytes:
        raise DataError(f"{path} ends within its header", fix=_FIX)
    magic, count, *shape = struct.unpack(f">{1 + ndim}I", header)
    if magic != 0x0800 | ndim:
        raise DataError(f"{path} is not an IDX file of bytes in {ndim} dimensions", fix=_FIX)
    if list(shape) != list(item_shape):
        raise DataError(f"{path} has items of shape {shape}, not {list(item_shape)}", fix=_FIX)
    body_bytes = count * int(np.prod(item_shape, dtype=np.int64))
    if body_bytes > min(MAX_BYTES, limit_bytes - header_bytes):
        raise DataError(f"{path} declares {body_bytes} bytes, more than it can contain", fix=_FIX)
    body = file.read(body_bytes)
    if len(body) < body_bytes:
        raise DataError(f"{path} declares {body_bytes} bytes but has {len(body)}", fix=_FIX)
    if file.read(1):
        raise DataError(f"{path} has more than the {body_bytes} bytes that it declares", fix=_FIX)
    return np.frombuffer(body, np.uint8).reshape(count, *item_shape)


def read_cifar10(directory: Path, split: str) -> tuple[Bytes, Bytes]:
    """Return images uint8 (N, 3072), channel by channel, and labels uint8 (N,).

    Args:
        directory: contains data_batch_1.bin to data_batch_5.bin and test_batch.bin.
        split: "train" or "test".

    Raises:
        TaskLoadError: a file is missing.
        DataError: a file is not a whole number of records, or has a label above 9.
    """
    names = ["test_batch.bin"] if split == "test" else [f"data_batch_{i}.bin" for i in range(1, 6)]
    records = np.concatenate([_read_records(_find(directory, name)) for name in names])
    return records[:, 1:], records[:, 0]


def _read_records(path: Path) -> Bytes:
    record_bytes = 1 + CIFAR_PIXELS
    try:
        size_bytes = path.stat().st_size
        if size_bytes == 0 or size_bytes % record_bytes:
            raise DataError(
                f"{path} has {size_bytes} bytes, not a whole number of {record_bytes}-byte records",
                fix=_FIX,
            )
        if size_bytes > MAX_BYTES:
            raise DataError(f"{path} has {size_bytes} bytes, more than {MAX_BYTES}", fix=_FIX)
        records = np.fromfile(path, np.uint8).reshape(-1, record_bytes)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", fix=_FIX) from error
    _check_labels(path, records[:, 0])
    return records


def _check_labels(path: Path, labels: Bytes) -> None:
    if labels.size and int(labels.max()) >= CLASSES:
        raise DataError(f"{path} has label {int(labels.max())}, above 9", fix=_FIX)


def _find(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    packed = "" if name.endswith(".bin") else " (or .gz)"
    raise TaskLoadError(
        f"{directory} has no file {name}{packed}",
        fix="Put the publisher's files there, with their names unchanged.",
    )


_CLASSES = 10
_CHANNELS_PER_GROUP = 16


def lenet(channels: int, side: int) -> nn.Module:
    """Return LeNet-5 with ReLU and max pooling: (N, channels, side, side) -> logits (N, 10).

    28-pixel images are padded to the 32 that the network was designed for.
    """
    padding = 2 if side == 28 else 0
    left = ((side + 2 * padding - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * left * left, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, _CLASSES),
    )


def resnet18(channels: int, width: int) -> nn.Module:
    """Return ResNet-18 in its CIFAR shape: (N, channels, H, W) -> logits (N, 10).

    A 3x3 stem without pooling, then two blocks each of 1, 2, 4 and 8 times the width. GroupNorm
    replaces the original's BatchNorm, because updates do not contain running statistics.
    """
    layers: list[nn.Module] = [_conv3(channels, width, 1), _norm(width), nn.ReLU()]
    inputs = width
    for stage in range(4):
        outputs = width * 2**stage
        layers += [
            Residual(inputs, outputs, stride=1 if stage == 0 else 2),
            Residual(outputs, outputs, stride=1),
        ]
        inputs = outputs
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, _CLASSES)
    )


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv3(inputs, outputs, stride),
            _norm(outputs),
            nn.ReLU(),
            _conv3(outputs, outputs, 1),
            _norm(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), _norm(outputs)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (N, outputs, H / stride, W / stride)."""
        return F.relu(self.body(images) + self.shortcut(images))


def _conv3(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _norm(channels: int) -> nn.GroupNorm:
    groups = channels // _CHANNELS_PER_GROUP if channels % _CHANNELS_PER_GROUP == 0 else 1
    return nn.GroupNorm(groups, channels)


class Format(NamedTuple):
    """An image format: channels, side in pixels, and the pixels' mean and deviation in [0, 1]."""

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
            description="Folder of the publisher's files, relative to the working directory; only"
            " needed to write shards.",
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
        """Return the publisher's training and test rows, for any seed.

        Raises:
            TaskLoadError: no directory was given, or a file is missing.
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
                f"option 'directory' of task images: {directory.absolute()} is not a directory",
                fix=f"Create it and put {_WHAT_TO_PUT[kind]} there.",
            )
        if kind == "mnist":
            train, heldout = read_mnist(directory, "train"), read_mnist(directory, "t10k")
        else:
            train, heldout = read_cifar10(directory, "train"), read_cifar10(directory, "test")
        if not len(train[1]) or not len(heldout[1]):
            raise ShardEmptyError(
                f"the image files in {directory} have no rows",
                fix="Download the files again; both parts must have images.",
            )
        return Dataset(train=_columns(*train), heldout=_columns(*heldout))


def _columns(images: Bytes, labels: Bytes) -> Columns:
    return {"image": np.ascontiguousarray(images), "label": labels.astype(np.int64)}
