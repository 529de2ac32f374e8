"""An Arrow column read as numbers: exact integers where it has only integers, float64 elsewhere."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Array = np.ndarray[Any, Any]
Cast = Literal["number", "time"]

EXACT_INTEGERS = 2**53
"""Up to here float64 has every integer."""

_INTEGER = r"^[+-]?[0-9]+$"
_FLOAT = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(?i:nan|inf|infinity)$"
_DECIMAL_COMMA = r"^(\s*[+-]?\d*),(\d+(?:[eE][+-]?\d+)?\s*)$"
_TRUTH = {"true": "1", "false": "0"}
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_S = 86_400.0
_SECONDS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


@dataclass(frozen=True)
class Numbers:
    """What was read. Where a value is missing or bad, ``values`` holds 0.

    Attributes:
        values: (N,) int64, uint64 or float64.
        null: (N,) there is no value.
        nan: (N,) the value is "not a number".
        bad: (N,) it cannot be read as a number.
        inexact: (N,) an integer beyond 2**53 that had to become a float64.
    """

    values: Array
    null: Array
    nan: Array
    bad: Array
    inexact: Array

    @property
    def missing(self) -> Array:
        """(N,) no value, or not a number."""
        missing: Array = self.null | self.nan
        return missing


def is_list(kind: pa.DataType) -> bool:
    """Whether a column has a list per row."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column is text."""
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def decoded(array: pa.Array) -> pa.Array:
    """The array without a dictionary (a categorical column) or runs around its values."""
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if pa.types.is_run_end_encoded(array.type):
        return pc.run_end_decode(array)
    return array


def with_points(array: pa.Array, decimal: str) -> pa.Array:
    """Text whose decimal mark is ``decimal`` with points instead; other columns as they are."""
    if decimal == "." or not is_text(array.type):
        return array
    return pc.replace_substring_regex(array.cast(pa.string()), _DECIMAL_COMMA, r"\1.\2")


def to_numbers(array: pa.Array, cast: Cast = "number") -> Numbers | None:
    """Read a column of single values.

    Args:
        array: (N,) numbers, booleans, decimals, times or text.
        cast: "time" reads text as ISO 8601 times. Times become seconds since 1970 in UTC.

    Returns:
        The numbers; None if values of this type are no numbers (lists, binary and so on).
    """
    array = decoded(array)
    kind, types = array.type, pa.types
    if types.is_null(kind):
        return _of_floats(array.cast(pa.float64()))
    if is_text(kind):
        text = pc.utf8_trim_whitespace(array.cast(pa.string()))
        return _of_times_in_text(text) if cast == "time" else _of_text(text)
    if types.is_boolean(kind):
        return _of_integers(array.cast(pa.int64()))
    if types.is_integer(kind):
        wide = pa.uint64() if types.is_uint64(kind) else pa.int64()
        return _of_integers(array.cast(wide))
    if types.is_floating(kind):
        return _of_floats(array.cast(pa.float64()))
    if types.is_decimal(kind):
        return _of_text(array.cast(pa.string()))
    seconds = _seconds(array)
    return None if seconds is None else _of_floats(seconds)


def parse_time(word: str) -> float | None:
    """Seconds since 1970 of an ISO 8601 time or date, taken as UTC if it names no zone."""
    if _DATE.match(word) is None:
        return None
    try:
        time = datetime.fromisoformat(word)
    except ValueError:
        return None
    return (time.replace(tzinfo=time.tzinfo or UTC) - _EPOCH).total_seconds()


def _of_integers(array: pa.Array) -> Numbers:
    null = _mask(array.is_null())
    values = array.fill_null(0).to_numpy(zero_copy_only=False)
    nothing = np.zeros(len(array), bool)
    return Numbers(values, null, nothing, nothing, nothing)


def _of_floats(array: pa.Array, bad: Array | None = None, inexact: Array | None = None) -> Numbers:
    nothing = np.zeros(len(array), bool)
    null = _mask(array.is_null())
    values = array.fill_null(0.0).to_numpy(zero_copy_only=False)
    nan = np.isnan(values)
    if nan.any():
        values = np.where(nan, 0.0, values)
    return Numbers(
        values,
        null if bad is None else null & ~bad,
        nan,
        nothing if bad is None else bad,
        nothing if inexact is None else inexact,
    )


def _of_text(text: pa.Array) -> Numbers:
    """Text, trimmed: decimal digits as Python writes numbers, true and false, or nothing."""
    null = pc.fill_null(pc.equal(text, ""), True)
    text = pc.if_else(null, pa.scalar(None, pa.string()), text)
    is_integer = pc.fill_null(pc.match_substring_regex(text, _INTEGER), False)
    is_float = pc.fill_null(pc.match_substring_regex(text, _FLOAT), False)
    rest = pc.invert(pc.or_(null, is_float))
    if pc.any(rest).as_py():
        lower = pc.utf8_lower(text)
        for word, digit in _TRUTH.items():
            hit = pc.fill_null(pc.equal(lower, word), False)
            text = pc.if_else(hit, digit, text)
            is_integer, is_float = pc.or_(is_integer, hit), pc.or_(is_float, hit)
    usable = pc.if_else(is_float, pc.replace_substring_regex(text, r"^\+", ""), None)
    bad = _mask(pc.invert(pc.or_(null, is_float)))
    if not pc.any(pc.and_(is_float, pc.invert(is_integer))).as_py():
        for wide in (pa.int64(), pa.uint64()):
            try:
                found = _of_integers(usable.cast(wide))
            except pa.ArrowException:
                continue
            return Numbers(found.values, found.null & ~bad, found.nan, bad, found.inexact)
    floats = usable.cast(pa.float64())
    size = np.abs(floats.fill_null(0.0).to_numpy(zero_copy_only=False))
    large = size > EXACT_INTEGERS
    for row in np.flatnonzero(_mask(is_integer) & (size == EXACT_INTEGERS)):
        large[row] = abs(int(text[int(row)].as_py())) != EXACT_INTEGERS
    return _of_floats(floats, bad, large & _mask(is_integer))


def _of_times_in_text(text: pa.Array) -> Numbers:
    null = _mask(pc.fill_null(pc.equal(text, ""), True))
    parsed = [None if missing else parse_time(word)
              for word, missing in zip(text.to_pylist(), null, strict=True)]  # fmt: skip
    values = np.array([0.0 if value is None else value for value in parsed], np.float64)
    bad = np.array([value is None for value in parsed], bool) & ~null
    nothing = np.zeros(len(null), bool)
    return Numbers(values, null, nothing, bad, nothing)


def _seconds(array: pa.Array) -> pa.Array | None:
    """Times as float64 seconds; dates as their midnight; None for other types."""
    kind, types = array.type, pa.types
    if types.is_date32(kind):
        return pc.multiply(array.cast(pa.int32()).cast(pa.float64()), _DAY_S)
    if types.is_date64(kind):
        array = array.cast(pa.int64()).cast(pa.timestamp("ms"))
    elif types.is_time(kind):
        wide = pa.int32() if types.is_time32(kind) else pa.int64()
        return pc.divide(array.cast(wide).cast(pa.float64()), _SECONDS[kind.unit])
    elif not (types.is_timestamp(kind) or types.is_duration(kind)):
        return None
    return pc.divide(
        array.cast(pa.int64()).cast(pa.float64(), safe=False), _SECONDS[array.type.unit]
    )


def _mask(array: pa.Array) -> Array:
    mask: Array = array.to_numpy(zero_copy_only=False).astype(bool, copy=False)
    return mask
