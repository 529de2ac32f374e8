"""Suggest the usual conversion of a surveyed column, and draft a preparation file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from geo_ray.base.text import nearest_word
from geo_ray.data.arrow_values import Cast, Marks, TimeFormat, marks_options, matching_formats
from geo_ray.data.columns import ColumnType, parse_types
from geo_ray.data.prepare.config import Fill, Source, Vocabulary, flow, source_text
from geo_ray.data.prepare.resolve import OptionFor, no_option
from geo_ray.data.prepare.survey import ColumnSurvey, Survey

_FEW_ROWS = 20  # with fewer rows an identifier cannot be detected
_MOST_BUCKETS = 256
_FEWEST_BUCKETS = 16
_MOST_CLASSES = 100
_MOST_LABELS = 20
_MOST_NULL_WORDS = 8
_POINT_GROUPS: Marks = (",", ".")
_LABEL_NAMES = {"label", "target", "class", "outcome", "response", "y"}


@dataclass(frozen=True)
class Suggestion:
    """A suggested source for a column.

    Attributes:
        source: the suggested source; None if the column should not be used.
        remark: the reason, or a hint.
    """

    source: Source | None
    remark: str = ""


def suggest(name: str, column: ColumnSurvey) -> Suggestion:
    """Suggest a source for an input column of a model."""
    lacking = column.nulls + column.nans
    if column.distinct is not None and len(column.distinct) == 1 and not lacking:
        return Suggestion(None, "it is constant")
    match column.kind:
        case "empty":
            return Suggestion(None, "it has no values")
        case "other":
            return Suggestion(None, "its values are not numbers, text or times")
        case "bytes":
            return Suggestion(None, "it has bytes, for a column of type bytes")
        case "list":
            if len(column.lengths) != 1:
                remark = f"its lists have different lengths: {_lengths(column)}"
                return Suggestion(None, f"{remark}; for a column such as list<int32>")
            length = max(*column.lengths, 1)
            return Suggestion(Source(column=name, length=length, missing=_drop_if(lacking)))
        case "bool":
            return Suggestion(Source(column=name, missing=_drop_if(lacking)))
        case "text":
            return _of_text(name, column)
    if column.kind == "int" and (days := _days_in_numbers(column)) is not None:
        return Suggestion(_measure(name, column, days), "its numbers are dates")
    if column.kind == "int" and _is_identifier(name, column):
        return Suggestion(None, "it differs in every row: an identifier?")
    remark = _groups_remark() if column.groups else ""
    return Suggestion(_measure(name, column, "time" if column.kind == "time" else "number"), remark)


def _groups_remark() -> str:
    return (
        "every point is followed by three digits; if it separates thousands, add "
        + marks_options(_POINT_GROUPS)
    )


def _measure(name: str, column: ColumnSurvey, cast: Cast) -> Source:
    lacking = column.nulls + column.nans + column.infinite + sum(column.texts.values())
    return Source(
        column=name,
        cast=cast,
        missing="mean" if lacking else "refuse",
        infinite="missing" if column.infinite else "refuse",
        scale="standard",
    )


def _days_in_numbers(column: ColumnSurvey) -> TimeFormat | None:
    """Return the date format of whole numbers such as 20260131."""
    if not 19_000_101 <= column.moments.low <= column.moments.high <= 21_001_231:
        return None
    days = TimeFormat(time="%Y%m%d")
    return days if matching_formats(column.seen, [days]) else None


def suggest_options(survey: Survey) -> tuple[str, ...]:
    """Return the reading options that the suggested sources need."""
    nulls: dict[str, None] = {}
    marks: tuple[Marks, ...] | None = None
    for name, column in survey.columns.items():
        source = suggest(name, column).source
        if column.kind != "text" or source is None or source.vocabulary is not None:
            continue
        nulls.update(dict.fromkeys(column.texts))
        if column.marks:
            marks = tuple(m for m in column.marks if marks is None or m in marks)
    options = [f"--null {shlex.quote(word)}" for word in nulls]
    if marks and _POINT_GROUPS in marks and any(c.groups for c in survey.columns.values()):
        marks = (_POINT_GROUPS,)
    return tuple([marks_options(marks[0])] if marks else []) + tuple(options)


def likely_label(survey: Survey) -> str | None:
    """Return the column that most likely has the class of each row; None if there is none."""
    few = {
        name: len(column.distinct)
        for name, column in survey.columns.items()
        if column.kind in ("int", "bool", "text")
        and column.distinct is not None
        and 2 <= len(column.distinct) <= _MOST_LABELS
        and not column.marks
        and not column.formats
    }
    named = [name for name in few if name.lower() in _LABEL_NAMES]
    two = [name for name, classes in few.items() if classes == 2]
    return next(reversed(named or two or list(few)), None)


def label_origin(label: str, survey: Survey) -> str | None:
    """Return the column of the files with the task's label, or the most likely one."""
    if label in survey.columns:
        return label
    return nearest_word(label, survey.columns) or likely_label(survey)


