"""The checkpoints of a run: commit, retention, falling back, sweeping."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from geo_ray.base.canonical import canonical_json, sha256_hex
from geo_ray.base.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
    ConfigError,
    RunDirectoryError,
)
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.folders import LocalFolder
from geo_ray.storage.manifest import (
    MAX_MANIFEST_BYTES,
    CheckpointManifest,
    decode_manifest,
    encode_manifest,
)
from geo_ray.storage.parts import write_part


def manifest(
    id: int, parts: tuple[Any, ...] = (), step: int | None = None, **extra: Any
) -> CheckpointManifest:
    return CheckpointManifest(
        id=id,
        step=id * 10 if step is None else step,
        created="2026-01-02T03:04:05Z",
        config_digest="ab" * 32,
        parts=parts,
        extra=extra,
    )


def save(store: CheckpointStore, id: int) -> None:
    folder = store.begin(id)
    parts = tuple(
        write_part(folder, name, {"x": torch.full((5,), float(id))}, {"id": id}) for name in "ab"
    )
    store.commit(id, manifest(id, parts))


def directories(store_root: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in store_root.iterdir())


def begun(store: CheckpointStore, id: int) -> Path:
    """Begin a save in a directory; where that is."""
    folder = store.begin(id)
    assert isinstance(folder, LocalFolder)
    return folder.path


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


# ------------------------------------------------------------------ saving and finding


def test_what_was_saved_is_found(store: CheckpointStore) -> None:
    save(store, 0)
    save(store, 1)
    found = store.latest()
    assert (found.manifest.id, found.manifest.step, found.problems) == (1, 10, ())
    tensors, meta = found.read("b")
    assert tensors["x"].tolist() == [1.0] * 5
    assert meta == {"id": 1}
    with pytest.raises(CheckpointError, match="no part 'c'; it has: a, b"):
        found.read("c")
    assert store.open(0).manifest.step == 0


def test_another_process_finds_it_too(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 3)
    other = CheckpointStore(tmp_path / "checkpoints")
    assert other.latest().manifest == store.latest().manifest
    assert other.next_id() == 4


def test_nothing_there_is_missing_and_not_corrupt(store: CheckpointStore, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointMissingError):
            store.latest()
        (tmp_path / "checkpoints" / "lost+found").mkdir(parents=True, exist_ok=True)
    with pytest.raises(CheckpointMissingError) as caught:
        store.open(7)
    assert store.ids() == [] and "This run has saved no checkpoint" in caught.value.fix


def test_one_that_is_not_there_is_answered_with_those_that_are(store: CheckpointStore) -> None:
    for _ in range(3):
        save(store, store.next_id())
    with pytest.raises(CheckpointMissingError) as caught:
        store.open(77)
    assert caught.value.fix == f"Use an existing one: {', '.join(map(str, store.ids()))}."
    assert str(store.ids()[-1]) in caught.value.fix


def test_an_unfinished_save_is_invisible_and_swept(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 0)
    write_part(store.begin(1), "a", {}, {})
    assert store.latest().manifest.id == 0
    later = CheckpointStore(tmp_path / "checkpoints")
    assert later.latest().manifest.id == 0
    later.begin(later.next_id())
    assert directories(tmp_path / "checkpoints") == [0, 1]
    assert list((tmp_path / "checkpoints" / "ckpt-00000001").iterdir()) == []


def test_a_save_in_progress_is_not_swept(store: CheckpointStore) -> None:
    first = begun(store, 0)
    store.begin(1)
    assert first.is_dir()


def test_files_of_dead_writers_are_removed_at_the_commit(store: CheckpointStore) -> None:
    path = begun(store, 0)
    part = write_part(path, "a", {}, {})
    (path / ".b.safetensors.123.tmp").write_bytes(b"torn")
    store.commit(0, manifest(0, (part,)))
    assert sorted(file.name for file in path.iterdir()) == ["a.safetensors", "manifest.json"]


def test_abandon_removes_the_files_and_the_id_is_free(store: CheckpointStore) -> None:
    path = begun(store, 0)
    write_part(path, "a", {}, {})
    store.abandon(0)
    store.abandon(0)
    assert not path.exists()
    save(store, 0)
    with pytest.raises(CheckpointError, match="committed"):
        store.abandon(0)


@pytest.mark.parametrize("id", [0, 1])
def test_ids_only_grow(store: CheckpointStore, id: int) -> None:
    save(store, 1)
    with pytest.raises(CheckpointError, match="the next is 2"):
        store.begin(id)


def test_a_save_is_begun_once(store: CheckpointStore) -> None:
    store.begin(0)
    with pytest.raises(CheckpointError, match="cannot be begun"):
        store.begin(0)


def test_commit_wants_a_begun_save_and_its_own_manifest(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="not being saved"):
        store.commit(0, manifest(0))
    store.begin(0)
    with pytest.raises(CheckpointError, match="was given for 0"):
        store.commit(0, manifest(1))
    store.commit(0, manifest(0))
    with pytest.raises(CheckpointError, match="not being saved"):
        store.commit(0, manifest(0))


def test_commit_refuses_parts_that_are_not_there_or_not_right(store: CheckpointStore) -> None:
    path = begun(store, 0)
    part = write_part(path, "a", {"x": torch.zeros(9)}, {})
    lost = part.model_copy(update={"name": "b", "file": "b.safetensors"})
    with pytest.raises(CheckpointCorruptError, match=r"b\.safetensors"):
        store.commit(0, manifest(0, (part, lost)))
    other = part.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(CheckpointCorruptError, match="SHA-256"):
        store.commit(0, manifest(0, (other,)))
    with pytest.raises(CheckpointMissingError):
        store.latest()
    store.commit(0, manifest(0, (part,)))


# ------------------------------------------------------------------ retention


def test_the_newest_checkpoints_stay(store: CheckpointStore, tmp_path: Path) -> None:
    for id in range(5):
        save(store, id)
    assert store.ids() == [3, 4]
    assert directories(tmp_path / "checkpoints") == [3, 4]


@pytest.mark.parametrize(
    ("step", "healthy", "stay"),
    [(10, True, [0, 2]), (20, True, [0, 1, 2]), (10, False, [0, 1, 2])],
)
def test_the_last_checkpoint_of_a_run_replaces_one_of_the_same_step(
    tmp_path: Path, step: int, healthy: bool, stay: list[int]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 3)
    for id in range(2):
        save(store, id)
    store.begin(2)
    last = manifest(2, step=step).model_copy(update={"healthy": healthy})
    store.commit(2, last, is_last=True)
    assert store.ids() == stay


@pytest.mark.parametrize("keep", [-1, 0, 1])
def test_one_checkpoint_is_not_enough(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        CheckpointStore(tmp_path, keep)


def damaged(root: Path, id: int, file: str = "a.safetensors") -> None:
    path = root / f"ckpt-{id:08d}" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(
    store: CheckpointStore, tmp_path: Path
) -> None:
    for id in range(2):
        save(store, id)
    damaged(tmp_path / "checkpoints", 1)
    assert store.latest().manifest.id == 0
    save(store, 2)
    assert store.ids() == [0, 1, 2]
    save(store, 3)
    assert store.ids() == [2, 3]


def test_a_truncated_checkpoint_does_not_count_even_if_nobody_looked(
    store: CheckpointStore, tmp_path: Path
) -> None:
    for id in range(2):
        save(store, id)
    os.truncate(tmp_path / "checkpoints" / "ckpt-00000001" / "b.safetensors", 10)
    save(store, 2)
    assert store.ids() == [0, 1, 2]


# ------------------------------------------------------------------ falling back


def test_a_damaged_newest_is_passed_over_loudly(
    store: CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for id in range(2):
        save(store, id)
    damaged(tmp_path / "checkpoints", 1)
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found.manifest.id == 0
    (problem,) = found.problems
    for text in (problem, caplog.text):
        assert "checkpoint 1" in text
        assert "a.safetensors" in text
    assert store.next_id() == 2


def test_no_whole_checkpoint_is_an_error_and_never_a_fresh_start(
    store: CheckpointStore, tmp_path: Path
) -> None:
    for id in range(2):
        save(store, id)
        damaged(tmp_path / "checkpoints", id, "manifest.json")
    with pytest.raises(CheckpointCorruptError) as caught:
        store.latest()
    assert "checkpoint 0" in caught.value.message
    assert "checkpoint 1" in caught.value.message


def test_a_manifest_moved_to_another_checkpoint_is_noticed(
    store: CheckpointStore, tmp_path: Path
) -> None:
    save(store, 0)
    (tmp_path / "checkpoints" / "ckpt-00000000").rename(tmp_path / "checkpoints" / "ckpt-00000009")
    with pytest.raises(CheckpointCorruptError, match="manifest of 0"):
        store.latest()


def test_a_newer_format_is_refused_with_advice_and_not_passed_over(
    store: CheckpointStore, tmp_path: Path
) -> None:
    for id in range(2):
        save(store, id)
    body = manifest(1).model_dump(mode="json") | {"version": 3, "new": True}
    data = canonical_json({"manifest": body, "sha256": sha256_hex(canonical_json(body))})
    (tmp_path / "checkpoints" / "ckpt-00000001" / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointError, match="format version 3") as caught:
        store.latest()
    assert "release" in caught.value.fix


# ------------------------------------------------------------------ manifests


def test_manifests_come_back_and_are_canonical() -> None:
    whole = manifest(3, rng={"b": [1, None, 0.1], "a": "\u00fc\u2028"})
    assert decode_manifest(encode_manifest(whole)) == whole
    assert encode_manifest(whole) == encode_manifest(decode_manifest(encode_manifest(whole)))


@pytest.mark.parametrize("value", [object(), {1: 2}, b"x", (1, 2), {1}])
def test_extra_must_be_json(value: object) -> None:
    with pytest.raises(ValidationError):
        manifest(0, x=value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), ["\ud800"]])
def test_extra_must_be_json_that_can_be_written(value: object) -> None:
    with pytest.raises((ValidationError, CheckpointError)):
        encode_manifest(manifest(0, x=value))


def test_manifests_are_bounded() -> None:
    with pytest.raises(CheckpointError, match="over"):
        encode_manifest(manifest(0, x="y" * MAX_MANIFEST_BYTES))
    with pytest.raises(CheckpointCorruptError, match="larger"):
        decode_manifest(b" " * (MAX_MANIFEST_BYTES + 1))


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"version": 1},
        manifest(0).model_dump(mode="json") | {"unknown": 1},
        manifest(0).model_dump(mode="json") | {"step": -1},
        manifest(0).model_dump(mode="json")
        | {"parts": [{"name": "a", "file": "../a", "bytes": 1, "sha256": "0" * 64}]},
    ],
    ids=range(6),
)
def test_manifests_with_a_right_digest_and_wrong_content_are_refused(body: Any) -> None:
    data = canonical_json({"manifest": body, "sha256": sha256_hex(canonical_json(body))})
    with pytest.raises(CheckpointError):
        decode_manifest(data)


def test_two_parts_of_one_name_are_refused(tmp_path: Path) -> None:
    part = write_part(tmp_path, "a", {}, {})
    with pytest.raises(ValueError, match="same name"):
        manifest(0, (part, part))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"[" * 10**5, b"\xff", json.dumps(1).encode()])
def test_garbage_is_no_manifest(data: bytes) -> None:
    with pytest.raises(CheckpointCorruptError):
        decode_manifest(data)


# ------------------------------------------------------------------ disks that refuse


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/geo_ray"])
def test_a_root_that_cannot_be_made_is_a_run_directory_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        CheckpointStore(tmp_path / place).begin(0)


def in_child_with_small_files(action: Callable[[], object]) -> int:
    """Run ``action`` where no file can grow beyond 50 bytes; 0 if it says RunDirectoryError."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
            action()
        except RunDirectoryError:
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_full_disk_keeps_the_last_good_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 0)
    path = begun(store, 1)
    part = write_part(path, "a", {}, {})
    assert in_child_with_small_files(lambda: write_part(path, "b", {}, {})) == 0
    assert in_child_with_small_files(lambda: store.commit(1, manifest(1, (part,)))) == 0
    assert [file.name for file in path.iterdir()] == ["a.safetensors"]
    assert CheckpointStore(tmp_path / "checkpoints").latest().manifest.id == 0
    store.commit(1, manifest(1, (part,)))
    assert store.latest().manifest.id == 1
