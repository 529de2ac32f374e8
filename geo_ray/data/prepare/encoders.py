"""Encode one source column as numbers, and report the rows that cannot be encoded.

Numeric sources: casting, missing and infinite values, scaling. Categorical sources: positions in
a vocabulary, or hash buckets.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geo_ray.data.arrow_values import (
    EXACT_INTEGERS,
    Numbers,
    decoded,
    is_binary,
    is_list,
    is_text,
    text_of,
    to_numbers,
    to_words,
)
from geo_ray.data.columns import ColumnType, Ragged
from geo_ray.data.parquet import ragged_of
from geo_ray.data.prepare.config import Fill, Linear, Source, Vocabulary, Word

Array = np.ndarray[Any, Any]

Kind = Literal[
    "absent", "missing", "text", "infinite", "inexact", "fraction", "range", "truth", "unknown",
    "is_list", "is_single", "length", "unreadable", "not_text", "not_bytes", "not_list",
]  # fmt: skip
"""Kinds of errors; `geo_ray.data.prepare.findings` has their messages."""


@dataclass(frozen=True)
class Wrong:
    """Rows that a source cannot encode.

    Attributes:
        kind: the kind of error.
        rows_N: (N,) the rows.
    """

    kind: Kind
    rows_N: Array


@dataclass
class Part:
    """The encoded rows of a source.

    Attributes:
        values_NW: (N, W) numbers; 0 in rows that are wrong or dropped.
        dropped_N: (N,) rows to drop.
        wrong: the errors, one record per kind.
        filled: rows whose missing value was replaced.
        other: words that are not in the vocabulary -> their rows.
        ragged: (N,) the rows of a column of text, bytes or lists; `values_NW` is then unused.
    """

    values_NW: Array
    dropped_N: Array
    wrong: list[Wrong] = field(default_factory=list)
    filled: int = 0
    other: Counter[str] = field(default_factory=Counter)
    ragged: Ragged | None = None

    def refuse(self, kind: Kind, rows_N: Array) -> None:
        """Record rows with an error, if any."""
        if rows_N.any():
            self.wrong.append(Wrong(kind, rows_N))


def any_of(mask_NW: Array) -> Array:
    """Return (N,) whether any number of the row is marked."""
    rows_N: Array = np.any(mask_NW, axis=1)
    return rows_N


def unusable(kind: Kind, rows: int, width: int) -> Part:
    """Build the result of a source that cannot be used at all."""
    part = Part(np.zeros((rows, width)), np.zeros(rows, bool))
    part.refuse(kind, np.ones(rows, bool))
    return part


def number_part(source: Source, array: pa.Array) -> Part:
    """Read and convert a column of numbers.

    Args:
        source: a source of a resolved preparation, without references to statistics.
        array: (N,) numbers, or lists of ``source.length`` numbers.
    """
    table = _table(source, decoded(array))
    if isinstance(table, str):
        return unusable(table, len(array), source.width)
    n, part = table.numbers, Part(table.numbers.values, np.zeros(len(array), bool))
    part.refuse("length", table.wrong_length_N)
    part.refuse("text", any_of(n.bad))
    part.refuse("inexact", any_of(n.inexact))
    missing_NW = n.missing & ~table.wrong_length_N[:, None]
    if n.values.dtype.kind == "f":
        infinite_NW = np.isinf(n.values)
        if source.infinite == "refuse":
            part.refuse("infinite", any_of(infinite_NW))
        elif source.infinite == "missing":
            missing_NW = missing_NW | infinite_NW
            part.values_NW = np.where(infinite_NW, 0.0, part.values_NW)
    if missing_NW.any():
        _fill(source, part, missing_NW)
    if isinstance(source.scale, Linear):
        before = _to_floats(part)
        with np.errstate(over="ignore"):
            part.values_NW = (before - source.scale.subtract) / source.scale.divide
        part.refuse("range", any_of(np.isinf(part.values_NW) & np.isfinite(before)))
    return part


def ragged_part(source: Source, array: pa.Array, wanted: ColumnType) -> Part:
    """Copy a column of text, bytes or lists of numbers.

    Args:
        source: a source of a resolved preparation.
        array: (N,) of any type.
        wanted: the type of the task's column, which is ragged.
    """
    array = decoded(array)
    null_N = array.is_null().to_numpy(zero_copy_only=False).astype(bool)
    part = Part(np.zeros((len(array), 0)), np.zeros(len(array), bool))
    valid = np.flatnonzero(~null_N)
    found = _ragged_rows(array.take(pa.array(valid)) if null_N.any() else array, wanted)
    lengths_N = np.zeros(len(array), np.int64)
    if isinstance(found, str):
        part.refuse(found, ~null_N)
        found = _RaggedRows(Ragged.of(str(wanted), []), {})
    else:
        lengths_N[valid] = found.rows.lengths
    for kind, rows_M in found.wrong.items():
        if kind == "missing":
            null_N[valid[rows_M]] = True
        else:
            wrong_N = np.zeros(len(array), bool)
            wrong_N[valid[rows_M]] = True
            part.refuse(kind, wrong_N)
    offsets = np.concatenate(([0], np.cumsum(lengths_N))).astype(np.int64)
    part.ragged = Ragged(found.rows.kind, found.rows.values, offsets)
    if source.missing == "drop_row":
        part.dropped_N = null_N
    else:
        part.refuse("missing", null_N)
    return part


@dataclass(frozen=True)
class _RaggedRows:
    """The rows of a column without missing values, and (N,) which rows cannot be used."""

    rows: Ragged
    wrong: dict[Kind, Array]


def _ragged_rows(array: pa.Array, wanted: ColumnType) -> _RaggedRows | Kind:
    kind, types = array.type, pa.types
    if types.is_null(kind):
        return _RaggedRows(Ragged.of(str(wanted), []), {})
    if wanted.ragged == "string":
        return (
            _RaggedRows(ragged_of(array.cast(pa.large_string())), {})
            if is_text(kind)
            else "not_text"
        )
    if wanted.ragged == "bytes":
        if not is_binary(kind):
            return "not_bytes"
        return _RaggedRows(ragged_of(array.cast(pa.large_binary())), {})
    if not is_list(kind):
        return "not_list"
    numbers = to_numbers(array.flatten())
    if numbers is None:
        return "unreadable"
    lengths_N = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths_N))).astype(np.int64)
    fitted, misfits = fit_dtype(numbers.values[:, None], wanted.dtype)
    masks: list[tuple[Kind, Array]] = [("missing", numbers.missing), ("text", numbers.bad)]
    masks += [("inexact", numbers.inexact), *((one.kind, one.rows_N) for one in misfits)]
    if numbers.values.dtype.kind == "f":
        masks.append(("infinite", np.isinf(numbers.values)))
    row_V = np.repeat(np.arange(len(array)), lengths_N)
    wrong: dict[Kind, Array] = {}
    for name, mask_V in masks:
        if mask_V.any():
            rows_N = wrong.setdefault(name, np.zeros(len(array), bool))
            rows_N[row_V[mask_V]] = True
    return _RaggedRows(Ragged("list", fitted[:, 0], offsets), wrong)


def _fill(source: Source, part: Part, missing_NW: Array) -> None:
    rows_N = any_of(missing_NW)
    if isinstance(source.missing, Fill):
        value = _beside(part, source.missing.fill)
        part.values_NW = np.where(missing_NW, value, part.values_NW)
        part.filled = int(rows_N.sum())
    elif source.missing == "drop_row":
        part.dropped_N = rows_N
    elif source.missing == "keep":
        part.values_NW = np.where(missing_NW, np.nan, _to_floats(part))
    else:
        part.refuse("missing", rows_N)


def _beside(part: Part, fill: Word) -> Array:
    """Return the replacement in the type of the numbers, whose type is widened if necessary.

    Whole numbers stay integers, so that missing values do not affect other rows.
    """
    number = float(fill)
    if part.values_NW.dtype.kind != "f" and number.is_integer():
        whole = int(fill)
        for name in (part.values_NW.dtype.name, "int64", "uint64"):
            limits = np.iinfo(name)
            if limits.min <= whole <= limits.max and not _outside(part.values_NW, limits).any():
                part.values_NW = part.values_NW.astype(name)
                return np.asarray(whole, name)
    part.values_NW = _to_floats(part)
    return np.asarray(number)


def _to_floats(part: Part) -> Array:
    """Convert numbers to float64; rows whose integers would change are errors."""
    if part.values_NW.dtype.kind in "iu":
        part.refuse("inexact", any_of(_beyond_floats(part.values_NW)))
    return part.values_NW.astype(np.float64)


def _beyond_floats(values_NW: Array) -> Array:
    beyond_NW: Array = (values_NW > EXACT_INTEGERS) | (values_NW < -EXACT_INTEGERS)
    return beyond_NW


def fit_dtype(values_NW: Array, dtype: np.dtype[np.generic]) -> tuple[Array, list[Wrong]]:
    """Convert numbers to the type of the task's column, if no value is lost.

    Rounding to a shorter float is allowed; integers beyond 2**53 in a float are a loss.

    Returns:
        (N, W) of the type, and the rows that do not fit it.
    """
    wrong: dict[Kind, Array] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.kind == "b":
            wrong["truth"] = (values_NW != 0) & (values_NW != 1)
            fitted = values_NW.astype(dtype)
        elif dtype.kind == "f":
            fitted = values_NW.astype(dtype)
            if values_NW.dtype.kind == "f":
                wrong["range"] = np.isinf(fitted) & np.isfinite(values_NW)
            elif values_NW.dtype.itemsize > 1:
                wrong["inexact"] = _beyond_floats(values_NW)
                wrong["range"] = np.isinf(fitted)
        else:
            whole_NW = np.rint(values_NW) if values_NW.dtype.kind == "f" else values_NW
            wrong["fraction"] = whole_NW != values_NW
            wrong["range"] = _outside(whole_NW, np.iinfo(dtype.name))
            fitted = np.where(wrong["range"], 0, whole_NW).astype(dtype)
    found = [Wrong(kind, any_of(mask)) for kind, mask in wrong.items() if mask.any()]
    return fitted, found


def _outside(values_NW: Array, limits: np.iinfo[np.signedinteger]) -> Array:
    """Mark whole numbers outside an integer type's range, without rounding the limits."""
    if values_NW.dtype.kind == "f":
        above: Array = values_NW >= float(limits.max) + (float(limits.max) < 2.0**53)
        return above | (values_NW < float(limits.min)) | ~np.isfinite(values_NW)
    own = np.iinfo(values_NW.dtype.name)
    out_NW: Array = np.zeros(values_NW.shape, bool)
    if limits.max < own.max:
        out_NW = out_NW | (values_NW > limits.max)
    if limits.min > own.min:
        out_NW = out_NW | (values_NW < limits.min)
    return out_NW


