"""What every reader of a file hands out: some rows, as Arrow columns."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined"
from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa


@dataclass(frozen=True)
class FilePiece:
    """Consecutive rows of one file.

    Attributes:
        names: all columns that the file has, also those that were not asked for.
        columns: name -> Arrow array of ``rows`` values.
        rows: how many rows, also if there is no column.
        fraction: how much of the file is read, about; for progress.
        sparse: a column that is not in ``names`` is one without values here (JSON lines).
        skipped: why a line before these rows that could be a row is none; empty otherwise.
    """

    names: tuple[str, ...]
    columns: dict[str, pa.Array]
    rows: int
    fraction: float
    sparse: bool = False
    skipped: str = ""


class Borrowed:
    """A file that whoever reads it cannot close: Arrow's streams close theirs when they end.

    Args:
        file: the owner's.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        """Read as the file does."""
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek as the file does."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Where the file is."""
        return self._file.tell()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Leave the file to its owner."""


def size_of(file: BinaryIO) -> int:
    """The size of a file that is at its start."""
    size = file.seek(0, 2)
    file.seek(0)
    return size


def fraction_read(file: BinaryIO, size: int) -> float:
    """How far a file of ``size`` bytes that is read from front to back is read, from 0 to 1."""
    return min(1.0, file.tell() / size) if size else 1.0


def flat_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """The columns of a batch; those inside a struct get names such as ``address.city``.

    Raises:
        ValueError: two columns have one name; the message is that name.
    """
    flat: dict[str, pa.Array] = {}
    waiting = list(zip(batch.schema.names, batch.columns, strict=True))[::-1]
    while waiting:
        name, array = waiting.pop()
        if pa.types.is_struct(array.type):
            parts = zip((field.name for field in array.type), array.flatten(), strict=True)
            waiting += [(f"{name}.{part}", inner) for part, inner in parts][::-1]
        elif name in flat:
            raise ValueError(name)
        else:
            flat[name] = array
    return flat
