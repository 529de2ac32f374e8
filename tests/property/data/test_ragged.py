"""A ragged column behaves like the list of its rows, in memory, in shards and in readers."""

from __future__ import annotations

import io
import tempfile
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.data.columns import Ragged, parse_types, parts_of_rows
from geo_ray.data.parquet import decode, encode
from geo_ray.data.reader import RegionReader
from geo_ray.data.shards import check_shards, write_shards
from geo_ray.data.split import IidSplit

ROWS = {
    "string": st.text(max_size=9),
    "bytes": st.binary(max_size=200),
    "list<int16>": st.lists(st.integers(-(2**15), 2**15 - 1), max_size=9),
    "list<float32>": st.lists(st.floats(width=32, allow_nan=False), max_size=9),
    "list<bool>": st.lists(st.booleans(), max_size=12),
}


@st.composite
def columns(draw: st.DrawFn, least: int = 0) -> tuple[str, list[Any]]:
    kind = draw(st.sampled_from(sorted(ROWS)))
    return kind, draw(st.lists(ROWS[kind], min_size=least, max_size=12))


@given(columns(), st.data())
def test_rows_slices_masks_and_selections_are_those_of_a_list(
    column: tuple[str, list[Any]], data: st.DataObject
) -> None:
    kind, rows = column
    ragged = Ragged.of(kind, rows)
    assert ragged.tolist() == rows and str(ragged.type) == kind
    assert len(ragged) == len(rows) and ragged.shape == (len(rows),)
    begin, stop, step = (data.draw(st.integers(-14, 14)) for _ in range(3))
    part = slice(begin, stop, step or None)
    assert ragged[part].tolist() == rows[part]
    if not rows:
        return
    chosen = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=20))
    assert ragged[np.array(chosen, np.int64)].tolist() == [rows[n] for n in chosen]
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    kept = [row for row, keep in zip(rows, mask, strict=True) if keep]
    assert ragged[np.array(mask)].tolist() == kept
    assert [list(row) for row in ragged] == [list(row) for row in rows]
    assert list(ragged[-1]) == list(rows[-1])
    assert Ragged.joined([ragged[:1], ragged[1:], ragged]).tolist() == [*rows, *rows]


@given(st.lists(ROWS["list<int16>"], max_size=9), st.none() | st.integers(0, 12))
def test_padded_rows(rows: list[list[int]], length: int | None) -> None:
    width = max(map(len, rows), default=0) if length is None else length
    expected = [(row + [-7] * width)[:width] for row in rows]
    found = Ragged.of("list<int16>", rows).padded(-7, length)
    assert found.shape == (len(rows), width)
    assert found.tolist() == expected


@given(st.lists(columns(1), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 400))
def test_parts_hold_every_row_once_within_both_limits(
    drawn: list[tuple[str, list[Any]]], most_rows: int, most_bytes: int
) -> None:
    rows = min(len(values) for _, values in drawn)
    table = {str(n): Ragged.of(kind, values[:rows]) for n, (kind, values) in enumerate(drawn)}
    order = np.arange(rows)[::-1]
    parts = list(parts_of_rows(table, order, most_rows, most_bytes))
    assert np.concatenate(parts).tolist() == order.tolist()

    def size(part: Any) -> int:
        return sum(column[part].values.nbytes + 8 * len(part) for column in table.values())

    for part in parts:
        assert len(part) <= most_rows and (len(part) == 1 or size(part) <= most_bytes)
    for before, after in pairwise(parts):  # no part is smaller than necessary
        assert len(before) == most_rows or size(np.append(before, after[0])) > most_bytes


@given(st.lists(columns(), min_size=1, max_size=3))
def test_parquet_files_have_the_rows_for_other_readers_too(
    drawn: list[tuple[str, list[Any]]],
) -> None:
    rows = min(len(values) for _, values in drawn)
    types = parse_types({f"c{n}": kind for n, (kind, _) in enumerate(drawn)})
    table = {f"c{n}": Ragged.of(kind, values[:rows]) for n, (kind, values) in enumerate(drawn)}
    data = encode({name: column.copy() for name, column in table.items()}, types)
    assert data == encode(table, types)
    other = pq.read_table(io.BytesIO(data))
    for name, column in table.items():
        assert other[name].to_pylist() == column.tolist()
        assert decode(data, types, "a file")[name].tolist() == column.tolist()


@settings(max_examples=25, deadline=None)
@given(st.lists(ROWS["string"], min_size=4, max_size=40), st.integers(1, 7), st.integers(0, 60))
def test_a_reader_gives_the_rows_in_the_same_order_as_numbers(
    texts: list[str], rows_per_shard: int, start: int
) -> None:
    numbers = np.arange(len(texts))
    table = {"text": Ragged.of("string", texts), "number": numbers}
    with tempfile.TemporaryDirectory() as folder:
        manifest = write_shards(
            {"train": table},
            "t",
            {"text": "string", "number": "int64"},
            None,
            IidSplit(),
            ["a", "b"],
            3,
            folder,
            rows_per_shard,
        )
        assert all(verdict.error is None for verdict in check_shards(manifest))
        seen: list[int] = []
        for region in ("a", "b"):
            reader = RegionReader(manifest, region, "train", 5, cache_shards=1)
            batch = reader.read(start, 13)
            assert batch["text"].tolist() == [texts[n] for n in batch["number"]]
            assert reader.read(start, 0)["text"].tolist() == []
            for scanned in reader.scan(3):
                assert scanned["text"].tolist() == [texts[n] for n in scanned["number"]]
                seen += scanned["number"].tolist()
        assert sorted(seen) == numbers.tolist()


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("string", [b"a"]),
        ("bytes", ["a"]),
        ("list<int8>", [[300]]),
        ("list<int8>", [[0.5]]),
        ("list<int8>", [["1"]]),
        ("list<int8>", [3]),
        ("list<float32>", ["a"]),
        ("string", [None]),
        ("int64", [1]),
        ("list<string>", [["a"]]),
    ],
)
def test_rows_of_another_type_are_refused(kind: str, rows: list[Any]) -> None:
    from geo_ray.base.errors import SchemaMismatchError

    with pytest.raises(SchemaMismatchError):
        Ragged.of(kind, rows)