@dataclass(frozen=True)
class _Table:
    """Read lists as numbers (N, W), and mark rows whose list has another length than W."""

    numbers: Numbers
    wrong_length_N: Array


def _table(source: Source, array: pa.Array) -> _Table | Kind:
    rows, width = len(array), source.width
    lists = is_list(array.type)
    if lists and source.length is None:
        return "is_list"
    if not lists and width > 1 and not pa.types.is_null(array.type):
        return "is_single"
    if not lists:
        numbers = to_numbers(pa.nulls(rows * width) if width > 1 else array, source.cast)
        if numbers is None:
            return "unreadable"
        return _Table(_shaped(numbers, (rows, width)), np.zeros(rows, bool))
    lengths = pc.list_value_length(array).fill_null(-1).to_numpy(zero_copy_only=False)
    usable_N = lengths == width
    inside = to_numbers(array.filter(pa.array(usable_N)).flatten(), source.cast)
    if inside is None:
        return "unreadable"
    spread = Numbers(*(_spread(a, usable_N, width, fill) for a, fill in (
        (inside.values, 0), (inside.null, True), (inside.nan, False), (inside.bad, False),
        (inside.inexact, False))))  # fmt: skip
    return _Table(spread, (lengths != width) & (lengths != -1))


def _shaped(n: Numbers, shape: tuple[int, int]) -> Numbers:
    parts = (n.values, n.null, n.nan, n.bad, n.inexact)
    return Numbers(*(part.reshape(shape) for part in parts))


