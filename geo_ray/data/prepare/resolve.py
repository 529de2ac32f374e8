"""Resolve a preparation: replace references to statistics by numbers and words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from geo_ray.base.errors import ConfigError
from geo_ray.base.text import listed, nearest_word
from geo_ray.data.arrow_values import EXACT_INTEGERS, text_of
from geo_ray.data.columns import ColumnType, parse_types
from geo_ray.data.prepare.config import Fill, Linear, Preparation, Source, Vocabulary
from geo_ray.data.prepare.statistics import ColumnStatistics, Statistics

OptionFor: TypeAlias = Callable[[str, str], str | None]
"""(column of the task, type) -> the task option that gives this type, such as ``features=31``."""

_STATISTICS_FIX = (
    "In each region run `geo-ray data stats FILES --region REGION --prepare PREPARATION --out "
    "stats-REGION.json`, then `geo-ray data merge-stats stats-*.json --out stats.json`, and add "
    "--stats stats.json."
)


@dataclass(frozen=True)
class Resolved:
    """A preparation that can be applied.

    Attributes:
        preparation: with the types of the task's columns and numbers instead of words like `mean`.
        notes: hints for the user, such as constant columns.
    """

    preparation: Preparation
    notes: tuple[str, ...]


@dataclass
class _Gathered:
    """Problems and hints collected while resolving."""

    option_for: OptionFor
    problems: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    without_statistics: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def no_option(column: str, wanted: str) -> None:
    """The `OptionFor` of a task without such options."""


def resolve(
    preparation: Preparation | None,
    types: Mapping[str, str],
    statistics: Statistics | None = None,
    option_for: OptionFor = no_option,
) -> Resolved:
    """Resolve a preparation for a task with statistics; has no side effects.

    Columns of the task that it does not list are copied from the files' column of the same name.

    Args:
        preparation: as loaded, or None to copy every column.
        types: the task's columns.
        statistics: of all regions, if the preparation refers to any.
        option_for: returns the task option that gives a column the required type.

    Raises:
        ConfigError: listing all problems.
        SchemaMismatchError: a type that is not allowed.
    """
    kinds = parse_types(types)
    given = preparation.columns if preparation is not None else {}
    out = _Gathered(option_for)
    for name in given:
        if name not in types:
            close = nearest_word(name, types)
            hint = f"; did you mean {close!r}?" if close else ""
            out.problems.append(
                f"{name}: the task has no such column, it has {listed(types)}{hint}"
            )
    columns: dict[str, tuple[Source, ...]] = {}
    for name, kind in kinds.items():
        sources = given.get(name, (Source(column=name),))
        columns[name] = _column(name, sources, kind, statistics, out)
    if out.without_statistics:
        lost = ", ".join(dict.fromkeys(out.without_statistics))
        out.problems.insert(0, f"the preparation needs statistics of {lost}")
    if out.problems:
        raise ConfigError(
            "\n    ".join(
                ["the preparation does not match the task or the statistics:", *out.problems]
            ),
            fix=_fix(out),
        )
    return Resolved(Preparation(columns=columns, types=dict(types)), tuple(out.notes))


def _fix(out: _Gathered) -> str:
    if out.without_statistics:
        return _STATISTICS_FIX
    if not out.options:
        return "Correct the preparation file, or the task's columns."
    given = " ".join(f"--task-option {option}" for option in dict.fromkeys(out.options))
    return f"Add {given}, or correct the preparation file."


def _column(
    name: str,
    sources: tuple[Source, ...],
    kind: ColumnType,
    statistics: Statistics | None,
    out: _Gathered,
) -> tuple[Source, ...]:
    if kind.ragged is not None:
        _check_ragged(name, sources, kind, out)
        return sources
    alone = len(sources) == 1
    before = len(out.problems)
    done = []
    for source in sources:
        where = name if source.column == name else f"{name}, column {source.column!r}"
        known: ColumnStatistics | None = None
        if source.needs_statistics:
            if statistics is None:
                out.without_statistics.append(source.column)
                continue
            found = _known(source.column, statistics)
            if isinstance(found, str):
                out.problems.append(f"{where}: {found}")
                continue
            known = found
        resolved = _source(source, known, where, out)
        if alone and resolved.vocabulary is None and resolved.length is None and kind.length:
            resolved = resolved.model_copy(update={"length": kind.length})
        words = resolved.vocabulary
        if words is not None and words.encode is None:
            encode = "index" if alone and kind.length is None else "one_hot"
            words = words.model_copy(update={"encode": encode})
            resolved = resolved.model_copy(update={"vocabulary": words})
        _check_type(resolved, kind, where, out)
        done.append(resolved)
    width = sum(source.width for source in done)
    if len(done) == len(sources) and len(out.problems) == before and width != (kind.length or 1):
        parts = ", ".join(f"{source.column} {source.width}" for source in done)
        type_name = kind.scalar if width == 1 else f"{kind.scalar}[{width}]"
        option = out.option_for(name, type_name)
        if option is not None:
            out.options.append(option)
        would = f'"{type_name}" in the task' if option is None else f"the task's option {option}"
        numbers = "1 number" if width == 1 else f"{width} numbers"
        out.problems.append(
            f"{name}: the preparation gives {numbers} per row ({parts}), the task requires "
            f"{kind.in_words}; use {would}"
        )
    return tuple(done)


def _check_ragged(name: str, sources: tuple[Source, ...], kind: ColumnType, out: _Gathered) -> None:
    """Columns of text, bytes and lists are copied: nothing converts their values."""
    if len(sources) != 1:
        out.problems.append(f"{name}: {kind.in_words} has one source, not {len(sources)}")
    for source in sources:
        given = source.model_dump(exclude_defaults=True, exclude={"column", "missing"})
        wrong = [*given, *([] if source.missing in ("refuse", "drop_row") else ["missing"])]
        if wrong:
            out.problems.append(
                f"{name}: {', '.join(wrong)} cannot be used for {kind.in_words}; only `missing: "
                "drop_row` can"
            )


def _known(column: str, statistics: Statistics) -> ColumnStatistics | str:
    regions = ", ".join(statistics.regions)
    if column in statistics.columns:
        return statistics.columns[column]
    if column in statistics.left_out:
        return f"has no statistics of {regions}: {statistics.left_out[column]}"
    close = nearest_word(column, statistics.columns)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"the statistics of {regions} do not include it{hint}"


def _source(source: Source, known: ColumnStatistics | None, where: str, out: _Gathered) -> Source:
    """Insert statistics into a source; missing statistics are recorded as a problem."""
    changes: dict[str, Any] = {}
    if known is None:
        return _check_fill(source, where, out)
    if source.vocabulary is not None and source.vocabulary.counted is not None:
        words = _frequent(known, source.vocabulary.counted)
        if words:
            changes["vocabulary"] = source.vocabulary.model_copy(
                update={"values": words, "counted": None}
            )
        else:
            out.problems.append(f"{where}: {_no_words(source.column)}")
    if source.missing == "most_frequent":
        common = _frequent(known, 1)
        if common:
            value: Any = common[0] if source.vocabulary is not None else _number(common[0], known)
            if value is None:
                out.problems.append(
                    f"{where}: the most frequent value {common[0]!r} is not a number"
                )
            else:
                changes["missing"] = Fill(fill=value)
        else:
            out.problems.append(f"{where}: {_no_words(source.column)}")
    if source.missing == "mean" or isinstance(source.scale, str):
        if known.mean is None or known.kind not in ("number", "time"):
            out.problems.append(f"{where}: it has no mean because its kind is {known.kind}")
            return source
        if source.missing == "mean":
            changes["missing"] = Fill(fill=known.mean)
        if isinstance(source.scale, str):
            scale = _linear(source.scale, known)
            if isinstance(scale, str):
                out.problems.append(f"{where}: {scale}")
                return source
            changes["scale"] = scale
            if known.m2 == 0:
                out.notes.append(f"column {source.column!r} is constant and becomes 0")
    return _check_fill(source.model_copy(update=changes), where, out)


def _linear(scale: str, known: ColumnStatistics) -> Linear | str:
    """Compute the standard deviation of all the numbers, M2 / count, not a sample estimate."""
    mean, m2 = known.mean or 0.0, known.m2 or 0.0
    if scale == "standard":
        return Linear(subtract=mean, divide=math.sqrt(m2 / known.count) or 1.0)
    if known.min is None or known.max is None:
        return "scale: minmax needs min and max; write the statistics without --no-extremes"
    spread = known.max - known.min
    if not math.isfinite(spread):
        return "its numbers are too large for scale: minmax"
    return Linear(subtract=known.min, divide=spread or 1.0)


def _frequent(known: ColumnStatistics, at_least: int) -> tuple[str, ...]:
    """Return words by descending frequency, equally frequent ones in alphabetical order."""
    words = known.words or {}
    ordered = sorted(sorted(words), key=words.__getitem__, reverse=True)
    return tuple(word for word in ordered if words[word] >= at_least)


def _no_words(column: str) -> str:
    return f"the statistics have no words of it; write them with --values {column}"


def _number(word: str, known: ColumnStatistics) -> int | float | None:
    if known.kind == "number":  # so a comma must be a decimal mark
        word = word.replace(",", ".")
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return None


def _check_fill(source: Source, where: str, out: _Gathered) -> Source:
    words: Vocabulary | None = source.vocabulary
    if words is not None and words.other == "refuse" and words.hash is None:
        fill = text_of(source.missing.fill) if isinstance(source.missing, Fill) else None
        if fill is not None and fill not in words.words:
            out.problems.append(f"{where}: fill: {fill!r} is not in its vocabulary")
    return source


def _check_type(source: Source, kind: ColumnType, where: str, out: _Gathered) -> None:
    fill = source.missing.fill if isinstance(source.missing, Fill) else None
    if source.vocabulary is None and isinstance(fill, int | float):
        problem = _misfit(fill, kind)
        if problem:
            out.problems.append(f"{where}: fill: {problem}")
    if kind.dtype.kind == "f":
        return
    fraction = isinstance(fill, float) and not fill.is_integer()
    for bad, what in (
        (source.scale is not None, "scale"),
        (source.missing == "keep", "missing: keep"),
        (source.infinite == "keep", "infinite: keep"),
        (fraction, "the replacement for missing values"),
    ):
        if bad:
            out.problems.append(
                f"{where}: {what} gives numbers that {kind.in_words} cannot hold; "
                'declare "float32" in the task'
            )


def _misfit(fill: int | float, kind: ColumnType) -> str | None:
    """Return why a column cannot hold the replacement for missing values; None if it can."""
    if kind.dtype.kind == "f":
        exact = isinstance(fill, float) or abs(fill) <= EXACT_INTEGERS
        return None if exact else f"{fill} is beyond 2**53, and a float cannot hold it"
    if kind.dtype.kind == "b":
        return None if fill in (0, 1) else f"{fill} is neither true nor false, nor 1 or 0"
    limits = np.iinfo(kind.scalar)
    return None if limits.min <= fill <= limits.max else f"{fill} does not fit {kind.scalar}"
