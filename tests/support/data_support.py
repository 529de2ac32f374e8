"""What the data tests share: a small labelled data set, and a store that records its calls."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from geo_ray.data.manifest import DataShard, Manifest
from geo_ray.data.shards import write_shards
from geo_ray.data.split import IidSplit
from geo_ray.storage.store import Store

TYPES = {"image": "uint8[6]", "weight": "float32[2]", "label": "int64"}
REGIONS = ("us-east", "eu-west", "ap-south")


def columns_task(name: str, label: str, features: int) -> str:
    """The source of a task of which only the columns are of interest."""
    return f'''
import geo_ray

class {name}:
    """Columns only."""
    class Options(geo_ray.Options):
        features: int = {features}
    label_column = "{label}"
    def __init__(self, options):
        self.columns = {{"x": f"float32[{{options.features}}]", "{label}": "int64"}}
    def model(self, seed): ...
    def collate(self, columns, device): ...
    def loss(self, model, batch): ...
    def evaluate(self, model, batch): ...
    def metrics(self, stats): ...
'''


def make_columns(rows: int, first: int = 0) -> dict[str, np.ndarray]:
    """Rows that can be told apart: weight[0] is the row's number."""
    number = np.arange(first, first + rows)
    return {
        "image": np.repeat((number % 251).astype(np.uint8)[:, None], 6, axis=1),
        "weight": np.stack([number, -number], axis=1).astype(np.float32),
        "label": (number % 10).astype(np.int64),
    }


def write(root: Path | str, train: int = 200, heldout: int = 60, **changes: object) -> Manifest:
    parts = {"train": make_columns(train), "heldout": make_columns(heldout, first=10_000)}
    arguments: dict[str, object] = {
        "columns_by_split": parts,
        "task_name": "toy",
        "column_types": TYPES,
        "label_column": "label",
        "split": IidSplit(),
        "regions": REGIONS,
        "seed": 5,
        "out": str(root),
        "rows_per_shard": 16,
    }
    return write_shards(**{**arguments, **changes})  # type: ignore[arg-type]


def replace_shard(manifest: Manifest, path: str, **changes: object) -> Manifest:
    """The manifest with one shard's record changed."""
    shards = tuple(
        DataShard(**{**s.model_dump(), **changes}) if s.path == path else s for s in manifest.shards
    )
    return Manifest(**{**manifest.model_dump(), "shards": shards})


class RecordingStore:
    """A real store that remembers what was asked of it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[tuple[str, str]] = []

    @property
    def uri(self) -> str:
        return self._store.uri

    def read(self, path: str) -> bytes:
        self.calls.append(("read", path))
        return self._store.read(path)

    def open(self, path: str) -> BinaryIO:
        self.calls.append(("open", path))
        return self._store.open(path)

    def write(self, path: str, data: bytes) -> None:
        self.calls.append(("write", path))
        self._store.write(path, data)

    def exists(self, path: str) -> bool:
        self.calls.append(("exists", path))
        return self._store.exists(path)

    def list(self, prefix: str = "") -> list[str]:
        self.calls.append(("list", prefix))
        return self._store.list(prefix)
