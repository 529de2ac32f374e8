"""Conversions between Python values, Arrow columns, numbers and categories.

`arrow_of` builds one array from values of mixed types. `Numbers` reads a column as exact integers
where it contains only integers and as float64 otherwise; `WordColumn` reads it as categories:
its distinct texts and the text of each row.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from geo_ray.base.model import StrictModel

_NO_PYTHON_TYPE = (pa.ArrowException, ArithmeticError, ValueError, LookupError)
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0+")
_TRUTH_TEXT = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
_OUT_OF_RANGE = "<value out of range: "  # Arrow writes this for times beyond the year 32767


def arrow_of(values: Sequence[Any] | np.ndarray[Any, Any]) -> pa.Array:
    """Build one array of the values' common type, or of text if they have none.

    Args:
        values: one per row (N): None, numbers, text, times, lists; or an array (N,) or (N, length).

    Returns:
        An Arrow array (N,).
    """
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = list(values)
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return _in_common(list(values))


def python_values(array: pa.Array) -> list[Any]:
    """Return the values of an array.

    Values that Python has no type for, such as dates after the year 9999, become text.
    """
    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except _NO_PYTHON_TYPE:
        return [_python_value(scalar) for scalar in array]


def _python_value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except _NO_PYTHON_TYPE:
        pass
    try:
        text: str = scalar.cast(pa.string()).as_py()
    except pa.ArrowException:  # an unknown time zone
        return str(scalar.value)
    return text.removeprefix(_OUT_OF_RANGE).removesuffix(">")


def text_of(value: Any) -> str:
    """Return a value as the text by which categories are compared.

    Equal values give the same text regardless of the writer: ``1``, ``1.0`` and the number give
    ``1``; ``True`` and ``TRUE`` give ``true``, also as text. All other text is unchanged.
    """
    if isinstance(value, str):
        word = value.strip()
        whole = _WHOLE.fullmatch(word)
        if whole is not None:
            return "0" if whole[1] == "-0" else whole[1]
        return _TRUTH_TEXT.get(word, word)
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    if isinstance(value, list | dict):
        return json.dumps(value, default=str)
    return text_of(str(value))


def _in_common(values: list[Any]) -> pa.Array:
    if all(isinstance(v, int) and not isinstance(v, bool) for v in values if v is not None):
        try:
            return pa.array(values, pa.uint64())
        except (pa.ArrowException, OverflowError):
            pass
    return pa.array([None if v is None else text_of(v) for v in values], pa.string())


Array = np.ndarray[Any, Any]

EXACT_INTEGERS = 2**53
"""Up to this limit, float64 represents every integer exactly."""

_INTEGER = r"^[+-]?[0-9]+$"
_FLOAT = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(?i:nan|inf|infinity)$"
_DECIMAL_COMMA = r"^(\s*[+-]?\d*),(\d+(?:[eE][+-]?\d+)?\s*)$"
_POINT = r"^(\s*[+-]?\d*)\.(\d*(?:[eE][+-]?\d+)?\s*)$"
_WHOLE_COMMA = r"^(\s*-?\d+),0+(\s*)$"
_GROUPS = {" ": "[ \u00a0\u202f]", "'": "['\u2019]", ".": r"\.", ",": ","}
_TRUTH_DIGITS = {"true": "1", "false": "0"}
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_S = 86_400.0
_SECONDS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


class TimeFormat(StrictModel):
    """The format of times in text, in the codes of Python's ``strptime``."""

    time: str = Field(description="such as %d.%m.%Y or %m/%d/%Y %H:%M; UTC unless it has %z")

    @model_validator(mode="after")
    def _states_a_day(self) -> TimeFormat:
        sample = datetime(2003, 4, 5, tzinfo=UTC)
        try:
            found = datetime.strptime(sample.strftime(self.time), self.time)
        except ValueError as error:
            raise ValueError(f"time: {self.time!r} is not a valid format: {error}") from None
        if (found.year, found.month, found.day) != (sample.year, sample.month, sample.day):
            raise ValueError(f"time: {self.time!r} needs a year, a month and a day: %Y, %m and %d")
        return self


