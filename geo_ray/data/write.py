"""Write arrays as Parquet shards, each region's into its own directory and store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from geo_ray.data.columns import Columns, ColumnType, check_columns, parse_types
from geo_ray.data.manifest import DataShard, Manifest, SplitName, is_region_name
from geo_ray.data.nearby import listed
from geo_ray.data.parquet import encode
from geo_ray.data.split import SplitConfig, assign
from geo_ray.errors import ConfigError, ShardEmptyError
from geo_ray.stores.base import Store, open_store

MAX_LABELS = 1000
"""Labels of a histogram; a shard with more (an identifier, say) gets none."""

_SPLITS: tuple[SplitName, ...] = ("train", "heldout")


def write_shards(
    columns_by_split: Mapping[str, Columns],
    task_name: str,
    column_types: Mapping[str, str],
    label_column: str | None,
    split: SplitConfig,
    regions: Sequence[str],
    seed: int,
    out: Mapping[str, str] | str,
    rows_per_shard: int = 8192,
    on_shard: Callable[[DataShard], None] | None = None,
) -> Manifest:
    """Split rows over regions and write them; the manifest is not saved (see `save_manifest`).

    Equal arguments give equal files. Rows are shuffled within each region.

    Args:
        columns_by_split: "train" and, if there is any, "heldout" -> columns (N first).
        task_name: goes into the manifest.
        column_types: column -> type, e.g. "float32[64]".
        label_column: 1-D integer column for histograms and label splits, or None.
        split: how to share the rows out; used for both parts alike.
        regions: the regions, in order.
        seed: fixes the split and the rows' order.
        out: region -> address of its store, or one address for all.
        rows_per_shard: most rows per file.
        on_shard: called after each file, for progress.

    Returns:
        The manifest, whose shards are all written.

    Raises:
        ConfigError: if regions, stores, split or sizes do not fit.
        SchemaMismatchError: if an array is not of its column's type.
        ShardEmptyError: if a part is empty or a region gets none of it.
        StoreError: if a store cannot be written.
    """
    uris = dict.fromkeys(regions, out) if isinstance(out, str) else dict(out)
    _check(columns_by_split, regions, uris, rows_per_shard)
    types = parse_types(column_types)
    labels = _labels(columns_by_split, types, label_column)
    classes = np.unique(np.concatenate(list(labels.values()))) if labels else None
    # All is checked before the first byte is written.
    plans = {
        part: assign(
            split,
            labels.get(part),
            check_columns(columns_by_split[part], types, f"{part} data"),
            regions,
            seed,
            classes,
        )
        for part in _SPLITS
        if part in columns_by_split
    }
    shards = []
    for index, region in enumerate(regions):
        store = open_store(uris[region])
        for part, region_N in plans.items():
            rows = np.flatnonzero(region_N == index)
            # Neighbouring rows are often alike; only whole windows of shards are mixed later.
            rows = np.random.default_rng([seed, 2, index]).permutation(rows)
            for path, picked in _files(region, part, rows, rows_per_shard):
                columns = {name: columns_by_split[part][name][picked] for name in types}
                histogram = _histogram(columns, label_column)
                shard = _write_one(store, path, region, part, columns, types, histogram)
                shards.append(shard)
                if on_shard is not None:
                    on_shard(shard)
    return Manifest(
        task=task_name,
        columns={name: str(kind) for name, kind in types.items()},
        seed=seed,
        stores={region: open_store(uris[region]).uri for region in regions},
        shards=tuple(shards),
    )


def _check(
    parts: Mapping[str, Columns],
    regions: Sequence[str],
    uris: Mapping[str, str],
    rows_per_shard: int,
) -> None:
    if "train" not in parts or not set(parts) <= set(_SPLITS):
        raise ConfigError(
            f"data parts are {', '.join(sorted(parts))}; 'train' is needed, 'heldout' may be"
        )
    for name, columns in parts.items():
        if not columns or not all(len(array) for array in columns.values()):
            raise ShardEmptyError(f"the {name} data has no rows", fix="Give it at least one row.")
    for region in regions:
        if not is_region_name(region):
            raise ConfigError(f"region name {region!r} is not letters, digits, '.', '_', '-'")
    if set(uris) != set(regions):
        raise ConfigError(
            f"stores are of {listed(sorted(uris))}, the regions are {listed(sorted(regions))}"
        )
    if rows_per_shard < 1:
        raise ConfigError(f"rows_per_shard must be positive, is {rows_per_shard}")


def _labels(
    parts: Mapping[str, Columns], types: Mapping[str, ColumnType], label_column: str | None
) -> dict[str, np.ndarray[Any, Any]]:
    if label_column is None:
        return {}
    kind = types.get(label_column)
    if kind is None or kind.length is not None or kind.dtype.kind not in "iu":
        raise ConfigError(
            f"label column {label_column!r} is {kind}; it must be a 1-D integer column"
        )
    return {part: columns[label_column] for part, columns in parts.items()}


def _files(
    region: str, part: str, rows: np.ndarray[Any, Any], rows_per_shard: int
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for number, begin in enumerate(range(0, len(rows), rows_per_shard)):
        yield f"{region}/{part}-{number:05d}.parquet", rows[begin : begin + rows_per_shard]


def _histogram(columns: Columns, label_column: str | None) -> dict[str, int]:
    if label_column is None:
        return {}
    values, counts = np.unique(columns[label_column], return_counts=True)
    if len(values) > MAX_LABELS:
        return {}
    return {str(value): int(count) for value, count in zip(values, counts, strict=True)}


def _write_one(
    store: Store,
    path: str,
    region: str,
    part: SplitName,
    columns: Columns,
    types: Mapping[str, ColumnType],
    histogram: dict[str, int],
) -> DataShard:
    data = encode(columns, types)
    store.write(path, data)
    return DataShard(
        path=path,
        region=region,
        split=part,
        rows=len(next(iter(columns.values()))),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        labels=histogram,
    )
