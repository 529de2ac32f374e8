"""From two regions' files to one manifest, by the functions of the library alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import geo_ray
from geo_ray.api.data import (
    DataStatistics,
    RegionData,
    SourceFiles,
    WantedStatistics,
    check_data,
    data_stats,
    inspect_data,
    merge_data,
    merge_data_stats,
)
from geo_ray.base import errors
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.prepare.saved_preparation import load_prepared
from tests.support.data_support import columns_task

TASK = columns_task("Toy", "y", 2)
PREPARE = """
columns:
  x: [{column: age, scale: standard}, {column: income, scale: standard, missing: mean}]
  y: {column: y}
"""
REGIONS = {"us": 1, "eu": 2}


@pytest.fixture
def ages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Files of two regions, a task and a preparation, in the current directory; ages by region."""
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(TASK)
    Path("prepare.yaml").write_text(PREPARE)
    found: dict[str, list[int]] = {}
    for region, seed in REGIONS.items():
        rng = np.random.default_rng(seed)
        found[region] = [int(age) for age in rng.integers(18, 90, 40)]
        Path(region).mkdir()
        with Path(region, "a.csv").open("w", newline="") as file:
            writer = csv.writer(file, delimiter=";")
            writer.writerow(["age", "income", "y"])
            for number, age in enumerate(found[region]):
                writer.writerow([age, "NA" if number == 3 else 1000 + age, number % 2])
    return found


READ = ReadOptions(delimiter=";")


def statistics_of_all() -> DataStatistics:
    wanted = WantedStatistics(prepare="prepare.yaml")
    parts = [data_stats(region, region, wanted, read=READ) for region in REGIONS]
    return merge_data_stats([parts[0], parts[1].save("eu.json")])


def sharded(region: str, stats: DataStatistics, *, force: bool = False) -> RegionData:
    files = SourceFiles(region, READ, "prepare.yaml", stats, heldout=0.25)
    return geo_ray.shard_data("toy.py:Toy", [region], f"out/{region}", files=files, force=force)


def test_statistics_of_regions_are_those_of_all_rows(ages: dict[str, list[int]]) -> None:
    merged = statistics_of_all()
    row = next(row for row in merged.table().to_pylist() if row["column"] == "age")
    every = np.array(ages["us"] + ages["eu"], dtype=np.float64)
    assert row["mean"] == pytest.approx(every.mean())
    assert row["deviation"] == pytest.approx(every.std())
    assert "80 rows, 2 columns" in repr(merged) and "<td>income</td>" in merged._repr_html_()
    told = data_stats("us", "us", WantedStatistics(columns=["y"]), read=READ)
    assert told.table()["column"] == ["y"]


def test_a_merged_manifest_keeps_the_preparation(
    ages: dict[str, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    stats = statistics_of_all()
    parts = [sharded(region, stats) for region in REGIONS]
    assert all(part.counts is not None and part.counts.filled["income"] == 1 for part in parts)
    merged = merge_data([part.path for part in parts], "both.json")
    assert merged.manifest.preparation is not None
    assert load_prepared("both.json") == load_prepared(parts[0].path)
    assert json.loads(Path("both.json").read_text())["preparation"]["path"] == (
        "both.preparation.json"
    )
    assert merged.manifest.regions() == ("us", "eu") and merged.table().num_rows == 4
    assert sum(merged.table()["rows"]) == 80 and "80 rows" in repr(merged)
    assert merged._repr_html_().count("<tr>") == 5
    check_data("both.json").raise_if_bad()
    differing = sharded("eu", data_stats("eu", "eu", read=READ), force=True)
    with pytest.raises(errors.ManifestError, match="prepared differently"):
        merge_data([parts[0].path, differing.path], "no.json")
    assert capsys.readouterr() == ("", "")


def test_an_inspection_says_what_is_there_and_drafts_a_preparation(
    ages: dict[str, list[int]],
) -> None:
    task = {"use": "toy.py:Toy", "options": {"features": 2}}
    with pytest.raises(errors.ConfigError, match="exists already"):
        inspect_data("us", READ, task=task, draft="prepare.yaml")
    with pytest.raises(errors.ConfigError, match="requires a task"):
        inspect_data("us", READ, draft="new.yaml")
    found = inspect_data("us", READ, task=task, draft="new.yaml")
    found.raise_if_bad()
    rows = {row["column"]: row for row in found.table().to_pylist()}
    assert rows["age"]["different"] == len(set(ages["us"])) and rows["age"]["type"] == "int"
    assert rows["income"]["no_value"] == 1 and "missing: mean" in rows["income"]["treatment"]
    assert repr(found) == "<DataSurvey: 40 rows in 1 files, 3 columns>"
    assert "<td>age</td>" in found._repr_html_()
    wanted = WantedStatistics(prepare="new.yaml")
    stats = data_stats("us", "us", wanted, read=READ)
    files = SourceFiles("us", READ, "new.yaml", stats, heldout=0)
    made = geo_ray.shard_data(task, "us", "out", files=files)
    assert made.manifest.rows("us", "train") == 40
    Path("us/b.csv").write_bytes(b"age\n\xff\n")
    with pytest.raises(errors.DataError, match=r"b\.csv"):
        inspect_data("us", READ).raise_if_bad()


def test_a_task_with_data_of_its_own_is_split_as_a_configuration_says(tmp_path: Path) -> None:
    split = {"kind": "ratio", "ratios": {"a": 3, "b": 1}}
    homes = {"a": str(tmp_path / "out"), "b": str(tmp_path / "other")}
    made = geo_ray.shard_data("digits", homes, tmp_path / "out", split=split, rows_per_shard=500)
    rows = {name: made.manifest.rows(name, "train") for name in homes}
    assert rows["a"] == pytest.approx(3 * rows["b"], abs=3)
    assert (tmp_path / "other" / "b").is_dir() and not (tmp_path / "out" / "b").exists()
    assert max(made.table()["rows"]) <= 500
    with pytest.raises(errors.ConfigError, match="already has a manifest"):
        geo_ray.shard_data("digits", "a,b", tmp_path / "out")
    with pytest.raises(errors.ConfigError, match="split"):
        geo_ray.shard_data("digits", "a,b", tmp_path / "new", split="evenly")
    with pytest.raises(errors.ConfigError, match="rows_per_shard"):
        geo_ray.shard_data("digits", "a,b", tmp_path / "new", rows_per_shard=0)
    with pytest.raises(errors.ConfigError, match="without a preparation that uses them"):
        SourceFiles(tmp_path, stats="all.json")
    assert not (tmp_path / "new").exists()
