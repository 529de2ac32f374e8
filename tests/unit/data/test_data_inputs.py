from __future__ import annotations

import datetime as dt
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geo_ray.base.errors import (
    ConfigError,
    ManifestError,
    SchemaMismatchError,
    ShardCorruptError,
    ShardEmptyError,
    ShardMissingError,
    StoreError,
)
from geo_ray.data.files.find import find_files
from geo_ray.data.prepare.config import parse_preparation
from geo_ray.data.prepare.inputs import Gathered, gather_rows, hold_out
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.prepare.statistics import Statistics
from geo_ray.data.shards import check_shards
from tests.support.data_support import write

TYPES = {"x": "float32[2]", "y": "int64"}


def table(first: int, rows: int) -> pa.Table:
    numbers = list(range(first, first + rows))
    return pa.table(
        {"x": [[float(n), 0.0] for n in numbers], "y": pa.array(numbers, pa.int16()), "z": numbers}
    )


def gather(
    folder: Path,
    types: dict[str, str] | None = None,
    prepare: str = "columns: {}",
    statistics: Statistics | None = None,
) -> Gathered:
    resolved = resolve(parse_preparation(prepare, "prepare.yaml"), types or TYPES, statistics)
    return gather_rows(find_files(str(folder)), resolved.preparation)


def test_files_are_joined_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    pq.write_table(table(3, 4), tmp_path / "b.parquet")
    pq.write_table(table(0, 3), tmp_path / "a.parquet")
    pq.write_table(table(7, 2), tmp_path / "sub" / "a.parquet")
    (tmp_path / "README.txt").write_text("not data")
    seen: list[tuple[float, int]] = []
    preparation = resolve(None, TYPES).preparation
    found = find_files(str(tmp_path))
    columns = gather_rows(found, preparation, None, lambda *at: seen.append(at)).columns
    assert columns["y"].tolist() == list(range(9))
    assert columns["x"].dtype == np.float32
    assert columns["x"][:, 0].tolist() == list(range(9))
    assert set(columns) == {"x", "y"}
    assert seen == [(1.0, 4 - 1), (2.0, 4), (3.0, 2)]


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ShardMissingError, match=str(tmp_path)):
        gather(tmp_path)
    pq.write_table(table(0, 0).cast(table(0, 1).schema), tmp_path / "a.parquet")
    with pytest.raises(ShardEmptyError):
        gather(tmp_path)
    pq.write_table(table(0, 3).drop_columns("y"), tmp_path / "bad.parquet")
    with pytest.raises(SchemaMismatchError, match=r"'y'.*bad\.parquet|all files") as caught:
        gather(tmp_path)
    assert "the files have x, z" in caught.value.message
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(ShardCorruptError, match=r"bad\.parquet"):
        gather(tmp_path)


def test_the_four_refusals_are_one(tmp_path: Path) -> None:
    """A text column, another format, nulls in one column and nulls in the next."""
    (tmp_path / "a.csv").write_text("x,y,label\n1,,no\n2,5,yes\n")
    (tmp_path / "b.csv").write_text("x,y,label\n,6,yes\n4.5,oops,yes\n")
    (tmp_path / "c.csv").write_text("x,label\n5,no\n")
    (tmp_path / "d.csv").write_bytes(b"x,y,label\n5,\xff,no\n")
    (tmp_path / "e.csv").write_text("")
    types = {"x": "int64", "y": "float32", "label": "int64"}
    with pytest.raises(SchemaMismatchError) as caught:
        gather(tmp_path, types)
    text = caught.value.message
    for part in (
        "d.csv is not utf-8 text",
        "--encoding latin-1",
        "column 'x': has no value (1 row, first in row 1 of b.csv)",
        "column 'x': has numbers that are not whole, such as '4.5'",
        "column 'y': has no value (1 row, first in row 1 of a.csv)",
        "column 'y': has text such as 'oops', where a number is required (1 row, first in row 2 of "
        "b",
        "add --null oops if that means a missing value",
        "column 'y': is missing in c.csv",
        "column 'label': has text such as 'no', where a number is required (5 rows, first in row 1 "
        "of a.csv; also in b.csv, c.csv)",
        "label: {column: label, vocabulary: {values: [no, yes]}}",
    ):
        assert part in text
    assert "--prepare" in caught.value.fix


def test_times_flags_decimals_and_categories_of_parquet_are_taken(tmp_path: Path) -> None:
    when = [dt.datetime(1970, 1, 1, 0, 0, second, tzinfo=dt.UTC) for second in (1, 2)]
    pq.write_table(
        pa.table(
            {
                "when": pa.array(when, pa.timestamp("us", "Europe/Berlin")),
                "flag": [True, False],
                "price": pa.array([Decimal("1.25"), Decimal("2.50")]),
                "place": pa.array(["b", "a"]).dictionary_encode(),
                "nested": [{"deep": {"n": 7}}, {"deep": {"n": 8}}],
                "big": pa.array([2**62 + 1, 5], pa.int64()),
            }
        ),
        tmp_path / "a.parquet",
    )
    prepare = """
columns:
  x:
    - {column: when}
    - {column: flag}
    - {column: price}
    - {column: nested.deep.n}
  place: {column: place, vocabulary: {values: [a, b]}}
"""
    types = {"x": "float32[4]", "place": "int8", "big": "int64"}
    columns = gather(tmp_path, types, prepare).columns
    assert columns["x"].tolist() == [[1, 1, 1.25, 7], [2, 0, 2.5, 8]]
    assert columns["place"].tolist() == [1, 0]
    assert columns["big"].tolist() == [2**62 + 1, 5]