Cast = Literal["number", "time"] | TimeFormat


_DAYS = (
    *("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d.%m.%y", "%d/%m/%y", "%m/%d/%y"),
    *("%d-%b-%Y", "%d %b %Y", "%b %d, %Y", "%d %B %Y", "%B %d, %Y"),
)
TIME_FORMATS = tuple(
    TimeFormat(time=day + clock) for day in _DAYS for clock in ("", " %H:%M", " %H:%M:%S")
)
"""Accepted formats of times in text besides ISO 8601; the most common first."""

Marks = tuple[str, str | None]
"""The decimal mark of numbers and the thousands mark."""


def _pattern(decimal: str, thousands: str | None) -> re.Pattern[str]:
    groups = "" if thousands is None else rf"|\d{{1,3}}(?:{_GROUPS[thousands]}\d{{3}})+"
    whole, mark = rf"(?:\d+{groups})", re.escape(decimal)
    return re.compile(rf"[+-]?(?:{whole}(?:{mark}\d*)?|{mark}\d+)(?:[eE][+-]?\d+)?")


NUMBER_MARKS: Mapping[Marks, re.Pattern[str]] = {
    marks: _pattern(*marks)
    for marks in (
        *((".", ","), (",", None), (",", ".")),
        *((".", "'"), (",", "'"), (".", " "), (",", " ")),
    )
}
"""Accepted number formats besides Python's; the most common first."""


def other_marks(decimal: str, thousands: str | None) -> tuple[Marks, ...]:
    """Return the alternative marks of a text that these marks cannot read.

    If the user chose a decimal comma, it is not questioned: a point is then not a decimal mark.
    """
    found = tuple(marks for marks in NUMBER_MARKS if marks != (decimal, thousands))
    return found if decimal == "." else tuple(marks for marks in found if marks[0] == decimal)


def matching_marks(
    words: Iterable[str], among: Iterable[Marks] = tuple(NUMBER_MARKS)
) -> tuple[Marks, ...]:
    """Return the marks with which all words are numbers."""
    words = list(words)
    return tuple(m for m in among if all(NUMBER_MARKS[m].fullmatch(word) for word in words))


def matching_formats(
    words: Iterable[str], among: Iterable[TimeFormat] = TIME_FORMATS
) -> tuple[TimeFormat, ...]:
    """Return the formats with which all words are times."""
    words = list(words)
    return tuple(f for f in among if all(parse_time(word, f) is not None for word in words))


def marks_options(marks: Marks) -> str:
    """Return the options of ``geo-ray data`` that read numbers with these marks."""
    decimal, thousands = marks
    named = {None: "", " ": "--thousands space", "'": '--thousands "\'"'}
    options = [named.get(thousands, f"--thousands {thousands}")]
    options += ["--decimal ,"] if decimal == "," else []
    return " ".join(option for option in options if option)


@dataclass(frozen=True)
class Numbers:
    """Numbers read from a column. Where a value is missing or bad, ``values`` holds 0.

    Attributes:
        values: (N,) int64, uint64 or float64.
        null: (N,) the value is missing.
        nan: (N,) the value is "not a number".
        bad: (N,) it cannot be read as a number.
        inexact: (N,) an integer beyond 2**53 that was converted to float64.
    """

    values: Array
    null: Array
    nan: Array
    bad: Array
    inexact: Array

    @property
    def missing(self) -> Array:
        """(N,) whether the value is missing or not a number."""
        missing: Array = self.null | self.nan
        return missing


