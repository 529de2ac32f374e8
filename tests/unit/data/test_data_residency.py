from __future__ import annotations

import logging
from pathlib import Path

import pytest

from geo_ray.base.errors import ResidencyDeniedError
from geo_ray.data.columns import parse_types
from geo_ray.data.reader import RegionReader
from geo_ray.data.shards import fetch_shard
from geo_ray.storage.store import LocalStore
from tests.support.data_support import RecordingStore, write


def test_a_shard_of_another_region_is_refused_before_any_io(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write(tmp_path)
    store = RecordingStore(LocalStore(tmp_path))
    source = RegionReader(manifest, "us-east", "train", 0, store=store)
    foreign = manifest.of("eu-west", "train")[0]
    with caplog.at_level(logging.WARNING), pytest.raises(ResidencyDeniedError) as caught:
        source.read_shard(foreign.path)
    assert store.calls == []
    for name in (foreign.path, "eu-west", "us-east"):
        assert name in caught.value.message
        assert name in caplog.text
    # The same store does answer for what is at home.
    source.read_shard(manifest.of("us-east", "train")[0].path)
    assert len(store.calls) == 1


def test_a_process_in_the_wrong_region_gets_no_reader(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    store = RecordingStore(LocalStore(tmp_path))
    with pytest.raises(ResidencyDeniedError):
        RegionReader(manifest, "us-east", "train", 0, here="eu-west", store=store)
    RegionReader(manifest, "us-east", "train", 0, here="us-east", store=store)
    assert store.calls == []


def test_fetching_is_refused_even_if_the_file_is_missing_or_broken(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    shard = manifest.of("eu-west", "train")[0]
    (tmp_path / shard.path).write_bytes(b"broken")
    store = RecordingStore(LocalStore(tmp_path))
    with pytest.raises(ResidencyDeniedError):
        fetch_shard(shard, parse_types(manifest.columns), store, here="us-east")
    assert store.calls == []


def test_a_stream_never_touches_another_regions_files(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    store = RecordingStore(LocalStore(tmp_path))
    source = RegionReader(manifest, "ap-south", "train", 0, store=store)
    source.read(0, 3 * source.num_rows)
    assert {path.split("/")[0] for _, path in store.calls} == {"ap-south"}
