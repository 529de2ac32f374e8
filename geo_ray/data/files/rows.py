"""All rows of the files that were found, in order, some at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from geo_ray.data.files.arrow_file import arrow_pieces, parquet_pieces
from geo_ray.data.files.csv_file import csv_pieces
from geo_ray.data.files.find import InputFile, InputFiles
from geo_ray.data.files.json_file import json_pieces
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.files.piece import FilePiece
from geo_ray.errors import SchemaMismatchError, ShardCorruptError

Unreadable = SchemaMismatchError | ShardCorruptError
"""What may be wrong with one file."""


@dataclass(frozen=True)
class Batch:
    """A piece of a file.

    Attributes:
        path: the file's.
        first_row: number of its first row in the file, from 1.
        piece: the rows.
        files_done: files read, this one in part; for progress.
    """

    path: str
    first_row: int
    piece: FilePiece
    files_done: float


def read_rows(
    found: InputFiles, wanted: Collection[str] | None, unreadable: list[Unreadable]
) -> Iterator[Batch]:
    """Read all files; memory holds a batch at a time.

    Args:
        found: the files.
        wanted: the columns to read, or None for all.
        unreadable: what is wrong with a file is added here, and reading goes on with the next one.

    Yields:
        Batches of at least one row, in the order of the files and of their rows.

    Raises:
        ShardMissingError: if a file vanished meanwhile.
        StoreError: if the store does not answer.
    """
    for number, entry in enumerate(found.files):
        first_row = 1
        with found.store.open(entry.path) as file:
            try:
                for piece in _pieces(file, entry, found.options, wanted):
                    if piece.rows:
                        yield Batch(entry.path, first_row, piece, number + piece.fraction)
                    first_row += piece.rows
            except (SchemaMismatchError, ShardCorruptError) as error:
                unreadable.append(error)


def _pieces(
    file: BinaryIO, entry: InputFile, options: ReadOptions, wanted: Collection[str] | None
) -> Iterator[FilePiece]:
    match entry.format:
        case "csv":
            return csv_pieces(file, entry, options, wanted)
        case "jsonl":
            return json_pieces(file, entry, options, wanted)
        case "parquet":
            return parquet_pieces(file, entry, wanted)
        case "arrow":
            return arrow_pieces(file, entry, wanted)
