"""Packed rows hold each token once; a second program that knows only lists gives the same rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_ray.base.errors import ConfigError, SchemaMismatchError
from geo_ray.data.columns import Ragged
from geo_ray.data.packing import (
    IGNORE,
    PackedRows,
    pack,
    pack_stream,
    packed_types,
    write_packed,
)

Rows = list[list[tuple[int, int, int, int]]]

LENGTHS = st.lists(st.integers(0, 9), max_size=12)


def documents(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens all differ."""
    edges = [0, *np.cumsum(lengths).tolist()]
    return [list(range(1 + begin, 1 + end)) for begin, end in pairwise(edges)]


def ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.of("list<int32>", rows)


def rows_of(packed: PackedRows) -> Rows:
    """The used places of each row: (token, label, position, document)."""
    found: Rows = []
    for row in range(len(packed)):
        places = list(
            zip(*(array[row].tolist() for array in packed.columns().values()), strict=True)
        )
        used = [place for place in places if place[3]]
        assert places[len(used) :] == [(0, IGNORE, 0, 0)] * (len(places) - len(used))
        found.append(used)
    return found


def labelled(document: list[int]) -> list[tuple[int, int]]:
    return list(zip(document, [*document[1:], IGNORE], strict=False))


def numbered(pieces: list[list[tuple[int, int]]]) -> list[tuple[int, int, int, int]]:
    return [
        (token, label, position, number)
        for number, piece in enumerate(pieces, start=1)
        for position, (token, label) in enumerate(piece)
    ]


def streamed(given_documents: list[list[int]], length: int) -> Rows:
    rows: list[list[list[tuple[int, int]]]] = []
    space = 0
    for document in given_documents:
        rest = labelled(document)
        while rest:
            if not space:
                rows.append([])
                space = length
            rows[-1].append(rest[:space])
            taken = len(rows[-1][-1])
            rest, space = rest[taken:], space - taken
    return [numbered(pieces) for pieces in rows]


def best_fit(given_documents: list[list[int]], length: int) -> Rows:
    pieces = [
        labelled(document)[at : at + length]
        for document in given_documents
        for at in range(0, len(document), length)
    ]
    rows: list[list[list[tuple[int, int]]]] = []
    order: list[int] = []  # rows that got this space earlier come first among equals
    for piece in sorted(pieces, key=len, reverse=True):
        spaces = [(length - sum(map(len, rows[row])), at, row) for at, row in enumerate(order)]
        fitting = [found for found in spaces if found[0] >= len(piece)]
        if fitting:
            row = min(fitting)[2]
            order.remove(row)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(piece)
        order.append(row)
    return [numbered(pieces) for pieces in rows]


@given(LENGTHS, st.integers(1, 11))
def test_rows_are_those_of_a_plain_program(lengths: list[int], length: int) -> None:
    given_documents = documents(lengths)
    assert rows_of(pack(ragged(given_documents), length)) == streamed(given_documents, length)
    whole = pack(ragged(given_documents), length, whole=True)
    assert rows_of(whole) == best_fit(given_documents, length)


@given(LENGTHS, st.integers(1, 11), st.booleans())
def test_each_token_and_each_label_occurs_once(
    lengths: list[int], length: int, whole: bool
) -> None:
    given_documents = documents(lengths)
    packed = pack(ragged(given_documents), length, whole=whole)
    assert packed.tokens.shape[1] == length
    places = [place for row in rows_of(packed) for place in row]
    assert sorted(place[0] for place in places) == [t for d in given_documents for t in d]
    following = {a: b for document in given_documents for a, b in pairwise(document)}
    assert {t: label for t, label, _, _ in places if label != IGNORE} == following
    for row in rows_of(packed):
        for (token, _, position, number), (other, _, next_position, next_number) in pairwise(row):
            if number == next_number:  # within a document its tokens are adjacent
                assert (other, next_position) == (token + 1, position + 1)
            else:
                assert (next_number, next_position) == (number + 1, 0)
    if whole:
        homes = [{t for t, *_ in row} for row in rows_of(packed)]
        for document in filter(None, given_documents):
            assert len(document) > length or any(set(document) <= home for home in homes)
    else:
        assert len(packed) == -(-sum(lengths) // length)


@given(LENGTHS, st.integers(1, 11), st.lists(st.integers(0, 12), max_size=4))
def test_batches_do_not_change_the_rows(lengths: list[int], length: int, cuts: list[int]) -> None:
    given_documents = documents(lengths)
    edges = sorted({0, len(lengths), *(min(cut, len(lengths)) for cut in cuts)})
    batches = [ragged(given_documents[a:b]) for a, b in pairwise(edges)]
    found = [row for block in pack_stream(batches, length) for row in rows_of(block)]
    assert found == rows_of(pack(ragged(given_documents), length))


def test_files_have_the_columns_of_a_task(tmp_path: Path) -> None:
    given_documents = documents([5, 0, 7, 2, 9])
    batches = [ragged(given_documents[:2]), ragged(given_documents[2:])]
    assert write_packed(pack_stream(batches, 4), tmp_path / "rows.parquet") == 6
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.column_names == list(packed_types(4))
    expected = pack(ragged(given_documents), 4).columns()
    assert {n: table[n].to_pylist() for n in table.column_names} == {
        name: array.tolist() for name, array in expected.items()
    }
    assert write_packed([], tmp_path / "none.parquet") == 0


def test_many_documents_waste_little_space() -> None:
    chance = np.random.default_rng(0)
    lengths = chance.integers(1, 300, 20_000)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = Ragged("list", np.arange(offsets[-1], dtype=np.int32), offsets)
    packed = pack(tokens, 512, whole=True)
    assert np.count_nonzero(packed.documents) == lengths.sum()
    assert packed.tokens.size < 1.01 * lengths.sum()


def test_documents_that_cannot_be_packed() -> None:
    with pytest.raises(ConfigError, match="length: 0"):
        pack(ragged([[1]]), 0)
    for kind, rows in (("list<float32>", [[1.0]]), ("list<int64>", [[2**31]]), ("string", ["a"])):
        with pytest.raises(SchemaMismatchError):
            pack(Ragged.of(kind, rows), 4)
