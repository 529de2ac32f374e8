"""The site file: how one site's files differ from the format shared by all regions.

A preparation is the same in all regions, which its fingerprint proves. But sites have their own
names of columns, words, time formats and units. A site file translates them while rows are read,
so that all later steps see the shared columns. It is not part of the fingerprint. It may also set
reading options, since sites use different separators and encodings.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, ValidationError, model_validator

from geo_ray.base.errors import ConfigError, SchemaMismatchError
from geo_ray.base.explain import explain
from geo_ray.base.model import StrictModel
from geo_ray.base.text import listed, missing_path, nearest_word
from geo_ray.base.yaml import parse_yaml, read_text
from geo_ray.data.arrow_values import (
    Marks,
    TimeFormat,
    as_times,
    decoded,
    is_text,
    marks_options,
    matching_formats,
    matching_marks,
    other_marks,
    python_values,
    text_of,
    to_numbers,
    to_words,
    with_points,
)
from geo_ray.data.files.options import CHARACTERS, ReadOptions

_SHOWN = 40

Array = np.ndarray[Any, Any]


class Unit(StrictModel):
    """Conversion of a column's numbers to the shared unit: value * multiply + add."""

    multiply: float = Field(
        default=1.0, description="factor, applied first, such as 0.45359237 for lb to kg"
    )
    add: float = Field(default=0.0, description="then added")

    @model_validator(mode="after")
    def _keeps_the_value(self) -> Unit:
        if self.multiply == 0:
            raise ValueError("multiply must not be 0")
        return self


class SiteColumn(StrictModel):
    """Translation of one column of the site to a shared one."""

    rename: str | None = Field(default=None, description="the shared name of the column")
    words: dict[str, bool | int | float | str | None] = Field(
        default_factory=dict,
        description="the site's word -> the shared word, or null for a missing value",
    )
    cast: TimeFormat | None = Field(
        default=None, description="{time: FORMAT}, such as %d.%m.%Y, if the column contains times"
    )
    unit: Unit | None = Field(
        default=None, description="{multiply: A, add: B}, if the column uses another unit"
    )

    @model_validator(mode="after")
    def _no_contradiction(self) -> SiteColumn:
        if self.cast is not None and self.unit is not None:
            raise ValueError("cast and unit cannot be combined: a time has no unit")
        twice = [w for w, n in Counter(text_of(word) for word in self.words).items() if n > 1]
        if twice:
            raise ValueError(f"words: {twice[0]!r} is listed twice")
        return self


class SiteRead(StrictModel):
    """Reading options of a site's files; each key is also an option of ``geo-ray data``."""

    delimiter: str | None = Field(default=None, description="delimiter of CSV files")
    decimal: Literal[".", ","] | None = Field(default=None, description="decimal mark")
    thousands: str | None = Field(default=None, description="thousands mark, or the word `space`")
    encoding: str | None = Field(default=None, description="encoding of text files")
    header: tuple[str, ...] | None = Field(
        default=None, description="names of the columns of CSV files without a header line"
    )
    nulls: tuple[str, ...] = Field(
        default=(), description="additional words that mean a missing value"
    )

    def added_to(self, options: ReadOptions, origin: str) -> ReadOptions:
        """Return the options combined with those of the site file.

        Args:
            options: the user's options; default values count as unset.
            origin: the name of the site file, for messages.

        Raises:
            ConfigError: both contradict each other, or the site file is invalid.
        """
        given: dict[str, Any] = {
            name: CHARACTERS.get(value, value) if isinstance(value, str) else value
            for name, value in self
            if name != "nulls" and value is not None
        }
        usual = ReadOptions()
        for name, value in given.items():
            other = getattr(options, name)
            if other not in (getattr(usual, name), value):
                raise ConfigError(
                    f"{origin} sets {name} to {value!r}, but --{name} is {other!r}",
                    fix=f"Remove --{name}, or correct read.{name} in {origin}.",
                )
        try:
            return replace(options, nulls=(*options.nulls, *self.nulls), **given)
        except ConfigError as error:
            fix = f"Correct `read` in {origin}. {error.fix}"
            raise ConfigError(f"{origin}: read: {error.message}", fix=fix) from None


