"""Read the rows of a JSON lines file; keys of nested objects become ``outer.inner``."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

from geo_ray.base.errors import SchemaMismatchError, ShardCorruptError
from geo_ray.data.arrow_values import arrow_of
from geo_ray.data.files.find import Borrowed, FilePiece, InputFile, fraction_read, size_of
from geo_ray.data.files.options import ReadOptions

_LINES = 16_384  # lines decoded at a time
_GROUP_CHARS = 16 << 20
_LINE_CHARS = 64 << 20

_ONE_EACH = "Write one JSON object per line."

Row = dict[str, Any]


@dataclass(frozen=True)
class _Bad:
    """A line that cannot be read."""

    number: int
    why: str
    fix: str = _ONE_EACH


class RepeatedKeyError(ValueError):
    """The object has the named key twice."""


def json_pieces(
    file: BinaryIO, found: InputFile, options: ReadOptions, wanted: Collection[str] | None
) -> Iterator[FilePiece]:
    """Read a JSON lines file in pieces; see `geo_ray.data.files.csv_file.csv_pieces`.

    A key that is missing from a line counts as a missing value.

    Raises:
        SchemaMismatchError: lines that are not JSON objects, or have a key twice or half characters
            (raised at the end, after the valid lines).
        ShardCorruptError: the text is invalid in the encoding, or decompression failed.
    """
    bad: list[_Bad] = []
    size = size_of(file)
    try:
        for lines in _groups(_text(file, found, options), found.path):
            rows: list[Row] = []
            for number, line in lines:
                _take(line, number, rows, bad)
            yield _piece(rows, wanted, fraction_read(file, size))
    except UnicodeError as error:
        raise ShardCorruptError(
            f"{found.path} is not {options.encoding} text: {error}",
            fix="Set its encoding, such as --encoding latin-1.",
        ) from None
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ShardCorruptError(
            f"{found.path}: cannot be read: {error}", fix="Write the file again."
        ) from error
    if bad:
        first = bad[0]
        raise SchemaMismatchError(
            f"{found.path} has lines that cannot be read: {len(bad)} of them, the first is line "
            f"{first.number}: {first.why}",
            fix=first.fix,
        )


def _text(file: BinaryIO, found: InputFile, options: ReadOptions) -> io.TextIOBase:
    stream: Any = pa.PythonFile(Borrowed(file), mode="r")
    if found.compression is not None:
        stream = pa.CompressedInputStream(stream, found.compression)
    encoding = "utf-8-sig" if options.encoding.lower() in ("utf-8", "utf8") else options.encoding
    return io.TextIOWrapper(io.BufferedReader(stream), encoding=encoding)


def _groups(text: io.TextIOBase, path: str) -> Iterator[list[tuple[int, str]]]:
    group: list[tuple[int, str]] = []
    number = chars = 0
    while line := text.readline(_LINE_CHARS):
        number += 1
        if len(line) >= _LINE_CHARS:
            raise SchemaMismatchError(
                f"{path}: line {number} is longer than {_LINE_CHARS} characters",
                fix=_ONE_EACH,
            )
        if number == 1 and line.lstrip().startswith("["):
            raise SchemaMismatchError(
                f"{path} is one JSON array, not one JSON object per line",
                fix="Write each object on a line of its own, for instance with `jq -c '.[]'`.",
            )
        if line.strip():
            group.append((number, line))
            chars += len(line)
        if len(group) == _LINES or chars >= _GROUP_CHARS:
            yield group
            group, chars = [], 0
    if group:
        yield group


def _take(line: str, number: int, rows: list[Row], bad: list[_Bad]) -> None:
    try:
        value = json.loads(line, object_pairs_hook=_object)
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
        if isinstance(value, dict):
            rows.append(flat_object(value))
            return
        bad.append(_Bad(number, f"{line.strip()[:60]!r} is not in braces"))
    except RepeatedKeyError as error:
        why = f"it has the key {error.args[0]!r} twice"
        bad.append(_Bad(number, why, "Give each key a unique name."))
    except UnicodeEncodeError as error:
        why = f"it has half a surrogate pair, {error.object[error.start]!r}"
        bad.append(_Bad(number, why, "Write the character itself, or both halves."))
    except (ValueError, RecursionError) as error:
        bad.append(_Bad(number, f"it is not a JSON object: {error}"))


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise RepeatedKeyError(next(name for name, n in counts.items() if n > 1))
    return row


def flat_object(row: Row) -> Row:
    """Flatten nested objects to dotted names.

    Raises:
        RepeatedKeyError: two values get one name.
    """
    flat: Row = {}
    waiting = list(row.items())[::-1]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{name}.{inner}", item) for inner, item in value.items()][::-1]
        elif name in flat:
            raise RepeatedKeyError(name)
        else:
            flat[name] = value
    return flat


def _piece(rows: list[Row], wanted: Collection[str] | None, fraction: float) -> FilePiece:
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    chosen = [name for name in names if wanted is None or name in wanted]
    columns = {name: arrow_of([row.get(name) for row in rows]) for name in chosen}
    return FilePiece(names, columns, len(rows), fraction, sparse=True)
