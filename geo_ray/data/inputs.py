"""Take a user's own Parquet files as input of `geo_ray.data.write`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from geo_ray.data.columns import Columns, parse_types
from geo_ray.data.parquet import decode
from geo_ray.data.stores.base import open_store
from geo_ray.errors import ConfigError, ShardEmptyError, ShardMissingError

_SUFFIX = ".parquet"


def read_parquet_files(
    uri: str,
    column_types: Mapping[str, str],
    on_file: Callable[[int, int], None] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """All rows of the ``*.parquet`` files of a store, in the order of their sorted paths.

    Further columns are ignored; see `geo_ray.data.parquet.decode` (lenient) for what is converted.

    Args:
        uri: directory or ``s3://`` address.
        column_types: column -> type of the task.
        on_file: called with (files read, files in all) after each file, for progress.

    Returns:
        Name -> array (N,) or (N, length). All of it is in memory at once.

    Raises:
        ShardMissingError: if there is no such file.
        ShardEmptyError: if there are files but no rows.
        SchemaMismatchError: naming file and column.
        ShardCorruptError: naming the file.
        StoreError: if the store does not answer.
    """
    types = parse_types(column_types)
    store = open_store(uri)
    paths = [path for path in store.list() if path.endswith(_SUFFIX)]
    if not paths:
        raise ShardMissingError(
            f"there is no *{_SUFFIX} file in {store.uri}", fix="Name the folder with your files."
        )
    parts: list[dict[str, np.ndarray[Any, Any]]] = []
    for path in paths:
        parts.append(decode(store.read(path), types, f"file {path} in {store.uri}", lenient=True))
        if on_file is not None:
            on_file(len(parts), len(paths))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in types}
    if not len(next(iter(columns.values()))):
        raise ShardEmptyError(f"the files in {store.uri} have no rows")
    return columns


def hold_out(columns: Columns, fraction: float, seed: int) -> dict[str, Columns]:
    """Set a random part of the rows aside for evaluation.

    Args:
        columns: name -> array, first axis N.
        fraction: 0 <= fraction < 1; 0 holds nothing out.
        seed: fixes which rows.

    Returns:
        "train" -> columns and, if ``fraction`` is positive, "heldout" -> columns (at least a row).

    Raises:
        ConfigError: if the fraction is out of range or leaves nothing to train on.
    """
    rows = len(next(iter(columns.values())))
    held = max(1, round(rows * fraction)) if fraction > 0 else 0
    if not 0 <= fraction < 1 or held >= rows:
        raise ConfigError(
            f"heldout: a fraction of {fraction} of {rows} rows leaves nothing to train on",
            fix="Use a fraction from 0 to less than 1, such as 0.1.",
        )
    if not held:
        return {"train": columns}
    order = np.random.default_rng([seed, 3]).permutation(rows)
    cut = {"train": np.sort(order[held:]), "heldout": np.sort(order[:held])}
    return {
        part: {n: array[rows_N] for n, array in columns.items()} for part, rows_N in cut.items()
    }