def _spread(flat: Array, usable_N: Array, width: int, fill: int | bool) -> Array:
    out = np.full((len(usable_N), width), fill, flat.dtype)
    out[usable_N] = flat.reshape(-1, width)
    return out


_UNKNOWN = -2


def bucket_of(word: str, buckets: int) -> int:
    """Return a word's hash bucket; it is the same in every process, region and release."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % buckets


class WordPlaces:
    """Encodes the words of a column as positions in a vocabulary.

    Args:
        source: a source of a resolved preparation, with a vocabulary of ``values`` or ``hash``.
        vocabulary: that vocabulary.
    """

    def __init__(self, source: Source, vocabulary: Vocabulary) -> None:
        self._source = source
        self._vocabulary = vocabulary
        self._place = {word: place for place, word in enumerate(vocabulary.words)}

    def part(self, array: pa.Array) -> Part:
        """Read and convert a column of categories (N,)."""
        rows, vocabulary = len(array), self._vocabulary
        found = to_words(array)
        if found is None:
            return unusable("unreadable", rows, self._source.width)
        place_W = np.array([self._find(word) for word in found.words] + [_UNKNOWN], np.int64)
        place_N = place_W[found.codes]  # -1 (a missing value) selects the last
        missing_N = found.codes == -1
        part = Part(place_N[:, None], np.zeros(rows, bool))
        if missing_N.any():
            match self._source.missing:
                case Fill(fill=value):
                    place_N[missing_N] = self._find(text_of(value))
                    part.filled = int(missing_N.sum())
                case "other":
                    place_N[missing_N] = vocabulary.places - 1
                    part.filled = int(missing_N.sum())
                case "drop_row":
                    part.dropped_N = missing_N
                case _:
                    part.refuse("missing", missing_N)
        if vocabulary.hash is None and vocabulary.other == "bucket":
            lost_W = np.flatnonzero(place_W[:-1] == vocabulary.places - 1)
            rows_W = np.bincount(found.codes[~missing_N], minlength=len(found.words))
            part.other = Counter({found.words[w]: int(rows_W[w]) for w in lost_W})
        part.refuse("unknown", (place_N == _UNKNOWN) & ~missing_N)
        place_N = np.where(place_N < 0, 0, place_N)
        if vocabulary.encode == "one_hot":
            part.values_NW = np.zeros((rows, vocabulary.places), np.uint8)
            part.values_NW[np.arange(rows), place_N] = 1
        else:
            part.values_NW = place_N[:, None]
        return part

    def _find(self, word: str) -> int:
        if self._vocabulary.hash is not None:
            return bucket_of(word, self._vocabulary.hash)
        other = self._vocabulary.places - 1 if self._vocabulary.other == "bucket" else _UNKNOWN
        return self._place.get(word, other)
