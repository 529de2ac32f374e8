"""Encode and decode shards as Parquet, restricted to an allow-list of column types.

Arrow rebuilds extension types while it opens a file, and a registered type may unpickle the
file's metadata, which would execute code of the file's author. `refuse_extensions` therefore
inspects the raw footer before Arrow reads it.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from geo_ray.base.errors import SchemaMismatchError, ShardCorruptError
from geo_ray.base.text import listed
from geo_ray.data.columns import Column, Columns, ColumnType, Ragged

_MAGIC = b"PAR1"
_TAIL_BYTES = 8  # footer length (uint32, little endian) and magic
_KEY = b"ARROW:schema"
_EXTENSION = b"ARROW:extension"
_STRING_FIELD = 0x18  # Thrift compact protocol: the next field, of type binary
_ADVICE = "Write the columns as plain numbers or fixed-size lists of numbers, without extensions."


def refuse_extensions(data: bytes, where: str) -> None:
    """Check the footer of a whole Parquet file.

    Args:
        data: the file's bytes.
        where: the shard or file, for the message.

    Raises:
        ShardCorruptError: if this is not a complete Parquet file, or it is encrypted.
        SchemaMismatchError: if it declares an Arrow extension type, or hides its schema.
    """
    refuse_extensions_in(io.BytesIO(data), where)


def refuse_extensions_in(file: BinaryIO, where: str) -> None:
    """Check the footer of an open, seekable Parquet file; see `refuse_extensions`."""
    footer = _footer(file, where)
    if _EXTENSION in footer:
        raise SchemaMismatchError(f"{where}: contains an Arrow extension type", fix=_ADVICE)
    at = footer.find(_KEY)
    while at >= 0:
        schema = _value_after(footer, at + len(_KEY))
        if schema is None:
            raise SchemaMismatchError(f"{where}: its embedded schema is malformed", fix=_ADVICE)
        if _EXTENSION in schema:
            raise SchemaMismatchError(f"{where}: contains an Arrow extension type", fix=_ADVICE)
        at = footer.find(_KEY, at + len(_KEY))


def _footer(file: BinaryIO, where: str) -> bytes:
    file.seek(0)
    head = file.read(len(_MAGIC))
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read()
    if size < len(_MAGIC) + _TAIL_BYTES or head != _MAGIC or tail[-4:] != _MAGIC:
        raise ShardCorruptError(f"{where}: not a complete, unencrypted Parquet file")
    length = int.from_bytes(tail[:4], "little")
    if length > size - len(_MAGIC) - _TAIL_BYTES:
        raise ShardCorruptError(f"{where}: its Parquet footer is truncated")
    file.seek(size - _TAIL_BYTES - length)
    return file.read(length)


def _value_after(footer: bytes, at: int) -> bytes | None:
    """Decode the base64 string field at ``at``; None if it is not such a field."""
    if at >= len(footer) or footer[at] != _STRING_FIELD:
        return None
    length, shift, at = 0, 0, at + 1
    while at < len(footer) and shift <= 28:
        byte = footer[at]
        length |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not byte & 0x80:
            break
    else:
        return None
    if at + length > len(footer):
        return None
    try:
        return base64.b64decode(footer[at : at + length], validate=True)
    except binascii.Error:
        return None


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
    """Return the Arrow type of a column; ragged columns have 64-bit offsets."""
    if kind.ragged is not None and kind.ragged != "list":
        return pa.large_string() if kind.ragged == "string" else pa.large_binary()
    scalar = _ARROW[kind.scalar]
    if kind.ragged == "list":
        return pa.large_list(scalar)
    return scalar if kind.length is None else pa.list_(scalar, kind.length)


def encode(columns: Columns, types: Mapping[str, ColumnType]) -> bytes:
    """Encode columns as one Parquet file; equal input gives equal bytes.

    Args:
        columns: columns that `check_columns` accepted, of N rows.
        types: their types.

    Raises:
        SchemaMismatchError: text that is not UTF-8.
    """
    arrays = [to_arrow(name, columns[name], kind) for name, kind in types.items()]
    sink = pa.BufferOutputStream()
    table = pa.Table.from_arrays(arrays, names=list(types))
    # Statistics would copy rows into the footer, in which `refuse_extensions` searches.
    numbers_only = all(kind.ragged is None for kind in types.values())
    options = {"use_dictionary": False, "write_statistics": numbers_only}
    pq.write_table(table, sink, compression="zstd", **options)
    return bytes(sink.getvalue())


def to_arrow(name: str, column: Column, kind: ColumnType) -> pa.Array:
    """Return a column as an Arrow array that shares its memory.

    Args:
        name: its name, for messages.
        column: (N,), (N, length) or ragged.
        kind: its type.

    Raises:
        SchemaMismatchError: text that is not UTF-8.
    """
    if not isinstance(column, Ragged):
        flat = _numbers(np.ascontiguousarray(column).reshape(-1), kind.scalar)
        if kind.length is None:
            return flat
        return pa.FixedSizeListArray.from_arrays(flat, type=arrow_type(kind))
    offsets = pa.py_buffer(np.ascontiguousarray(column.offsets))
    values = np.ascontiguousarray(column.values)
    if kind.ragged == "list":
        inner = _numbers(values, kind.scalar)
        return pa.Array.from_buffers(
            arrow_type(kind), len(column), [None, offsets], children=[inner]
        )
    buffers = [None, offsets, pa.py_buffer(values)]
    array = pa.Array.from_buffers(arrow_type(kind), len(column), buffers)
    _check_text(array, f"column {name!r}")
    return array


def _check_text(array: pa.Array, where: str) -> None:
    if pa.types.is_large_string(array.type):
        try:
            array.validate(full=True)
        except pa.ArrowException as error:
            raise SchemaMismatchError(
                f"{where} has text that is not UTF-8: {error}",
                fix="Encode the text as UTF-8, or declare the column as bytes.",
            ) from None


def _numbers(flat: np.ndarray[Any, Any], scalar: str) -> pa.Array:
    """Convert numbers to an Arrow array.

    Arrow's own conversions import pandas, which takes half a second in every process.
    """
    values = np.packbits(flat, bitorder="little") if scalar == "bool" else flat
    return pa.Array.from_buffers(_ARROW[scalar], flat.size, [None, pa.py_buffer(values)])


def _values(flat: pa.Array) -> np.ndarray[Any, Any]:
    """Return the numbers of an Arrow array without missing values; see `_numbers`."""
    if not len(flat):
        return np.empty(0, np.uint8)
    buffer, end = flat.buffers()[1], flat.offset + len(flat)
    if flat.type == pa.bool_():
        bits = np.frombuffer(buffer, np.uint8)
        return np.unpackbits(bits, count=end, bitorder="little")[flat.offset :].astype(bool)
    dtype = flat.type.to_pandas_dtype()
    return np.frombuffer(buffer, dtype, count=end)[flat.offset :]


def decode(data: bytes, types: Mapping[str, ColumnType], where: str) -> dict[str, Column]:
    """Read one Parquet file that `encode` wrote; names and types must be equal.

    Args:
        data: the file's bytes.
        types: the columns to read.
        where: the shard or file, for messages.

    Returns:
        Name -> writable array of shape (N,) or (N, length) that the caller owns, or a ragged
        column, which shares Arrow's memory and is read-only.

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
            name: _of_arrow(table.column(name), kind, f"{where}: column {name!r}")
            for name, kind in types.items()
        }
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ShardCorruptError(f"{where}: cannot be decoded: {error}") from error


