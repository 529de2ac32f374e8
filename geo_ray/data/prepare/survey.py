"""Survey the columns of a folder: types, missing values, distinct values and moments.

The survey makes one pass over the rows with bounded memory. `share` reduces it to what may leave
the region: statistics of columns, and category values only where the user asked for them.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geo_ray.base.errors import ConfigError
from geo_ray.base.text import listed, nearest_word
from geo_ray.data.arrow_values import (
    TIME_FORMATS,
    Marks,
    Numbers,
    TimeFormat,
    as_times,
    decoded,
    is_binary,
    is_list,
    is_text,
    matching_formats,
    matching_marks,
    other_marks,
    parse_time,
    to_numbers,
    to_words,
    whole_words,
    with_points,
)
from geo_ray.data.files.find import InputFiles, LeftOut
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.files.rows import Batch, ReadReport, Unreadable, read_rows
from geo_ray.data.prepare.config import MAX_WORDS, Fill, Preparation, Source, WrittenSources
from geo_ray.data.prepare.findings import Findings, Spot
from geo_ray.data.prepare.preparer import Preparer
from geo_ray.data.prepare.statistics import (
    ColumnKind,
    ColumnStatistics,
    Moments,
    Statistics,
    column_statistics,
)

MOST_DISTINCT = 1000
"""Maximum number of distinct values counted."""

_MOST_LENGTHS = 5
_MOST_TEXTS = 64
_LONG_TEXT = 1000  # bytes
_POINT_GROUPS = r"^\s*[+-]?[1-9]\d{0,2}\.\d{3}\s*$"

Family = Literal["int", "float", "bool", "time", "text", "list", "bytes", "other"]


@dataclass
class ColumnSurvey:
    """The survey of one column.

    Attributes:
        words: word -> rows, if they are counted.
        rows: surveyed rows.
        nulls: rows with a missing value.
        nans: values that are not a number.
        infinite: infinite numbers.
        families: kind of value -> number of values.
        first_file: kind of value -> the first file that has it.
        moments: of its finite numbers, or of its times in seconds.
        lengths: the lengths of its lists, the first few.
        seen: its first `MOST_DISTINCT` different values as text -> their rows.
        is_many: whether it has more distinct values.
        repeats: whether a value occurred twice among the counted ones.
        example: its first text that is neither a number nor a time.
        texts: its text that has no digit and is no number -> rows; the first few.
        marks: decimal and thousands marks that read all its text with digits, other than Python's
            own; None if it has no such text.
        formats: formats that read all its text with digits as times; None if it has no such text.
        groups: whether in all its text numbers with a point it could be a thousands mark, such as
            in 2.281; None if it has no such numbers.
        files: the files that have the column.
    """

    words: Counter[str] | None = None
    rows: int = field(default=0, init=False)
    nulls: int = field(default=0, init=False)
    nans: int = field(default=0, init=False)
    infinite: int = field(default=0, init=False)
    families: Counter[Family] = field(default_factory=Counter, init=False)
    first_file: dict[Family, str] = field(default_factory=dict, init=False)
    moments: Moments = field(default_factory=Moments, init=False)
    lengths: set[int] = field(default_factory=set, init=False)
    seen: Counter[str] = field(default_factory=Counter, init=False)
    is_many: bool = field(default=False, init=False)
    repeats: bool = field(default=False, init=False)
    example: str | None = field(default=None, init=False)
    texts: Counter[str] = field(default_factory=Counter, init=False)
    marks: tuple[Marks, ...] | None = field(default=None, init=False)
    formats: tuple[TimeFormat, ...] | None = field(default=None, init=False)
    groups: bool | None = field(default=None, init=False)
    files: dict[str, None] = field(default_factory=dict, init=False)

    @property
    def distinct(self) -> frozenset[str] | None:
        """Return its values as text; None if there are more than `MOST_DISTINCT`."""
        return None if self.is_many else frozenset(self.seen)

    @property
    def kind(self) -> Family | Literal["empty"]:
        """Return the kind of the whole column; text if its values have no other common kind."""
        kinds = set(self.families)
        if not kinds:
            return "empty"
        if len(kinds) == 1:
            return next(iter(kinds))
        if kinds <= {"int", "bool"}:
            return "int"
        if kinds <= {"int", "float", "bool"}:
            return "float"
        return "other" if kinds & {"list", "bytes", "other"} else "text"


@dataclass
class Survey:
    """The survey of a folder.

    Attributes:
        files: number of files read.
        rows: number of their rows.
        columns: name -> its survey, in the order of first appearance.
        rows_of: file -> its rows; files without rows are not in it.
        names: all columns of the files, including those that were not surveyed.
        report: errors of files, and what was skipped.
    """

    files: int
    rows: int = 0
    names: dict[str, None] = field(default_factory=dict)
    columns: dict[str, ColumnSurvey] = field(default_factory=dict)
    rows_of: Counter[str] = field(default_factory=Counter)
    report: ReadReport = field(default_factory=ReadReport)

    @property
    def unreadable(self) -> list[Unreadable]:
        """Return the errors of files."""
        return self.report.unreadable

    @property
    def left_out(self) -> list[LeftOut]:
        """Return the files, folders and lines that were not read, with the reasons."""
        return self.report.left_out


@dataclass(frozen=True)
class Trial:
    """A preparation that is applied to the surveyed rows, to record what it rejects.

    Attributes:
        preparer: a preparer of a preparation without statistics, see
            `geo_ray.data.prepare.survey.untrained`.
        findings: records what it rejects.
        formats: columns that it reads as times, and their formats.
    """

    preparer: Preparer
    findings: Findings
    formats: Mapping[str, TimeFormat] = field(default_factory=dict)

    def record(self, batch: Batch) -> None:
        """Apply it to some rows."""
        arrays = {n: a for n, a in batch.piece.columns.items() if n in self.preparer.inputs}
        if batch.piece.sparse:
            for name in self.preparer.inputs:
                arrays.setdefault(name, pa.nulls(batch.piece.rows))
        spot = Spot(batch.path, batch.first_row, batch.piece.names)
        self.preparer.transform(arrays, self.findings, spot, batch.piece.rows)


def survey_files(
    found: InputFiles,
    wanted: Collection[str] | None = None,
    count_words: Collection[str] = (),
    on_read: Callable[[float, int], None] | None = None,
    trial: Trial | None = None,
) -> Survey:
    """Read all rows once and survey their columns.

    Args:
        found: the files.
        wanted: the columns to survey, or None for all.
        count_words: columns whose distinct values are counted, up to `MAX_WORDS`.
        on_read: called with (files read, rows of the batch), for progress.
        trial: a preparation to try on all rows.

    Raises:
        ConfigError: if a column whose words are counted has too many words, or none.
        DataLeftOutError: if something was skipped and the options are strict.
        StoreError: if the store does not answer.
    """
    survey = Survey(sum(len(file.members) or 1 for file in found.files))
    options = found.options
    read = wanted
    if wanted is not None and trial is not None:
        read = {*wanted, *trial.preparer.inputs}
    for batch in read_rows(found, read, survey.report):
        if trial is not None:
            trial.record(batch)
        survey.rows += batch.piece.rows
        survey.rows_of[batch.path] += batch.piece.rows
        survey.names.update(dict.fromkeys(batch.piece.names))
        for name, array in batch.piece.columns.items():
            if wanted is not None and name not in wanted:
                continue
            column = survey.columns.get(name)
            if column is None:
                words: Counter[str] | None = Counter() if name in count_words else None
                column = survey.columns[name] = ColumnSurvey(words=words)
            column.rows += len(array)
            column.files[batch.path] = None
            if trial is not None and name in trial.formats:
                array = _times(decoded(array), trial.formats[name])
            written = decoded(array)
            _record(column, written, options, batch.path)
            words = whole_words(written, options.decimal, options.thousands)
            _distinguish(column, words, name)
        if on_read is not None:
            on_read(batch.files_done, batch.piece.rows)
    if any(file.format in ("jsonl", "webdataset") for file in found.files):
        for column in survey.columns.values():  # a row without the key has a missing value
            column.nulls += survey.rows - column.rows
            column.rows = survey.rows
    return survey


def _times(array: pa.Array, cast: TimeFormat) -> pa.Array:
    is_written = is_text(array.type) or pa.types.is_integer(array.type)
    return as_times(array, cast)[0] if is_written else array


def _record(column: ColumnSurvey, array: pa.Array, options: ReadOptions, path: str) -> None:
    kind, types = array.type, pa.types
    if is_text(kind):
        _record_text(column, array, options, path)
        return
    if is_list(kind) and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        column.nulls += array.null_count
        lengths = pc.unique(pc.list_value_length(array).drop_null()).to_pylist()
        column.lengths.update(lengths[: max(0, _MOST_LENGTHS - len(column.lengths))])
        _count_family(column, "list", len(array) - array.null_count, path)
        return
    numbers = to_numbers(array)
    if numbers is None:
        column.nulls += array.null_count
        family: Family = "bytes" if is_binary(kind) else "other"
        _count_family(column, family, len(array) - array.null_count, path)
        return
    family = "float" if numbers.values.dtype.kind == "f" else "int"
    if types.is_boolean(kind):
        family = "bool"
    elif types.is_temporal(kind):
        family = "time"
    _take(column, numbers, family, path)


def _record_text(column: ColumnSurvey, written: pa.Array, options: ReadOptions, path: str) -> None:
    array = with_points(written, options.decimal, options.thousands)
    numbers = to_numbers(array)
    assert numbers is not None  # noqa: S101  (text can always be read)
    family: Family = "float" if numbers.values.dtype.kind == "f" else "int"
    good_N = ~numbers.missing & ~numbers.bad
    lower = pc.utf8_lower(pc.utf8_trim_whitespace(array.cast(pa.string())))
    truth = pc.fill_null(pc.is_in(lower, value_set=pa.array(["true", "false"])), False)
    truth_N = truth.to_numpy(zero_copy_only=False).astype(bool)
    _take(column, numbers, family, path, int((good_N & ~truth_N).sum()))
    _count_family(column, "bool", int(truth_N.sum()), path)
    if options.decimal == "." and column.groups is not False:
        _record_groups(column, written.filter(pa.array(good_N)))
    if not numbers.bad.any():
        return
    rest = written.filter(pa.array(numbers.bad))
    if parse_time(rest[0].as_py().strip()) is None:
        times, text_M = None, np.ones(len(rest), bool)
    else:
        times = to_numbers(rest, "time")
        text_M = times.bad if times is not None else np.ones(len(rest), bool)
    if times is not None:
        column.moments = column.moments.merge(Moments.of(times.values[~text_M]))
    _count_family(column, "time", int((~text_M).sum()), path)
    _count_family(column, "text", int(text_M.sum()), path)
    if not text_M.any():
        return
    if column.example is None:
        column.example = rest[int(np.flatnonzero(text_M)[0])].as_py()
    _record_marks(column, rest.filter(pa.array(text_M)), options)


def _record_groups(column: ColumnSurvey, numbers: pa.Array) -> None:
    """Whether points in numbers could be thousands marks."""
    text = numbers.cast(pa.string())
    points = text.filter(pc.match_substring(text, "."))
    if len(points):
        column.groups = pc.all(pc.match_substring_regex(points, _POINT_GROUPS)).as_py()


def _record_marks(column: ColumnSurvey, text: pa.Array, options: ReadOptions) -> None:
    """Find marks or formats that read other text as numbers or times."""
    counted = pc.value_counts(pc.utf8_trim_whitespace(text.cast(pa.string())))
    for pair in counted.to_pylist():
        word = pair["values"]
        if not any(letter.isdigit() for letter in word):
            if word in column.texts or len(column.texts) < _MOST_TEXTS:
                column.texts[word] += pair["counts"]
            continue
        if column.marks is None or column.formats is None:
            column.marks = other_marks(options.decimal, options.thousands)
            column.formats = TIME_FORMATS
        elif not column.marks and not column.formats:
            break
        column.marks = matching_marks([word], column.marks)
        column.formats = matching_formats([word], column.formats)


def _take(
    column: ColumnSurvey, numbers: Numbers, family: Family, path: str, count: int | None = None
) -> None:
    good_N = ~numbers.missing & ~numbers.bad
    values = numbers.values[good_N]
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    column.nulls += int(numbers.null.sum())
    column.nans += int(numbers.nan.sum())
    column.infinite += len(values) - len(finite)
    column.moments = column.moments.merge(Moments.of(finite))
    _count_family(column, family, len(values) if count is None else count, path)


def _count_family(column: ColumnSurvey, family: Family, count: int, path: str) -> None:
    if count:
        column.families[family] += count
        column.first_file.setdefault(family, path)


def _distinguish(column: ColumnSurvey, array: pa.Array, name: str) -> None:
    """Count distinct values: the first ones, or all on request."""
    if column.is_many and not column.seen and column.words is None:
        return
    found = None if column.words is None and _is_long(array) else to_words(array)
    if found is None:
        column.is_many, column.seen = True, Counter()
        if column.words is not None:
            raise ConfigError(
                f"--values: column {name!r} has no words to count; its type is {array.type}",
                fix="Remove it from --values.",
            )
        return
    rows_W = np.bincount(found.codes[found.codes >= 0], minlength=len(found.words)).tolist()
    counts = dict(zip(found.words, rows_W, strict=True))
    if column.words is not None:
        column.words.update(counts)
        if len(column.words) > MAX_WORDS:
            raise ConfigError(
                f"--values: column {name!r} has more than {MAX_WORDS:,} different values",
                fix="Remove it from --values and write vocabulary: {hash: 1024} for it.",
            )
    for word, rows in counts.items():
        is_known = word in column.seen
        if not column.is_many:
            column.repeats = column.repeats or is_known or rows > 1
        if is_known or len(column.seen) < MOST_DISTINCT:
            column.seen[word] += rows
        else:
            column.is_many = True


def _is_long(array: pa.Array) -> bool:
    """Whether values are documents, of which not even the first thousand should be kept."""
    if not is_text(array.type) or not len(array):
        return False
    mean = pc.mean(pc.binary_length(array.cast(pa.large_string()))).as_py()
    return mean is not None and mean > _LONG_TEXT


@dataclass(frozen=True)
class Needs:
    """The statistics that a preparation refers to.

    Attributes:
        columns: columns of the files of which it needs any statistic.
        words: columns whose words must be counted.
        numbers: columns whose mean it needs.
        formats: columns of times, and their formats.
    """

    columns: tuple[str, ...]
    words: tuple[str, ...]
    numbers: tuple[str, ...]
    formats: Mapping[str, TimeFormat]


def needs_of(preparation: Preparation) -> Needs:
    """Return the statistics that `geo_ray.data.prepare.resolve` needs."""
    sources = [source for given in preparation.columns.values() for source in given]
    columns = dict.fromkeys(s.column for s in sources if s.needs_statistics)
    words = dict.fromkeys(s.column for s in sources if s.needs_words)
    numbers = dict.fromkeys(
        s.column for s in sources if s.missing == "mean" or isinstance(s.scale, str)
    )
    formats = {s.column: s.cast for s in sources if isinstance(s.cast, TimeFormat)}
    return Needs(tuple(columns), tuple(words), tuple(numbers), formats)


def copied_columns(preparation: Preparation) -> tuple[str, ...]:
    """Return columns of the files that are the only source of a column and are not converted."""
    alone = [sources[0] for sources in preparation.columns.values() if len(sources) == 1]
    keys = {"column", "missing"}
    return tuple(s.column for s in alone if not s.model_dump(exclude_defaults=True, exclude=keys))


def untrained(preparation: Preparation) -> Preparation:
    """Replace references to statistics by placeholders, to apply a preparation before they exist.

    The result rejects the rows that the resolved preparation rejects, except for errors that
    depend on the types of the task's columns.
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
    """Reject files that lack columns.

    Args:
        survey: of the files.
        wanted: the required columns.
        written: sources of the preparation file that needs them, for messages.

    Raises:
        ConfigError: naming all missing columns.
    """
    lost = [name for name in wanted if name not in survey.names]
    if not lost:
        return
    places = {key[1]: source.where for key, source in (written or {}).items()}
    hints = []
    for name in lost:
        close = nearest_word(name, survey.names)
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
    """Compute the statistics of a region.

    Args:
        survey: survey of its files.
        region: its name.
        wanted: required columns, or None for all columns of the files.
        at_least: minimum number of rows of a listed word.
        extremes: whether to include minimum and maximum, which are values of single rows.
        needed: columns whose mean a preparation uses.

    Raises:
        ConfigError: naming all required columns that are not in the files.
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
    """Return the kind of a column for statistics."""
    match column.kind:
        case "int" | "float" | "bool":
            return "number"
        case "bytes":
            return "other"
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
