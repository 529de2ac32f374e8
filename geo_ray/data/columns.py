"""The allowed types of shard columns, such as ``"float32[64]"``, ``"string"``, ``"list<int32>"``.

Only numbers, lists of numbers, text and bytes are allowed: they decode directly into NumPy arrays
and cannot contain code. A column whose rows differ in length is a `Ragged`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from geo_ray.base.errors import SchemaMismatchError
from geo_ray.base.text import listed

Array = np.ndarray[Any, Any]

SCALARS = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
)
"""The allowed element types, as NumPy names."""

RaggedKind = Literal["string", "bytes", "list"]

_TEXTS: Mapping[str, RaggedKind] = {"string": "string", "bytes": "bytes"}

_PATTERN = re.compile(r"([a-z0-9]+)(?:\[([1-9][0-9]{0,8})\])?|list<([a-z0-9]+)>")
_LONG_ROW = 64  # elements; from this mean length on, rows are copied one by one


class Ragged:
    """A column whose rows differ in length: text, bytes, or lists of numbers.

    ``column[i]`` is one row: ``str``, ``bytes`` or an array. A slice, an array of row numbers or a
    mask gives a `Ragged` again. ``values`` and ``offsets`` are Arrow's layout, without a copy.

    Args:
        kind: "string", "bytes" or "list".
        values: (V,) the elements of all rows, one row after the other; UTF-8 bytes (uint8) if the
            kind is "string", uint8 if it is "bytes".
        offsets: (N + 1,) int64, from 0 to V; row i has the elements
            ``values[offsets[i] : offsets[i + 1]]``.

    Raises:
        SchemaMismatchError: if the offsets do not fit the values.
    """

    def __init__(self, kind: RaggedKind, values: Array, offsets: Array) -> None:
        self.kind: RaggedKind = kind
        self.values = values
        self.offsets = offsets
        wrong = values.ndim != 1 or offsets.ndim != 1 or offsets.dtype != np.int64
        if wrong or not len(offsets) or offsets[0] != 0 or offsets[-1] != len(values):
            raise SchemaMismatchError(
                f"the offsets of {len(values)} values are no int64 numbers from 0 to {len(values)}",
                fix="Build the column with geo_ray.Ragged.of(TYPE, ROWS).",
            )
        if kind != "list" and values.dtype != np.uint8:
            raise SchemaMismatchError(
                f"a column of type {kind} has {values.dtype} values, not uint8",
                fix="Build the column with geo_ray.Ragged.of(TYPE, ROWS).",
            )

    @classmethod
    def of(cls, type_name: str, rows: Iterable[Any]) -> Ragged:
        """Build a column from Python values.

        Args:
            type_name: "string", "bytes", or a list type such as "list<int32>".
            rows: texts, bytes, or sequences of numbers that the element type holds.

        Raises:
            SchemaMismatchError: if a row is of another type, or a number does not fit.
        """
        kind = ColumnType.parse(type_name, "rows")
        if kind.ragged is None:
            raise SchemaMismatchError(
                f"{type_name!r} has rows of equal length", fix="Use a NumPy array."
            )
        parts = [_flat_row(row, kind, number) for number, row in enumerate(rows)]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        values = np.concatenate(parts) if parts else np.empty(0, kind.dtype)
        return cls(kind.ragged, values, offsets)

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of at least one column of one type, one column after the other."""
        lengths = np.concatenate([part.lengths for part in parts])
        values = np.concatenate([part.values for part in parts])
        return cls(parts[0].kind, values, _offsets(lengths))

    @property
    def type(self) -> ColumnType:
        """The type of the column."""
        name = str(self.values.dtype) if self.kind == "list" else self.kind
        return ColumnType(name, None, self.kind)

    @property
    def lengths(self) -> Array:
        """(N,) int64, the number of elements of each row."""
        lengths: Array = np.diff(self.offsets)
        return lengths

    @property
    def shape(self) -> tuple[int]:
        """(N,), as for an array of one value per row."""
        return (len(self),)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, rows: int | np.integer[Any]) -> Any: ...

    @overload
    def __getitem__(self, rows: slice | Array) -> Ragged: ...

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            begin, stop, step = rows.indices(len(self))
            if step != 1:
                return self._take(np.arange(begin, stop, step))
            offsets = self.offsets[begin : max(begin, stop) + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            return Ragged(self.kind, self.values[first:last], offsets - first)
        if isinstance(rows, np.ndarray):
            return self._take(np.flatnonzero(rows) if rows.dtype == bool else rows)
        if not -len(self) <= rows < len(self):
            raise IndexError(f"row {rows} of {len(self)}")
        row = int(rows) % len(self)
        return self._row(int(self.offsets[row]), int(self.offsets[row + 1]))

    def __iter__(self) -> Iterator[Any]:
        return (self._row(begin, stop) for begin, stop in pairwise(self.offsets.tolist()))

    def __repr__(self) -> str:
        return f"<Ragged {self.type}: {len(self)} rows, {len(self.values)} values>"

    def tolist(self) -> list[Any]:
        """Return the rows: a list of str, of bytes, or of lists of numbers."""
        return [row.tolist() if self.kind == "list" else row for row in self]

    def copy(self) -> Ragged:
        """Return a copy that the caller owns."""
        return Ragged(self.kind, self.values.copy(), self.offsets.copy())

    def padded(self, fill: float = 0, length: int | None = None) -> Array:
        """Return the rows as one array (N, length), shorter ones filled at their end.

        Args:
            fill: the added element.
            length: elements per row; longer rows are cut. None for the longest row.
        """
        lengths = self.lengths
        width = int(lengths.max(initial=0)) if length is None else length
        out = np.full((len(self), width), fill, self.values.dtype)
        column = np.arange(len(self.values)) - np.repeat(self.offsets[:-1], lengths)
        row = np.repeat(np.arange(len(self)), lengths)
        inside = column < width
        out[row[inside], column[inside]] = self.values[inside]
        return out

    def _row(self, begin: int, stop: int) -> Any:
        part = self.values[begin:stop]
        if self.kind == "list":
            return part
        return part.tobytes() if self.kind == "bytes" else part.tobytes().decode()

    def _take(self, rows_N: Array) -> Ragged:
        rows_N = np.where(rows_N < 0, rows_N + len(self), rows_N)
        begins, stops = self.offsets[rows_N], self.offsets[rows_N + 1]
        offsets = _offsets(stops - begins)
        total = int(offsets[-1])
        if total >= _LONG_ROW * len(rows_N):
            values = np.empty(total, self.values.dtype)
            for at, begin, stop in zip(
                offsets.tolist(), begins.tolist(), stops.tolist(), strict=False
            ):
                values[at : at + stop - begin] = self.values[begin:stop]
        else:
            shift = np.repeat(begins - offsets[:-1], stops - begins)
            values = self.values[np.arange(total) + shift]
        return Ragged(self.kind, values, offsets)


Column: TypeAlias = Array | Ragged

Columns = Mapping[str, Column]
"""Column name -> array whose first axis has the rows (N), or a `Ragged` of N rows."""


def _offsets(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _flat_row(row: Any, kind: ColumnType, number: int) -> Array:
    if kind.ragged == "string" and isinstance(row, str):
        return np.frombuffer(row.encode(), np.uint8)
    if kind.ragged == "bytes" and isinstance(row, bytes | bytearray | memoryview):
        return np.frombuffer(row, np.uint8)
    if kind.ragged == "list" and not isinstance(row, str | bytes):
        found = np.asarray(row)
        if found.ndim == 1 and (found.dtype.kind in "biuf" or not len(found)):
            made = found.astype(kind.dtype)
            floats = kind.dtype.kind == "f" and found.dtype.kind != "b"
            if floats or np.array_equal(made, found):
                return made
    raise SchemaMismatchError(
        f"row {number} is {str(row)[:40]!r}, which is not of type {kind}",
        fix="Give one str, bytes or sequence of numbers per row.",
    )


@dataclass(frozen=True)
class ColumnType:
    """The type of one column.

    Attributes:
        scalar: one of `SCALARS`, "string" or "bytes".
        length: elements per row for a 2-D column, None for one value per row.
        ragged: how rows of different length are read; None if all rows have equal lengths.
    """

    scalar: str
    length: int | None = None
    ragged: RaggedKind | None = None

    @classmethod
    def parse(cls, text: str, column: str) -> ColumnType:
        """Read ``"float32[64]"`` and the like; the error names ``column``.

        Raises:
            SchemaMismatchError: if the type is not allowed.
        """
        if text in _TEXTS:
            return cls(text, None, _TEXTS[text])
        match = _PATTERN.fullmatch(text)
        scalar = None if match is None else match[1] or match[3]
        if match is None or scalar not in SCALARS:
            raise SchemaMismatchError(
                f"column {column!r}: type {text!r} is not allowed",
                fix=f"Use one of {', '.join(SCALARS)}, with [LENGTH] after it for a fixed-size "
                "list; or string, bytes, or a list of any length such as list<int32>.",
            )
        if match[3]:
            return cls(match[3], None, "list")
        return cls(scalar, int(match[2]) if match[2] else None)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of one element; uint8 for text and bytes."""
        return np.dtype("uint8" if self.scalar in ("string", "bytes") else self.scalar)

    @property
    def is_integer(self) -> bool:
        """Whether a row is one integer, such as a label."""
        return self.ragged is None and self.length is None and self.dtype.kind in "iu"

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape of a column of ``rows`` rows: (N,) or (N, length)."""
        return (rows,) if self.length is None else (rows, self.length)

    @property
    def in_words(self) -> str:
        """Describe a row, for messages: "one int64 number", "a list of 4 float32 numbers"."""
        if self.scalar in ("string", "bytes"):
            return "one text" if self.scalar == "string" else "one value of bytes"
        what = "true-or-false value" if self.scalar == "bool" else f"{self.scalar} number"
        if self.ragged is not None:
            return f"a list of {what}s"
        if self.length is None:
            return f"one {what}"
        return f"a list of {self.length} {what}{'s' if self.length > 1 else ''}"

    def __str__(self) -> str:
        if self.ragged == "list":
            return f"list<{self.scalar}>"
        return self.scalar if self.length is None else f"{self.scalar}[{self.length}]"


def parse_types(types: Mapping[str, str]) -> dict[str, ColumnType]:
    """All columns of a task or manifest.

    Raises:
        SchemaMismatchError: if there is no column or a type is not allowed.
    """
    if not types:
        raise SchemaMismatchError("no columns are declared", fix="Declare at least one column.")
    return {name: ColumnType.parse(text, name) for name, text in types.items()}


def counts_text(rows: Mapping[str, int]) -> str:
    """List the row counts of columns, for messages: "x has 3, y has 2"."""
    return listed(f"{name} has {count}" for name, count in rows.items())


def row_bytes(types: Mapping[str, ColumnType]) -> int:
    """Return the size of a row in memory, without the elements of ragged columns."""
    return sum(
        8 if kind.ragged is not None else kind.dtype.itemsize * (kind.length or 1)
        for kind in types.values()
    )


def types_of(columns: Columns) -> dict[str, ColumnType]:
    """Return the types of arrays (N,) or (N, length), whose dtypes must be allowed, and ragged."""
    return {
        name: column.type
        if isinstance(column, Ragged)
        else ColumnType(str(column.dtype), column.shape[1] if column.ndim > 1 else None)
        for name, column in columns.items()
    }


def parts_of_rows(
    columns: Columns, rows_N: Array, most_rows: int, most_bytes: int
) -> Iterator[Array]:
    """Divide rows into parts of limited size in memory, in order.

    Args:
        columns: the columns of the rows.
        rows_N: (N,) numbers of rows, in any order.
        most_rows: maximum rows of a part.
        most_bytes: maximum bytes of a part with several rows.

    Yields:
        Consecutive parts of ``rows_N``.
    """
    ragged = [column for column in columns.values() if isinstance(column, Ragged)]
    arrays = [column for column in columns.values() if not isinstance(column, Ragged)]
    fixed = 8 * len(ragged) + sum(a.itemsize * int(np.prod(a.shape[1:])) for a in arrays)
    begin = 0
    while begin < len(rows_N):
        window_M = rows_N[begin : begin + most_rows]
        sizes_M = np.full(len(window_M), fixed, np.int64)
        for column in ragged:
            lengths_M = column.offsets[window_M + 1] - column.offsets[window_M]
            sizes_M += lengths_M * column.values.itemsize
        fit = int(np.searchsorted(np.cumsum(sizes_M), most_bytes, side="right"))
        part_M = window_M[: max(1, fit)]
        yield part_M
        begin += len(part_M)


def _row_in_words(array: Column) -> str:
    """Describe a row of a column, whose type need not be allowed."""
    if isinstance(array, Ragged):
        return array.type.in_words
    if array.ndim == 1:
        return f"one {array.dtype} value"
    shape = " x ".join(str(size) for size in array.shape[1:])
    return f"a list of {shape} {array.dtype} values" if shape else "no value"


def check_columns(columns: Columns, types: Mapping[str, ColumnType], where: str) -> int:
    """Check that the columns match the declared types.

    Args:
        columns: arrays and ragged columns with equal numbers of rows (N).
        types: the declared columns; extra or missing ones are errors.
        where: description of the checked data, for the message.

    Returns:
        The number of rows N.

    Raises:
        SchemaMismatchError: naming the column.
    """
    if set(columns) != set(types):
        raise SchemaMismatchError(
            f"{where}: columns are {listed(sorted(columns))}, declared columns are "
            f"{listed(sorted(types))}"
        )
    rows = {name: len(array) if array.shape else -1 for name, array in columns.items()}
    if len(set(rows.values())) != 1:
        raise SchemaMismatchError(
            f"{where}: columns differ in their number of rows: {counts_text(rows)}"
        )
    count = next(iter(rows.values()))
    for name, kind in types.items():
        array = columns[name]
        if isinstance(array, Ragged):
            is_right = array.type == kind
        else:
            is_right = kind.ragged is None and array.dtype == kind.dtype
            is_right = is_right and array.shape == kind.shape(count)
        if not is_right:
            raise SchemaMismatchError(
                f"{where}: column {name!r} has {_row_in_words(array)} in each row, declared as "
                f"{kind.in_words} ({kind})"
            )
    return count
