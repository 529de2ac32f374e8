"""Read rows from Parquet and Arrow (IPC, Feather) files.

Files that declare Arrow extension types are rejected before Arrow reads their schema; see
`geo_ray.data.parquet` for the reason. An Arrow file stores its schema in the first message and
in the footer, and both are inspected; a stream has only the message.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from geo_ray.base.errors import SchemaMismatchError, ShardCorruptError
from geo_ray.data.files.find import Borrowed, FilePiece, InputFile, flat_columns
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.parquet import refuse_extensions_in

_MAGIC = b"ARROW1"
_HEAD_BYTES = 8  # magic and padding
_CONTINUATION = b"\xff\xff\xff\xff"
_EXTENSION = b"ARROW:extension"


def refuse_arrow_extensions(file: BinaryIO, where: str) -> bool:
    """Check the raw schema of an Arrow file or stream, whose texts are stored uncompressed.

    Args:
        file: at its start, seekable.
        where: the file, for the message.

    Returns:
        Whether the file is a stream, which has no footer.

    Raises:
        ShardCorruptError: if it is neither a file nor a stream.
        SchemaMismatchError: if it declares an extension type.
    """
    head = file.read(_HEAD_BYTES)
    is_stream = not head.startswith(_MAGIC)
    if is_stream:
        file.seek(0)
    schemas = [_first_message(file, where)]
    if not is_stream:
        schemas.append(_footer(file, where))
    if any(_EXTENSION in schema for schema in schemas):
        raise SchemaMismatchError(
            f"{where}: contains an Arrow extension type",
            fix="Write the columns as plain numbers, text or lists, without extensions.",
        )
    return is_stream


def _first_message(file: BinaryIO, where: str) -> bytes:
    prefix = file.read(8)
    length = int.from_bytes(prefix[4:], "little")
    message = file.read(length) if prefix.startswith(_CONTINUATION) else b""
    if not message or len(message) < length:
        raise ShardCorruptError(
            f"{where}: is not an Arrow file or stream",
            fix="Write it again; Feather files must be of version 2.",
        )
    return message


def _footer(file: BinaryIO, where: str) -> bytes:
    size = file.seek(0, 2)
    tail_bytes = 4 + len(_MAGIC)
    file.seek(max(0, size - tail_bytes))
    tail = file.read()
    length = int.from_bytes(tail[:4], "little")
    if not tail.endswith(_MAGIC) or length > size - tail_bytes:
        raise ShardCorruptError(f"{where}: its end is missing", fix="Write the file again.")
    file.seek(size - tail_bytes - length)
    return file.read(length)


_ROWS = 65_536  # maximum rows decoded at a time
_BATCH_BYTES = 16 << 20  # approximate limit of a batch with long rows
_BUFFER_BYTES = 1 << 20  # read at a time from a column


def parquet_pieces(
    file: BinaryIO, found: InputFile, _options: ReadOptions, wanted: Collection[str] | None
) -> Iterator[FilePiece]:
    """Read a Parquet file in pieces; see `geo_ray.data.files.csv_file.csv_pieces`.

    Raises:
        SchemaMismatchError: an extension type, or two columns of one name.
        ShardCorruptError: Arrow cannot decode it.
    """
    refuse_extensions_in(file, found.path)
    file.seek(0)
    try:
        # INT96 as nanoseconds would silently wrap beyond the year 2262.
        native = pa.PythonFile(Borrowed(file), mode="r")
        source = pq.ParquetFile(
            native,
            coerce_int96_timestamp_unit="us",
            pre_buffer=False,  # which would read whole columns of a row group
            buffer_size=_BUFFER_BYTES,
        )
        total = max(1, source.metadata.num_rows)
        tops = [n for n in source.schema_arrow.names if wanted is None or _is_wanted(n, wanted)]
        names = _names(source.schema_arrow, found.path)
        rows = 0
        step = _rows_at_a_time(source.metadata)
        for batch in source.iter_batches(batch_size=step, columns=tops, use_threads=False):
            rows += batch.num_rows
            yield _piece(batch, names, wanted, rows / total)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _corrupt(found, error) from error


def arrow_pieces(
    file: BinaryIO, found: InputFile, _options: ReadOptions, wanted: Collection[str] | None
) -> Iterator[FilePiece]:
    """Read an Arrow file or stream in pieces; see `parquet_pieces`."""
    is_stream = refuse_arrow_extensions(file, found.path)
    file.seek(0)
    try:
        native = _mapped(file)
        if is_stream:
            with pa.ipc.open_stream(native) as stream:
                names = _names(stream.schema, found.path)
                for batch in stream:
                    yield from _slices(batch, names, wanted, 0.5)
            return
        with pa.ipc.open_file(native) as source:
            names = _names(source.schema, found.path)
            total = source.num_record_batches
            for number in range(total):
                batch = source.get_batch(number)
                yield from _slices(batch, names, wanted, (number + 1) / total)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _corrupt(found, error) from error


def _rows_at_a_time(metadata: pq.FileMetaData) -> int:
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    size = sum(int(group.total_byte_size) for group in groups)
    return max(1, min(_ROWS, _BATCH_BYTES * int(metadata.num_rows) // max(1, size)))


def _slices(
    batch: pa.RecordBatch, names: tuple[str, ...], wanted: Collection[str] | None, fraction: float
) -> Iterator[FilePiece]:
    batch.validate()  # otherwise its size may be read from outside of its buffers
    step = max(1, min(_ROWS, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
    for begin in range(0, batch.num_rows, step):
        yield _piece(batch.slice(begin, step), names, wanted, fraction)


def _mapped(file: BinaryIO) -> pa.NativeFile:
    """Map a file into memory: a batch, which may be the whole file, is then paged in on access."""
    try:
        return pa.BufferReader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):  # it is not a file of the system, or it is empty
        return pa.PythonFile(Borrowed(file), mode="r")


def _piece(
    batch: pa.RecordBatch, names: tuple[str, ...], wanted: Collection[str] | None, fraction: float
) -> FilePiece:
    batch.validate(
        full=True
    )  # otherwise Arrow does not check the file, not even that its text is UTF-8
    columns = flat_columns(batch)
    chosen = {n: array for n, array in columns.items() if wanted is None or n in wanted}
    return FilePiece(names, chosen, batch.num_rows, fraction)


def _names(schema: pa.Schema, path: str) -> tuple[str, ...]:
    try:
        return tuple(flat_columns(pa.RecordBatch.from_pylist([], schema=schema)))
    except ValueError as error:
        raise SchemaMismatchError(
            f"{path} has two columns {error}", fix="Give each column a unique name."
        ) from None


def _is_wanted(top: str, wanted: Collection[str]) -> bool:
    return top in wanted or any(name.startswith(f"{top}.") for name in wanted)


def _corrupt(found: InputFile, error: Exception) -> ShardCorruptError:
    return ShardCorruptError(
        f"{found.path}: cannot be decoded: {error}", fix="Write the file again."
    )
