"""Read a user's files as the input of `geo_ray.data.write`.

Prepared rows are stored in unnamed temporary files instead of memory until they are written.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined"

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import pyarrow as pa

from geo_ray.base.errors import ConfigError, ShardEmptyError, StoreError
from geo_ray.data.columns import (
    Column,
    Columns,
    ColumnType,
    Ragged,
    parse_types,
    parts_of_rows,
    row_bytes,
    types_of,
)
from geo_ray.data.files.find import InputFiles, LeftOut
from geo_ray.data.files.rows import Batch, ReadReport, read_rows
from geo_ray.data.prepare.config import Preparation, WrittenSources
from geo_ray.data.prepare.findings import Findings, Spot
from geo_ray.data.prepare.preparer import Counts, Preparer

_COPY_BYTES = 8 << 20  # copied at a time


class RowFile:
    """Collects rows by column in temporary files, which the system deletes when the process ends.

    Args:
        types: the columns.

    Raises:
        StoreError: if the folder for temporary files has no space left.
    """

    def __init__(self, types: Mapping[str, ColumnType]) -> None:
        self._types = dict(types)
        self._rows = 0
        self._ends = {name: 0 for name, kind in self._types.items() if kind.ragged is not None}
        names = [*((name, "") for name in self._types), *((name, "ends") for name in self._ends)]
        try:
            self._files: dict[tuple[str, str], IO[bytes]] = {
                name: tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
                for name in names
            }
            for name in self._ends:
                self._write((name, "ends"), np.zeros(1, np.int64))
        except OSError as error:
            raise _disk_full(error) from error

    def __len__(self) -> int:
        return self._rows

    def append(self, columns: Columns) -> None:
        """Add rows, name -> (N,), (N, length) or ragged of the columns' types."""
        try:
            for name, kind in self._types.items():
                column = columns[name]
                if isinstance(column, Ragged):
                    self._write((name, "ends"), column.offsets[1:] + self._ends[name])
                    self._ends[name] += len(column.values)
                    column = column.values
                self._write((name, ""), np.ascontiguousarray(column, dtype=kind.dtype))
        except OSError as error:
            raise _disk_full(error) from error
        self._rows += len(columns[next(iter(self._types))])

    def columns(self) -> dict[str, Column]:
        """Return all rows, name -> read-only column that is paged in from disk on access."""
        found: dict[str, Column] = {}
        for name, kind in self._types.items():
            if kind.ragged is None:
                found[name] = self._mapped((name, ""), kind.dtype, kind.shape(self._rows))
                continue
            values = self._mapped((name, ""), kind.dtype, (self._ends[name],))
            offsets = self._mapped((name, "ends"), np.dtype(np.int64), (self._rows + 1,))
            found[name] = Ragged(kind.ragged, values, offsets)
        return found

    def _write(self, key: tuple[str, str], array: np.ndarray[Any, Any]) -> None:
        self._files[key].write(array.data if array.size else b"")

    def _mapped(
        self, key: tuple[str, str], dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        if not shape[0]:
            return np.empty(shape, dtype)
        try:
            self._files[key].flush()
        except OSError as error:
            raise _disk_full(error) from error
        return np.memmap(self._files[key], dtype=dtype, mode="r", shape=shape)

    def close(self) -> None:
        """Close the files; arrays returned by `columns` stay valid while referenced."""
        for file in self._files.values():
            file.close()


def pick(columns: Columns, types: Mapping[str, ColumnType], rows_N: Any) -> Columns:
    """Copy rows in the given order into new temporary files, a part in memory at a time."""
    file = RowFile(types)
    step = max(1, _COPY_BYTES // row_bytes(types))
    for part_N in parts_of_rows(columns, rows_N, step, _COPY_BYTES):
        file.append({name: columns[name][part_N] for name in types})
    picked = file.columns()
    file.close()
    return picked


def _disk_full(error: OSError) -> StoreError:
    return StoreError(
        f"rows cannot be stored in {tempfile.gettempdir()}: {error.strerror or error}",
        fix="Free space, or set TMPDIR to a folder on a larger disk.",
    )


_PREPARED_BYTES = 32 << 20  # prepared at a time


@dataclass(frozen=True)
class Gathered:
    """All prepared rows.

    Attributes:
        columns: column of the task -> array (N,), (N, length) or ragged, backed by files on disk.
        counts: counts of the preparation.
        left_out: files, folders and lines that were not read.
    """

    columns: dict[str, Column]
    counts: Counts
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class Complaint:
    """Context for the message of an error about the rows.

    Attributes:
        prepared: whether the user has a preparation file.
        draft: the command that writes a draft of one.
        label: the task's column that has the class of each row.
        written: sources of the preparation file.
    """

    prepared: bool = False
    draft: str = ""
    label: str | None = None
    written: WrittenSources = field(default_factory=dict)


def gather_rows(
    found: InputFiles,
    preparation: Preparation,
    complaint: Complaint | None = None,
    on_read: Callable[[float, int], None] | None = None,
) -> Gathered:
    """Read and prepare all rows of the files, a batch in memory at a time and the result on disk.

    Errors of all files are collected and reported together.

    Args:
        found: the files.
        preparation: a resolved preparation; see `geo_ray.data.prepare.resolve`.
        complaint: context for error messages.
        on_read: called with (files read, rows of the batch), for progress.

    Raises:
        SchemaMismatchError: listing all columns and files with errors, with advice.
        ShardCorruptError: listing the files, if nothing else is wrong.
        ShardEmptyError: if there are no rows, or all were dropped.
        DataLeftOutError: if something was skipped and the options are strict.
        StoreError: if a store does not answer, or the disk is full.
    """
    complaint = complaint or Complaint()
    types = parse_types(preparation.types)
    preparer = Preparer(
        preparation, decimal=found.options.decimal, thousands=found.options.thousands
    )
    findings = Findings(types, complaint.label, complaint.written)
    report, counts = ReadReport(), Counts()
    names: dict[str, None] = {}
    step = max(1, _PREPARED_BYTES // row_bytes(types))
    file = RowFile(types)
    try:
        for batch in read_rows(found, preparer.inputs, report):
            spot = Spot(batch.path, batch.first_row, batch.piece.names)
            arrays = _filled(batch, preparer.inputs)
            for begin in range(0, batch.piece.rows, step):
                some = {name: array.slice(begin, step) for name, array in arrays.items()}
                rows = min(step, batch.piece.rows - begin)
                prepared = preparer.transform(some, findings, spot.at(begin), rows)
                if not findings:
                    file.append(prepared.columns)
                    counts.add(prepared.counts)
            if on_read is not None:
                on_read(batch.files_done, batch.piece.rows)
            names.update(dict.fromkeys(batch.piece.names))
        findings.forget(report.untranslated)
        for error in report.unreadable:
            findings.add_unreadable(error)
        if names:
            spot = Spot(f"all files of {found.name}", 1, tuple(names))
            for name, sources in preparation.columns.items():
                for source in sources:
                    if source.column not in names:
                        findings.add_absent(name, source, spot)
        findings.raise_any(
            f"the files in {found.name} do not match the task", complaint.prepared, complaint.draft
        )
        if not len(file):
            left = f"; all {counts.rows} rows were dropped" if counts.rows else ""
            raise ShardEmptyError(
                f"the files in {found.name} have no rows{left}",
                fix="Fill missing values instead of dropping rows."
                if left
                else "Name a folder whose files have rows.",
            )
        return Gathered(file.columns(), counts, tuple(report.left_out))
    finally:
        file.close()


def _filled(batch: Batch, inputs: tuple[str, ...]) -> dict[str, pa.Array]:
    """Return the columns; a key absent from all JSON lines is a column of missing values."""
    arrays = dict(batch.piece.columns)
    if batch.piece.sparse:
        for name in inputs:
            arrays.setdefault(name, pa.nulls(batch.piece.rows))
    return arrays


def hold_out(columns: Columns, fraction: float, seed: int) -> dict[str, Columns]:
    """Reserve a random part of the rows for evaluation.

    Args:
        columns: name -> array, first axis N.
        fraction: 0 <= fraction < 1; 0 reserves no rows.
        seed: determines the rows.

    Returns:
        "train" -> columns and, if ``fraction`` is positive, "heldout" -> columns (at least a row).

    Raises:
        ConfigError: if the fraction is out of range or leaves nothing to train on.
        StoreError: if the disk is full.
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
    return {part: pick(columns, types_of(columns), rows_N) for part, rows_N in cut.items()}
