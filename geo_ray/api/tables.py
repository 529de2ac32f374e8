"""Rows of plain values as Arrow tables, which pandas, polars and duckdb take as they are."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

Table: TypeAlias = pa.Table

_KINDS = {int: pa.int64(), float: pa.float64(), str: pa.string()}


def table_of(rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, type] | None = None) -> Table:
    """A table of rows; a column may have nulls.

    Args:
        rows: values by column; the columns are those of the first row, or of ``kinds``.
        kinds: int, float or str by column; needed where there may be no rows or only nulls.
    """
    if kinds is None:
        return pa.Table.from_pylist([dict(row) for row in rows])
    schema = pa.schema([pa.field(name, _KINDS[kind]) for name, kind in kinds.items()])
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