def _check_exact(schema: pa.Schema, types: Mapping[str, ColumnType], where: str) -> None:
    if sorted(schema.names) != sorted(types):
        raise SchemaMismatchError(
            f"{where}: columns are {listed(schema.names)}, declared columns are {listed(types)}"
        )
    for name, kind in types.items():
        found = schema.field(name).type
        if not found.equals(arrow_type(kind)):
            raise SchemaMismatchError(f"{where}: column {name!r} is {found}, declared as {kind}")


def ragged_of(array: pa.Array) -> Ragged:
    """Return an Arrow array as a ragged column that shares its memory.

    Args:
        array: of an `arrow_type` of a ragged column, without missing values.
    """
    kind, count = array.type, len(array)
    buffers = array.buffers()
    if not count:
        found = np.zeros(1, np.int64)
    else:
        end = array.offset + count + 1
        found = np.frombuffer(buffers[1], np.int64, count=end)[array.offset :]
    first, last = int(found[0]), int(found[-1])
    offsets = found - first if first else found
    if pa.types.is_large_list(kind):
        flat = array.values.slice(first, last - first)
        values = _values(flat) if len(flat) else np.empty(0, kind.value_type.to_pandas_dtype())
        return Ragged("list", values, offsets)
    data = buffers[2] if last > first else b""
    values = np.frombuffer(data, np.uint8, count=last if last > first else 0)[first:]
    return Ragged("string" if pa.types.is_large_string(kind) else "bytes", values, offsets)


def _of_arrow(column: pa.ChunkedArray, kind: ColumnType, where: str) -> Column:
    if column.null_count:
        raise SchemaMismatchError(f"{where} has {column.null_count} missing values")
    if kind.ragged is None:
        return _to_numpy(column, kind, where)
    parts = []
    for chunk in column.chunks or [pa.array([], arrow_type(kind))]:
        if kind.ragged == "list" and chunk.flatten().null_count:
            raise SchemaMismatchError(f"{where} has {chunk.flatten().null_count} missing values")
        _check_text(chunk, where)
        parts.append(ragged_of(chunk))
    return parts[0] if len(parts) == 1 else Ragged.joined(parts)


def _to_numpy(column: pa.ChunkedArray, kind: ColumnType, where: str) -> np.ndarray[Any, Any]:
    out = np.empty(kind.shape(len(column)), dtype=kind.dtype)
    at = 0
    for chunk in column.chunks:
        flat = chunk if kind.length is None else chunk.flatten()
        if flat.null_count:
            raise SchemaMismatchError(f"{where} has {flat.null_count} missing values")
        out[at : at + len(chunk)] = _values(flat).reshape(kind.shape(len(chunk)))
        at += len(chunk)
    return out