def is_list(kind: pa.DataType) -> bool:
    """Whether each row of a column is a list."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column is text."""
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Whether a column has bytes that are not text."""
    types = pa.types
    is_plain = types.is_binary(kind) or types.is_large_binary(kind)
    return bool(is_plain or types.is_fixed_size_binary(kind) or types.is_binary_view(kind))


def decoded(array: pa.Array) -> pa.Array:
    """Return the plain array of a dictionary-encoded (categorical) or run-length-encoded one."""
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if pa.types.is_run_end_encoded(array.type):
        return pc.run_end_decode(array)
    return array


def with_points(array: pa.Array, decimal: str, thousands: str | None = None) -> pa.Array:
    """Rewrite numbers in text as Python writes them; leave other text and other columns unchanged.

    Args:
        array: (N,) of any type.
        decimal: the decimal mark. With a comma, a number with a point is not read: it may be
            a thousand times as large.
        thousands: the mark between groups of three digits, if any.
    """
    if not is_text(array.type) or (decimal == "." and thousands is None):
        return array
    text = array.cast(pa.string())
    if thousands is not None:
        text = _without_groups(text, thousands, rf"(?:\{decimal}\d*)?")
    if decimal == ",":
        text = pc.replace_substring_regex(text, _POINT, r"\1?\2")  # makes it not a number
        text = pc.replace_substring_regex(text, _DECIMAL_COMMA, r"\1.\2")
    return text


def whole_words(array: pa.Array, decimal: str, thousands: str | None = None) -> pa.Array:
    """Reduce whole numbers in text to their digits, as `with_points` reads them; for categories."""
    if not is_text(array.type) or (decimal == "." and thousands is None):
        return array
    text = array.cast(pa.string())
    if thousands is not None:
        text = _without_groups(text, thousands, rf"(?:\{decimal}0*)?")
    return pc.replace_substring_regex(text, _WHOLE_COMMA, r"\1\2") if decimal == "," else text


def to_numbers(array: pa.Array, cast: Cast = "number") -> Numbers | None:
    """Read a column of single values.

    Args:
        array: (N,) numbers, booleans, decimals, times or text.
        cast: "time" reads text as ISO 8601 times, a format reads text in that format. Times
            become seconds since 1970 in UTC.

    Returns:
        The numbers; None if values of this type are not numbers (lists, binary and so on).
    """
    array = decoded(array)
    if isinstance(cast, TimeFormat) and pa.types.is_integer(array.type):  # 20260131
        array = _padded(array, cast)
    kind, types = array.type, pa.types
    if types.is_null(kind):
        return _of_floats(array.cast(pa.float64()))
    if is_text(kind):
        text = pc.utf8_trim_whitespace(array.cast(pa.string()))
        return _of_text(text) if cast == "number" else _of_times_in_text(text, cast)
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


def as_times(array: pa.Array, cast: TimeFormat) -> tuple[pa.Array, Array]:
    """Parse text, or whole numbers such as 20260131, as Arrow times in UTC.

    Returns:
        Times (N,), and (N,) which values do not have the format; those are null.
    """
    text = array.cast(pa.string()) if is_text(array.type) else _padded(array, cast)
    times = _of_times_in_text(pc.utf8_trim_whitespace(text), cast)
    micros = np.rint(times.values * 1e6).astype(np.int64)
    made = pa.array(micros, mask=times.null | times.bad).cast(pa.timestamp("us", "UTC"))
    return made, times.bad


def parse_time(word: str, cast: Cast = "time") -> float | None:
    """Return a time or date as seconds since 1970, in UTC if it has no time zone.

    Args:
        word: without spaces around it; ISO 8601, where ``UTC`` may be the zone, unless ``cast`` is
            a format.
        cast: the format.
    """
    try:
        if isinstance(cast, TimeFormat):
            time = datetime.strptime(word, cast.time)
        elif _DATE.match(word) is None:
            return None
        else:
            time = datetime.fromisoformat(word.removesuffix(" UTC"))
            if time.tzinfo is not None and word.endswith(" UTC"):
                return None
        return (time.replace(tzinfo=time.tzinfo or UTC) - _EPOCH).total_seconds()
    except (ValueError, OverflowError):
        return None


def _padded(array: pa.Array, cast: TimeFormat) -> pa.Array:
    """Write whole numbers as text with the leading zeros of a format such as %d%m%Y."""
    width = len(datetime(2003, 4, 5, tzinfo=UTC).strftime(cast.time))
    return pc.utf8_lpad(array.cast(pa.string()), width, padding="0")


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
    """Return trimmed text: numbers as Python writes them, true and false, or an empty text."""
    null = pc.fill_null(pc.equal(text, ""), True)
    text = pc.if_else(null, pa.scalar(None, pa.string()), text)
    is_integer = pc.fill_null(pc.match_substring_regex(text, _INTEGER), False)
    is_float = pc.fill_null(pc.match_substring_regex(text, _FLOAT), False)
    rest = pc.invert(pc.or_(null, is_float))
    if pc.any(rest).as_py():
        lower = pc.utf8_lower(text)
        for word, digit in _TRUTH_DIGITS.items():
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


def _of_times_in_text(text: pa.Array, cast: Cast) -> Numbers:
    null = _mask(pc.fill_null(pc.equal(text, ""), True))
    encoded = text.dictionary_encode()
    parsed = [parse_time(word, cast) for word in encoded.dictionary.to_pylist()] + [None]
    value_W = np.array([0.0 if value is None else value for value in parsed], np.float64)
    bad_W = np.array([value is None for value in parsed], bool)
    at = encoded.indices.cast(pa.int64()).fill_null(len(parsed) - 1).to_numpy(zero_copy_only=False)
    nothing = np.zeros(len(null), bool)
    return Numbers(np.where(null, 0.0, value_W[at]), null, nothing, bad_W[at] & ~null, nothing)


def _seconds(array: pa.Array) -> pa.Array | None:
    """Return times as float64 seconds and dates as their midnight; None for other types."""
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


def _without_groups(text: pa.Array, thousands: str, fraction: str) -> pa.Array:
    """Remove the thousands marks from numbers; other text is unchanged."""
    mark = _GROUPS[thousands]
    pattern = rf"^\s*[+-]?\d{{1,3}}(?:{mark}\d{{3}})+{fraction}\s*$"
    bare = pc.replace_substring_regex(pc.utf8_trim_whitespace(text), mark, "")
    return pc.if_else(pc.match_substring_regex(text, pattern), bare, text)


def _mask(array: pa.Array) -> Array:
    mask: Array = array.to_numpy(zero_copy_only=False).astype(bool, copy=False)
    return mask


Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class WordColumn:
    """A column read as categories.

    Attributes:
        words: the distinct texts, without spaces around them.
        codes: (N,) index into ``words``, -1 where the value is missing (also empty text and NaN).
    """

    words: tuple[str, ...]
    codes: Ints


def to_words(array: pa.Array) -> WordColumn | None:
    """Read a column of single values.

    Integers and equal floats give the same word. Text is not converted, so ``01`` and ``1`` are
    two words.

    Args:
        array: (N,) text, numbers, booleans, times.

    Returns:
        The words; None if values of this type are not categories (lists, binary and so on).
    """
    array, types = decoded(array), pa.types
    kind = array.type
    if is_list(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return None
    if types.is_binary_view(kind):
        return None
    if types.is_nested(kind) or types.is_fixed_size_binary(kind):
        return None
    if types.is_null(kind):
        return WordColumn((), np.full(len(array), -1, np.int64))
    encoded = array.dictionary_encode()
    raw = [_word(value) for value in python_values(encoded.dictionary)]
    words = tuple(dict.fromkeys(word for word in raw if word is not None))
    index = {word: number for number, word in enumerate(words)}
    code_W = np.array([-1 if word is None else index[word] for word in raw] + [-1], np.int64)
    codes = encoded.indices.cast(pa.int64()).fill_null(len(raw)).to_numpy(zero_copy_only=False)
    return WordColumn(words, code_W[codes])


def _word(value: Any) -> str | None:
    if value is None or value != value:  # NaN differs from itself
        return None
    return text_of(value) or None
