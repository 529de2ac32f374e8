"""The data of a run: generated once, or named; what does not fit is refused before the start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_ray.base.errors import (
    ConfigError,
    ManifestError,
    RegionsOmittedError,
    RunDirectoryError,
    SchemaMismatchError,
    ShardEmptyError,
)
from geo_ray.data.manifest import save_manifest
from geo_ray.runs.build import build_averager
from geo_ray.runs.data import data_rows, open_readers, prepare_manifest
from geo_ray.runs.directory import CONFIG_FILE
from geo_ray.runtime.bridge_actor import BridgeActor
from geo_ray.runtime.spec import RunSpec
from geo_ray.storage.places import CheckpointPlaces
from tests.support.job_support import digits, experiment


class Borrowed:
    """A task that brings no data of its own."""

    def __init__(self) -> None:
        inner = digits()
        self.columns, self.label_column = inner.columns, inner.label_column
        self.model, self.collate = inner.model, inner.collate
        self.loss, self.evaluate, self.metrics = inner.loss, inner.evaluate, inner.metrics


def files(folder) -> dict:
    return {p: p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


def test_generated_data_are_written_once_and_cover_all_rows(tmp_path):
    config, task = experiment(), digits()
    manifest, address = prepare_manifest(config, task, tmp_path, tmp_path / "data")
    assert address == str(tmp_path / "data" / "manifest.json")
    rows = {s: sum(manifest.rows(r, s) for r in config.region_names) for s in ("train", "heldout")}
    assert rows == {"train": 1433, "heldout": 364}
    before = files(tmp_path / "data")
    again, _ = prepare_manifest(config, task, tmp_path, tmp_path / "data")
    assert again == manifest and files(tmp_path / "data") == before


def test_each_region_reads_its_own_rows(tmp_path):
    config, task = experiment(), digits()
    manifest, _ = prepare_manifest(config, task, tmp_path, tmp_path / "data")
    train, heldout = open_readers(config, manifest, "us", here="us")
    assert train.read(3, 8)["image"].shape == (8, 64)
    assert sum(len(c["label"]) for c in heldout.scan(50)) == manifest.rows("us", "heldout")


def test_a_named_manifest_is_found_from_the_base(tmp_path):
    config, task = experiment(), digits()
    manifest, address = prepare_manifest(config, task, tmp_path, tmp_path / "data")
    for name in ("data/manifest.json", address):
        named = experiment("data.generate=null", f"data.manifest={name}")
        found, where = prepare_manifest(named, task, tmp_path, tmp_path / "unused")
        assert found == manifest and where == address
    assert not (tmp_path / "unused").exists()
    # A task that brings no data may use it too.
    assert prepare_manifest(named, Borrowed(), tmp_path, tmp_path)[0] == manifest


def test_a_task_without_data_cannot_generate(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.generate.*is not self-contained"):
        prepare_manifest(experiment(), Borrowed(), tmp_path, tmp_path)


def test_a_manifest_that_is_not_there_is_named(tmp_path):
    named = experiment("data.generate=null", "data.manifest=nowhere.json")
    with pytest.raises(ManifestError, match=r"nowhere\.json"):
        prepare_manifest(named, digits(), tmp_path, tmp_path)


def test_shards_of_another_task_are_refused(tmp_path):
    manifest, _ = prepare_manifest(experiment(), digits(), tmp_path, tmp_path / "data")
    save_manifest(
        manifest.model_copy(update={"columns": {"image": "float32[64]"}, "shards": ()}),
        str(tmp_path / "other.json"),
    )
    named = experiment("data.generate=null", "data.manifest=other.json")
    with pytest.raises((SchemaMismatchError, ManifestError), match=r"columns|shards"):
        prepare_manifest(named, digits(), tmp_path, tmp_path)
    task = digits()
    task.columns = {"image": "float32[64]", "label": "int32"}
    named = experiment("data.generate=null", "data.manifest=data/manifest.json")
    with pytest.raises(SchemaMismatchError, match="int32"):
        prepare_manifest(named, task, tmp_path, tmp_path)


def test_a_region_without_rows_is_named(tmp_path):
    prepare_manifest(experiment(), digits(), tmp_path, tmp_path / "data")
    more = experiment(
        "regions=[{name: eu}, {name: asia}]",
        "data.generate=null",
        "data.manifest=data/manifest.json",
    )
    with pytest.raises(ShardEmptyError, match=r"'asia' has no train rows.*'eu', 'us'"):
        prepare_manifest(more, digits(), tmp_path, tmp_path)
    fewer = experiment("regions=[{name: us}]", "data.generate=null",
                       "data.manifest=data/manifest.json")  # fmt: skip
    with pytest.raises(RegionsOmittedError, match=r"\d+ training rows of eu") as caught:
        prepare_manifest(fewer, digits(), tmp_path, tmp_path)
    assert "data.leave_out=[eu]" in caught.value.fix


def test_a_part_of_the_regions_is_enough_if_that_is_meant(tmp_path, caplog):
    prepare_manifest(experiment(), digits(), tmp_path, tmp_path / "data")
    some = ("regions=[{name: us}]", "data.generate=null", "data.manifest=data/manifest.json")
    meant = experiment(*some, "data.leave_out=[eu]")
    prepare_manifest(meant, digits(), tmp_path, tmp_path)
    prepare_manifest(experiment(*some), digits(), tmp_path, tmp_path, goes_on=True)
    assert "training rows of eu, which the run does not use" in caplog.text
    with pytest.raises(ConfigError, match="no region asia; it has eu, us"):
        prepare_manifest(experiment(*some, "data.leave_out=[asia]"), digits(), tmp_path, tmp_path)


def test_each_region_stands_for_the_rows_of_its_data(tmp_path):
    config = experiment("data.generate={split: {kind: ratio, ratios: {eu: 3, us: 1}}}")
    manifest, _ = prepare_manifest(config, digits(), tmp_path, tmp_path / "data")
    rows = data_rows(config, manifest)
    assert rows == {name: manifest.rows(name, "train") for name in ("eu", "us")}
    assert rows["eu"] == pytest.approx(3 * rows["us"], rel=0.01)
    assert build_averager(config, 10, rows).state.data_rows == rows


def test_sites_that_share_rows_have_equal_parts_of_them(tmp_path):
    """Together they count as the region does; a site with rows of its own has those."""
    manifest, _ = prepare_manifest(experiment(), digits(), tmp_path, tmp_path / "data")
    shared = experiment(
        "regions=[{name: eu}, {name: x, at: us}, {name: y, at: us}, {name: us}]",
        "data.generate=null",
        "data.manifest=data/manifest.json",
    )
    rows = data_rows(shared, manifest)
    assert rows["x"] == rows["y"] == rows["us"] == manifest.rows("us", "train") / 3
    assert sum(rows.values()) == manifest.rows("eu", "train") + manifest.rows("us", "train")


@pytest.mark.parametrize(
    ("sections", "is_refused"),
    [
        ((), True),  # generated data lie there
        (("data.generate=null", "data.manifest=s3://b/m.json"), False),
        (
            (
                "data.generate=null",
                "data.manifest=s3://b/m.json",
                "train.eval_every=1",
                "train.keep_best={metric: loss, mode: min}",
            ),
            True,
        ),
    ],
)
def test_with_a_store_not_all_need_see_the_directory(tmp_path, sections, is_refused):
    store = "s3://bucket/prefix"
    asked = experiment(f"checkpoint.store={store}", *sections)
    elsewhere = str(tmp_path / "on another machine")
    spec = RunSpec(asked.model_dump_json(), str(tmp_path), str(tmp_path), "", "run", elsewhere,
                   CheckpointPlaces(store))  # fmt: skip
    without = replace(spec, places=CheckpointPlaces(f"{elsewhere}/checkpoints"))
    with pytest.raises(RunDirectoryError, match="cannot access") as caught:
        without.check_run_directory("eu")
    assert "data.generate" in caught.value.fix
    if is_refused:
        with pytest.raises(RunDirectoryError, match="cannot access"):
            spec.check_run_directory("eu")
    else:
        spec.check_run_directory("eu")


def test_the_actor_that_hosts_the_averager_is_told_them(tmp_path):
    (tmp_path / CONFIG_FILE).write_text("x: 1", "utf-8")
    spec = RunSpec(
        experiment().model_dump_json(),
        str(tmp_path),
        str(tmp_path),
        "",
        "run",
        run_dir=str(tmp_path),
        num_params=10,
        data_rows={"eu": 5.0, "us": 7.0},
    )
    actor = BridgeActor(spec, spec.experiment.averager_region)
    actor.ready()
    assert actor._loaded.averager.state.data_rows == {"eu": 5.0, "us": 7.0}
