"""Small compressed JSON values of a queue, and their limits."""

from __future__ import annotations

import zlib
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from geo_ray.errors import QueueJournalError

T = TypeVar("T")
MOST_PACKED_BYTES: Final = 60_000
_MOST_BYTES: Final = 16 * 1024 * 1024


def pack(reader: TypeAdapter[T], value: T) -> bytes:
    """Write a value as `unpack` reads it."""
    return zlib.compress(reader.dump_json(value))


def unpack(reader: TypeAdapter[T], data: bytes, where: str) -> T:
    """Read a value.

    Args:
        reader: of its kind.
        data: its bytes.
        where: they lie, for the message.

    Raises:
        QueueJournalError: they are nothing of the kind.
    """
    try:
        stream: Any = zlib.decompressobj()
        text = stream.decompress(data, _MOST_BYTES)
        if not stream.eof:
            raise ValueError("cut off, or too long")
        return reader.validate_json(text)
    except (ValidationError, ValueError, zlib.error) as error:
        first = str(error).splitlines()[0]
        raise QueueJournalError(f"{where} of the queue cannot be read: {first}") from None
