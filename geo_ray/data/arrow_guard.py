"""Refuse an Arrow file that names extension types, before Arrow reads its schema.

The danger is that of `geo_ray.data.parquet_guard`. A file has its schema twice, in the
first message and in the footer; both are looked through. A stream has the message alone.
"""

from __future__ import annotations

from typing import BinaryIO

from geo_ray.errors import SchemaMismatchError, ShardCorruptError

_MAGIC = b"ARROW1"
_HEAD_BYTES = 8  # magic and padding
_CONTINUATION = b"\xff\xff\xff\xff"
_EXTENSION = b"ARROW:extension"


def refuse_arrow_extensions(file: BinaryIO, where: str) -> bool:
    """Check the schema of an Arrow file or stream; its texts are stored as they are.

    Args:
        file: at its start, seekable.
        where: the file, for the message.

    Returns:
        Whether it is a stream, without a footer.

    Raises:
        ShardCorruptError: if it is neither.
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
            f"{where}: carries an Arrow extension type",
            fix="Write the columns as plain numbers, text or lists, without extensions.",
        )
    return is_stream


def _first_message(file: BinaryIO, where: str) -> bytes:
    prefix = file.read(8)
    length = int.from_bytes(prefix[4:], "little")
    message = file.read(length) if prefix.startswith(_CONTINUATION) else b""
    if not message or len(message) < length:
        raise ShardCorruptError(
            f"{where}: is no Arrow file or stream",
            fix="Write it anew; Feather files must be of version 2.",
        )
    return message


def _footer(file: BinaryIO, where: str) -> bytes:
    size = file.seek(0, 2)
    tail_bytes = 4 + len(_MAGIC)
    file.seek(max(0, size - tail_bytes))
    tail = file.read()
    length = int.from_bytes(tail[:4], "little")
    if not tail.endswith(_MAGIC) or length > size - tail_bytes:
        raise ShardCorruptError(f"{where}: its end is missing", fix="Write the file anew.")
    file.seek(size - tail_bytes - length)
    return file.read(length)
