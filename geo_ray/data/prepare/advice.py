"""What is wrong with a column in plain words, and which treatment would mend it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geo_ray.data.columns import ColumnType
from geo_ray.data.prepare.config import Source
from geo_ray.data.prepare.numbers import (
    NUMBER_MARKS,
    Marks,
    fitting_formats,
    fitting_marks,
    marks_options,
    parse_time,
)
from geo_ray.data.prepare.part import Kind
from geo_ray.data.prepare.yaml_line import flow

_SHOWN = 40
_FEW_WORDS = 20
_NULL_WORDS = 3


@dataclass(frozen=True)
class ColumnAdvice:
    """What to do about a column.

    Attributes:
        changes: keys of its treatment and their values.
        remark: what else may be done.
    """

    changes: Mapping[str, Any]
    remark: str = ""


@dataclass(frozen=True)
class ColumnFacts:
    """What a column has where it is wrong.

    Attributes:
        example: the first value.
        words: distinct words, of text; at most `MOST_WORDS`.
        whole: whether all its values are wrong.
        marks: how its numbers may be written, other than by the marks in use.
    """

    example: Any
    words: tuple[str, ...] = ()
    whole: bool = True
    marks: tuple[Marks, ...] = tuple(NUMBER_MARKS)


MOST_WORDS = 64
"""Words of a column that are remembered to advise about."""


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def in_words(kind: Kind, example: Any, wanted: ColumnType) -> str:
    """What is wrong; ``example`` is the first value that is."""
    has = f"such as {shown(example)}"
    match kind:
        case "absent":
            return "is missing"
        case "missing":
            return (
                "has no value" if example is None or example == "" else f"has no value, but {has}"
            )
        case "text":
            return f"has text {has}, where a number is wanted"
        case "infinite":
            return "has infinite numbers"
        case "inexact":
            return f"has integers beyond 2**53, {has}, which a float cannot hold"
        case "fraction":
            return f"has numbers that are not whole, {has}; the task wants {wanted.in_words}"
        case "range":
            return f"has numbers {has} that do not fit; the task wants {wanted.in_words}"
        case "truth":
            return f"has values {has} that are neither true nor false, nor 1 or 0"
        case "unknown":
            return f"has words {has} that are not in its vocabulary"
        case "is_list":
            return f"has a list of numbers in each row, {has}, where a single number is wanted"
        case "is_single":
            return f"has a single value in each row, {has}; the task wants {wanted.in_words}"
        case "length":
            return f"has lists of another length than {wanted.length}, {has}"
        case "unreadable":
            return f"has values that are no numbers, no text and no times, {has}"


@dataclass(frozen=True)
class ColumnTarget:
    """What a column is for.

    Attributes:
        wanted: the task's column.
        is_label: whether it has the class of each row, so that a place more were a class more.
        has_statistics: whether its treatment takes something from statistics.
    """

    wanted: ColumnType
    is_label: bool = False
    has_statistics: bool = False


def advise(kind: Kind, source: Source, role: ColumnTarget, seen: ColumnFacts) -> ColumnAdvice:
    """A treatment that mends it.

    Args:
        kind: what is wrong.
        source: the treatment so far.
        role: what it is for.
        seen: the values that are wrong.
    """
    wanted = role.wanted
    match kind:
        case "missing":
            return _of_missing(source, role)
        case "text":
            return _of_text(source, seen, role)
        case "infinite":
            drop = {} if source.missing != "refuse" else {"missing": "drop_row"}
            return ColumnAdvice({"infinite": "missing", **drop}, "or infinite: keep")
        case "inexact":
            return ColumnAdvice(
                {"vocabulary": {"hash": 1024}},
                "if it is an identifier, leave it out; if it is a time, write it as a timestamp",
            )
        case "fraction":
            floats = "float32" if wanted.length is None else f"float32[{wanted.length}]"
            return ColumnAdvice({}, f'the task could have "{floats}" for it')
        case "range":
            wider = "int64 or float64" if wanted.dtype.kind in "iu" else "float64"
            return ColumnAdvice({}, f"the task could have {wider} for it, or scale it: standard")
        case "unknown":
            words = flow(sorted(seen.words)[:_FEW_WORDS])
            more = "" if role.is_label else ", or write other: bucket there"
            return ColumnAdvice({}, f"add {words} to the vocabulary{more}")
        case "is_list":
            count = len(seen.example) if isinstance(seen.example, list) else 2
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
        case _:
            return ColumnAdvice({}, "leave the column out, or write it as numbers or text")


def _of_missing(source: Source, role: ColumnTarget) -> ColumnAdvice:
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


def _of_text(source: Source, seen: ColumnFacts, role: ColumnTarget) -> ColumnAdvice:
    text = str(seen.example).strip()
    with_digits = [word for word in seen.words or (text,) if any(map(str.isdigit, word))]
    if source.cast == "number" and parse_time(text) is not None:
        return ColumnAdvice({"cast": "time"})
    formats = fitting_formats(with_digits) if with_digits else ()
    if formats:
        site = "if only this region writes times so, put the cast into its site file (--site)"
        either = f"or {formats[1].time}; " if len(formats) > 1 else ""
        return ColumnAdvice({"cast": {"time": formats[0].time}}, either + site)
    if source.cast != "number":
        return ColumnAdvice({}, "say how it is written: cast: {time: FORMAT}, such as %d.%m.%Y")
    marks = fitting_marks(with_digits, seen.marks) if with_digits else ()
    if marks:
        remark = f"add {marks_options(marks[0])}"
        if marks[0] == (".", ",") and (",", None) in marks:
            remark += " (or --decimal , if the comma is a decimal mark)"
        return ColumnAdvice({}, remark)
    if not seen.whole and len(seen.words) <= _NULL_WORDS:
        options = " ".join(f"--null {shlex.quote(word)}" for word in sorted(seen.words))
        return ColumnAdvice({}, f"add {options} if that means that there is no value")
    if seen.whole and len(seen.words) <= _FEW_WORDS:
        words: dict[str, Any] = {"values": sorted(seen.words)}
        if role.is_label:
            return ColumnAdvice(
                {"vocabulary": words | {"other": "refuse"}},
                "list the words of every region; their order numbers the classes, from 0",
            )
        return ColumnAdvice({"vocabulary": words}, "or vocabulary: {file: WORDS.txt}")
    hashed = {"vocabulary": {"hash": 64}}
    return ColumnAdvice(hashed, "or vocabulary: {file: WORDS.txt}, or {counted: 10} (with --stats)")
