"""What of a survey leaves a region: statistics of columns, and words only where asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geo_ray.data.nearby import listed, nearest
from geo_ray.data.prepare.config import Fill, Preparation, Source
from geo_ray.data.prepare.numbers import TimeFormat
from geo_ray.data.prepare.statistics import (
    ColumnKind,
    ColumnStatistics,
    Statistics,
    column_statistics,
)
from geo_ray.data.prepare.survey import ColumnSurvey, Survey
from geo_ray.data.prepare.written import WrittenSources
from geo_ray.errors import ConfigError


@dataclass(frozen=True)
class Needs:
    """Which statistics a preparation refers to.

    Attributes:
        columns: all columns of the files that it needs any of.
        words: those whose words must be counted.
        numbers: those whose mean must be known.
        formats: those that are times, and how they are written.
    """

    columns: tuple[str, ...]
    words: tuple[str, ...]
    numbers: tuple[str, ...]
    formats: Mapping[str, TimeFormat]


def needs_of(preparation: Preparation) -> Needs:
    """What `geo_ray.data.prepare.resolve` will ask for; pure."""
    sources = [source for given in preparation.columns.values() for source in given]
    columns = dict.fromkeys(s.column for s in sources if s.needs_statistics)
    words = dict.fromkeys(s.column for s in sources if s.needs_words)
    numbers = dict.fromkeys(
        s.column for s in sources if s.missing == "mean" or isinstance(s.scale, str)
    )
    formats = {s.column: s.cast for s in sources if isinstance(s.cast, TimeFormat)}
    return Needs(tuple(columns), tuple(words), tuple(numbers), formats)


def untrained(preparation: Preparation) -> Preparation:
    """The preparation with something else for what statistics would give, to try it on rows.

    It refuses the rows that the resolved preparation refuses, as far as that does not depend on the
    types of the task's columns.
    """
    columns = {
        name: tuple(_untrained(source) for source in sources)
        for name, sources in preparation.columns.items()
    }
    types = {
        name: f"float64[{sum(source.width for source in sources)}]"
        for name, sources in columns.items()
    }
    return Preparation(columns=columns, types=types)


def _untrained(source: Source) -> Source:
    changes: dict[str, Any] = {}
    words = source.vocabulary
    if words is not None:
        listed_words = {"counted": None, "hash": 1} if words.counted is not None else {}
        changes["vocabulary"] = words.model_copy(update={"encode": "index", **listed_words})
        known = words.words[0] if words.words else ""
        if source.missing in ("most_frequent", "other"):
            changes["missing"] = Fill(fill=known)
    elif source.missing in ("mean", "most_frequent"):
        changes["missing"] = Fill(fill=0)
    if isinstance(source.scale, str):
        changes["scale"] = None
    return source.model_copy(update=changes)


def require_columns(
    survey: Survey, wanted: Collection[str], written: WrittenSources | None = None
) -> None:
    """Refuse files that lack columns.

    Args:
        survey: of the files.
        wanted: the columns that they must have.
        written: of the preparation file that wants them, for messages.

    Raises:
        ConfigError: naming all that are missing.
    """
    lost = [name for name in wanted if name not in survey.names]
    if not lost:
        return
    places = {key[1]: source.where for key, source in (written or {}).items()}
    hints = []
    for name in lost:
        close = nearest(name, survey.names)
        remarks = [places[name]] if name in places else []
        remarks += [f"did you mean {close!r}?"] if close else []
        hints.append(f"{name!r}" + (f" ({'; '.join(remarks)})" if remarks else ""))
    raise ConfigError(
        f"the files have no column {', '.join(hints)}; they have {listed(survey.names)}",
        fix="Correct the preparation file; if the column has another name at this site, rename it "
        "in a site file (--site)."
        if set(lost) <= set(places)
        else "Correct --columns, --values or the preparation file.",
    )


def share(
    survey: Survey,
    region: str,
    wanted: Collection[str] | None,
    at_least: int,
    extremes: bool,
    needed: Sequence[str] = (),
) -> Statistics:
    """The statistics of a region.

    Args:
        survey: of its files.
        region: its name.
        wanted: columns that must be there, or None for all that the files have.
        at_least: words that fewer rows have are left out.
        extremes: whether least and greatest numbers, which are values of single rows, are told.
        needed: columns whose mean a preparation uses.

    Raises:
        ConfigError: if a wanted column is not in the files; names all of them.
    """
    require_columns(survey, wanted or ())
    columns, left_out = {}, {}
    for name in survey.columns if wanted is None else dict.fromkeys(wanted):
        column = survey.columns[name]
        kind = kind_of(column)
        if kind in ("number", "time") and not column.moments.usable:
            left_out[name] = f"its numbers are too large in {region}"
            continue
        columns[name] = _column(column, kind, at_least, extremes)
    return Statistics(
        regions=(region,),
        rows=survey.rows,
        at_least=at_least,
        needed=tuple(needed),
        columns=columns,
        left_out=left_out,
    )


def kind_of(column: ColumnSurvey) -> ColumnKind:
    """The kind of a column as statistics tell it."""
    match column.kind:
        case "int" | "float" | "bool":
            return "number"
        case kind:
            return kind


def _column(
    column: ColumnSurvey, kind: ColumnKind, at_least: int, extremes: bool
) -> ColumnStatistics:
    known = ColumnStatistics(kind=kind, nulls=0)
    if kind in ("number", "time"):
        known = column_statistics(kind, column.moments, extremes)
    words = None
    if column.words is not None:
        words = {w: n for w, n in sorted(column.words.items()) if n >= at_least}
    update = {
        "nulls": column.nulls,
        "nans": column.nans,
        "infinite": column.infinite,
        "words": words,
    }
    return known.model_copy(update=update)
