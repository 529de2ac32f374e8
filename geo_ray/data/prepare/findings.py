"""Collect all problems of a user's columns and report them together, each with a suggested fix."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final

from geo_ray.base.errors import GeoRayError, SchemaMismatchError, ShardCorruptError
from geo_ray.base.text import listed, nearest_word
from geo_ray.data.arrow_values import (
    NUMBER_MARKS,
    Marks,
    marks_options,
    matching_formats,
    matching_marks,
    parse_time,
)
from geo_ray.data.columns import ColumnType
from geo_ray.data.prepare.config import Source, WrittenSources, flow, source_text
from geo_ray.data.prepare.encoders import Kind

_SHOWN = 40
_FEW_WORDS = 20
_NULL_WORDS = 3


@dataclass(frozen=True)
class ColumnAdvice:
    """Advice on a column.

    Attributes:
        changes: keys of its source to change, and their values.
        remark: alternatives.
    """

    changes: Mapping[str, Any]
    remark: str = ""


@dataclass(frozen=True)
class ColumnFacts:
    """Facts about the invalid values of a column.

    Attributes:
        example: the first value.
        words: distinct words of text values; at most `MOST_WORDS`.
        whole: whether all its values are invalid.
        marks: alternative decimal and thousands marks that would read its numbers.
    """

    example: Any
    words: tuple[str, ...] = ()
    whole: bool = True
    marks: tuple[Marks, ...] = tuple(NUMBER_MARKS)


MOST_WORDS = 64
"""Maximum number of words of a column remembered for advice."""


def shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def in_words(kind: Kind, example: Any, wanted: ColumnType) -> str:
    """Describe an error; ``example`` is the first invalid value."""
    has = f"such as {shown(example)}"
    match kind:
        case "absent":
            return "is missing"
        case "missing":
            return (
                "has no value" if example is None or example == "" else f"has no value, but {has}"
            )
        case "text":
            return f"has text {has}, where a number is required"
        case "infinite":
            return "has infinite numbers"
        case "inexact":
            return f"has integers beyond 2**53, {has}, which a float cannot hold"
        case "fraction":
            return f"has numbers that are not whole, {has}; the task requires {wanted.in_words}"
        case "range":
            return f"has numbers {has} that do not fit; the task requires {wanted.in_words}"
        case "truth":
            return f"has values {has} that are neither true nor false, nor 1 or 0"
        case "unknown":
            return f"has words {has} that are not in its vocabulary"
        case "is_list":
            return f"has a list of numbers in each row, {has}, where a single number is required"
        case "is_single":
            return f"has a single value in each row, {has}; the task requires {wanted.in_words}"
        case "length":
            return f"has lists of another length than {wanted.length}, {has}"
        case "unreadable":
            return f"has values that are not numbers, text or times, {has}"
        case "not_text":
            return f"has values {has}, where text is required"
        case "not_bytes":
            return f"has values {has}, where bytes are required"
        case "not_list":
            return f"has single values {has}; the task requires {wanted.in_words}"


@dataclass(frozen=True)
class ColumnTarget:
    """The role of a column.

    Attributes:
        wanted: the task's column.
        is_label: whether it has the class of each row, so that another position would be another
            class.
        has_statistics: whether its source uses statistics.
    """

    wanted: ColumnType
    is_label: bool = False
    has_statistics: bool = False


def advise(kind: Kind, source: Source, role: ColumnTarget, facts: ColumnFacts) -> ColumnAdvice:
    """Suggest changes to a source that fix an error.

    Args:
        kind: the error.
        source: the current source.
        role: the role of the column.
        facts: facts about the invalid values.
    """
    wanted = role.wanted
    match kind:
        case "missing":
            return _of_missing(source, role)
        case "text":
            return _of_text(source, facts, role)
        case "infinite":
            drop = {} if source.missing != "refuse" else {"missing": "drop_row"}
            return ColumnAdvice({"infinite": "missing", **drop}, "or infinite: keep")
        case "inexact":
            return ColumnAdvice(
                {"vocabulary": {"hash": 1024}},
                "if it is an identifier, remove it; if it is a time, write it as a timestamp",
            )
        case "fraction":
            floats = "float32" if wanted.length is None else f"float32[{wanted.length}]"
            return ColumnAdvice({}, f'declare it as "{floats}" in the task')
        case "range":
            wider = "int64 or float64" if wanted.dtype.kind in "iu" else "float64"
            return ColumnAdvice({}, f"declare it as {wider} in the task, or add scale: standard")
        case "unknown":
            words = flow(sorted(facts.words)[:_FEW_WORDS])
            more = "" if role.is_label else ", or write other: bucket there"
            return ColumnAdvice({}, f"add {words} to the vocabulary{more}")
        case "is_list":
            count = len(facts.example) if isinstance(facts.example, list) else 2
            return ColumnAdvice(
                {"length": count}, f'the task\'s column must then have "[{count}]" too'
            )
        case "is_single":
            part = f"{{column: {flow(source.column)}}}"
            return ColumnAdvice(
                {},
                f"join {wanted.length} columns: [{part}, {{column: ANOTHER}}, ...], or have "
                f'"{wanted.scalar}" instead of "{wanted}" in the task',
            )
        case "not_text" | "not_bytes" | "not_list":
            return ColumnAdvice({}, "write it in this type, or declare its type in the task")
        case _:
            return ColumnAdvice({}, "remove the column, or write it as numbers or text")


def _of_missing(source: Source, role: ColumnTarget) -> ColumnAdvice:
    if role.wanted.ragged is not None:
        return ColumnAdvice({"missing": "drop_row"})
    if source.vocabulary is not None:
        has_place = source.vocabulary.hash is None and source.vocabulary.other == "bucket"
        if has_place and not role.is_label:
            return ColumnAdvice({"missing": "other"}, "or missing: drop_row")
        return ColumnAdvice({"missing": "drop_row"}, "or missing: {fill: WORD}")
    if role.has_statistics:
        return ColumnAdvice({"missing": "mean"}, "or missing: drop_row, or missing: {fill: 0}")
    if role.wanted.dtype.kind == "f":
        return ColumnAdvice(
            {"missing": "drop_row"}, "or missing: {fill: 0}, or missing: mean (--stats)"
        )
    return ColumnAdvice({"missing": "drop_row"}, "or missing: {fill: 0}")


def _of_text(source: Source, facts: ColumnFacts, role: ColumnTarget) -> ColumnAdvice:
    text = str(facts.example).strip()
    with_digits = [word for word in facts.words or (text,) if any(map(str.isdigit, word))]
    if source.cast == "number" and parse_time(text) is not None:
        return ColumnAdvice({"cast": "time"})
    formats = matching_formats(with_digits) if with_digits else ()
    if formats:
        site = "if only this region uses this format, put the cast into its site file (--site)"
        either = f"or {formats[1].time}; " if len(formats) > 1 else ""
        return ColumnAdvice({"cast": {"time": formats[0].time}}, either + site)
    if source.cast != "number":
        return ColumnAdvice({}, "set its format: cast: {time: FORMAT}, such as %d.%m.%Y")
    marks = matching_marks(with_digits, facts.marks) if with_digits else ()
    if marks:
        remark = f"add {marks_options(marks[0])}"
        if marks[0] == (".", ",") and (",", None) in marks:
            remark += " (or --decimal , if the comma is a decimal mark)"
        return ColumnAdvice({}, remark)
    if not facts.whole and len(facts.words) <= _NULL_WORDS:
        options = " ".join(f"--null {shlex.quote(word)}" for word in sorted(facts.words))
        return ColumnAdvice({}, f"add {options} if that means a missing value")
    if facts.whole and len(facts.words) <= _FEW_WORDS:
        words: dict[str, Any] = {"values": sorted(facts.words)}
        if role.is_label:
            return ColumnAdvice(
                {"vocabulary": words | {"other": "refuse"}},
                "list the words of every region; their order numbers the classes, from 0",
            )
        return ColumnAdvice({"vocabulary": words}, "or vocabulary: {file: WORDS.txt}")
    hashed = {"vocabulary": {"hash": 64}}
    return ColumnAdvice(hashed, "or vocabulary: {file: WORDS.txt}, or {counted: 10} (with --stats)")


_MOST_FILES = 20
_NO_NUMBERS: Set[Kind] = {"text", "missing", "unreadable"}


@dataclass(frozen=True)
class Spot:
    """The origin of some rows.

    Attributes:
        path: the file.
        row: number of the row in the file, from 1.
        names: all columns of the file.
    """

    path: str
    row: int
    names: tuple[str, ...]

    def at(self, offset: int) -> Spot:
        """Return a spot in the same file, the given number of rows further."""
        return replace(self, row=self.row + offset)


@dataclass
class _Record:
    """One kind of error of one column: its count, first place and files."""

    first: Spot
    example: Any
    whole: bool = True
    everywhere: bool = False
    rows: int = 0
    words: dict[str, None] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)


class Findings:
    """Collects errors by column of the task and column of the files.

    Args:
        types: the task's columns.
        label: the task's column that has the class of each row, if known.
        written: sources of the preparation file, if any.
        ignored: kinds of errors to ignore because they depend on unknown types.
        in_use: columns that other sources read, which are not suggested for a missing one.
    """

    def __init__(
        self,
        types: Mapping[str, ColumnType],
        label: str | None = None,
        written: WrittenSources | None = None,
        ignored: Collection[Kind] = (),
        in_use: Collection[str] = (),
    ) -> None:
        self._ignored = ignored
        self._in_use = frozenset(in_use)
        self._types = types
        self._label = label
        self._written = written or {}
        self._found: dict[tuple[str, str], dict[Kind, _Record]] = {}
        self._sources: dict[tuple[str, str], Source] = {}
        self._unreadable: dict[str, GeoRayError] = {}

    def __bool__(self) -> bool:
        return bool(self._found or self._unreadable)

    def add(
        self, name: str, source: Source, kind: Kind, rows: int, first: Spot, facts: ColumnFacts
    ) -> None:
        """Record rows that a source of the task's column ``name`` cannot encode."""
        if kind in self._ignored:
            return
        key = (name, source.column)
        self._sources[key] = source
        record = self._found.setdefault(key, {}).setdefault(kind, _Record(first, facts.example))
        record.rows += rows
        record.whole = record.whole and facts.whole
        record.words.update(dict.fromkeys(facts.words[: MOST_WORDS - len(record.words)]))
        record.files[first.path] = None

    def add_absent(self, name: str, source: Source, spot: Spot) -> None:
        """Record that no file has the column; this replaces other errors of the column."""
        key = (name, source.column)
        self._sources[key] = source
        record = _Record(spot, None, everywhere=True)
        record.files[spot.path] = None
        self._found[key] = {"absent": record}

    def add_unreadable(self, error: SchemaMismatchError | ShardCorruptError) -> None:
        """Record a file that cannot be read."""
        self._unreadable[error.message] = error

    def forget_copies(self, columns: Collection[str], rows: int) -> None:
        """Drop the errors of columns of the files without any number, which may be text or bytes.

        Args:
            columns: columns that a preparation copies, perhaps to a column of text.
            rows: rows of all files.
        """
        self._found = {
            key: found
            for key, found in self._found.items()
            if key[1] not in columns
            or sum(found[kind].rows for kind in _NO_NUMBERS & found.keys()) < rows
        }

    def forget(self, columns: Collection[str]) -> None:
        """Drop the errors of columns of the files whose cause was already reported."""
        self._found = {key: found for key, found in self._found.items() if key[1] not in columns}

    def raise_any(
        self, what: str, prepared: bool, draft: str = "", *, is_sealed: bool = False
    ) -> None:
        """Raise one error that lists all recorded ones; do nothing if there are none.

        Args:
            what: the first line.
            prepared: whether a preparation file is in use, which the advice then changes.
            draft: the command that writes a draft of a preparation file.
            is_sealed: whether a model was trained with the preparation, so that only the rows can
                be corrected.

        Raises:
            SchemaMismatchError: if columns or rows do not match the task.
            ShardCorruptError: if all errors are unreadable files.
        """
        if not self:
            return
        lines, helped = [f"{what}:"], False
        for error in list(self._unreadable.values())[:_MOST_FILES]:
            lines += [f"  {error.message}", f"      {error.fix}"]
        if len(self._unreadable) > _MOST_FILES:
            lines.append(f"  and {len(self._unreadable) - _MOST_FILES} more files")
        order = list(self._types)
        for key, records in sorted(self._found.items(), key=lambda item: order.index(item[0][0])):
            text, more = self._say(key, records)
            lines += text
            helped = helped or more
        if not self._found:
            wrong_rows = any(isinstance(e, SchemaMismatchError) for e in self._unreadable.values())
            error_class = SchemaMismatchError if wrong_rows else ShardCorruptError
            raise error_class("\n  ".join(lines), fix="Add these options, or correct the files.")
        fix = _SEALED if is_sealed else _fix(helped, prepared, draft)
        raise SchemaMismatchError("\n  ".join(lines), fix=fix)

    def _say(self, key: tuple[str, str], records: Mapping[Kind, _Record]) -> tuple[list[str], bool]:
        name, column = key
        source, wanted = self._sources[key], self._types[name]
        written = self._written.get(key)
        hints = ([f"for {name!r}"] if column != name else []) + ([written.where] if written else [])
        where = f"column {column!r}" + (f" ({'; '.join(hints)})" if hints else "")
        by_statistics = written is not None and isinstance(written.keys.get("scale"), str)
        role = ColumnTarget(wanted, name == self._label, by_statistics)
        lines: list[str] = []
        changes: dict[str, Any] = {}
        remarks: list[str] = []
        for kind, record in records.items():
            lines.append(
                f"  {where}: {in_words(kind, record.example, wanted)}{_places(kind, record)}"
            )
            advice = advise(kind, source, role, _facts(record))
            if kind == "absent":
                advice = _of_absent(column, record, wanted, self._in_use)
            changes |= advice.changes
            if advice.remark:
                remarks.append(advice.remark)
        if changes:
            joined = wanted.length is not None and source.length is None
            text = source_text(source, changes) if written is None else written.changed(changes)
            line = f"{flow(name)}: [{text}, ...]" if joined else f"{flow(name)}: {text}"
            lines.append(f"      {line}")
        lines += [f"      {remark}" for remark in dict.fromkeys(remarks)]
        return lines, bool(changes) or any("column:" in remark for remark in remarks)


