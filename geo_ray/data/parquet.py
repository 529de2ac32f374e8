"""Columns to Parquet bytes and back, with plain ``pyarrow.parquet`` and the type allow-list."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from geo_ray.data.columns import Columns, ColumnType
from geo_ray.data.nearby import listed
from geo_ray.data.parquet_guard import refuse_extensions
from geo_ray.errors import SchemaMismatchError, ShardCorruptError

_ARROW = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
}


def arrow_type(kind: ColumnType) -> pa.DataType:
    """The Arrow type of a column: a number, or a fixed-size list of numbers."""
    scalar = _ARROW[kind.scalar]
    return scalar if kind.length is None else pa.list_(scalar, kind.length)


def encode(columns: Columns, types: Mapping[str, ColumnType]) -> bytes:
    """One Parquet file; equal input gives equal bytes.

    Args:
        columns: arrays that `check_columns` accepted, first axis N.
        types: their types.
    """
    arrays = []
    for name, kind in types.items():
        flat = pa.array(np.ascontiguousarray(columns[name]).reshape(-1), type=_ARROW[kind.scalar])
        arrays.append(
            flat
            if kind.length is None
            else pa.FixedSizeListArray.from_arrays(flat, type=arrow_type(kind))
        )
    sink = pa.BufferOutputStream()
    table = pa.Table.from_arrays(arrays, names=list(types))
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    return bytes(sink.getvalue())


def decode(
    data: bytes, types: Mapping[str, ColumnType], where: str
) -> dict[str, np.ndarray[Any, Any]]:
    """Read one Parquet file that `encode` wrote; names and types must be equal.

    Args:
        data: the file's bytes.
        types: the columns to read.
        where: the shard or file, for messages.

    Returns:
        Name -> writable array of shape (N,) or (N, length) that the caller owns.

    Raises:
        SchemaMismatchError: an extension type, wrong columns or types, or missing values.
        ShardCorruptError: Arrow cannot decode it.
    """
    refuse_extensions(data, where)
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        _check_exact(file.schema_arrow, types, where)
        table = file.read(columns=list(types), use_threads=False)
        return {
            name: _to_numpy(table.column(name), kind, f"{where}: column {name!r}")
            for name, kind in types.items()
        }
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ShardCorruptError(f"{where}: cannot be decoded: {error}") from error


def _check_exact(schema: pa.Schema, types: Mapping[str, ColumnType], where: str) -> None:
    if sorted(schema.names) != sorted(types):
        raise SchemaMismatchError(
            f"{where}: columns are {listed(schema.names)}, declared {listed(types)}"
        )
    for name, kind in types.items():
        found = schema.field(name).type
        if not found.equals(arrow_type(kind)):
            raise SchemaMismatchError(f"{where}: column {name!r} is {found}, declared is {kind}")


def _to_numpy(column: pa.ChunkedArray, kind: ColumnType, where: str) -> np.ndarray[Any, Any]:
    if column.null_count:
        raise SchemaMismatchError(f"{where} has {column.null_count} missing values")
    out = np.empty(kind.shape(len(column)), dtype=kind.dtype)
    at = 0
    for chunk in column.chunks:
        flat = chunk if kind.length is None else chunk.flatten()
        if flat.null_count:
            raise SchemaMismatchError(f"{where} has {flat.null_count} missing values")
        values = flat.to_numpy(zero_copy_only=False)
        out[at : at + len(chunk)] = values.reshape(kind.shape(len(chunk)))
        at += len(chunk)
    return out
