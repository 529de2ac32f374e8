"""Rows of a CSV file, every value as text: what it means is decided where its column is used.

Arrow guesses types from a file's first block and fails when a later block differs; text never does.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv as pa_csv

from geo_ray.data.files.find import InputFile
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.files.piece import Borrowed, FilePiece, fraction_read
from geo_ray.errors import SchemaMismatchError, ShardCorruptError

BLOCK_BYTES = 8 << 20
"""Decoded at a time; a row may have about as much."""

_HEAD_BYTES = 1 << 20
_NUMBER = re.compile(r"\s*[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?\s*")
_OTHER_DELIMITERS = {";": "';'", "\t": "tab", "|": "'|'", ",": "','"}


def csv_pieces(
    file: BinaryIO, found: InputFile, options: ReadOptions, wanted: Collection[str] | None
) -> Iterator[FilePiece]:
    """Read a CSV file block by block.

    Args:
        file: at its start; closed by the caller.
        found: its path and compression.
        options: delimiter, encoding and the like.
        wanted: the columns to read, or None for all; absent ones are left out.

    Yields:
        Pieces whose columns are text; values that mean "no value" are nulls.

    Raises:
        SchemaMismatchError: no header that can be used, or rows of another length (raised at the
            end, after the good rows).
        ShardCorruptError: it is not text of the encoding, or cannot be decompressed.
    """
    delimiter = options.delimiter or ("\t" if ".tsv" in found.path.lower() else ",")
    try:
        raw_names, has_rows = _header(_decompressed(file, found), found.path, delimiter, options)
        if not raw_names or not has_rows:
            return
        file.seek(0)
        yield from _blocks(file, found, delimiter, options, raw_names, wanted)
    except UnicodeError as error:
        raise _wrong_encoding(found.path, options.encoding, str(error)) from None
    except (pa.ArrowException, OSError, EOFError) as error:
        raise _undecodable(found.path, options.encoding, str(error)) from error


def _decompressed(file: BinaryIO, found: InputFile) -> Any:
    if found.compression is None:
        return file
    return pa.CompressedInputStream(pa.PythonFile(Borrowed(file), mode="r"), found.compression)


def _header(stream: Any, path: str, delimiter: str, options: ReadOptions) -> tuple[list[str], bool]:
    """The columns' names as the file writes them, and whether anything follows them."""
    head = bytes(stream.read(_HEAD_BYTES))
    _refuse_other_formats(head, path, options)
    text = head.decode(options.encoding, errors="replace").removeprefix("\ufeff")
    if not text.strip(_blank(delimiter, options)):
        return [], False
    lines = io.StringIO(text, newline="")
    try:
        first = next(csv.reader(lines, delimiter=delimiter))
    except (csv.Error, StopIteration) as error:
        raise SchemaMismatchError(f"{path}: its first line is no CSV: {error}") from None
    if options.header:
        return list(options.header), True
    names = [name.strip() for name in first]
    if all(_NUMBER.fullmatch(name) for name in names):
        raise SchemaMismatchError(
            f"{path} has no header line: its first line is {delimiter.join(first)[:80]!r}",
            fix="Name its columns, in order: --header NAME,NAME,...",
        )
    others = [c for c in _OTHER_DELIMITERS if c != delimiter and len(names) == 1 and c in names[0]]
    if others and options.delimiter is None:
        raise SchemaMismatchError(
            f"{path}: its header is a single column {names[0][:80]!r}",
            fix=f"Add --delimiter {_OTHER_DELIMITERS[others[0]]}.",
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SchemaMismatchError(
            f"{path}: its header names {twice[0] or 'nothing'!r} twice",
            fix="Give each column a name of its own.",
        )
    rest = lines.read()
    return first, bool(rest if len(first) == 1 else rest.strip("\r\n"))


def _blank(delimiter: str, options: ReadOptions) -> str:
    """Characters that alone make no row: not the delimiter, which separates empty values."""
    if options.header:
        return "\r\n" if len(options.header) > 1 else ""
    return " \t\r\n".replace(delimiter, "")


def _blocks(
    file: BinaryIO,
    found: InputFile,
    delimiter: str,
    options: ReadOptions,
    raw_names: Sequence[str],
    wanted: Collection[str] | None,
) -> Iterator[FilePiece]:
    names = tuple(name.strip() for name in raw_names)
    chosen = [raw for raw in raw_names if wanted is None or raw.strip() in wanted]
    bad: list[Any] = []

    def note(row: Any) -> str:
        bad.append(row)
        return "skip"

    reader = pa_csv.open_csv(
        _decompressed(file, found),
        read_options=pa_csv.ReadOptions(
            use_threads=False,
            block_size=BLOCK_BYTES,
            column_names=list(options.header) or None,
            encoding=options.encoding,
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=delimiter,
            newlines_in_values=True,
            ignore_empty_lines=len(raw_names) > 1,  # of a single column they are empty values
            invalid_row_handler=note,
        ),
        convert_options=pa_csv.ConvertOptions(
            column_types={raw: pa.string() for raw in raw_names},
            include_columns=[*chosen, *({raw_names[-1]} - set(chosen))],
            null_values=_null_cells(options.nulls),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    last: str | None = None
    size = os.fstat(file.fileno()).st_size
    with reader:
        for number, batch in enumerate(reader, start=1):
            if batch.num_rows:
                last = batch.column(raw_names[-1])[-1].as_py()
            columns = {raw.strip(): batch.column(raw) for raw in chosen}
            # Arrow reads ahead of what it decodes, a block per batch.
            decoded = min(1.0, number * BLOCK_BYTES / size)
            done = decoded if found.compression is None else fraction_read(file)
            yield FilePiece(names, columns, batch.num_rows, done)
    if last is not None and "\n" in last and not _ends_quoted(file, found, last):
        raise SchemaMismatchError(
            f"{found.path}: a quote that is not closed takes in what follows it: {last[:60]!r}",
            fix="Close the quote, or double a quote that is part of a value.",
        )
    if bad:
        first = bad[0]
        raise SchemaMismatchError(
            f"{found.path} has rows with more or fewer values than the header's "
            f"{first.expected_columns}: {len(bad)} of them, the first is row {first.number} of the "
            f"file, with {first.actual_columns}: {first.text[:60]!r}",
            fix="Look for a quote that is not closed, or a value that has the delimiter in it and "
            "is not quoted.",
        )


def _ends_quoted(file: BinaryIO, found: InputFile, last: str) -> bool:
    """Whether the last value, which has a line end in it, is closed by a quote."""
    if found.compression is not None:
        return not last.endswith("\n")
    file.seek(-min(16, file.seek(0, 2)), 2)
    return file.read().rstrip(b"\r\n\0 ").endswith(b'"')


def _null_cells(words: Sequence[str]) -> list[str]:
    """Cells that mean that there is no value; Arrow compares them with their spaces."""
    spaced = [f"{left}{word}{right}" for word in words for left in ("", " ") for right in ("", " ")]
    return ["", *spaced]


def _refuse_other_formats(head: bytes, path: str, options: ReadOptions) -> None:
    for magic, what, fix in (
        (b"\x1f\x8b", "gzip-compressed", "Rename it, so that its name ends in .csv.gz."),
        (b"PK\x03\x04", "a zip archive or an Excel sheet", "Unpack it, or save it as CSV (UTF-8)."),
        (b"PAR1", "a Parquet file", "Rename it, so that its name ends in .parquet."),
    ):
        if head.startswith(magic):
            raise ShardCorruptError(f"{path} is {what}, no CSV", fix=fix)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and "16" not in options.encoding:
        raise _wrong_encoding(path, options.encoding, "it begins with the mark of UTF-16", "utf-16")


def _wrong_encoding(
    path: str, encoding: str, detail: str, better: str = "latin-1"
) -> ShardCorruptError:
    return ShardCorruptError(
        f"{path} is not {encoding} text: {detail}",
        fix=f"Name its encoding, such as --encoding {better}.",
    )


def _undecodable(path: str, encoding: str, detail: str) -> ShardCorruptError:
    if "UTF8" in detail:
        row = re.search(r"Row #(\d+)", detail)
        return _wrong_encoding(path, encoding, f"row {row[1]} of the file" if row else "a value")
    if "straddl" in detail:
        return ShardCorruptError(
            f"{path}: a row has more than {BLOCK_BYTES >> 20} MiB",
            fix="Look for a quote that is not closed.",
        )
    return ShardCorruptError(f"{path}: cannot be read: {detail}", fix="Write the file anew.")
