"""Readers of MNIST's IDX files (plain or gzip) and of CIFAR-10's binary batches.

Sizes are checked against the file before memory is taken for its content.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from geo_ray.errors import DataError, TaskLoadError

Bytes = npt.NDArray[np.uint8]

CLASSES = 10
MNIST_SIDE = 28
CIFAR_PIXELS = 3 * 32 * 32
MAX_BYTES = 1 << 30
_DEFLATE_MAX_RATIO = 1032  # no deflate stream expands further
_FIX = "Download the file again, and compare its size and digest with the publisher's."


def read_mnist(directory: Path, split: str) -> tuple[Bytes, Bytes]:
    """Return images uint8 (N, 784) and labels uint8 (N,) of "train" or "t10k".

    Raises:
        TaskLoadError: a file is missing.
        DataError: a file is not what its header says, or the two do not match.
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
        raise DataError(f"{path} is no IDX file of bytes in {ndim} dimensions", fix=_FIX)
    if list(shape) != list(item_shape):
        raise DataError(f"{path} has items of shape {shape}, not {list(item_shape)}", fix=_FIX)
    body_bytes = count * int(np.prod(item_shape, dtype=np.int64))
    if body_bytes > min(MAX_BYTES, limit_bytes - header_bytes):
        raise DataError(f"{path} announces {body_bytes} bytes, more than it can hold", fix=_FIX)
    body = file.read(body_bytes)
    if len(body) < body_bytes:
        raise DataError(f"{path} announces {body_bytes} bytes but has {len(body)}", fix=_FIX)
    if file.read(1):
        raise DataError(f"{path} has more than the {body_bytes} bytes it announces", fix=_FIX)
    return np.frombuffer(body, np.uint8).reshape(count, *item_shape)


def read_cifar10(directory: Path, split: str) -> tuple[Bytes, Bytes]:
    """Return images uint8 (N, 3072), channel by channel, and labels uint8 (N,).

    Args:
        directory: holds data_batch_1.bin to data_batch_5.bin and test_batch.bin.
        split: "train" or "test".

    Raises:
        TaskLoadError: a file is missing.
        DataError: a file is no whole number of records, or has a label above 9.
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
                f"{path} has {size_bytes} bytes, no whole number of {record_bytes}-byte records",
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
