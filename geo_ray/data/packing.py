"""Pack documents of tokens into rows of one length, for language models.

Every token is in exactly one row, and every token but the first of its document is the label of the
token before it exactly once, also if a document continues in another row. Labels never cross from
one document into the next. The result depends on the order of the documents only.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, no-untyped-call"

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from geo_ray.base.errors import ConfigError, SchemaMismatchError
from geo_ray.data.columns import Ragged, parse_types
from geo_ray.data.parquet import to_arrow

IGNORE = -100
"""Label of tokens that nothing follows, as PyTorch's ``cross_entropy`` ignores it by default."""

Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class PackedRows:
    """Rows of tokens, all int32 (R, length).

    Attributes:
        tokens: the tokens; 0 where a row is not full.
        labels: the next token of the same document; `IGNORE` at its end and where a row is not
            full.
        positions: position from the start of the document, or of its part in this row.
        documents: number of the document in its row, from 1; 0 where a row is not full. A token may
            attend only to tokens with the same number.
    """

    tokens: Ints
    labels: Ints
    positions: Ints
    documents: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    def columns(self) -> dict[str, Ints]:
        """Return the columns by name, for a task with `packed_types`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def packed_types(length: int) -> dict[str, str]:
    """Return the types of the columns of packed rows, for the ``columns`` of a task."""
    return {field.name: f"int32[{length}]" for field in fields(PackedRows)}


def pack(documents: Ragged, length: int, *, whole: bool = False) -> PackedRows:
    """Pack documents into rows.

    Args:
        documents: lists of integers; empty ones are dropped.
        length: tokens per row.
        whole: False: documents follow one another and continue in the next row, and only the last
            row may be not full. True: a document of at most ``length`` tokens is in one row, a
            longer one is divided into parts of ``length``; parts are placed by decreasing length,
            each into the row with the least sufficient space (best-fit decreasing, as in "Fewer
            Truncations Improve Language Modeling", arXiv 2404.10830, section 3; reconstructed).

    Raises:
        ConfigError: the length is not positive.
        SchemaMismatchError: the documents are not lists of integers below 2**31.
    """
    if whole:
        return _packed_whole(documents, length)
    blocks = list(pack_stream([documents], length))
    return PackedRows(*(np.concatenate(parts) for parts in zip(*map(_arrays, blocks), strict=True)))


def pack_stream(
    batches: Iterable[Ragged], length: int, *, whole: bool = False
) -> Iterator[PackedRows]:
    """Pack documents that arrive in batches, in memory for one batch.

    Args:
        batches: batches of documents, as for `pack`.
        length: tokens per row.
        whole: as for `pack`; each batch is then packed separately. Otherwise, the result has the
            same rows for every division into batches.

    Yields:
        Rows, at least one block; a block may be empty.
    """
    if whole:
        for documents in batches:
            yield _packed_whole(documents, length)
        return
    waiting = _Tokens.of(Ragged.of("list<int32>", []), length)
    for documents in batches:
        waiting = waiting.followed_by(_Tokens.of(documents, length))
        full = len(waiting.tokens) // length * length
        yield waiting.rows(full, length)
        waiting = waiting.after(full)
    yield waiting.rows(len(waiting.tokens), length)


def write_packed(blocks: Iterable[PackedRows], path: str | Path) -> int:
    """Write packed rows as a Parquet file for ``geo-ray data shard``.

    Args:
        blocks: rows of one length, such as those of `pack_stream`; one is in memory at a time.
        path: the file.

    Returns:
        The number of rows.
    """
    rows, writer = 0, None
    for block in blocks:
        types = parse_types(packed_types(block.tokens.shape[1]))
        arrays = [to_arrow(name, block.columns()[name], kind) for name, kind in types.items()]
        table = pa.Table.from_arrays(arrays, names=list(types))
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
        rows += len(block)
    if writer is not None:
        writer.close()
    return rows


@dataclass(frozen=True)
class _Tokens:
    """Tokens of documents one after the other, their labels, and which ones start a document."""

    tokens: Ints
    labels: Ints
    starts: np.ndarray[Any, np.dtype[np.bool_]]

    @classmethod
    def of(cls, documents: Ragged, length: int) -> _Tokens:
        if length < 1:
            raise ConfigError(f"length: {length} is not positive", fix="Use at least 1.")
        values = documents.values
        if documents.kind != "list" or values.dtype.kind not in "iu":
            raise SchemaMismatchError(
                f"documents are of type {documents.type}, not lists of integers",
                fix='Build them with geo_ray.Ragged.of("list<int32>", ROWS).',
            )
        limits = np.iinfo(np.int32)
        if len(values) and not limits.min <= int(values.min()) <= int(values.max()) <= limits.max:
            raise SchemaMismatchError(
                f"documents have tokens from {values.min()} to {values.max()}",
                fix="Use tokens below 2**31.",
            )
        tokens = values.astype(np.int32)
        labels = np.append(tokens[1:], np.int32(IGNORE))[: len(tokens)]
        filled = documents.lengths > 0
        labels[documents.offsets[1:][filled] - 1] = IGNORE
        starts = np.zeros(len(tokens), bool)
        starts[documents.offsets[:-1][filled]] = True
        return cls(tokens, labels, starts)

    def followed_by(self, other: _Tokens) -> _Tokens:
        return _Tokens(
            np.concatenate((self.tokens, other.tokens)),
            np.concatenate((self.labels, other.labels)),
            np.concatenate((self.starts, other.starts)),
        )

    def after(self, count: int) -> _Tokens:
        return _Tokens(self.tokens[count:], self.labels[count:], self.starts[count:])

    def rows(self, count: int, length: int) -> PackedRows:
        """Return the first tokens as rows, the last one filled up."""
        total = -(-count // length) * length
        tokens, labels = np.zeros(total, np.int32), np.full(total, IGNORE, np.int32)
        starts = np.zeros(total, bool)
        tokens[:count], labels[:count] = self.tokens[:count], self.labels[:count]
        starts[:count], starts[::length] = self.starts[:count], True
        starts[count:] = False
        return _numbered(tokens, labels, starts, np.arange(total) < count, length)


def _numbered(
    tokens: Ints,
    labels: Ints,
    starts: np.ndarray[Any, np.dtype[np.bool_]],
    used: np.ndarray[Any, np.dtype[np.bool_]],
    length: int,
) -> PackedRows:
    """Number the documents of each row; every row starts with a document."""
    starts_RL, used_RL = starts.reshape(-1, length), used.reshape(-1, length)
    column_L = np.arange(length, dtype=np.int32)
    begin_RL = np.maximum.accumulate(np.where(starts_RL, column_L, 0), axis=1)
    return PackedRows(
        tokens.reshape(-1, length),
        labels.reshape(-1, length),
        np.where(used_RL, column_L - begin_RL, 0).astype(np.int32),
        np.where(used_RL, np.cumsum(starts_RL, axis=1), 0).astype(np.int32),
    )


def _packed_whole(documents: Ragged, length: int) -> PackedRows:
    given = _Tokens.of(documents, length)
    begins: list[int] = []
    sizes: list[int] = []
    for begin, size in zip(documents.offsets.tolist(), documents.lengths.tolist(), strict=False):
        for at in range(0, size, length):
            begins.append(begin + at)
            sizes.append(min(length, size - at))
    places, rows = _best_fit(sizes, length)
    order = np.repeat(np.array(places, np.int64) - np.array(begins, np.int64), sizes)
    target = np.arange(len(given.tokens)) + order
    total = rows * length
    tokens, labels = np.zeros(total, np.int32), np.full(total, IGNORE, np.int32)
    starts, used = np.zeros(total, bool), np.zeros(total, bool)
    tokens[target], labels[target], used[target] = given.tokens, given.labels, True
    starts[np.array(places, np.int64)] = True
    return _numbered(tokens, labels, starts, used, length)


def _best_fit(sizes: list[int], length: int) -> tuple[list[int], int]:
    """Place parts into rows; of rows with equal space, the first one is taken.

    Returns:
        The place of each part (row * length + column), and the number of rows.
    """
    places = [0] * len(sizes)
    with_space: dict[int, deque[int]] = defaultdict(deque)  # space -> rows, in order
    spaces = 0  # bit s is set if a row has space s
    rows = 0
    for part in sorted(range(len(sizes)), key=lambda part: -sizes[part]):
        size = sizes[part]
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            row = with_space[space].popleft()
            if not with_space[space]:
                spaces &= ~(1 << space)
        else:
            row, space, rows = rows, length, rows + 1
        places[part] = row * length + length - space
        if space > size:
            with_space[space - size].append(row)
            spaces |= 1 << (space - size)
    return places, rows


def _arrays(block: PackedRows) -> tuple[Ints, ...]:
    return (block.tokens, block.labels, block.positions, block.documents)
