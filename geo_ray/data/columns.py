"""The allowed types of shard columns, such as ``"float32[64]"``, ``"int64"``, ``"uint8[784]"``.

Only booleans, numbers and fixed-size lists of them are allowed: they decode directly into NumPy
arrays and cannot contain code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from geo_ray.base.errors import SchemaMismatchError
from geo_ray.base.text import listed

Columns = Mapping[str, np.ndarray[Any, Any]]
"""Column name -> array whose first axis has the rows (N)."""

SCALARS = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
)
"""The allowed element types, as NumPy names."""

_PATTERN = re.compile(r"([a-z0-9]+)(?:\[([1-9][0-9]{0,8})\])?")


@dataclass(frozen=True)
class ColumnType:
    """The type of one column.

    Attributes:
        scalar: one of `SCALARS`.
        length: elements per row for a 2-D column, None for one value per row.
    """

    scalar: str
    length: int | None = None

    @classmethod
    def parse(cls, text: str, column: str) -> ColumnType:
        """Read ``"float32[64]"`` and the like; the error names ``column``.

        Raises:
            SchemaMismatchError: if the type is not allowed.
        """
        match = _PATTERN.fullmatch(text)
        if match is None or match[1] not in SCALARS:
            raise SchemaMismatchError(
                f"column {column!r}: type {text!r} is not allowed",
                fix=f"Use one of {', '.join(SCALARS)}, with [LENGTH] after it for a fixed-size "
                "list.",
            )
        return cls(match[1], int(match[2]) if match[2] else None)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of one element."""
        return np.dtype(self.scalar)

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape of a column of ``rows`` rows: (N,) or (N, length)."""
        return (rows,) if self.length is None else (rows, self.length)

    @property
    def in_words(self) -> str:
        """Describe a row, for messages: "one int64 number", "a list of 4 float32 numbers"."""
        what = "true-or-false value" if self.scalar == "bool" else f"{self.scalar} number"
        if self.length is None:
            return f"one {what}"
        return f"a list of {self.length} {what}{'s' if self.length > 1 else ''}"

    def __str__(self) -> str:
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
    """Return the size of a row in memory."""
    return sum(kind.dtype.itemsize * (kind.length or 1) for kind in types.values())


def types_of(columns: Columns) -> dict[str, ColumnType]:
    """Return the types of arrays (N,) or (N, length), whose dtypes must be allowed."""
    return {
        name: ColumnType(str(array.dtype), array.shape[1] if array.ndim > 1 else None)
        for name, array in columns.items()
    }


def _row_in_words(array: np.ndarray[Any, Any]) -> str:
    """Describe a row of an array, whose type need not be allowed."""
    if array.ndim == 1:
        return f"one {array.dtype} value"
    shape = " x ".join(str(size) for size in array.shape[1:])
    return f"a list of {shape} {array.dtype} values" if shape else "no value"


def check_columns(columns: Columns, types: Mapping[str, ColumnType], where: str) -> int:
    """Check that the arrays match the declared types.

    Args:
        columns: arrays with equal first axes (N).
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
    rows = {name: len(array) if array.ndim else -1 for name, array in columns.items()}
    if len(set(rows.values())) != 1:
        raise SchemaMismatchError(
            f"{where}: columns differ in their number of rows: {counts_text(rows)}"
        )
    count = next(iter(rows.values()))
    for name, kind in types.items():
        array = columns[name]
        if array.dtype != kind.dtype or array.shape != kind.shape(count):
            raise SchemaMismatchError(
                f"{where}: column {name!r} has {_row_in_words(array)} in each row, declared as "
                f"{kind.in_words} ({kind})"
            )
    return count
