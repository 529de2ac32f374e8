"""Statistics of parts, merged, are those of the whole: NumPy over all rows is the oracle."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.data.files.find import find_files
from geo_ray.data.prepare.config import parse_preparation
from geo_ray.data.prepare.inputs import gather_rows
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.prepare.statistics import Moments, Statistics, merge_statistics
from geo_ray.data.prepare.survey import share, survey_files

MOST = 1e12

numbers = st.one_of(
    st.floats(-MOST, MOST, allow_subnormal=False),
    st.integers(-(10**9), 10**9).map(float),
    st.sampled_from([0.1, -0.1, 1e12, 1e-12]),
)
cells = st.one_of(numbers, st.none(), st.just(float("nan")), st.just(float("inf")))
parts = st.lists(st.lists(cells, max_size=12), min_size=1, max_size=5)


def expect_moments(count: int, mean: float, m2: float, values: np.ndarray) -> None:
    assert count == len(values)
    if not count:
        return
    size = max(1e-300, float(np.abs(values).max()))
    exact = values.astype(np.longdouble)
    middle = exact.mean()
    assert mean == pytest.approx(float(middle), rel=1e-12, abs=1e-14 * size)
    spread = float(np.square(exact - middle).sum())
    assert m2 == pytest.approx(spread, rel=1e-9, abs=1e-13 * count * size**2)
    if values.min() == values.max():
        assert m2 == 0  # exactly, or scaling would blow rounding up


@given(st.lists(st.lists(numbers, max_size=30), min_size=1, max_size=6), st.randoms())
def test_moments_merge_to_those_of_all_numbers(lists: list[list[float]], random: object) -> None:
    whole = np.array([value for values in lists for value in values])
    merged = Moments()
    random.shuffle(lists)  # type: ignore[attr-defined]
    for values in lists:
        merged = merged.merge(Moments.of(np.array(values)))
    expect_moments(merged.count, merged.mean, merged.m2, whole)
    if len(whole):
        assert (merged.low, merged.high) == (whole.min(), whole.max())


@given(st.floats(-1e300, 1e300), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_equal_numbers_have_no_deviation_however_they_are_cut(value: float, cut: list[int]) -> None:
    merged = Moments()
    for count in cut:
        merged = merged.merge(Moments.of(np.full(count, value)))
    assert merged.m2 == 0
    assert merged.mean == value


def write(folder: Path, number: int, values: list[float | None]) -> None:
    """Odd parts as CSV would mix formats in a folder; so each part has a folder of its own."""
    folder.mkdir()
    if number % 2:
        with (folder / "a.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["v", "w"])
            writer.writerows([["" if v is None else repr(v), f"k{hash(v) % 3}"] for v in values])
    else:
        words = [f"k{hash(v) % 3}" for v in values]
        table = pa.table({"v": pa.array(values, pa.float64()), "w": pa.array(words, pa.string())})
        pq.write_table(table, folder / "a.parquet")


def stats(folder: Path, region: str) -> Statistics:
    survey = survey_files(find_files(str(folder)), None, ("w",))
    return share(survey, region, None, at_least=1, extremes=True)


@settings(max_examples=40, deadline=None)
@given(parts)
def test_files_cut_anyhow_give_the_statistics_of_all_rows(lists: list[list[float | None]]) -> None:
    values = [value for part in lists for value in part]
    with tempfile.TemporaryDirectory() as name:
        for number, part in enumerate(lists):
            write(Path(name) / str(number), number, part)
        regions = [stats(Path(name) / str(n), f"r{n}") for n in range(len(lists)) if lists[n]]
    if not regions:
        return
    merged = merge_statistics(regions)
    assert merge_statistics(regions[::-1]) == merged
    column = merged.columns["v"]
    finite = np.array([v for v in values if v is not None and np.isfinite(v)])
    assert merged.rows == len(values)
    assert column.nulls == sum(v is None for v in values)
    assert column.nans == sum(v is not None and v != v for v in values)
    assert column.infinite == sum(v == float("inf") for v in values)
    if len(finite):
        assert column.mean is not None
        assert column.m2 is not None
        assert (column.min, column.max) == (finite.min(), finite.max())
        expect_moments(column.count, column.mean, column.m2, finite)
    words = merged.columns["w"].words
    assert words is not None
    assert sum(words.values()) == len(values)
    assert words == {w: sum(f"k{hash(v) % 3}" == w for v in values) for w in words}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(numbers, min_size=1, max_size=12), min_size=2, max_size=4))
def test_regions_prepared_apart_have_the_rows_of_the_union(lists: list[list[float]]) -> None:
    """Also bit for bit: each region and the union are prepared with the same numbers."""
    preparation = parse_preparation(
        "columns: {x: [{column: v, scale: standard}, {column: w, vocabulary: {counted: 1}}]}", "p"
    )
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(len(lists))]
        for folder, values in zip(folders, lists, strict=True):
            write(folder, 1, list(values))
        union = Path(name) / "union"
        union.mkdir()
        for number, folder in enumerate(folders):
            (union / f"{number}.csv").write_bytes((folder / "a.csv").read_bytes())
        merged = merge_statistics([stats(f, f"r{n}") for n, f in enumerate(folders)])
        width = 2 + len(merged.columns["w"].words or ())
        made = resolve(preparation, {"x": f"float32[{width}]"}, merged).preparation
        apart = [gather_rows(find_files(str(f)), made).columns["x"] for f in folders]
        together = gather_rows(find_files(str(union)), made).columns["x"]
    assert np.concatenate(apart).tobytes() == together.tobytes()
    scaled = together[:, 0].astype(np.float64)
    values = np.array([value for part in lists for value in part])
    if values.std() > 1e-6 * np.abs(values).max():
        assert scaled.mean() == pytest.approx(0, abs=1e-5)
        assert scaled.std() == pytest.approx(1, rel=1e-5)