class SiteFile(StrictModel):
    """Reading options of a site's files, and its columns that differ from the shared ones."""

    version: Literal[1] = Field(default=1, description="version of this format")
    read: SiteRead = Field(default_factory=SiteRead, description="reading options of the files")
    columns: dict[str, SiteColumn] = Field(
        default_factory=dict,
        description="column of the site's files -> its translation to a shared column",
    )

    @model_validator(mode="after")
    def _one_column_per_name(self) -> SiteFile:
        names = Counter(self.shared_name(name) for name in self.columns)
        twice = [name for name, n in names.items() if n > 1]
        if twice:
            raise ValueError(f"columns: two of them become {twice[0]!r}")
        return self

    def shared_name(self, column: str) -> str:
        """Return the shared name of a column of the site."""
        known = self.columns.get(column)
        return column if known is None or known.rename is None else known.rename

    def own_names(self, shared: Collection[str]) -> set[str]:
        """Return the columns of the site that may translate to the given shared columns."""
        renamed = {name for name in self.columns if self.shared_name(name) in shared}
        return renamed | {name for name in shared if self.shared_name(name) == name}


def load_site(path: Path) -> SiteFile:
    """Read a site file.

    Raises:
        ConfigError: naming every key that is wrong.
    """
    if not path.exists():
        raise ConfigError(
            f"there is no site file {path}{missing_path(path)}", fix="Correct the path of --site."
        )
    tree = parse_yaml(read_text(path), str(path))
    try:
        return SiteFile.model_validate_json(json.dumps(tree.value, allow_nan=False))
    except ValidationError as error:
        lines = explain(error, SiteFile, tree.origins)
        raise ConfigError(
            "\n    ".join([f"{path}: this site file is invalid:", *lines]),
            fix="Correct the keys; docs/guides/preparation.md lists them.",
        ) from None


@dataclass
class _Problem:
    """Values of one column of a file that could not be translated."""

    what: str
    example: object
    row: int
    rows: int
    hint: str


