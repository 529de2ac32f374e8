"""From a shard's home to trusted arrays: residency, bytes, hash, schema and rows, in this order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from geo_ray.data.columns import ColumnType
from geo_ray.data.manifest import DataShard
from geo_ray.data.parquet import decode
from geo_ray.data.residency import check_residency
from geo_ray.errors import ShardCorruptError, ShardEmptyError, ShardMissingError
from geo_ray.stores.base import Store


def fetch_shard(
    shard: DataShard, types: Mapping[str, ColumnType], store: Store, here: str
) -> dict[str, np.ndarray[Any, Any]]:
    """Read a shard and check that it is what the manifest says.

    Args:
        shard: the manifest's record of it.
        types: the manifest's columns.
        store: the store of its region.
        here: the region that this process runs in.

    Returns:
        Name -> array (N,) or (N, length), owned by the caller.

    Raises:
        ResidencyDeniedError: before any I/O, if the shard's home is elsewhere.
        ShardMissingError: it is not in the store.
        ShardCorruptError: size, sha256 or number of rows differ, or it cannot be decoded.
        SchemaMismatchError: its columns or types differ, or it has extension types or gaps.
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
