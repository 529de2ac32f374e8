"""Read the rows of a CSV file with every value as text; the column's user interprets the text.

Arrow guesses types from a file's first block and fails when a later block differs; reading text
never fails.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv as pa_csv

from geo_ray.base.errors import SchemaMismatchError, ShardCorruptError
from geo_ray.data.files.find import Borrowed, FilePiece, InputFile, fraction_read, size_of
from geo_ray.data.files.options import ReadOptions

BLOCK_BYTES = 8 << 20
"""Bytes decoded at a time, which also limits the length of a row."""

_HEAD_BYTES = 1 << 20
_MARK = "\ufeff".encode()
_NUMBER = re.compile(r"\s*[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?\s*")
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[ \t]*(?:\r\n|\r|\n)', re.I)
_OTHER_DELIMITERS = {";": "';'", "\t": "tab", "|": "'|'", ",": "','"}


@dataclass(frozen=True)
class _Layout:
    """The part of a file before its rows.

    Attributes:
        names: column names; () if the file has neither names nor rows.
        delimiter: the character between values.
        bytes: size of that part as UTF-8.
        lines: number of lines before the first row.
        has_rows: whether any rows follow.
        skipped: why a line that looks like a row was skipped; empty if none was.
    """

    names: tuple[str, ...]
    delimiter: str
    bytes: int = 0
    lines: int = 0
    has_rows: bool = True
    skipped: str = ""


class _NotTextError(UnicodeError):
    """The file has a byte that is invalid in its encoding."""


class _Utf8Text:
    """The text of a file as UTF-8, without its byte order mark, as Arrow reads a Python file.

    Arrow drops a line feed at the start of a block if the block before it ended with a carriage
    return, even within quotes. So a piece never ends with a carriage return unless the file ends
    there.

    Args:
        raw: the file's bytes.
        encoding: encoding of the bytes.
        skip: number of UTF-8 bytes to skip at the beginning.
    """

    def __init__(self, raw: Any, encoding: str, skip: int = 0) -> None:
        self._raw = raw
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._is_utf8 = codecs.lookup(encoding).name == "utf-8"
        self._waiting = b""
        self._done = False
        self._lines = 0
        self.closed = False
        self._take(max(skip, len(_MARK)) + len(_MARK))
        self._waiting = self._waiting.removeprefix(_MARK)[skip:]

    def read(self, size: int) -> bytes:
        """Read at most ``size`` bytes; none at the end.

        Raises:
            UnicodeError: a byte is invalid in the encoding.
        """
        self._take(size)
        piece = self._waiting[:size]
        if (
            len(piece) > 1
            and piece.endswith(b"\r")
            and not (self._done and len(piece) == len(self._waiting))
        ):
            piece = piece[:-1]
        self._waiting = self._waiting[len(piece) :]
        return piece

    def _take(self, size: int) -> None:
        """Fill the buffer with ``size`` bytes, or with all remaining ones."""
        while len(self._waiting) < size and not self._done:
            data = bytes(self._raw.read(size))
            self._done = not data
            try:
                text = self._decoder.decode(data, final=self._done)
            except UnicodeDecodeError as error:
                before = error.object[: error.start].count(b"\n")
                byte = error.object[error.start]
                raise _NotTextError(self._lines + before + 1, byte) from None
            self._lines += data.count(b"\n")
            self._waiting += data if self._is_utf8 else text.encode()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing: the caller closes the file."""


def csv_pieces(
    file: BinaryIO, found: InputFile, options: ReadOptions, wanted: Collection[str] | None
) -> Iterator[FilePiece]:
    """Read a CSV file in blocks.

    Args:
        file: at its start; closed by the caller.
        found: its path and compression.
        options: delimiter, encoding and so on.
        wanted: the columns to read, or None for all; absent ones are ignored.

    Yields:
        Pieces whose columns are text; values that mean "no value" are nulls.

    Raises:
        SchemaMismatchError: no usable header, or rows with a different number of values (raised at
            the end, after the good rows).
        ShardCorruptError: the text is invalid in the encoding, or decompression failed.
    """
    try:
        _refuse_other_formats(bytes(_decompressed(file, found).read(4)), found.path, options)
        file.seek(0)
        layout = _layout(_Utf8Text(_decompressed(file, found), options.encoding), found, options)
        if not layout.names or not layout.has_rows:
            return
        file.seek(0)
        yield from _blocks(file, found, options, layout, wanted)
    except _NotTextError as error:
        line, byte = error.args
        better = "cp1252" if 0x80 <= byte < 0xA0 else "latin-1"
        raise _wrong_encoding(
            found.path, options.encoding, f"line {line} has the byte 0x{byte:02x}", better
        ) from None
    except UnicodeError as error:
        raise _wrong_encoding(found.path, options.encoding, str(error)) from None
    except (pa.ArrowException, OSError, EOFError) as error:
        raise _undecodable(found.path, str(error)) from error