class SiteReader:
    """Translates columns of a site to shared ones and collects untranslatable values.

    Args:
        site: the translation.
        origin: the name of the site file, for messages.
        decimal: the decimal mark of numbers that are text.
        thousands: their thousands mark.

    Attributes:
        untranslated: shared columns with values that could not be translated.
    """

    def __init__(
        self, site: SiteFile, origin: str, decimal: str = ".", thousands: str | None = None
    ) -> None:
        self._site = site
        self._origin = origin
        self._marks = decimal, thousands
        self._problems: dict[tuple[str, str], _Problem] = {}
        self._seen: set[str] = set()
        self.untranslated: set[str] = set()

    def names(self, own: Iterable[str], path: str) -> tuple[str, ...]:
        """Return the shared names of the columns of a file.

        Raises:
            SchemaMismatchError: two columns translate to the same name.
        """
        own = tuple(own)
        self._seen.update(own)
        names = tuple(self._site.shared_name(name) for name in own)
        twice = [name for name, n in Counter(names).items() if n > 1]
        if twice:
            both = [name for name in own if self._site.shared_name(name) == twice[0]]
            raise SchemaMismatchError(
                f"{path}: the columns {listed(both)} both become {twice[0]!r}",
                fix=f"Rename one of them to another name in {self._origin}.",
            )
        return names

    def columns(self, own: Mapping[str, pa.Array], first_row: int) -> dict[str, pa.Array]:
        """Translate rows of a file.

        Args:
            own: column of the site -> values (N,).
            first_row: the number of the first row in its file, from 1.
        """
        return {
            self._site.shared_name(name): self._column(name, array, first_row)
            for name, array in own.items()
        }

    def take_problem(self, path: str) -> SchemaMismatchError | None:
        """Return the errors since the last call, of the file at ``path``."""
        problems, self._problems = self._problems, {}
        if not problems:
            return None
        lines = [
            f"column {name!r} {problem.what}, such as {_shown(problem.example)} "
            f"({problem.rows:,} {'row' if problem.rows == 1 else 'rows'}, first in row "
            f"{problem.row}{problem.hint})"
            for (name, _), problem in problems.items()
        ]
        return SchemaMismatchError(
            f"{path}: " + "; ".join(lines),
            fix=f"Correct the column in {self._origin}. Declare a word for missing values there as "
            "words: {WORD: null}.",
        )

    def lost(self) -> SchemaMismatchError | None:
        """Return the columns of the site file that no file had."""
        lost = [name for name in self._site.columns if name not in self._seen]
        if not lost or not self._seen:
            return None
        hints = []
        for name in lost:
            close = nearest_word(name, self._seen)
            hints.append(f"{name!r}" + (f" (did you mean {close!r}?)" if close else ""))
        return SchemaMismatchError(
            f"{self._origin} names the column {', '.join(hints)}, which no file has; the files "
            "have "
            f"{listed(sorted(self._seen))}",
            fix=f"Correct the name in {self._origin}, or remove the column there.",
        )

    def _column(self, name: str, array: pa.Array, first_row: int) -> pa.Array:
        rules = self._site.columns.get(name)
        if rules is None:
            return array
        array = decoded(array)
        if rules.words:
            array = self._translated(name, array, rules.words, first_row)
        if rules.cast is not None:
            array = self._times(name, array, rules.cast, first_row)
        if rules.unit is not None:
            array = self._converted(name, array, rules.unit, first_row)
        return array

    def _translated(
        self, name: str, array: pa.Array, words: Mapping[str, object], first_row: int
    ) -> pa.Array:
        found = to_words(array)
        if found is None:
            self._refuse(name, "has values that are not words", array, None, first_row)
            return array
        shared = {text_of(word): None if to is None else text_of(to) for word, to in words.items()}
        if not shared.keys() & set(found.words):
            return array
        made = pa.array([shared.get(word, word) for word in found.words], pa.string())
        translated = made.take(pa.array(found.codes, mask=found.codes < 0))
        if not is_text(array.type):
            return translated
        listed_W = np.array([word in shared for word in found.words] + [False])
        # Other text stays as written: `1.000` may be a thousand, and is not the word `1`.
        return pc.if_else(pa.array(listed_W[found.codes]), translated, array.cast(pa.string()))

    def _times(self, name: str, array: pa.Array, cast: TimeFormat, first_row: int) -> pa.Array:
        if not is_text(array.type) and not pa.types.is_integer(array.type):
            return array
        times, bad_N = as_times(array, cast)
        self._refuse(name, f"has times not written as {cast.time}", array, bad_N, first_row)
        return times

    def _converted(self, name: str, array: pa.Array, unit: Unit, first_row: int) -> pa.Array:
        numbers = to_numbers(with_points(array, *self._marks))
        if numbers is None:
            self._refuse(name, "has values that are not numbers", array, None, first_row)
            return array
        self._refuse(name, "has text where a unit needs numbers", array, numbers.bad, first_row)
        what = "has integers beyond 2**53, whose unit cannot be converted"
        self._refuse(name, what, array, numbers.inexact, first_row)
        values = numbers.values.astype(np.float64) * unit.multiply + unit.add
        values[numbers.nan] = np.nan
        return pa.array(values, mask=numbers.null | numbers.bad)

    def _refuse(
        self, name: str, what: str, array: pa.Array, wrong_N: Array | None, first_row: int
    ) -> None:
        rows: Sequence[int] | Array = (
            range(len(array)) if wrong_N is None else np.flatnonzero(wrong_N)
        )
        if not len(rows):
            return
        problem = self._problems.get((name, what))
        if problem is None:
            (example,) = python_values(array.slice(int(rows[0]), 1))
            problem = _Problem(
                what,
                example,
                first_row + int(rows[0]),
                0,
                _hint(example, other_marks(*self._marks)),
            )
            self.untranslated.add(self._site.shared_name(name))
            self._problems[name, what] = problem
        problem.rows += len(rows)


def _hint(example: object, marks: Iterable[Marks]) -> str:
    """Suggest what would read a value as a time or a number."""
    word = str(example).strip()
    if formats := matching_formats([word]):
        return f"; {formats[0].time} fits it"
    if matching := matching_marks([word], marks):
        return f"; add {marks_options(matching[0])}"
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
