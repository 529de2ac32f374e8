"""Processes that die while saving, and disks that change bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_ray.base.errors import CheckpointCorruptError
from geo_ray.base.files import Failpoint, no_failpoint
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest, PartInfo
from geo_ray.storage.parts import write_part

PARTS = ("server-a-0", "server-b-0", "averager")


def content(id: int, part: str) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    tensors = {"params_P": torch.full((7,), id + 0.5), "step": torch.tensor(id)}
    return tensors, {"id": id, "part": part}


def one_part(directory: Path, id: int, name: str, failpoint: Failpoint) -> PartInfo:
    tensors, meta = content(id, name)
    return write_part(directory, name, tensors, meta, failpoint)  # type: ignore[arg-type]


def manifest(id: int, parts: tuple[PartInfo, ...]) -> CheckpointManifest:
    return CheckpointManifest(
        id=id, step=id, created="now", config_digest="0" * 64, parts=parts, extra={"id": id}
    )


def save(root: Path, id: int, failpoint: Failpoint = no_failpoint) -> None:
    store = CheckpointStore(root, keep=2, failpoint=failpoint)
    directory = store.begin(id)
    parts = tuple(one_part(directory, id, name, failpoint) for name in PARTS)
    store.commit(id, manifest(id, parts))


def check_whole(root: Path, ids: set[int]) -> int:
    """The newest checkpoint loads, has exactly its own values, and is one of ``ids``."""
    found = CheckpointStore(root).latest()
    id = found.manifest.id
    assert id in ids
    for name in PARTS:
        tensors, meta = found.read(name)
        expected, expected_meta = content(id, name)
        assert meta == expected_meta
        assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    return id


def killed_at(point: int, action: Callable[[Failpoint], object]) -> int:
    """Run ``action`` in a child that kills itself at its ``point``-th failpoint."""
    child = os.fork()
    if child == 0:
        remaining = [point]

        def failpoint(name: str) -> None:
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            remaining[0] -= 1

        try:
            action(failpoint)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ------------------------------------------------------------------ kills


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    passed: list[str] = []
    rehearsal = tmp_path / "rehearsal"
    for id in range(3):
        passed.clear()
        save(rehearsal, id, passed.append)
    assert len(set(passed)) >= 12
    committed_from = passed.index("manifest.renamed")

    for point, name in enumerate(passed):
        root = tmp_path / f"kill{point}"
        save(root, 0)
        save(root, 1)
        assert killed_at(point, lambda f, root=root: save(root, 2, f)) == -signal.SIGKILL, name
        newest = check_whole(root, {1, 2})
        assert newest == (2 if point >= committed_from else 1), name
        # The next save cleans up and works, and the one after it retires the oldest.
        for id in (3, 4):
            save(root, id)
            assert check_whole(root, {id}) == id
        assert len(CheckpointStore(root).ids()) == 2
        assert all(path.suffix != ".tmp" for path in root.rglob("*"))
        assert len(list(root.iterdir())) == 2


def test_a_part_writer_that_is_killed_can_be_replaced(tmp_path: Path) -> None:
    """The coordinator lives on, asks a replacement for the part, and commits."""
    passed: list[str] = []
    one_part(tmp_path, 0, PARTS[0], passed.append)
    store = CheckpointStore(tmp_path / "root")
    for id, name in enumerate(passed):
        directory = store.begin(id)
        kept = [one_part(directory, id, part, no_failpoint) for part in PARTS[1:]]
        victim = lambda f, d=directory, i=id: one_part(d, i, PARTS[0], f)  # noqa: E731
        assert killed_at(id, victim) == -signal.SIGKILL, name
        again = one_part(directory, id, PARTS[0], no_failpoint)
        store.commit(id, manifest(id, (again, *kept)))
        assert check_whole(tmp_path / "root", {id}) == id


def test_parts_of_many_processes_make_one_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    directory = store.begin(0)
    children = []
    for part in PARTS:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                one_part(directory, 0, part, no_failpoint)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
    # What the children would have reported: the same bytes, hence the same description.
    (tmp_path / "again").mkdir()
    parts = tuple(one_part(tmp_path / "again", 0, part, no_failpoint) for part in PARTS)
    store.commit(0, manifest(0, parts))
    assert check_whole(tmp_path, {0}) == 0


# ------------------------------------------------------------------ changed bytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    save(root, 0)
    save(root, 1)
    return root


def newest_files(root: Path) -> Iterator[Path]:
    return (root / "ckpt-00000001").iterdir()


def falls_back(root: Path) -> bool:
    found = CheckpointStore(root).latest()
    return found.manifest.id == 0 and len(found.problems) == 1


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    num_flips = 0
    for file in newest_files(saved):
        good = file.read_bytes()
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 1 << (position % 8)
            file.write_bytes(bad)
            assert falls_back(saved), f"{file.name}: byte {position}"
            num_flips += 1
        file.write_bytes(good)
    assert num_flips > 1000
    assert check_whole(saved, {1}) == 1


def test_every_truncation_is_noticed(saved: Path) -> None:
    for file in newest_files(saved):
        good = file.read_bytes()
        for length in range(len(good)):
            file.write_bytes(good[:length])
            assert falls_back(saved), f"{file.name}: {length} bytes"
        file.write_bytes(good)
    assert check_whole(saved, {1}) == 1


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_edit_is_noticed(saved: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(newest_files(saved))))
    good = file.read_bytes()
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, len(good)))
    bad = good[:start] + data.draw(st.binary(max_size=40)) + good[stop:]
    try:
        file.write_bytes(bad)
        assert falls_back(saved) == (bad != good)
    finally:
        file.write_bytes(good)


def test_parts_of_two_checkpoints_do_not_mix(saved: Path) -> None:
    old, new = (saved / f"ckpt-0000000{id}" / "averager.safetensors" for id in (0, 1))
    good = new.read_bytes()
    new.write_bytes(old.read_bytes())
    assert falls_back(saved)
    new.write_bytes(good)


def test_nothing_whole_left_is_an_error(tmp_path: Path) -> None:
    for id in range(2):
        save(tmp_path, id)
        (tmp_path / f"ckpt-0000000{id}" / f"{PARTS[0]}.safetensors").unlink()
    with pytest.raises(CheckpointCorruptError, match="no checkpoint is complete"):
        CheckpointStore(tmp_path).latest()