def _decompressed(file: BinaryIO, found: InputFile) -> Any:
    if found.compression is None:
        return file
    return pa.CompressedInputStream(pa.PythonFile(Borrowed(file), mode="r"), found.compression)


def _layout(stream: _Utf8Text, found: InputFile, options: ReadOptions) -> _Layout:
    """Read the lines before the first row."""
    path, head = found.path, stream.read(_HEAD_BYTES)
    is_whole = len(head) < _HEAD_BYTES - 1
    text = head.decode(errors="ignore")
    separator = _SEPARATOR_LINE.match(text)  # Excel writes and reads such a line
    delimiter = options.delimiter or ("\t" if ".tsv" in path.lower() else ",")
    if separator is not None and options.delimiter is None:
        delimiter = separator[1]
    begin = separator.end() if separator is not None else 0
    before = 1 if separator is not None else 0
    if not text[begin:].strip(_blank(delimiter, options)):
        return _Layout((), delimiter)
    if not options.header:  # an empty line has no names
        gap = re.match(r"(?:[ \t]*(?:\r\n|\r|\n))*", text[begin:])
        blank = gap[0] if gap is not None else ""
        if delimiter not in blank:
            begin, before = begin + len(blank), before + len(blank.splitlines())
    lines = io.StringIO(text[begin:], newline="")
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        first = next(reader)
    except (csv.Error, StopIteration) as error:
        raise SchemaMismatchError(f"{path}: its first line is not valid CSV: {error}") from None
    names = tuple(name.strip() for name in first)
    if options.header:
        skipped = _repeated_header(names, options.header, delimiter)
        if not skipped:
            size = len(text[:begin].encode())
            return _Layout(options.header, delimiter, size, before)
        names = options.header
    else:
        skipped = ""
        _refuse_header(names, delimiter, path, options, separator is not None)
    rest = lines.read()
    if not rest and not is_whole:
        raise SchemaMismatchError(
            f"{path}: its header line has more than {_HEAD_BYTES >> 20} MiB",
            fix="Look for a quote that is not closed.",
        )
    size = (
        len(head) - len(rest.encode()) if is_whole else len(text[: len(text) - len(rest)].encode())
    )
    has_rows = bool(rest if len(names) == 1 else rest.strip("\r\n")) or not is_whole
    return _Layout(names, delimiter, size, before + reader.line_num, has_rows, skipped)


def _repeated_header(first: tuple[str, ...], given: tuple[str, ...], delimiter: str) -> str:
    """Why the first line is not a row although the user names the columns; empty if it is a row."""
    line = delimiter.join(first)[:80]
    if [name.casefold() for name in first] == [name.casefold() for name in given]:
        return f"its first line {line!r} has the names of --header"
    if len(first) > 1 and len(first) == len(given) and _counts(first):
        return f"its first line {line!r} numbers the columns, which --header names"
    return ""


def _counts(names: tuple[str, ...]) -> bool:
    """Whether names are 0, 1, 2 and so on, as pandas writes them for columns without names."""
    return names == tuple(str(number) for number in range(len(names)))


def _refuse_header(
    names: tuple[str, ...], delimiter: str, path: str, options: ReadOptions, has_options: bool
) -> None:
    line = delimiter.join(names)[:80]
    if all(_NUMBER.fullmatch(name) for name in names):
        if len(names) > 1 and _counts(names):
            raise SchemaMismatchError(
                f"{path}: its first line {line!r} numbers the columns and does not name them",
                fix="Name its columns, in order: --header NAME,NAME,... The line is then skipped.",
            )
        raise SchemaMismatchError(
            f"{path} has no header line: its first line is {line!r}",
            fix="Name its columns, in order: --header NAME,NAME,... If these numbers are the "
            f"names, add --header {','.join(names)[:80]}; the line is then not read as a row.",
        )
    others = [c for c in _OTHER_DELIMITERS if c != delimiter and len(names) == 1 and c in names[0]]
    if others and options.delimiter is None and not has_options:
        raise SchemaMismatchError(
            f"{path}: its header is a single column {names[0][:80]!r}",
            fix=f"Add --delimiter {_OTHER_DELIMITERS[others[0]]}.",
        )
    twice = sorted(name for name, n in Counter(names).items() if n > 1)
    if twice:
        raise SchemaMismatchError(
            f"{path}: its header names {twice[0] or 'nothing'!r} twice",
            fix="Give each column a unique name.",
        )


