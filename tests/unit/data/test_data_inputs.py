from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_support import write

from geo_ray.data.check import check_shards
from geo_ray.data.inputs import hold_out, read_parquet_files
from geo_ray.errors import (
    ConfigError,
    ManifestError,
    SchemaMismatchError,
    ShardCorruptError,
    ShardEmptyError,
    ShardMissingError,
)

TYPES = {"x": "float32[2]", "y": "int64"}


def table(first: int, rows: int) -> pa.Table:
    numbers = list(range(first, first + rows))
    return pa.table(
        {"x": [[float(n), 0.0] for n in numbers], "y": pa.array(numbers, pa.int16()), "z": numbers}
    )


def test_files_are_joined_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    pq.write_table(table(3, 4), tmp_path / "b.parquet")
    pq.write_table(table(0, 3), tmp_path / "a.parquet")
    pq.write_table(table(7, 2), tmp_path / "sub" / "a.parquet")
    (tmp_path / "README.txt").write_text("not data")
    seen: list[tuple[int, int]] = []
    columns = read_parquet_files(str(tmp_path), TYPES, lambda *at: seen.append(at))
    assert columns["y"].tolist() == list(range(9))
    assert columns["x"].dtype == np.float32
    assert columns["x"][:, 0].tolist() == list(range(9))
    assert set(columns) == {"x", "y"}
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ShardMissingError, match=str(tmp_path)):
        read_parquet_files(str(tmp_path), TYPES)
    pq.write_table(table(0, 0).cast(table(0, 1).schema), tmp_path / "a.parquet")
    with pytest.raises(ShardEmptyError):
        read_parquet_files(str(tmp_path), TYPES)
    pq.write_table(table(0, 3).drop_columns("y"), tmp_path / "bad.parquet")
    with pytest.raises(SchemaMismatchError, match=r"bad\.parquet.*'y'"):
        read_parquet_files(str(tmp_path), TYPES)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(ShardCorruptError, match=r"bad\.parquet"):
        read_parquet_files(str(tmp_path), TYPES)


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
