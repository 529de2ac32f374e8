from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from geo_ray.base.errors import DataError, ShardEmptyError, TaskLoadError
from geo_ray.data.tasks.checked_calls import describe
from geo_ray.data.tasks.images import Images, read_cifar10, read_idx, read_mnist

CPU = torch.device("cpu")


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.tobytes()


def mnist(directory: Path, rows: int = 12, packed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    images = np.random.default_rng(0).integers(0, 256, (rows, 28, 28), np.uint8)
    labels = (np.arange(rows) % 10).astype(np.uint8)
    for split in ("train", "t10k"):
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = directory / f"{split}-{name}-ubyte"
            if packed:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(idx(array)))
            else:
                path.write_bytes(idx(array))
    return images, labels


def cifar10(directory: Path, rows: int = 3) -> np.ndarray:
    records = np.random.default_rng(0).integers(0, 256, (rows, 3073), np.uint8)
    records[:, 0] = np.arange(rows) % 10
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (directory / f"{name}.bin").write_bytes(records.tobytes())
    return records


def images_task(**options: object) -> Images:
    return Images(Images.Options.model_validate(options))


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({}, 61_706),
        ({"format": "cifar10"}, 62_006),
        ({"format": "cifar10", "model": "resnet18"}, 11_173_962),
    ],
)
def test_sizes_are_those_of_the_literature(options: dict[str, object], parameters: int) -> None:
    assert describe(images_task(**options)).parameters == parameters


def test_resnet_has_group_norm_and_no_buffers() -> None:
    model = images_task(format="cifar10", model="resnet18").model(0)
    assert not list(model.buffers())
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {norm.num_groups for norm in norms} == {4, 8, 16, 32}
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_files_are_read(packed: bool, tmp_path: Path) -> None:
    images, labels = mnist(tmp_path, packed=packed)
    read_images, read_labels = read_mnist(tmp_path, "train")
    assert np.array_equal(read_images, images.reshape(12, 784))
    assert np.array_equal(read_labels, labels)
    data = images_task(directory=str(tmp_path)).dataset(0)
    assert np.array_equal(data.heldout["label"], labels)


def test_cifar10_files_are_read_in_order(tmp_path: Path) -> None:
    records = cifar10(tmp_path)
    images, labels = read_cifar10(tmp_path, "train")
    assert np.array_equal(images, np.tile(records[:, 1:], (5, 1)))
    assert np.array_equal(labels, np.tile(records[:, 0], 5))
    data = images_task(format="cifar10", directory=str(tmp_path)).dataset(0)
    assert data.train["image"].shape == (15, 3072)
    assert data.heldout["image"].shape == (3, 3072)


def test_images_are_normalised_channel_by_channel() -> None:
    task = images_task(format="cifar10")
    pixels = np.concatenate([np.full(1024, value, np.uint8) for value in (0, 128, 255)])
    batch = task.collate({"image": pixels[None], "label": np.array([3])}, CPU)
    assert batch.inputs.shape == (1, 3, 32, 32)
    expected = [(0 - 0.4914) / 0.2470, (128 / 255 - 0.4822) / 0.2435, (1 - 0.4465) / 0.2616]
    assert batch.inputs[0, :, 5, 7].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "name"), [("mnist", "t10k-"), ("cifar10", "test_batch.bin")])
def test_without_a_directory_the_error_says_what_to_put_where(kind: str, name: str) -> None:
    with pytest.raises(TaskLoadError) as caught:
        images_task(format=kind).dataset(0)
    assert "'directory' is not set" in str(caught.value)
    assert name in str(caught.value)
    assert "directory: PATH" in str(caught.value)


def test_a_directory_or_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TaskLoadError, match="absent is not a directory"):
        images_task(directory=str(tmp_path / "absent")).dataset(0)
    with pytest.raises(TaskLoadError, match="no file train-images-idx3-ubyte"):
        images_task(directory=str(tmp_path)).dataset(0)
    cifar10(tmp_path)
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(TaskLoadError, match=r"no file data_batch_4\.bin"):
        images_task(format="cifar10", directory=str(tmp_path)).dataset(0)


GOOD = idx(np.zeros((2, 28, 28), np.uint8))
HUGE = struct.pack(">4I", 0x803, 0xFFFFFFFF, 28, 28)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "ends within its header"),
        (GOOD[:15], "ends within its header"),
        (struct.pack(">I", 0x801) + GOOD[4:], "not an IDX file"),
        (struct.pack(">I", 0xD03) + GOOD[4:], "not an IDX file"),
        (idx(np.zeros((2, 27, 28), np.uint8)), "shape [27, 28], not [28, 28]"),
        (GOOD[:-1], "1568 bytes"),
        (GOOD + b"\0", "more than the 1568 bytes"),
        (HUGE, "more than it can contain"),
        (struct.pack(">4I", 0x803, 2, 0xFFFFFFFF, 0xFFFFFFFF), "shape"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_malformed_idx_files(content: bytes, part: str, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("images.gz" if packed else "images")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError) as caught:
        read_idx(path, (28, 28))
    assert str(path) in str(caught.value)
    # A truncated file is told by its size when plain, by its end when compressed.
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"not gzip", gzip.compress(GOOD)[:-9], gzip.compress(GOOD)[:-8] + b"\1" * 8],
)
def test_damaged_compression(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"images\.gz"):
        read_idx(path, (28, 28))


def test_a_bomb_announced_by_a_small_file_is_refused_before_memory_is_taken(
    tmp_path: Path,
) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(struct.pack(">4I", 0x803, 1_000_000, 28, 28)))
    with pytest.raises(DataError, match="more than it can contain"):
        read_idx(path, (28, 28))


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path, ())


def test_images_and_labels_that_do_not_match(tmp_path: Path) -> None:
    mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(11, np.uint8)))
    with pytest.raises(DataError, match=r"12 images.* 11 labels"):
        read_mnist(tmp_path, "train")


def test_labels_above_nine(tmp_path: Path) -> None:
    mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.full(12, 10, np.uint8)))
    with pytest.raises(DataError, match="label 10"):
        read_mnist(tmp_path, "train")
    cifar10(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(bytes([200]) + bytes(3072))
    with pytest.raises(DataError, match=r"data_batch_2\.bin has label 200"):
        read_cifar10(tmp_path, "train")


@pytest.mark.parametrize("size_bytes", [0, 1, 3072, 3074])
def test_cifar10_files_of_a_wrong_length(size_bytes: int, tmp_path: Path) -> None:
    cifar10(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(bytes(size_bytes))
    with pytest.raises(DataError, match=rf"test_batch\.bin has {size_bytes} bytes"):
        read_cifar10(tmp_path, "test")


def test_a_cifar10_file_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    cifar10(tmp_path)
    with (tmp_path / "test_batch.bin").open("wb") as file:
        file.truncate(3073 * 400_000)  # sparse: takes no room on the disk
    with pytest.raises(DataError, match="more than"):
        read_cifar10(tmp_path, "test")


def test_files_without_rows(tmp_path: Path) -> None:
    mnist(tmp_path, rows=0)
    with pytest.raises(ShardEmptyError):
        images_task(directory=str(tmp_path)).dataset(0)
