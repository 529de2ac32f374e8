"""What of a survey leaves a region: statistics of columns, and words only where asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from geo_ray.data.nearby import listed, nearest
from geo_ray.data.prepare.config import Preparation
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
    """

    columns: tuple[str, ...]
    words: tuple[str, ...]


def needs_of(preparation: Preparation) -> Needs:
    """What `geo_ray.data.prepare.resolve` will ask for; pure."""
    sources = [source for given in preparation.columns.values() for source in given]
    columns = dict.fromkeys(s.column for s in sources if s.needs_statistics)
    words = dict.fromkeys(s.column for s in sources if s.needs_words)
    return Needs(tuple(columns), tuple(words))


def share(
    survey: Survey,
    region: str,
    wanted: Collection[str] | None,
    at_least: int,
    extremes: bool,
    written: WrittenSources | None = None,
) -> Statistics:
    """The statistics of a region.

    Args:
        survey: of its files.
        region: its name.
        wanted: columns that must be there, or None for all that the files have.
        at_least: words that fewer rows have are left out.
        extremes: whether least and greatest numbers, which are values of single rows, are told.
        written: of the preparation file that wants the columns, for messages.

    Raises:
        ConfigError: if a wanted column is not in the files; names all of them.
    """
    lost = [name for name in wanted or () if name not in survey.columns]
    if lost:
        places = {key[1]: source.where for key, source in (written or {}).items()}
        hints = []
        for name in lost:
            close = nearest(name, survey.names)
            remarks = [places[name]] if name in places else []
            remarks += [f"did you mean {close!r}?"] if close else []
            hints.append(f"{name!r}" + (f" ({'; '.join(remarks)})" if remarks else ""))
        raise ConfigError(
            f"the files have no column {', '.join(hints)}; they have {listed(survey.names)}",
            fix="Correct the preparation file."
            if set(lost) <= set(places)
            else "Correct --columns, --values or the preparation file.",
        )
    columns, left_out = {}, {}
    for name in survey.columns if wanted is None else dict.fromkeys(wanted):
        column = survey.columns[name]
        kind = kind_of(column)
        if kind in ("number", "time") and not column.moments.usable:
            left_out[name] = f"its numbers are too large in {region}"
            continue
        columns[name] = _column(column, kind, at_least, extremes)
    return Statistics(
        regions=(region,), rows=survey.rows, at_least=at_least, columns=columns, left_out=left_out
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
