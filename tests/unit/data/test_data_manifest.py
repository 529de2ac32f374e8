from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from geo_ray.base.errors import ManifestError
from geo_ray.data.manifest import DataShard, Manifest, load_manifest, merge_manifests, save_manifest
from geo_ray.data.reader import RegionReader
from tests.support.data_support import REGIONS, write

SHARD = {
    "path": "us-east/train-00000.parquet",
    "region": "us-east",
    "split": "train",
    "rows": 3,
    "bytes": 100,
    "sha256": "0" * 64,
    "labels": {"0": 1, "1": 2},
}
MANIFEST = {
    "version": 1,
    "task": "toy",
    "columns": {"label": "int64"},
    "seed": 0,
    "stores": {"us-east": "."},
    "shards": [SHARD],
}


def load_tree(tmp_path: Path, tree: object) -> Manifest:
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(tree))
    return load_manifest(str(file))


def test_a_saved_manifest_is_read_back_equal(tmp_path: Path) -> None:
    manifest = write(tmp_path / "data")
    save_manifest(manifest, str(tmp_path / "data" / "manifest.json"))
    assert load_manifest(str(tmp_path / "data" / "manifest.json")) == manifest
    assert load_manifest(str(tmp_path / "data")) == manifest
    assert load_manifest((tmp_path / "data" / "manifest.json").as_uri()) == manifest


def test_the_directory_may_be_moved(tmp_path: Path) -> None:
    save_manifest(write(tmp_path / "old"), str(tmp_path / "old" / "manifest.json"))
    shutil.move(tmp_path / "old", tmp_path / "new place")
    moved = load_manifest(str(tmp_path / "new place"))
    assert moved.stores["us-east"] == (tmp_path / "new place").as_uri()
    assert len(RegionReader(moved, "us-east", "train", 0).read(0, 5)["label"]) == 5


def test_stores_outside_the_manifests_directory_stay_absolute(tmp_path: Path) -> None:
    manifest = write(tmp_path / "data")
    save_manifest(manifest, str(tmp_path / "elsewhere" / "manifest.json"))
    assert load_manifest(str(tmp_path / "elsewhere")) == manifest


def test_of_and_rows_select_a_regions_split(tmp_path: Path) -> None:
    manifest = write(tmp_path, train=200, heldout=60)
    assert manifest.regions() == REGIONS
    assert sum(manifest.rows(region, "train") for region in REGIONS) == 200
    assert manifest.rows("eu-west", "heldout") == 20
    for shard in manifest.of("eu-west", "train"):
        assert shard.path.startswith("eu-west/train-")
        assert sum(shard.labels.values()) == shard.rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "../secret.parquet"}, "'..'"),
        ({"path": "us-east/../../x.parquet"}, "'..'"),
        ({"path": "/etc/passwd"}, "absolute"),
        ({"path": ""}, "is empty"),
        ({"path": "us-east\\x"}, "backslash"),
        ({"path": "us-east//x"}, "shortest form"),
        ({"path": "./x"}, "shortest form"),
        ({"region": "mars"}, "'mars', which has no store"),
        ({"labels": {"0": 1}}, "add up to 3"),
        ({"labels": {"0": 4, "1": -1}}, "add up to 3"),
        ({"sha256": "abc"}, "shards.0.sha256"),
        ({"rows": -1}, "shards.0.rows"),
        ({"bytes": 0}, "shards.0.bytes"),
        ({"split": "test"}, "shards.0.split"),
        ({"sha1": "x"}, "shards.0.sha1 (line 1): unknown key; did you mean sha256?"),
        ({"rows": "3"}, 'got "3", expected a whole number'),
    ],
)
def test_a_contradictory_shard_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        load_tree(tmp_path, {**MANIFEST, "shards": [{**SHARD, **change}]})
    assert message in caught.value.message
    assert "manifest.json" in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2, "novelty": 1}, "version 2 is unknown"),
        ({"version": None}, "version None is unknown"),
        ({"version": True}, "version True is unknown"),
        ({"shards": [SHARD, SHARD]}, "more than once"),
        ({"columns": {}}, "no columns"),
        ({"columns": {"label": "object"}}, "'label'"),
        ({"columns": {"label": "float32[0]"}}, "'label'"),
        ({"stores": {"us-east": "ftp://host/x"}}, "us-east"),
        ({"stores": {"us-east": ".", "a/b": "."}}, "'a/b'"),
        ({"seed": -1}, "seed (line 1): got -1, expected a whole number of at least 0"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_contradictory_manifest_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        load_tree(tmp_path, {**MANIFEST, **change})
    assert message in caught.value.message


def test_credentials_in_an_address_are_refused_and_not_repeated(tmp_path: Path) -> None:
    for uri in (
        "s3://AKIAX:hunter2@bucket/x",
        "s3://bucket?endpoint_url=http://AKIAX:hunter2@host",
        "s3://bucket?aws_secret_access_key=hunter2",
    ):
        with pytest.raises(ManifestError) as caught:
            load_tree(tmp_path, {**MANIFEST, "stores": {"us-east": uri}})
        assert "bucket" in str(caught.value)
        assert "hunter2" not in str(caught.value)


def test_constructing_a_contradiction_is_the_same_error() -> None:
    with pytest.raises(ManifestError):
        DataShard(**{**SHARD, "path": "/x"})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{", "[]", "\ufffe", '"x"'])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError):
        load_manifest(str(tmp_path / "manifest.json"))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError):
        load_manifest(str(tmp_path))


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        load_manifest(str(tmp_path / "nothing.json"))
    assert "nothing.json" in str(caught.value)
    assert "geo-ray data shard" in str(caught.value)


def test_manifests_of_different_regions_merge(tmp_path: Path) -> None:
    first = write(tmp_path / "a", regions=("us-east",))
    second = write(tmp_path / "b", regions=("eu-west", "ap-south"))
    merged = merge_manifests([first, second])
    assert merged.regions() == REGIONS
    assert merged.stores["us-east"] != merged.stores["eu-west"]
    for region in REGIONS:
        source = first if region == "us-east" else second
        assert merged.of(region, "train") == source.of(region, "train")


def test_manifests_that_do_not_fit_are_not_merged(tmp_path: Path) -> None:
    first = write(tmp_path / "a", regions=("us-east",))
    with pytest.raises(ManifestError, match="us-east"):
        merge_manifests([first, first])
    with pytest.raises(ManifestError, match="other"):
        merge_manifests([first, write(tmp_path / "b", regions=("eu-west",), task_name="other")])
    with pytest.raises(ManifestError):
        merge_manifests([])


@pytest.mark.parametrize("depth", [500, 100_000])
def test_a_manifest_that_is_nested_too_deeply_is_a_typed_error(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"version": 1, "shards": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ManifestError, match="manifest"):
        load_manifest(str(path))