def test_files_of_one_folder_may_differ_in_what_is_whole(tmp_path: Path) -> None:
    """The first has integers, the second floats and nothing; the order of columns differs too."""
    (tmp_path / "a.csv").write_text("v,w\n1,x\n2,y\n")
    (tmp_path / "b.csv").write_text("w,v\nx,2.5\ny,\n")
    prepare = "columns: {v: {column: v, missing: {fill: 0}}}"
    columns = gather(tmp_path, {"v": "float32"}, prepare).columns
    assert columns["v"].tolist() == [1, 2, 2.5, 0]


def test_keys_that_some_lines_lack_have_no_value_but_misspelt_ones_are_missing(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"y": 5}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 2}\n')
    prepare = "columns: {x: {column: x, missing: {fill: 0}}, y: {column: y, missing: {fill: 9}}}"
    found = gather(tmp_path, {"x": "int64", "y": "int64"}, prepare)
    assert found.columns["x"].tolist() == [1, 0, 2]
    assert found.columns["y"].tolist() == [9, 5, 9]
    assert found.counts.filled == {"x": 1, "y": 2}
    with pytest.raises(SchemaMismatchError, match=r"'why'.*is missing in all files"):
        gather(tmp_path, {"x": "int64", "y": "int64"}, prepare.replace("column: y", "column: why"))


def test_rows_may_all_be_dropped_but_not_silently(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("v,w\n,1\n,2\n")
    with pytest.raises(ShardEmptyError, match="all 2 rows were dropped"):
        gather(tmp_path, {"v": "float32"}, "columns: {v: {column: v, missing: drop_row}}")


def test_a_full_disk_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("v\n1\n")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(StoreError) as caught:
        gather(tmp_path, {"v": "float32"})
    assert "TMPDIR" in caught.value.fix


MEMORY = """
import sys
from pathlib import Path
from geo_ray.data.files.find import find_files
from geo_ray.data.prepare.inputs import gather_rows, hold_out
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.split import IidSplit
from geo_ray.data.shards import write_shards

TYPES = {"x": "float64[64]", "y": "int64"}
peak = 0

def sample(*_):
    global peak  # what the process has to itself; files that are mapped can be given up
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = max(peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))

for folder in sys.argv[1:]:
    made = resolve(None, TYPES).preparation
    columns = gather_rows(find_files(folder), made, None, sample).columns
    parts = hold_out(columns, 0.1, 0)
    write_shards(parts, "t", TYPES, "y", IidSplit(), ("a",), 0, folder + "-out", 8192, sample)
    print(peak / 1024)
"""


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folders = [tmp_path / "small", tmp_path / "large"]
    for folder, files in zip(folders, (4, 12), strict=True):
        folder.mkdir()
        for number in range(files):
            flat = pa.array(rng.normal(size=64 * 20_000))
            x = pa.FixedSizeListArray.from_arrays(flat, 64)
            data = pa.table({"x": x, "y": rng.integers(0, 3, 20_000)})
            path = folder / f"{number:02d}.parquet"
            pq.write_table(data, path, row_group_size=5_000, compression=None)
    total_mb = sum(path.stat().st_size for path in folders[1].iterdir()) / 2**20
    child = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, folders)], capture_output=True, text=True
    )
    small_mb, large_mb = (float(line) for line in child.stdout.split())
    assert total_mb > 100
    assert large_mb - small_mb < total_mb / 3, child.stderr


@pytest.mark.parametrize(("fraction", "held"), [(0.1, 10), (0.5, 50), (0.001, 1), (0.0, 0)])
def test_held_out_rows_are_set_apart(fraction: float, held: int) -> None:
    columns = {"x": np.arange(100), "y": np.arange(100) * 2}
    parts = hold_out(columns, fraction, seed=1)
    assert [len(part["x"]) for part in parts.values()] == ([100 - held, held] if held else [100])
    assert sorted(n for part in parts.values() for n in part["x"].tolist()) == list(range(100))
    for part in parts.values():
        assert np.array_equal(part["y"], part["x"] * 2)
    again = hold_out(columns, fraction, seed=1)
    assert all(np.array_equal(parts[name]["x"], again[name]["x"]) for name in parts)


@pytest.mark.parametrize(("fraction", "rows"), [(-0.1, 10), (1.0, 10), (0.5, 1), (0.99, 10)])
def test_nothing_to_train_on_is_refused(fraction: float, rows: int) -> None:
    with pytest.raises(ConfigError, match="heldout"):
        hold_out({"x": np.arange(rows)}, fraction, seed=0)


def test_checking_goes_on_after_a_bad_shard(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    gone, broken = manifest.shards[0], manifest.shards[2]
    (tmp_path / gone.path).unlink()
    (tmp_path / broken.path).write_bytes(b"broken")
    verdicts = list(check_shards(manifest))
    assert tuple(v.shard for v in verdicts) == manifest.shards
    errors = {v.shard.path: type(v.error) for v in verdicts if v.error}
    assert errors == {gone.path: ShardMissingError, broken.path: ShardCorruptError}
    assert {v.shard.region for v in check_shards(manifest, "eu-west")} == {"eu-west"}
    assert not any(v.error for v in check_shards(manifest, "eu-west"))
    with pytest.raises(ManifestError, match="mars"):
        list(check_shards(manifest, "mars"))
