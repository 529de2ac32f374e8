"""Read the shards of MosaicML Streaming (MDS).

Written from the format's documentation ("Dataset Format" of docs.mosaicml.com/projects/streaming,
and streaming/base/format/mds/README.md of github.com/mosaicml/streaming). A shard, little endian:

    uint32 samples; uint32 offsets[samples + 1]; the columns as JSON; the samples

The bytes of sample i are at offsets[i]. They begin with a uint32 size for each column that has no
fixed size; then follow the values, in the order of the columns.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, no-untyped-call"
from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from geo_ray.base.errors import SchemaMismatchError, ShardCorruptError
from geo_ray.data.arrow_values import arrow_of
from geo_ray.data.columns import SCALARS
from geo_ray.data.files.find import FilePiece, InputFile
from geo_ray.data.files.json_file import flat_object
from geo_ray.data.files.options import ReadOptions

_BATCH_ROWS = 16_384
_BATCH_BYTES = 16 << 20
_MOST_BYTES = 1 << 32  # offsets are uint32
_NUMBERS = {name for name in SCALARS if name != "bool"}
_ARRAY_TYPES = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"},
    **{33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}

Decode = Callable[[bytes], Any]


@dataclass(frozen=True)
class _Shard:
    """A shard in memory or in a file.

    Attributes:
        file: the shard.
        offsets: (samples + 1,) int64.
        names: its columns.
        encodings: their encodings.
        sizes: their sizes in bytes; None if the size differs.
    """

    file: BinaryIO
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]


def mds_pieces(
    file: BinaryIO, found: InputFile, options: ReadOptions, wanted: Collection[str] | None
) -> Iterator[FilePiece]:
    """Read a shard in pieces; see `geo_ray.data.files.csv_file.csv_pieces`.

    Arrays become lists of numbers, images stay JPEG or PNG bytes, and JSON objects give columns
    such as ``meta.caption``.

    Raises:
        SchemaMismatchError: a wanted column has an encoding that is not read, such as a pickle.
        ShardCorruptError: it is not a shard, or a value cannot be decoded.
    """
    try:
        if found.compression is not None:
            native = pa.CompressedInputStream(pa.BufferReader(file.read()), found.compression)
            file = pa.BufferReader(native.read())
        shard = _opened(file)
        decoders, skipped = _decoders(shard, found, wanted)
        begin, count = 0, len(shard.offsets) - 1
        while begin < count:
            full = int(np.searchsorted(shard.offsets, shard.offsets[begin] + _BATCH_BYTES))
            stop = min(count, begin + _BATCH_ROWS, max(full, begin + 1))
            rows = [flat_object(row) for row in _rows(shard, begin, stop, decoders)]
            yield _piece(shard, rows, wanted, stop / count, skipped)
            begin, skipped = stop, ""
    except (pa.ArrowException, OSError, ValueError, LookupError, RecursionError) as error:
        raise ShardCorruptError(
            f"{found.path}: cannot be read as an MDS shard: {error}", fix="Write the shard again."
        ) from error


def _opened(file: BinaryIO) -> _Shard:
    size = file.seek(0, 2)
    file.seek(0)
    samples = int.from_bytes(_exactly(file, 4), "little")
    table = 4 * (samples + 2)
    if size < table or size > _MOST_BYTES:
        raise ValueError(f"it has {size} bytes for {samples} samples")
    offsets = np.frombuffer(_exactly(file, table - 4), "<u4").astype(np.int64)
    if offsets[0] < table or offsets[-1] != size or (np.diff(offsets) < 0).any():
        raise ValueError("its offsets do not fit its size")
    columns = json.loads(_exactly(file, int(offsets[0]) - table))
    names, encodings = columns["column_names"], columns["column_encodings"]
    sizes = columns["column_sizes"]
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError("its lists of columns differ in length")
    return _Shard(
        file,
        offsets,
        tuple(str(name) for name in names),
        tuple(str(encoding) for encoding in encodings),
        tuple(int(size) if size else None for size in sizes),
    )


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = bytes(file.read(count))
    if len(data) != count:
        raise ValueError("it is truncated")
    return data


def _decoders(
    shard: _Shard, found: InputFile, wanted: Collection[str] | None
) -> tuple[dict[str, Decode], str]:
    """Return the decoders of the wanted columns, and which columns cannot be read."""
    decoders: dict[str, Decode] = {}
    unread = []
    for name, encoding in zip(shard.names, shard.encodings, strict=True):
        is_asked_for = wanted is not None and any(
            one == name or one.startswith(f"{name}.") for one in wanted
        )
        if wanted is not None and not is_asked_for:
            continue
        decode = _decoder(encoding)
        if decode is not None:
            decoders[name] = decode
        elif is_asked_for:
            what = "a Python pickle, which can execute code when it is read"
            raise SchemaMismatchError(
                f"{found.path}: column {name!r} has the encoding {encoding!r}: "
                + (what if encoding == "pkl" else "it is not read"),
                fix="Write the column as str, bytes, int, float32, ndarray, json, jpeg or png.",
            )
        else:
            unread.append(f"{name} ({encoding})")
    return decoders, f"columns that are not read: {', '.join(unread)}" if unread else ""


def _decoder(encoding: str) -> Decode | None:
    kind, _, config = encoding.partition(":")
    if kind == "ndarray":
        return _array_decoder(config)
    if kind in _NUMBERS or kind == "int":
        dtype = np.dtype("int64" if kind == "int" else kind).newbyteorder("<")
        return lambda data: np.frombuffer(data, dtype, count=1)[0].item()
    match kind:
        case "bytes" | "jpeg" | "png":
            return bytes
        case "str" | "str_decimal":
            return lambda data: data.decode()
        case "str_int":
            return lambda data: int(data)
        case "str_float":
            return lambda data: float(data)
        case "json":
            return lambda data: json.loads(data)
    return None


def _array_decoder(config: str) -> Decode:
    """Read arrays: an optional type, then an optional shape, then the values in row-major order."""
    given_type, _, given_shape = config.partition(":")

    def decode(data: bytes) -> Any:
        at = 0
        name = given_type
        if not name:
            name, at = _ARRAY_TYPES[data[0]], 1
        elif name not in _NUMBERS:
            raise ValueError(f"arrays have the type {name!r}")
        if not given_shape:  # axes and the type of their lengths in one byte, then the lengths
            axes, width = data[at] >> 2, 1 << (data[at] & 3)
            at += 1 + axes * width
        return np.frombuffer(data, np.dtype(name).newbyteorder("<"), offset=at)

    return decode


def _rows(
    shard: _Shard, begin: int, stop: int, decoders: dict[str, Decode]
) -> Iterator[dict[str, Any]]:
    shard.file.seek(int(shard.offsets[begin]))
    varying = [number for number, size in enumerate(shard.sizes) if size is None]
    for sample in range(begin, stop):
        length = int(shard.offsets[sample + 1] - shard.offsets[sample])
        data = _exactly(shard.file, length)
        sizes = [size or 0 for size in shard.sizes]
        for place, number in enumerate(varying):
            sizes[number] = int.from_bytes(data[4 * place : 4 * place + 4], "little")
        at = 4 * len(varying)
        if at + sum(sizes) != length:
            raise ValueError(f"sample {sample} has {length} bytes, its columns {at + sum(sizes)}")
        row = {}
        for name, size in zip(shard.names, sizes, strict=True):
            if name in decoders:
                row[name] = decoders[name](data[at : at + size])
            at += size
        yield row


def _piece(
    shard: _Shard,
    rows: list[dict[str, Any]],
    wanted: Collection[str] | None,
    fraction: float,
    skipped: str,
) -> FilePiece:
    names = dict.fromkeys(shard.names)
    has_objects = "json" in shard.encodings
    if has_objects:
        names = dict.fromkeys(name for row in rows for name in row) | names
    columns = {}
    for name in names:
        if any(name in row for row in rows) and (wanted is None or name in wanted):
            values = [row.get(name) for row in rows]
            is_bytes = any(isinstance(value, bytes) for value in values)
            columns[name] = pa.array(values, pa.large_binary()) if is_bytes else arrow_of(values)
    kept = tuple(name for name in names if name in columns or name in shard.names)
    return FilePiece(kept, columns, len(rows), fraction, has_objects, skipped)
