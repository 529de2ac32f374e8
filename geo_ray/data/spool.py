"""Prepared rows on their way to shards: on disk rather than in memory, in files without a name."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from geo_ray.data.columns import Columns, ColumnType, row_bytes
from geo_ray.errors import StoreError

_COPY_BYTES = 8 << 20  # at a time


class Spool:
    """Collects rows column by column; its files vanish with the process, however that ends.

    Args:
        types: the columns.

    Raises:
        StoreError: if the folder for temporary files has no room.
    """

    def __init__(self, types: Mapping[str, ColumnType]) -> None:
        self._types = dict(types)
        self._rows = 0
        try:
            self._files: dict[str, IO[bytes]] = {
                name: tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
                for name in self._types
            }
        except OSError as error:
            raise _no_room(error) from error

    def __len__(self) -> int:
        return self._rows

    def append(self, columns: Columns) -> None:
        """Add rows, name -> (N,) or (N, length) of the columns' types."""
        try:
            for name, kind in self._types.items():
                array = np.ascontiguousarray(columns[name], dtype=kind.dtype)
                self._files[name].write(array.data if array.size else b"")
        except OSError as error:
            raise _no_room(error) from error
        self._rows += len(columns[next(iter(self._types))])

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """All rows, name -> read-only array that is paged in from disk when it is looked at."""
        found: dict[str, np.ndarray[Any, Any]] = {}
        for name, kind in self._types.items():
            if not self._rows:
                found[name] = np.empty(kind.shape(0), kind.dtype)
                continue
            try:
                self._files[name].flush()
            except OSError as error:
                raise _no_room(error) from error
            found[name] = np.memmap(
                self._files[name], dtype=kind.dtype, mode="r", shape=kind.shape(self._rows)
            )
        return found

    def close(self) -> None:
        """Give the files up; arrays of `columns` stay valid as long as they are held."""
        for file in self._files.values():
            file.close()


def pick(columns: Columns, types: Mapping[str, ColumnType], rows_N: Any) -> Columns:
    """Copy rows, in the given order, into a spool of their own; memory holds a part at a time."""
    spool = Spool(types)
    step = max(1, _COPY_BYTES // row_bytes(types))
    for begin in range(0, len(rows_N), step):
        part_N = rows_N[begin : begin + step]
        spool.append({name: columns[name][part_N] for name in types})
    picked = spool.columns()
    spool.close()
    return picked


def _no_room(error: OSError) -> StoreError:
    return StoreError(
        f"rows cannot be kept in {tempfile.gettempdir()}: {error.strerror or error}",
        fix="Free space, or set TMPDIR to a folder on a larger disk.",
    )