def suggest_label(name: str, column: ColumnSurvey) -> Suggestion:
    """Suggest a source for the column with the class of each row; classes are numbered from 0."""
    missing = _drop_if(column.nulls + column.nans)
    if column.kind in ("int", "bool", "float"):
        return Suggestion(Source(column=name, missing=missing))
    words = sorted(column.distinct or ())
    if not words or len(words) > _MOST_CLASSES:
        return Suggestion(None, f"it does not have 1 to {_MOST_CLASSES} classes")
    vocabulary = Vocabulary(values=tuple(words), other="refuse")
    remark = "list the words of every region here; their order numbers the classes, from 0"
    return Suggestion(Source(column=name, vocabulary=vocabulary, missing=missing), remark)


def _of_text(name: str, column: ColumnSurvey) -> Suggestion:
    numbers = column.families["int"] + column.families["float"]
    wordless = column.families["text"] - sum(column.texts.values())
    remarks = [_nulls_remark(column)] if column.texts else []
    if column.formats and not numbers and not column.families["time"]:
        cast, *others = column.formats
        if any(_days_first(other) != _days_first(cast) for other in others):
            remarks.insert(0, f"or {others[0].time}: no value distinguishes day and month")
        return Suggestion(_measure(name, column, cast), "; ".join(remarks))
    if column.marks and len(column.texts) <= _MOST_NULL_WORDS:
        options = marks_options(column.marks[0])
        remark = f"numbers such as {column.example!r} need {options}"
        if len(column.marks) > 1 and (",", None) in column.marks[1:] and column.marks[0][0] == ".":
            remark += " (or --decimal , if the comma is a decimal mark)"
        return Suggestion(_measure(name, column, "number"), "; ".join([remark, *remarks]))
    mostly_numbers = 0 < column.families["text"] < numbers
    if mostly_numbers and not wordless and len(column.texts) <= _MOST_NULL_WORDS:
        remarks += [_groups_remark()] if column.groups else []
        return Suggestion(_measure(name, column, "number"), "; ".join(remarks))
    if mostly_numbers:
        return Suggestion(
            None,
            f"{column.families['text']:,} values are text such as {column.example!r}, the others "
            "are numbers; correct them, or translate them in a site file",
        )
    if _is_identifier(name, column):
        return Suggestion(None, "it differs in every row: an identifier?")
    different = len(column.distinct) if column.distinct is not None else _MOST_BUCKETS
    buckets = _FEWEST_BUCKETS
    while buckets < min(4 * different, _MOST_BUCKETS):
        buckets *= 2
    return Suggestion(
        Source(
            column=name,
            vocabulary=Vocabulary(hash=buckets),
            missing=Fill(fill="unknown") if column.nulls else "refuse",
        )
    )


def _nulls_remark(column: ColumnSurvey) -> str:
    words = " ".join(f"--null {shlex.quote(word)}" for word in column.texts)
    example = next(iter(column.texts))
    return (
        f"{sum(column.texts.values()):,} values are text such as {example!r}; if that means "
        f"a missing value, add {words}"
    )


def _days_first(cast: TimeFormat) -> bool:
    return cast.time.startswith(("%d", "%Y"))


