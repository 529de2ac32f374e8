"""Apply a preparation: convert the columns of the files to the columns of the task.

The same code prepares shards and, at inference, single rows:

    preparer = Preparer(load_prepared("data/manifest.json"), only=["x"])
    x = preparer.apply({"age": [31, 64], "country": ["DE", None]}).columns["x"]
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from geo_ray.base.errors import SchemaMismatchError
from geo_ray.base.text import listed
from geo_ray.data.arrow_values import (
    Marks,
    arrow_of,
    decoded,
    other_marks,
    python_values,
    to_words,
    whole_words,
    with_points,
)
from geo_ray.data.columns import Column, ColumnType, Ragged, counts_text, parse_types
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.files.site import SiteFile, SiteReader
from geo_ray.data.prepare.config import Preparation, Source
from geo_ray.data.prepare.encoders import (
    Array,
    Part,
    WordPlaces,
    Wrong,
    fit_dtype,
    number_part,
    ragged_part,
    unusable,
)
from geo_ray.data.prepare.findings import ColumnFacts, Findings, Spot, shown

MOST_OTHER_WORDS = 1000
"""Maximum number of words outside a column's vocabulary that are remembered."""


@dataclass
class Counts:
    """Counts of a preparation, by column of the files.

    Attributes:
        rows: input rows.
        dropped: dropped rows in total.
        dropped_by: column -> rows dropped because of it; a row may count for several columns.
        filled: column -> missing values that were replaced.
        other: column -> words that are not in its vocabulary.
        other_words: column -> these words and their row counts; at most `MOST_OTHER_WORDS` of them.
    """

    rows: int = 0
    dropped: int = 0
    dropped_by: Counter[str] = field(default_factory=Counter)
    filled: Counter[str] = field(default_factory=Counter)
    other: Counter[str] = field(default_factory=Counter)
    other_words: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, more: Counts) -> None:
        """Add the counts of further rows."""
        self.rows += more.rows
        self.dropped += more.dropped
        self.dropped_by.update(more.dropped_by)
        self.filled.update(more.filled)
        self.other.update(more.other)
        for column, words in more.other_words.items():
            self.add_other_words(column, words)

    def add_other_words(self, column: str, words: Mapping[str, int]) -> None:
        """Count words outside a vocabulary, unless there are too many different ones."""
        known = self.other_words.setdefault(column, Counter())
        for word, rows in words.items():
            if word in known or len(known) < MOST_OTHER_WORDS:
                known[word] += rows


@dataclass(frozen=True)
class Prepared:
    """The result of preparing some rows.

    Attributes:
        columns: column of the task -> (N,), (N, length) or ragged, without dropped rows.
        is_valid: (input rows,) whether each row was not dropped.
        counts: counts of the preparation.
    """

    columns: dict[str, Column]
    is_valid: Array
    counts: Counts


