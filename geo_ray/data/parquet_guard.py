"""Refuse a Parquet file that names Arrow extension types, before Arrow reads its footer.

Arrow rebuilds an extension type while it *opens* a file: a type that some library of this process
registered may unpickle the file's metadata, which runs code of whoever wrote the file. So the raw
footer is inspected first, without Arrow.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import BinaryIO

from geo_ray.errors import SchemaMismatchError, ShardCorruptError

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
        ShardCorruptError: if this is no whole Parquet file, or it is encrypted.
        SchemaMismatchError: if it declares an Arrow extension type, or hides its schema.
    """
    refuse_extensions_in(io.BytesIO(data), where)


def refuse_extensions_in(file: BinaryIO, where: str) -> None:
    """Check the footer of an open, seekable Parquet file; see `refuse_extensions`."""
    footer = _footer(file, where)
    if _EXTENSION in footer:
        raise SchemaMismatchError(f"{where}: carries an Arrow extension type", fix=_ADVICE)
    at = footer.find(_KEY)
    while at >= 0:
        schema = _value_after(footer, at + len(_KEY))
        if schema is None:
            raise SchemaMismatchError(f"{where}: its embedded schema is malformed", fix=_ADVICE)
        if _EXTENSION in schema:
            raise SchemaMismatchError(f"{where}: carries an Arrow extension type", fix=_ADVICE)
        at = footer.find(_KEY, at + len(_KEY))


def _footer(file: BinaryIO, where: str) -> bytes:
    file.seek(0)
    head = file.read(len(_MAGIC))
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read()
    if size < len(_MAGIC) + _TAIL_BYTES or head != _MAGIC or tail[-4:] != _MAGIC:
        raise ShardCorruptError(f"{where}: not a whole, unencrypted Parquet file")
    length = int.from_bytes(tail[:4], "little")
    if length > size - len(_MAGIC) - _TAIL_BYTES:
        raise ShardCorruptError(f"{where}: its Parquet footer is truncated")
    file.seek(size - _TAIL_BYTES - length)
    return file.read(length)


def _value_after(footer: bytes, at: int) -> bytes | None:
    """Decode the base64 string field at ``at``; None if it is anything else."""
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