def _drop_if(lacking: int) -> Literal["drop_row", "refuse"]:
    return "drop_row" if lacking else "refuse"


def _is_identifier(name: str, column: ColumnSurvey) -> bool:
    is_named = name.lower() == "id" or name.lower().endswith(("_id", " id"))
    values = sum(column.families.values())
    return (not column.repeats and values >= _FEW_ROWS) or (is_named and column.is_many)


def _lengths(column: ColumnSurvey) -> str:
    return ", ".join(str(length) for length in sorted(column.lengths))


def draft_text(
    survey: Survey,
    types: Mapping[str, str],
    label: str | None,
    option_for: OptionFor = no_option,
) -> str:
    """Draft a preparation file for the columns of a task.

    Columns of the task that the files have are copied. All other columns of the files are joined
    to the first list of numbers that the files do not have.

    Args:
        survey: survey of the files.
        types: the task's columns.
        label: its label column, if any.
        option_for: returns the task option that gives a column the required type.
    """
    kinds = parse_types(types)
    direct = {name: _origin(name, survey, label) for name in kinds}
    taken = {origin for origin in direct.values() if origin is not None}
    rest = {n: suggest(n, c) for n, c in survey.columns.items() if n not in taken}
    lines = ["# The sources of each column of the task; see docs/guides/preparation.md."]
    if options := suggest_options(survey):
        lines.append(f"# Read the files with these options: {' '.join(options)}")
    lines.append("columns:")
    joined = False
    for name, kind in kinds.items():
        origin = direct[name]
        if origin is not None and kind.ragged is not None:
            source = Source(column=origin, missing=_drop_if(survey.columns[origin].nulls))
            lines.append(f"  {flow(name)}: {source_text(source)}")
        elif origin is not None:
            lines += _single(name, origin, survey.columns[origin], name == label)
        elif kind.length is not None and not joined:
            lines += _joined(name, kind, rest, option_for)
            joined = True
        else:
            lines.append(f"  {flow(name)}: {{column: NAME}}  # set the column of the files")
    return "\n".join(lines) + "\n"


def _origin(name: str, survey: Survey, label: str | None) -> str | None:
    if name == label:
        return label_origin(name, survey)
    return name if name in survey.columns else None


def _single(name: str, origin: str, column: ColumnSurvey, is_label: bool) -> list[str]:
    found = suggest_label(origin, column) if is_label else _untouched(origin, column)
    if is_label and origin != name:
        remarks = ["is this the label?", *([found.remark] if found.remark else [])]
        found = Suggestion(found.source, "; ".join(remarks))
    remark = f"  # {found.remark}" if found.remark else ""
    return [f"  {flow(name)}: {source_text(found.source or Source(column=origin))}{remark}"]


def _untouched(name: str, column: ColumnSurvey) -> Suggestion:
    """Suggest a source for a column that the task itself declares; it is not scaled."""
    if column.kind == "list":  # the task sets its length
        return Suggestion(Source(column=name, missing=_drop_if(column.nulls)))
    found = suggest(name, column)
    source = found.source or Source(column=name)
    missing = _drop_if(column.nulls + column.nans)
    return Suggestion(source.model_copy(update={"scale": None, "missing": missing}), found.remark)


def _joined(
    name: str, kind: ColumnType, rest: Mapping[str, Suggestion], option_for: OptionFor
) -> list[str]:
    used = [found for found in rest.values() if found.source is not None]
    width = sum(
        s.width if s.vocabulary is None else s.vocabulary.places
        for s in (found.source for found in used)
        if s is not None
    )
    remark = f"{width} numbers per row"
    if width != kind.length:
        option = option_for(name, f"{kind.scalar}[{width}]") if width else None
        remark += f"; the task has {kind}"
        remark += f"; set --task-option {option}" if option is not None else ""
    lines = [f"  {flow(name)}:  # {remark}"]
    for column, found in rest.items():
        remark = f"  # {found.remark}" if found.remark else ""
        if found.source is None:
            lines.append(f"    # {flow(column)} is not used: {found.remark}")
        else:
            lines.append(f"    - {source_text(found.source)}{remark}")
    return lines