def _blank(delimiter: str, options: ReadOptions) -> str:
    """Characters that do not form a row alone; the delimiter does, it separates empty values."""
    if options.header:
        return "\r\n" if len(options.header) > 1 else ""
    return " \t\r\n".replace(delimiter, "")


def _blocks(
    file: BinaryIO,
    found: InputFile,
    options: ReadOptions,
    layout: _Layout,
    wanted: Collection[str] | None,
) -> Iterator[FilePiece]:
    names, skipped = layout.names, layout.skipped
    chosen = [name for name in names if wanted is None or name in wanted]
    bad: list[Any] = []

    def note(row: Any) -> str:
        bad.append(row)
        return "skip"

    size = size_of(file)
    text = _Utf8Text(_decompressed(file, found), options.encoding, layout.bytes)
    reader = pa_csv.open_csv(
        pa.PythonFile(text, mode="r"),
        read_options=pa_csv.ReadOptions(
            use_threads=False, block_size=BLOCK_BYTES, column_names=list(names)
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=layout.delimiter,
            newlines_in_values=True,
            ignore_empty_lines=len(names) > 1,  # in a single column, empty lines are empty values
            invalid_row_handler=note,
        ),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=[*chosen, *({names[-1]} - set(chosen))],
            null_values=_null_cells(options.nulls),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    last: str | None = None
    with reader:
        for number, batch in enumerate(reader, start=1):
            if batch.num_rows:
                last = batch.column(names[-1])[-1].as_py()
            columns = {name: batch.column(name) for name in chosen}
            # Arrow reads one block ahead of the batch that it decodes.
            decoded = min(1.0, number * BLOCK_BYTES / size)
            done = decoded if found.compression is None else fraction_read(file, size)
            yield FilePiece(names, columns, batch.num_rows, done, skipped=skipped)
            skipped = ""
    if last is not None and "\n" in last and not _ends_quoted(file, found, last):
        raise SchemaMismatchError(
            f"{found.path}: an unclosed quote includes the text after it: {last[:60]!r}",
            fix="Close the quote, or double a quote that is part of a value.",
        )
    if bad:
        first = bad[0]
        raise SchemaMismatchError(
            f"{found.path} has rows with more or fewer values than the header's "
            f"{first.expected_columns}: {len(bad)} of them, the first is row "
            f"{first.number + layout.lines} of the file, with {first.actual_columns}: "
            f"{first.text[:60]!r}",
            fix="Look for a quote that is not closed, or an unquoted value that contains the "
            "delimiter.",
        )


def _ends_quoted(file: BinaryIO, found: InputFile, last: str) -> bool:
    """Whether the last value, which contains a line end, ends with a quote."""
    if found.compression is not None:
        return not last.endswith("\n")
    file.seek(-min(16, file.seek(0, 2)), 2)
    return file.read().rstrip(b"\r\n\0 ").endswith(b'"')


def _null_cells(words: Sequence[str]) -> list[str]:
    """Texts of missing values; Arrow compares cells including their spaces."""
    spaced = [f"{left}{word}{right}" for word in words for left in ("", " ") for right in ("", " ")]
    return ["", *spaced]


def _refuse_other_formats(head: bytes, path: str, options: ReadOptions) -> None:
    for magic, what, fix in (
        (b"\x1f\x8b", "gzip-compressed", "Rename it, so that its name ends in .csv.gz."),
        (b"PK\x03\x04", "a zip archive or an Excel sheet", "Unpack it, or save it as CSV (UTF-8)."),
        (b"PAR1", "a Parquet file", "Rename it, so that its name ends in .parquet."),
    ):
        if head.startswith(magic):
            raise ShardCorruptError(f"{path} is {what}, not CSV", fix=fix)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and "16" not in options.encoding:
        raise _wrong_encoding(
            path, options.encoding, "it begins with the UTF-16 byte order mark", "utf-16"
        )


def _wrong_encoding(
    path: str, encoding: str, detail: str, better: str = "latin-1"
) -> ShardCorruptError:
    return ShardCorruptError(
        f"{path} is not {encoding} text: {detail}",
        fix=f"Set its encoding, such as --encoding {better}.",
    )


def _undecodable(path: str, detail: str) -> ShardCorruptError:
    if "straddl" in detail:
        return ShardCorruptError(
            f"{path}: a row has more than {BLOCK_BYTES >> 20} MiB",
            fix="Look for a quote that is not closed.",
        )
    return ShardCorruptError(f"{path}: cannot be read: {detail}", fix="Write the file again.")