class Preparer:
    """Applies one preparation; it reads no file and does not change its arguments.

    Args:
        preparation: a resolved preparation, see `geo_ray.data.prepare.resolve`.
        only: columns of the task to make; None for all. Inference has no label column.
        decimal: the decimal mark of numbers that are text, "." or ",".
        thousands: their thousands mark, if any.
        site: translation of the rows' columns to the shared ones, if they differ; see `load_site`.
            Number marks that it sets need not be given here.

    Raises:
        SchemaMismatchError: if the preparation is not resolved, or lacks a column of ``only``.
        ConfigError: if the marks contradict each other or those of the site.
    """

    def __init__(
        self,
        preparation: Preparation,
        only: Sequence[str] | None = None,
        decimal: str = ".",
        thousands: str | None = None,
        site: SiteFile | None = None,
    ) -> None:
        marks = ReadOptions(decimal=decimal, thousands=thousands)
        if site is not None:
            marks = site.read.added_to(marks, "the site file")
        self._decimal = marks.decimal
        self._thousands = marks.thousands
        self._other_marks = other_marks(marks.decimal, marks.thousands)
        self._site = site
        self._types = parse_types(preparation.types)
        chosen = tuple(preparation.types) if only is None else tuple(only)
        unknown = sorted(set(chosen) - (set(preparation.types) & set(preparation.columns)))
        if unknown:
            raise SchemaMismatchError(
                f"the preparation does not make column {unknown[0]!r}; it makes "
                f"{listed(sorted(preparation.types))}",
                fix="Use the preparation that `geo-ray data shard` wrote next to the manifest.",
            )
        self._sources = {name: preparation.columns[name] for name in chosen}
        self._places = {
            (name, number): WordPlaces(source, source.vocabulary)
            for name, sources in self._sources.items()
            for number, source in enumerate(sources)
            if source.vocabulary is not None
        }

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the needed columns of the files, without duplicates."""
        names = [source.column for sources in self._sources.values() for source in sources]
        return tuple(dict.fromkeys(names))

    def apply(self, rows: Mapping[str, Sequence[Any] | Array]) -> Prepared:
        """Prepare rows that are in memory.

        Args:
            rows: column -> values (N,), None for a missing one; further columns are ignored. With
                a site, these are the columns of the site.

        Returns:
            The task's columns, without the rows that ``missing: drop_row`` drops; see
            `Prepared.is_valid`.

        Raises:
            SchemaMismatchError: listing all rows that the preparation rejects.
        """
        own = self.inputs if self._site is None else self._site.own_names(self.inputs)
        arrays = {name: _array(name, values) for name, values in rows.items() if name in own}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise SchemaMismatchError(
                f"columns differ in their number of rows: {counts_text(lengths)}",
                fix="Give each column one value per row, None for a missing value.",
            )
        findings = Findings(self._types, in_use=self.inputs)
        names = tuple(rows)
        if self._site is not None:
            reader = SiteReader(self._site, "the site file", self._decimal, self._thousands)
            names = reader.names(names, "the rows")
            arrays = reader.columns(arrays, 1)
            problem = reader.take_problem("the rows")
            if problem is not None:
                raise problem
        spot = Spot("the rows", 1, names)
        prepared = self.transform(arrays, findings, spot)
        for name, sources in self._sources.items():
            for source in sources:
                if source.column not in names:
                    findings.add_absent(name, source, spot)
        findings.raise_any("the rows do not match the preparation", prepared=True, is_sealed=True)
        return prepared

    def transform(
        self, arrays: Mapping[str, pa.Array], findings: Findings, spot: Spot, rows: int = 0
    ) -> Prepared:
        """Prepare Arrow columns; errors are recorded and not raised.

        Args:
            arrays: column of the files -> (N,).
            findings: records the errors; if it records any, the result must not be used.
            spot: the origin of the rows.
            rows: N, needed if there may be no column.

        Returns:
            The task's columns.
        """
        rows = len(next(iter(arrays.values()))) if arrays else rows
        parts = {
            name: [
                self._part((name, number), source, arrays.get(source.column), rows)
                for number, source in enumerate(sources)
            ]
            for name, sources in self._sources.items()
        }
        counts = Counts(rows=rows)
        valid_N = np.ones(rows, bool)
        for _, source, part in _each(self._sources, parts):
            valid_N &= ~part.dropped_N
            counts.dropped_by[source.column] += int(part.dropped_N.sum())
            counts.filled[source.column] += part.filled
            counts.other[source.column] += sum(part.other.values())
            if part.other:
                counts.add_other_words(source.column, part.other)
        counts.dropped = rows - int(valid_N.sum())
        for name, source, part in _each(self._sources, parts):
            for wrong in part.wrong:
                _note(findings, name, source, wrong, arrays, valid_N, spot, self._other_marks)
        columns = {
            name: self._join(name, parts[name], arrays, valid_N, findings, spot) for name in parts
        }
        return Prepared(columns, valid_N, counts)

    def _part(
        self, key: tuple[str, int], source: Source, array: pa.Array | None, rows: int
    ) -> Part:
        if array is None:
            return unusable("absent", rows, source.width)
        kind = self._types[key[0]]
        if kind.ragged is not None:
            return ragged_part(source, array, kind)
        places = self._places.get(key)
        if places is not None:
            return places.part(whole_words(decoded(array), self._decimal, self._thousands))
        return number_part(source, with_points(decoded(array), self._decimal, self._thousands))

    def _join(
        self,
        name: str,
        parts: Sequence[Part],
        arrays: Mapping[str, pa.Array],
        valid_N: Array,
        findings: Findings,
        spot: Spot,
    ) -> Column:
        kind: ColumnType = self._types[name]
        if kind.ragged is not None:
            found = parts[0].ragged
            return Ragged.of(str(kind), []) if found is None else found[valid_N]
        out_NW = np.empty((int(valid_N.sum()), kind.length or 1), kind.dtype)
        at = 0
        for source, part in zip(self._sources[name], parts, strict=True):
            fitted_NW, wrong = fit_dtype(part.values_NW[valid_N], kind.dtype)
            for one in wrong:
                rows_N = np.zeros(len(valid_N), bool)
                rows_N[np.flatnonzero(valid_N)[one.rows_N]] = True
                known = [w.rows_N for w in part.wrong]
                rows_N &= ~np.logical_or.reduce(known) if known else True
                wrong_rows = Wrong(one.kind, rows_N)
                _note(findings, name, source, wrong_rows, arrays, valid_N, spot, self._other_marks)
            out_NW[:, at : at + source.width] = fitted_NW
            at += source.width
        return out_NW[:, 0] if kind.length is None else out_NW


def _array(name: str, values: Any) -> pa.Array:
    """Convert the caller's values of a column to one array."""
    single = isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable)
    if single or (isinstance(values, np.ndarray) and not values.ndim):
        raise SchemaMismatchError(
            f"column {name!r} is {shown(values)}; it must have one value per row",
            fix="Give each column a list of values, also for a single row.",
        )
    try:
        return arrow_of(values)
    except UnicodeEncodeError as error:
        raise SchemaMismatchError(
            f"column {name!r} has half a surrogate pair in its text: {error.object[error.start]!r}",
            fix="Write the character itself, or both halves.",
        ) from None


def _each(
    sources: Mapping[str, Sequence[Source]], parts: Mapping[str, Sequence[Part]]
) -> list[tuple[str, Source, Part]]:
    return [
        (name, source, part)
        for name in sources
        for source, part in zip(sources[name], parts[name], strict=True)
    ]


def _note(
    findings: Findings,
    name: str,
    source: Source,
    wrong: Wrong,
    arrays: Mapping[str, pa.Array],
    valid_N: Array,
    spot: Spot,
    marks: tuple[Marks, ...],
) -> None:
    """Exclude dropped rows, whose values do not matter."""
    wrong_N = wrong.rows_N & valid_N
    rows = np.flatnonzero(wrong_N)
    if not len(rows):
        return
    array = arrays.get(source.column)
    if array is None:
        facts = ColumnFacts(None)
    else:
        words = to_words(array.take(pa.array(rows))) if wrong.kind in ("text", "unknown") else None
        whole = len(rows) >= len(array) - array.null_count
        (example,) = python_values(array.slice(int(rows[0]), 1))
        facts = ColumnFacts(example, words.words if words else (), whole, marks)
    findings.add(name, source, wrong.kind, len(rows), spot.at(int(rows[0])), facts)
