"""Everything that is wrong with a user's columns, gathered, said at once and with what to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from geo_ray.data.columns import ColumnType
from geo_ray.data.nearby import listed, nearest
from geo_ray.data.prepare.advice import (
    MOST_WORDS,
    ColumnAdvice,
    ColumnFacts,
    ColumnTarget,
    advise,
    in_words,
)
from geo_ray.data.prepare.config import Source
from geo_ray.data.prepare.part import Kind
from geo_ray.data.prepare.written import WrittenSources
from geo_ray.data.prepare.yaml_line import flow, source_text
from geo_ray.errors import GeoRayError, SchemaMismatchError, ShardCorruptError

_MOST_FILES = 20


@dataclass(frozen=True)
class Spot:
    """Where some rows are from.

    Attributes:
        path: the file.
        row: the number of a row in it, from 1.
        names: all columns of the file.
    """

    path: str
    row: int
    names: tuple[str, ...]

    def at(self, offset: int) -> Spot:
        """The same file, so many rows further."""
        return replace(self, row=self.row + offset)


@dataclass
class _Record:
    """One kind of trouble of one column: how often, where first, and in which files."""

    first: Spot
    example: Any
    whole: bool = True
    everywhere: bool = False
    rows: int = 0
    words: dict[str, None] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)


class Findings:
    """Gathers what is wrong; keyed by column of the task and column of the files.

    Args:
        types: the task's columns.
        label: the task's column that has the class of each row, if that is known.
        written: of the preparation file, if there is one.
        ignored: kinds that are not noted: they depend on types that are not known.
    """

    def __init__(
        self,
        types: Mapping[str, ColumnType],
        label: str | None = None,
        written: WrittenSources | None = None,
        ignored: Collection[Kind] = (),
    ) -> None:
        self._ignored = ignored
        self._types = types
        self._label = label
        self._written = written or {}
        self._found: dict[tuple[str, str], dict[Kind, _Record]] = {}
        self._sources: dict[tuple[str, str], Source] = {}
        self._unreadable: dict[str, GeoRayError] = {}

    def __bool__(self) -> bool:
        return bool(self._found or self._unreadable)

    def add(
        self, name: str, source: Source, kind: Kind, rows: int, first: Spot, seen: ColumnFacts
    ) -> None:
        """Note rows that a source of the task's column ``name`` cannot take."""
        if kind in self._ignored:
            return
        key = (name, source.column)
        self._sources[key] = source
        record = self._found.setdefault(key, {}).setdefault(kind, _Record(first, seen.example))
        record.rows += rows
        record.whole = record.whole and seen.whole
        record.words.update(dict.fromkeys(seen.words[: MOST_WORDS - len(record.words)]))
        record.files[first.path] = None

    def add_absent(self, name: str, source: Source, spot: Spot) -> None:
        """Note that no file has the column, whatever else was said of it."""
        key = (name, source.column)
        self._sources[key] = source
        record = _Record(spot, None, everywhere=True)
        record.files[spot.path] = None
        self._found[key] = {"absent": record}

    def add_unreadable(self, error: SchemaMismatchError | ShardCorruptError) -> None:
        """Note a file that cannot be read."""
        self._unreadable[error.message] = error

    def forget(self, columns: Collection[str]) -> None:
        """Drop what was noted of columns of the files; the cause was said already."""
        self._found = {key: found for key, found in self._found.items() if key[1] not in columns}

    def raise_any(self, what: str, prepared: bool, draft: str = "") -> None:
        """Raise one error that lists all that was noted; nothing if there is nothing.

        Args:
            what: the first line.
            prepared: whether a preparation file is in use, to be changed rather than written.
            draft: the command that writes a first preparation file.

        Raises:
            SchemaMismatchError: if columns or rows do not fit.
            ShardCorruptError: if nothing but unreadable files was found.
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
            raise error_class("\n  ".join(lines), fix="Mend the files that are named.")
        raise SchemaMismatchError("\n  ".join(lines), fix=_fix(helped, prepared, draft))

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
            advice = advise(kind, source, role, _seen(record))
            if kind == "absent":
                advice = _of_absent(column, record, wanted)
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


def _seen(record: _Record) -> ColumnFacts:
    return ColumnFacts(record.example, tuple(record.words), record.whole)


def _places(kind: Kind, record: _Record) -> str:
    if kind == "absent":
        return f" in {listed(record.files)}"
    if kind in ("is_list", "is_single", "unreadable"):
        return f" (in {listed(record.files)})"
    rows = "1 row" if record.rows == 1 else f"{record.rows:,} rows"
    first = f"row {record.first.row} of {record.first.path}"
    more = len(record.files) - 1
    also = f"; also in {listed(list(record.files)[1:])}" if more else ""
    return f" ({rows}, first in {first}{also})"


def _of_absent(column: str, record: _Record, wanted: ColumnType) -> ColumnAdvice:
    names = record.first.names
    if not record.everywhere:
        them = "give it the column, or leave the file out"
        return ColumnAdvice({}, f"{record.first.path} has {listed(names)}; {them}")
    close = nearest(column, set(names))
    if close is not None:
        return ColumnAdvice({"column": close})
    remark = f"the files have {listed(names) if names else 'no columns'}"
    if wanted.length is not None and names:
        some = ", ".join(f"{{column: {flow(name)}}}" for name in names[:2])
        remark += f"; join some of them: [{some}, ...]"
    else:
        remark += "; name the right one: {column: NAME}"
    return ColumnAdvice({}, remark)


def _fix(helped: bool, prepared: bool, draft: str) -> str:
    if not helped:
        place = "the preparation file or in the files" if prepared else "the files or in the task"
        return f"Mend what is listed, in {place}."
    if prepared:
        return "Put the lines with braces into the preparation file, or mend the files."
    first = f"; `{draft}` writes a first one" if draft else ""
    return (
        "Write a preparation file, with the lines in braces below the line `columns:`, and add "
        f"--prepare FILE{first}."
    )
