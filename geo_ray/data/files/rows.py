"""Read the rows of all files that were found, in order and in batches."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import BinaryIO, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from geo_ray.base.errors import DataLeftOutError, SchemaMismatchError, ShardCorruptError
from geo_ray.base.plugins import Plugins
from geo_ray.data.files.find import FilePiece, InputFile, InputFiles, LeftOut
from geo_ray.data.files.options import DEFAULT_NULLS, ReadOptions
from geo_ray.data.files.site import SiteReader
from geo_ray.storage.store import Store

Unreadable = SchemaMismatchError | ShardCorruptError
"""Errors of a single file."""

ReadPieces = Callable[
    [BinaryIO, InputFile, ReadOptions, Collection[str] | None], Iterator[FilePiece]
]
"""Reads a file of one format in pieces; see `geo_ray.data.files.csv_file.csv_pieces`."""

READERS: Final = Plugins[ReadPieces](
    {
        "csv": "geo_ray.data.files.csv_file:csv_pieces",
        "jsonl": "geo_ray.data.files.json_file:json_pieces",
        "parquet": "geo_ray.data.files.arrow_file:parquet_pieces",
        "arrow": "geo_ray.data.files.arrow_file:arrow_pieces",
        "webdataset": "geo_ray.data.files.tar_file:tar_pieces",
        "mds": "geo_ray.data.files.mds_file:mds_pieces",
    }
)
"""The reader of each format whose files have several rows."""

ReadFolder = Callable[[Store, InputFile, Collection[str] | None], Iterator[FilePiece]]
"""Reads the files of a folder; see `geo_ray.data.files.image_folder.image_pieces`."""

FOLDER_READERS: Final = Plugins[ReadFolder](
    {"images": "geo_ray.data.files.image_folder:image_pieces"}
)
"""The reader of each format whose files have one row each."""

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_MOST_NAMED = 20


@dataclass(frozen=True)
class Batch:
    """A piece of a file.

    Attributes:
        path: path of the file.
        first_row: number of its first row in the file, from 1.
        piece: the rows, with shared columns if there is a site file.
        files_done: files read, including a part of this one; for progress.
    """

    path: str
    first_row: int
    piece: FilePiece
    files_done: float


@dataclass
class ReadReport:
    """Files and values that were not read.

    Attributes:
        unreadable: errors of files.
        left_out: files, folders and lines that are not read, with the reasons.
        untranslated: shared columns with values that the site file could not translate.
    """

    unreadable: list[Unreadable] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    untranslated: set[str] = field(default_factory=set)


def read_rows(
    found: InputFiles, wanted: Collection[str] | None, report: ReadReport
) -> Iterator[Batch]:
    """Read all files, one batch in memory at a time.

    The folders of a path such as ``country=DE/part-0.parquet`` are columns, too, unless the file
    has a column of that name.

    Args:
        found: the files.
        wanted: the columns to read, or None for all.
        report: receives the error of a file, after which reading continues with the next file,
            and what was skipped.

    Yields:
        Batches of at least one row, in the order of the files and of their rows.

    Raises:
        ShardMissingError: if a file was removed in the meantime.
        StoreError: if the store does not answer.
        DataLeftOutError: if something was skipped and the options are strict.
    """
    options = found.options
    report.left_out += found.left_out
    _refuse_left_out(found, report)
    own = _own_names(found, wanted)
    site = None
    if found.site is not None:
        site = SiteReader(found.site, str(options.site), options.decimal, options.thousands)
    for number, entry in enumerate(found.files):
        first_row = 1
        try:
            for piece in _pieces(found, entry, own):
                if piece.skipped:
                    report.left_out.append(LeftOut(entry.path, piece.skipped))
                if piece.rows:
                    made = _with_folders(_with_nulls(piece, options), entry.path, own)
                    if site is not None:
                        names = site.names(made.names, entry.path)
                        columns = site.columns(made.columns, first_row)
                        made = replace(made, names=names, columns=columns)
                    yield Batch(entry.path, first_row, made, number + piece.fraction)
                first_row += piece.rows
            if first_row == 1:
                report.left_out.append(LeftOut(entry.path, "it has no rows"))
            problem = None if site is None else site.take_problem(entry.path)
            if problem is not None:
                report.unreadable.append(problem)
                report.untranslated |= site.untranslated if site is not None else set()
        except (SchemaMismatchError, ShardCorruptError) as error:
            report.unreadable.append(error)
    lost = None if site is None else site.lost()
    if lost is not None:
        report.unreadable.append(lost)
    _refuse_left_out(found, report)


def _pieces(
    found: InputFiles, entry: InputFile, wanted: Collection[str] | None
) -> Iterator[FilePiece]:
    if entry.members:
        yield from FOLDER_READERS[entry.format](found.store, entry, wanted)
        return
    with found.store.open(entry.path) as file:
        yield from READERS[entry.format](file, entry, found.options, wanted)


def _own_names(found: InputFiles, wanted: Collection[str] | None) -> Collection[str] | None:
    """Return the columns to read, by their names in the files."""
    return wanted if wanted is None or found.site is None else found.site.own_names(wanted)


def _refuse_left_out(found: InputFiles, report: ReadReport) -> None:
    serious = [one for one in report.left_out if not one.is_marker]
    if not found.options.strict or not serious:
        return
    lines = [f"{one.path}: {one.reason}" for one in serious[:_MOST_NAMED]]
    if len(serious) > _MOST_NAMED:
        lines.append(f"and {len(serious) - _MOST_NAMED} more")
    raise DataLeftOutError(
        "\n    ".join([f"not all of {found.name} would be read:", *lines]),
        fix="Move files without data elsewhere and correct the others, or remove --strict.",
    )


def _with_nulls(piece: FilePiece, options: ReadOptions) -> FilePiece:
    """Replace the user's words for missing values, quoted or not, by nulls."""
    own = [word for word in options.nulls if word not in DEFAULT_NULLS]
    if not own:
        return piece
    words, columns = pa.array(own), dict(piece.columns)
    for name, array in columns.items():
        if pa.types.is_string(array.type):
            hit = pc.is_in(pc.utf8_trim_whitespace(array), value_set=words)
            columns[name] = pc.if_else(hit, pa.scalar(None, pa.string()), array)
    return replace(piece, columns=columns)


def _with_folders(piece: FilePiece, path: str, wanted: Collection[str] | None) -> FilePiece:
    """Add the columns given by the folders of the path, as Spark writes them."""
    names, columns = dict.fromkeys(piece.names), dict(piece.columns)
    for part in PurePosixPath(path).parts[:-1]:
        name, equals, value = part.partition("=")
        name = unquote(name).strip()
        if not equals or not name or name in names:
            continue
        names[name] = None
        if wanted is None or name in wanted:
            text = None if value == _HIVE_NULL else unquote(value)
            columns[name] = pa.repeat(pa.scalar(text, pa.string()), piece.rows)
    return replace(piece, names=tuple(names), columns=columns)
