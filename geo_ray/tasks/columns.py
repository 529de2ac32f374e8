"""Column types as text ("int64", "float32[64]") and the check of arrays against them.

The same closed list as that of the shards (`geo_ray.data.columns`), which a task may not import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from geo_ray.errors import SchemaMismatchError
from geo_ray.tasks.base import Columns

_PATTERN = re.compile(r"(bool|u?int(?:8|16|32|64)|float(?:16|32|64))(?:\[([1-9][0-9]{0,8})\])?")


@dataclass(frozen=True)
class ColumnSpec:
    """A parsed column type: dtype, and the length of each row's list (None for a scalar)."""

    dtype: np.dtype[Any]
    length: int | None

    def row_shape(self) -> tuple[int, ...]:
        """Return the shape of one row: () or (length,)."""
        return () if self.length is None else (self.length,)


def parse_column_type(text: str) -> ColumnSpec:
    """Parse "uint8[784]" and the like.

    Raises:
        SchemaMismatchError: the text is no column type.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise SchemaMismatchError(
            f"{text!r} is no column type",
            fix='Write a NumPy dtype and an optional length: "int64", "float32[64]", "uint8[784]".',
        )
    length = match.group(2)
    return ColumnSpec(np.dtype(match.group(1)), int(length) if length else None)


def check_columns(types: Mapping[str, str], columns: Columns) -> None:
    """Check names, dtypes, row shapes and equal row counts of a table.

    Raises:
        SchemaMismatchError: naming the first column that differs and how.
    """
    if set(types) != set(columns):
        raise SchemaMismatchError(
            f"columns are {', '.join(sorted(columns))}; the task has {', '.join(sorted(types))}"
        )
    rows: dict[int, str] = {}
    for name, text in types.items():
        expected, array = parse_column_type(text), columns[name]
        found = f"{array.dtype}{list(array.shape[1:]) or ''}"
        if array.ndim == 0 or array.dtype != expected.dtype:
            raise SchemaMismatchError(f"column {name!r} is {found}, the task has {text}")
        if array.shape[1:] != expected.row_shape():
            raise SchemaMismatchError(f"column {name!r} is {found}, the task has {text}")
        rows.setdefault(int(array.shape[0]), name)
    if len(rows) > 1:
        counts = ", ".join(f"{name!r} {count}" for count, name in rows.items())
        raise SchemaMismatchError(f"columns differ in their number of rows: {counts}")
