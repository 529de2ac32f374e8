from __future__ import annotations

import hashlib
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geo_ray.base.errors import (
    DataError,
    ManifestError,
    SchemaMismatchError,
    ShardCorruptError,
    ShardEmptyError,
    ShardMissingError,
    StoreError,
)
from geo_ray.data import reader as reading
from geo_ray.data.columns import parse_types
from geo_ray.data.manifest import Manifest
from geo_ray.data.parquet import encode
from geo_ray.data.reader import RegionReader
from geo_ray.storage.store import LocalStore
from tests.support.data_support import TYPES, RecordingStore, make_columns, replace_shard, write

VICTIM = "us-east/train-00001.parquet"


def reader(manifest: Manifest, **changes: object) -> RegionReader:
    arguments: dict[str, object] = {"region": "us-east", "split": "train", "order_seed": 3}
    return RegionReader(manifest, **{**arguments, **changes})  # type: ignore[arg-type]


def numbers(columns: object) -> list[int]:
    return [int(number) for number in columns["weight"][:, 0]]  # type: ignore[index]


def test_an_epoch_has_every_row_once_with_its_columns_together(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    source = reader(manifest)
    rows = source.read(0, source.num_rows)
    assert sorted(numbers(rows)) == sorted(n for b in source.scan(100) for n in numbers(b))
    assert np.array_equal(rows["weight"][:, 1], -rows["weight"][:, 0])
    assert np.array_equal(rows["label"], rows["weight"][:, 0].astype(int) % 10)
    assert np.array_equal(rows["image"][:, 3], rows["weight"][:, 0].astype(int) % 251)
    second = source.read(source.num_rows, source.num_rows)
    assert sorted(numbers(second)) == sorted(numbers(rows))
    assert numbers(second) != numbers(rows)


def test_cuts_caches_and_processes_do_not_change_the_stream(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    whole = numbers(reader(manifest).read(0, 150))
    for cache_shards, step in ((1, 7), (2, 50), (100, 150)):
        source = reader(manifest, cache_shards=cache_shards)
        pieces = [numbers(source.read(at, min(step, 150 - at))) for at in range(0, 150, step)]
        assert [n for piece in pieces for n in piece] == whole


def test_the_stream_depends_on_seed_region_and_split(tmp_path: Path) -> None:
    manifest = write(tmp_path, train=240, heldout=240)
    streams = {
        (seed, region, split): tuple(
            n % 10_000 for n in numbers(RegionReader(manifest, region, split, seed).read(0, 30))
        )
        for seed in (1, 2)
        for region in ("us-east", "eu-west")
        for split in ("train", "heldout")
    }
    assert len(set(streams.values())) == len(streams)


def test_types_and_shapes_are_those_of_the_manifest(tmp_path: Path) -> None:
    source = reader(write(tmp_path))
    for columns in (source.read(5, 9), next(iter(source.scan(9))), source.read(0, 0)):
        rows = len(columns["label"])
        for name, kind in parse_types(TYPES).items():
            assert columns[name].dtype == kind.dtype
            assert columns[name].shape == kind.shape(rows)


def test_returned_arrays_belong_to_the_caller(tmp_path: Path) -> None:
    source = reader(write(tmp_path))
    before = numbers(source.read(0, 40))
    source.read(0, 40)["weight"][:] = 0
    for batch in source.scan(1000):
        batch["weight"][:] = 0
    source.read_shard(VICTIM)["weight"][:] = 0
    assert numbers(source.read(0, 40)) == before


def test_scan_keeps_the_order_of_the_files(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    source = reader(manifest, split="heldout")
    expected = [
        n for s in manifest.of("us-east", "heldout") for n in numbers(source.read_shard(s.path))
    ]
    batches = list(source.scan(3))
    assert [n for batch in batches for n in numbers(batch)] == expected
    assert max(len(batch["label"]) for batch in batches) == 3
    with pytest.raises(ValueError, match="batch_rows"):
        next(source.scan(0))


def test_decoded_shards_are_kept_up_to_the_limit(tmp_path: Path) -> None:
    manifest = write(tmp_path, rows_per_shard=10)
    store = RecordingStore(LocalStore(tmp_path))
    source = reader(manifest, store=store, cache_shards=100)
    for _ in range(3):
        source.read(0, source.num_rows)
    assert len(store.calls) == len(manifest.of("us-east", "train")) == 7
    small = RecordingStore(LocalStore(tmp_path))
    source = reader(manifest, store=small, cache_shards=4)
    for at in range(source.num_rows):
        source.read(at, 1)
    assert len(small.calls) == 7


def test_nothing_is_read_before_it_is_needed(tmp_path: Path) -> None:
    store = RecordingStore(LocalStore(tmp_path))
    source = reader(write(tmp_path), store=store)
    assert source.num_rows > 0
    assert store.calls == []


def test_unknown_regions_and_shards_are_named(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    with pytest.raises(ManifestError, match="mars"):
        reader(manifest, region="mars")
    with pytest.raises(ManifestError, match="nothing"):
        reader(manifest).read_shard("nothing")


# ------------------------------------------------------------------ faults


def refused(manifest: Manifest, error: type[DataError], message: str = "") -> None:
    """Reading the epoch and reading the shard are both refused, naming shard and region."""
    for act in (
        lambda source: source.read(0, source.num_rows),
        lambda source: list(source.scan(64)),
        lambda source: source.read_shard(VICTIM),
    ):
        with pytest.raises(error) as caught:
            act(reader(manifest))
        assert type(caught.value) is error
        assert VICTIM in caught.value.message
        assert "us-east" in caught.value.message
        assert message in caught.value.message


def forge(manifest: Manifest, root: Path, data: bytes) -> Manifest:
    """Replace the victim's file and let the manifest vouch for the new bytes."""
    (root / VICTIM).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    return replace_shard(manifest, VICTIM, sha256=digest, bytes=len(data))


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


@pytest.mark.parametrize("position", [0, 4, 100, -9, -1])
def test_a_flipped_bit_is_corrupt(tmp_path: Path, position: int) -> None:
    manifest = write(tmp_path)
    data = bytearray((tmp_path / VICTIM).read_bytes())
    data[position] ^= 1
    (tmp_path / VICTIM).write_bytes(data)
    refused(manifest, ShardCorruptError, "sha256")


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_a_truncated_file_is_corrupt(tmp_path: Path, keep: int) -> None:
    manifest = write(tmp_path)
    (tmp_path / VICTIM).write_bytes((tmp_path / VICTIM).read_bytes()[:keep])
    refused(manifest, ShardCorruptError, "bytes")


def test_a_truncated_file_that_the_manifest_vouches_for_is_corrupt(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    data = (tmp_path / VICTIM).read_bytes()[:-20]
    refused(forge(manifest, tmp_path, data), ShardCorruptError)


def test_a_missing_shard_is_missing(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    (tmp_path / VICTIM).unlink()
    refused(manifest, ShardMissingError)


def test_a_directory_in_its_place_is_missing(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    (tmp_path / VICTIM).unlink()
    (tmp_path / VICTIM).mkdir()
    refused(manifest, ShardMissingError)


def test_another_schema_is_a_mismatch(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    columns = make_columns(16)
    for types, changed in (
        ({**TYPES, "label": "int32"}, {"label": columns["label"].astype(np.int32)}),
        ({**TYPES, "image": "uint8[5]"}, {"image": columns["image"][:, :5]}),
        ({**TYPES, "extra": "int64"}, {"extra": columns["label"]}),
    ):
        data = encode({**columns, **changed}, parse_types(types))
        refused(forge(manifest, tmp_path, data), SchemaMismatchError)


def test_an_extension_type_is_a_mismatch(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    tensor = pa.fixed_shape_tensor(pa.float32(), [2])
    storage = pa.array([[1, 2]], pa.list_(pa.float32(), 2))
    table = pa.table({"weight": pa.ExtensionArray.from_storage(tensor, storage)})
    refused(forge(manifest, tmp_path, parquet(table)), SchemaMismatchError, "extension")


def test_a_file_without_rows_is_empty(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    data = encode(make_columns(0), parse_types(TYPES))
    refused(forge(manifest, tmp_path, data), ShardEmptyError)


def test_a_shard_of_no_rows_in_the_manifest_is_refused_at_once(tmp_path: Path) -> None:
    manifest = replace_shard(write(tmp_path), VICTIM, rows=0, labels={})
    with pytest.raises(ShardEmptyError, match=VICTIM):
        reader(manifest)


def test_another_number_of_rows_is_corrupt(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    data = encode(make_columns(15), parse_types(TYPES))
    refused(forge(manifest, tmp_path, data), ShardCorruptError, "15 rows")


def test_a_healed_shard_is_read_again(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    data = (tmp_path / VICTIM).read_bytes()
    (tmp_path / VICTIM).unlink()
    source = reader(manifest)
    with pytest.raises(ShardMissingError):
        source.read(0, source.num_rows)
    (tmp_path / VICTIM).write_bytes(data)
    assert len(source.read(0, source.num_rows)["label"]) == source.num_rows


def test_a_store_that_is_away_is_asked_again_for_as_long_as_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(LocalStore):
        until_s = 0.0

        def read(self, path: str) -> bytes:
            if clock.now_s < self.until_s:
                raise StoreError("the store does not answer")
            return super().read(path)

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    clock = SimpleNamespace(now_s=100.0, sleep=sleep, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(reading, "time", clock)
    manifest = write(tmp_path)
    store = Away(tmp_path)
    source = reader(manifest, store=store)
    store.until_s = 120.0
    with pytest.raises(StoreError):
        source.read(0, 1)
    assert clock.now_s == 100.0, "unless it is told so, a reader asks once"
    source.retry_for(10.0)
    with pytest.raises(StoreError):
        source.read(0, 1)
    assert clock.now_s == 110.0
    source.retry_for(600.0)
    assert numbers(source.read(0, 150)) == numbers(reader(manifest).read(0, 150))
    assert 120.0 <= clock.now_s < 135.0
