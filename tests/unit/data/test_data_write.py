from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from geo_ray.base.errors import ConfigError, SchemaMismatchError, ShardEmptyError, StoreError
from geo_ray.data.manifest import load_manifest, save_manifest
from geo_ray.data.reader import RegionReader
from geo_ray.data.shards import write_shards
from geo_ray.data.split import ByLabelSplit, DirichletSplit, RatioSplit
from tests.support.data_support import REGIONS, TYPES, make_columns, write


def rows_of(manifest: object, region: str, split: str) -> list[int]:
    reader = RegionReader(manifest, region, split, 0)  # type: ignore[arg-type]
    return [int(number) for batch in reader.scan(7) for number in batch["weight"][:, 0]]


def test_every_row_is_in_exactly_one_region(tmp_path: Path) -> None:
    manifest = write(tmp_path, train=203, heldout=61)
    for split, first, count in (("train", 0, 203), ("heldout", 10_000, 61)):
        found = [n for region in REGIONS for n in rows_of(manifest, region, split)]
        assert sorted(found) == list(range(first, first + count))


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert first.shards == second.shards
    assert write(tmp_path / "c", seed=6).shards != first.shards


def test_each_region_has_its_own_directory_and_maximal_size(tmp_path: Path) -> None:
    seen: list[int] = []
    manifest = write(tmp_path, rows_per_shard=10, on_rows=seen.append)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(REGIONS)
    assert seen == [shard.rows for shard in manifest.shards]
    for shard in manifest.shards:
        assert 1 <= shard.rows <= 10
        assert (tmp_path / shard.path).stat().st_size == shard.bytes


def test_each_region_may_have_its_own_store(tmp_path: Path) -> None:
    manifest = write(tmp_path, out={region: str(tmp_path / f"of-{region}") for region in REGIONS})
    save_manifest(manifest, str(tmp_path / "manifest.json"))
    again = load_manifest(str(tmp_path / "manifest.json"))
    assert again == manifest
    assert again.stores["eu-west"] == (tmp_path / "of-eu-west").as_uri()
    assert len(rows_of(again, "eu-west", "train")) > 0


def test_rows_are_shuffled_within_the_region(tmp_path: Path) -> None:
    found = rows_of(write(tmp_path), "us-east", "train")
    assert found != sorted(found)


def test_ratio_is_kept_in_both_parts(tmp_path: Path) -> None:
    ratios = {"us-east": 2.0, "eu-west": 1.0, "ap-south": 1.0}
    manifest = write(tmp_path, split=RatioSplit(ratios=ratios))
    assert [manifest.rows(region, "train") for region in REGIONS] == [100, 50, 50]
    assert [manifest.rows(region, "heldout") for region in REGIONS] == [30, 15, 15]


def test_label_skew_is_alike_in_both_parts(tmp_path: Path) -> None:
    manifest = write(tmp_path, split=ByLabelSplit())
    for region in REGIONS:
        held = {k for shard in manifest.of(region, "heldout") for k in shard.labels}
        assert held == {k for shard in manifest.of(region, "train") for k in shard.labels}
    # A held-out part that lacks labels is cut like the training part all the same.
    parts = {"train": make_columns(200), "heldout": make_columns(200)}
    keep = np.isin(parts["heldout"]["label"], [0, 5, 9])
    parts["heldout"] = {name: array[keep] for name, array in parts["heldout"].items()}
    manifest = write(tmp_path / "lack", columns_by_split=parts, split=ByLabelSplit())
    assert [set(manifest.of(r, "heldout")[0].labels) for r in REGIONS] == [{"0"}, {"5"}, {"9"}]


def test_dirichlet_skews_and_accounts_for_every_label(tmp_path: Path) -> None:
    manifest = write(tmp_path, train=2000, split=DirichletSplit(alpha=0.3), rows_per_shard=500)
    total = dict.fromkeys(map(str, range(10)), 0)
    for shard in manifest.shards:
        if shard.split == "train":
            for label, count in shard.labels.items():
                total[label] += count
    assert total == dict.fromkeys(map(str, range(10)), 200)


def test_tasks_without_labels_and_without_heldout_rows_work(tmp_path: Path) -> None:
    manifest = write(
        tmp_path, columns_by_split={"train": make_columns(50)}, label_column=None, regions=("a",)
    )
    assert all(shard.labels == {} for shard in manifest.shards)
    with pytest.raises(ShardEmptyError, match="heldout"):
        RegionReader(manifest, "a", "heldout", 0)


def test_identifiers_are_not_counted_as_labels(tmp_path: Path) -> None:
    columns = {"id": np.arange(3000)}
    manifest = write_shards(
        {"train": columns}, "t", {"id": "int64"}, "id", RatioSplit(ratios={"a": 1.0}), ["a"], 0,
        str(tmp_path), 2000,
    )  # fmt: skip
    assert [len(shard.labels) for shard in manifest.shards] == [0, 1000]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"columns_by_split": {"heldout": make_columns(5)}}, ConfigError),
        ({"columns_by_split": {"train": make_columns(5), "test": make_columns(5)}}, ConfigError),
        ({"columns_by_split": {"train": make_columns(0)}}, ShardEmptyError),
        ({"columns_by_split": {"train": make_columns(2)}}, ShardEmptyError),
        ({"heldout": 2}, ShardEmptyError),
        ({"regions": ("../up",)}, ConfigError),
        ({"regions": ("a", "a")}, ConfigError),
        ({"regions": ()}, ConfigError),
        ({"out": {"us-east": "x"}}, ConfigError),
        ({"rows_per_shard": 0}, ConfigError),
        ({"label_column": "nothing"}, ConfigError),
        ({"label_column": "weight"}, ConfigError),
        ({"column_types": {**TYPES, "label": "int32"}}, SchemaMismatchError),
        ({"column_types": {**TYPES, "more": "int32"}}, SchemaMismatchError),
        ({"split": RatioSplit(ratios={"us-east": 1.0})}, ConfigError),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        write(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="file"):
        write(tmp_path / "file")
