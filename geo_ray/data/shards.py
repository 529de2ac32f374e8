"""Write, fetch and verify the Parquet shards of a data set.

`write_shards` writes arrays to each region's directory and store. `fetch_shard` returns arrays
only after checking residency, byte count, hash, schema and row count, in this order.
`check_shards` does so for all shards of a manifest.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geo_ray.base.errors import (
    ConfigError,
    DataError,
    ManifestError,
    ShardCorruptError,
    ShardEmptyError,
    ShardMissingError,
)
from geo_ray.base.text import listed
from geo_ray.data.columns import (
    Column,
    Columns,
    ColumnType,
    Ragged,
    check_columns,
    parse_types,
    parts_of_rows,
)
from geo_ray.data.manifest import DataShard, Manifest, SplitName, check_residency, is_region_name
from geo_ray.data.parquet import decode, encode
from geo_ray.data.split import SplitConfig, assign
from geo_ray.storage.store import Store, open_store


def fetch_shard(
    shard: DataShard, types: Mapping[str, ColumnType], store: Store, here: str
) -> dict[str, Column]:
    """Read a shard and check it against the manifest.

    Args:
        shard: the manifest's record of it.
        types: the manifest's columns.
        store: the store of its region.
        here: the region that this process runs in.

    Returns:
        Name -> array (N,) or (N, length), owned by the caller, or a read-only ragged column.

    Raises:
        ResidencyDeniedError: before any I/O, if the shard belongs to another region.
        ShardMissingError: the store does not have it.
        ShardCorruptError: size, sha256 or number of rows differ, or it cannot be decoded.
        SchemaMismatchError: its columns or types differ, or it has extension types or missing
            values.
        ShardEmptyError: it has no rows.
    """
    check_residency(shard, here)
    where = f"shard {shard.path} of region {shard.region}"
    if shard.rows == 0:
        raise ShardEmptyError(f"{where} has no rows")
    try:
        data = store.read(shard.path)
    except ShardMissingError as error:
        raise ShardMissingError(f"{where} is missing: {error.message}") from None
    if len(data) != shard.bytes:
        raise ShardCorruptError(f"{where} has {len(data)} bytes, the manifest says {shard.bytes}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != shard.sha256:
        raise ShardCorruptError(f"{where} has sha256 {digest}, the manifest says {shard.sha256}")
    columns = decode(data, types, where)
    rows = len(next(iter(columns.values())))
    if rows == 0:
        raise ShardEmptyError(f"{where} has no rows")
    if rows != shard.rows:
        raise ShardCorruptError(f"{where} has {rows} rows, the manifest says {shard.rows}")
    return columns


MAX_LABELS = 1000
"""Maximum labels of a histogram; a shard with more labels (such as identifiers) gets none."""

_SHARD_BYTES = 32 << 20  # limit of decoded shards with ragged columns

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
    on_rows: Callable[[int], None] | None = None,
) -> Manifest:
    """Split rows over regions and write them; the manifest is not saved (see `save_manifest`).

    Equal arguments give equal files. Rows are shuffled within each region. A shard with ragged
    columns also ends at 32 MiB in memory.

    Args:
        columns_by_split: "train" and, if there is any, "heldout" -> columns (N first).
        task_name: name of the task for the manifest.
        column_types: column -> type, e.g. "float32[64]".
        label_column: 1-D integer column for histograms and label splits, or None.
        split: how to distribute the rows; used for both parts.
        regions: the regions, in order.
        seed: determines the split and the row order.
        out: region -> address of its store, or a single address for all regions.
        rows_per_shard: maximum rows per file.
        on_rows: called with the number of rows of each written file, for progress.

    Returns:
        The manifest; all of its shards are written.

    Raises:
        ConfigError: if regions, stores, split or sizes do not fit.
        SchemaMismatchError: if an array is not of its column's type.
        ShardEmptyError: if a part is empty or a region gets no rows of it.
        StoreError: if a store cannot be written.
    """
    uris = dict.fromkeys(regions, out) if isinstance(out, str) else dict(out)
    _check(columns_by_split, regions, uris, rows_per_shard)
    types = parse_types(column_types)
    labels = _labels(columns_by_split, types, label_column)
    classes = np.unique(np.concatenate(list(labels.values()))) if labels else None
    # Check everything before writing the first byte.
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
            # Adjacent rows are often similar; readers shuffle only within windows of shards.
            rows = np.random.default_rng([seed, 2, index]).permutation(rows)
            limit = _SHARD_BYTES if any(k.ragged for k in types.values()) else sys.maxsize
            parts = parts_of_rows(columns_by_split[part], rows, rows_per_shard, limit)
            for number, picked in enumerate(parts):
                path = f"{region}/{part}-{number:05d}.parquet"
                columns = {name: columns_by_split[part][name][picked] for name in types}
                histogram = _histogram(columns, label_column)
                shard = _write_one(store, path, region, part, columns, types, histogram)
                shards.append(shard)
                if on_rows is not None:
                    on_rows(shard.rows)
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
            f"data parts are {', '.join(sorted(parts))}; 'train' is required, 'heldout' is optional"
        )
    for name, columns in parts.items():
        if not columns or not all(len(array) for array in columns.values()):
            raise ShardEmptyError(f"the {name} data has no rows", fix="Give it at least one row.")
    for region in regions:
        if not is_region_name(region):
            raise ConfigError(f"region name {region!r} is not letters, digits, '.', '_', '-'")
    if set(uris) != set(regions):
        raise ConfigError(
            f"stores are given for {listed(sorted(uris))}, the regions are "
            f"{listed(sorted(regions))}"
        )
    if rows_per_shard < 1:
        raise ConfigError(f"rows_per_shard must be positive, is {rows_per_shard}")


def _labels(
    parts: Mapping[str, Columns], types: Mapping[str, ColumnType], label_column: str | None
) -> dict[str, np.ndarray[Any, Any]]:
    if label_column is None:
        return {}
    kind = types.get(label_column)
    if kind is None or not kind.is_integer:
        raise ConfigError(
            f"label column {label_column!r} is {kind}; it must be a 1-D integer column"
        )
    return {part: _numbers(columns[label_column]) for part, columns in parts.items()}


def _numbers(column: Column) -> np.ndarray[Any, Any]:
    return column.values if isinstance(column, Ragged) else column


def _histogram(columns: Columns, label_column: str | None) -> dict[str, int]:
    if label_column is None:
        return {}
    values, counts = np.unique(_numbers(columns[label_column]), return_counts=True)
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


@dataclass(frozen=True)
class Verdict:
    """The result of checking one shard.

    Attributes:
        shard: the manifest's record.
        error: why it must not be used; None if it is valid.
    """

    shard: DataShard
    error: DataError | None


def shards_to_check(manifest: Manifest, region: str | None) -> tuple[DataShard, ...]:
    """Return the shards of one region, or of all regions.

    Raises:
        ManifestError: if the region is unknown.
    """
    if region is not None and region not in manifest.stores:
        raise ManifestError(
            f"region {region!r} is not in the manifest, which has {listed(manifest.stores)}",
            fix="Correct the region's name.",
        )
    return tuple(s for s in manifest.shards if region is None or s.region == region)


def check_shards(manifest: Manifest, region: str | None = None) -> Iterator[Verdict]:
    """Read each shard entirely and compare it with the manifest; continue after errors.

    Args:
        manifest: the data set.
        region: check only this region's shards; None for all, which reads across regions.

    Yields:
        One verdict per shard, in the manifest's order.

    Raises:
        ManifestError: if the region is unknown.
    """
    types = parse_types(manifest.columns)
    stores = {name: open_store(uri) for name, uri in manifest.stores.items()}
    for shard in shards_to_check(manifest, region):
        try:
            fetch_shard(shard, types, stores[shard.region], here=shard.region)
        except DataError as error:
            yield Verdict(shard, error)
        else:
            yield Verdict(shard, None)