def _facts(record: _Record) -> ColumnFacts:
    return ColumnFacts(record.example, tuple(record.words), record.whole)


def _places(kind: Kind, record: _Record) -> str:
    if kind == "absent":
        return f" in {listed(record.files)}"
    if kind in ("is_list", "is_single", "unreadable", "not_text", "not_bytes", "not_list"):
        return f" (in {listed(record.files)})"
    rows = "1 row" if record.rows == 1 else f"{record.rows:,} rows"
    first = f"row {record.first.row} of {record.first.path}"
    more = len(record.files) - 1
    also = f"; also in {listed(list(record.files)[1:])}" if more else ""
    return f" ({rows}, first in {first}{also})"


def _of_absent(column: str, record: _Record, wanted: ColumnType, in_use: Set[str]) -> ColumnAdvice:
    """Advice for a column that is not there; columns ``in_use`` are not suggested."""
    names = record.first.names
    if not record.everywhere:
        them = "add the column to it, or remove the file"
        return ColumnAdvice({}, f"{record.first.path} has {listed(names)}; {them}")
    close = nearest_word(column, set(names) - in_use)
    if close is not None:
        return ColumnAdvice({"column": close})
    remark = f"the files have {listed(names) if names else 'no columns'}"
    if wanted.length is not None and names:
        some = ", ".join(f"{{column: {flow(name)}}}" for name in names[:2])
        remark += f"; join some of them: [{some}, ...]"
    else:
        remark += "; name the correct one: {column: NAME}"
    return ColumnAdvice({}, remark)


_SEALED: Final = (
    "Correct the rows: add the missing columns, and pass `decimal` or `thousands` if numbers are "
    "text. Change the preparation file (lines with braces) only to train again with new shards."
)


def _fix(helped: bool, prepared: bool, draft: str) -> str:
    if not helped:
        place = "the preparation file or in the files" if prepared else "the files or in the task"
        return f"Correct the problems above in {place}."
    if prepared:
        return "Put the lines with braces into the preparation file, or correct the files."
    first = f"; `{draft}` writes a draft" if draft else ""
    return (
        "Write a preparation file, with the lines in braces below `columns:`, and add "
        f"--prepare FILE{first}."
    )
