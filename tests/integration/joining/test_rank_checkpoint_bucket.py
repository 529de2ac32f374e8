"""Checkpoints of ranks in a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from geo_ray.base.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
)
from geo_ray.joining.checkpoint import (
    CheckedLoadPlanner,
    SafetensorsReader,
    SafetensorsWriter,
    commit,
    load,
    write_part,
)
from geo_ray.joining.checkpoint_manifest import PartRecord, read_manifest
from geo_ray.storage.uri import join, parse_s3
from tests.support.rank_checkpoint_support import as_rank, sharded
from tests.support.s3_support import client_of, new_prefix, s3_server, set_credentials

WHOLE = torch.arange(14.0).reshape(7, 2)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def address(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    set_credentials(monkeypatch)
    return join(new_prefix(endpoint), "step-5")


def parts(address: str) -> list[PartRecord]:
    found = []
    for rank in range(2):
        with as_rank(rank, 2):
            state = {"w": sharded(WHOLE, (2,), [Shard(0)]), "n": (1, 2)}
            found.append(write_part(state, address, rank, 2))
    return found


def loaded(address: str) -> Any:
    state = {"w": torch.zeros(7, 2), "n": ()}
    load(state, address)
    return state["w"].tolist(), state["n"]


def keys(endpoint: str, address: str) -> list[str]:
    found = client_of(endpoint).list_objects_v2(Bucket=parse_s3(address).bucket)
    return [each["Key"] for each in found["Contents"]]


def test_parts_in_a_bucket_load_in_another_sharding(address: str, endpoint: str) -> None:
    records = parts(address)
    with pytest.raises(CheckpointMissingError):
        loaded(address)
    commit(address, records)
    assert loaded(address) == (WHOLE.tolist(), (1, 2))
    assert keys(endpoint, address) == [
        "some/prefix/step-5/manifest.json",
        "some/prefix/step-5/rank-00000-shards-000.safetensors",
        "some/prefix/step-5/rank-00001-shards-000.safetensors",
    ]


def test_torch_saves_to_a_bucket_and_loads_from_it(address: str) -> None:
    dcp.save({"w": WHOLE, "n": [None]}, storage_writer=SafetensorsWriter(address))
    state = {"w": torch.zeros(7, 2), "n": 0}
    dcp.load(state, storage_reader=SafetensorsReader(address), planner=CheckedLoadPlanner())
    assert (state["w"].tolist(), state["n"]) == (WHOLE.tolist(), [None])


def test_a_second_writer_is_refused(address: str) -> None:
    records = parts(address)
    with pytest.raises(CheckpointConflictError, match="rank-00000"):
        parts(address)
    commit(address, records)
    with pytest.raises(CheckpointError, match="exists already"):
        commit(address, records)
    with pytest.raises(CheckpointError, match="too late"):
        parts(address)


@pytest.mark.parametrize("change", ["missing", "truncated", "changed"])
def test_a_damaged_object_is_found(address: str, endpoint: str, change: str) -> None:
    manifest = commit(address, parts(address))
    client, where = client_of(endpoint), parse_s3(address)
    key = f"{where.prefix}/{manifest.files[1].file}"
    data = client.get_object(Bucket=where.bucket, Key=key)["Body"].read()
    if change == "missing":
        client.delete_object(Bucket=where.bucket, Key=key)
    else:
        data = data[:-1] if change == "truncated" else data[:-1] + b"\x01"
        client.put_object(Bucket=where.bucket, Key=key, Body=data)
    with pytest.raises(CheckpointCorruptError, match=manifest.files[1].file):
        loaded(address)
    assert read_manifest(address) == manifest
