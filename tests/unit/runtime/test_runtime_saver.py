"""Parts of a checkpoint come from many processes in any order; the saver commits the whole."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest
import torch

from geo_ray.base.errors import CheckpointCorruptError, CheckpointMissingError, RunDirectoryError
from geo_ray.experiment.experiment import Experiment
from geo_ray.runtime.checkpoints import Saver, part_names
from geo_ray.runtime.policies import LossHealth
from geo_ray.runtime.spec import Resume
from geo_ray.storage.checkpoint import Checkpoint, CheckpointStore
from geo_ray.storage.folders import directory_of
from geo_ray.storage.manifest import AVERAGER_PART, CheckpointManifest, PartInfo
from geo_ray.storage.parts import write_part
from geo_ray.storage.places import CheckpointPlaces

REGIONS = [{"name": "us", "ps_shards": 2}, {"name": "eu"}]
DIGEST = "d" * 64
LONG_S = 60.0
NAMES = ["averager", "eu-ps0", "us-ps0", "us-ps1"]


def experiment_of(regions: list[dict[str, object]], **sections: object) -> Experiment:
    tree = {
        "name": "tiny",
        "task": {"use": "digits"},
        "data": {"generate": {}},
        "regions": regions,
        "strategy": {"kind": "sma"},
        "optimizer": {"kind": "sgd"},
        "train": {"steps": 1},
        **sections,
    }
    return Experiment.model_validate_json(json.dumps(tree))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep=2)


@pytest.fixture
def saver(store: CheckpointStore) -> Saver:
    return Saver(store, experiment_of(regions=REGIONS), DIGEST, attempt=3, health=LossHealth())


def part(root: Path, checkpoint: int, name: str) -> PartInfo:
    return write_part(directory_of(root, checkpoint), name, {"x": torch.ones(2)}, {"of": name})


def test_names_of_all_parts() -> None:
    assert part_names(experiment_of(regions=REGIONS)) == set(NAMES)
    assert part_names(experiment_of(regions=[{"name": "eu"}])) == {"eu-ps0"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_part_commits_whatever_the_order(
    order: tuple[int, ...], saver: Saver, store: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = saver.begin()
    parts = {name: part(tmp_path, checkpoint, name) for name in NAMES}
    groups = [([AVERAGER_PART], 0), (["eu-ps0"], 40), (["us-ps0", "us-ps1"], 44)]
    sizes = []
    for i in order:
        saver.add(checkpoint, [parts[name] for name in groups[i][0]], groups[i][1])
        sizes.append(saver.committed(LONG_S))
    assert sizes[:2] == [None, None]
    assert sizes[2] == sum(info.bytes for info in parts.values())
    assert saver.committed() is None  # told once
    assert saver.open_id is None
    assert saver.step == 44
    found = store.latest()
    assert found.manifest.step == 44
    assert found.manifest.extra["attempt"] == 3
    assert found.manifest.extra["codecs"] == {"up": None, "down": None}
    assert found.manifest.config_digest == DIGEST
    assert [info.name for info in found.manifest.parts] == NAMES


def test_late_parts_of_an_abandoned_checkpoint_are_not_mixed_into_the_next(
    saver: Saver, tmp_path: Path
) -> None:
    first = saver.begin()
    late = [part(tmp_path, first, name) for name in NAMES]
    saver.abandon()
    saver.add(first, late, 5)
    second = saver.begin()
    assert second > first
    saver.add(first, late, 5)
    assert saver.committed(LONG_S) is None
    assert saver.open_id == second


def test_an_abandoned_checkpoint_leaves_no_file(
    saver: Saver, store: CheckpointStore, tmp_path: Path
) -> None:
    part(tmp_path, saver.begin(), "eu-ps0")
    saver.abandon()
    saver.abandon()  # nothing open: nothing to do
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointMissingError):
        store.latest()


def test_a_damaged_part_is_not_committed(
    saver: Saver, store: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = saver.begin()
    parts = [part(tmp_path, checkpoint, name) for name in NAMES]
    (directory_of(tmp_path, checkpoint) / parts[0].file).write_bytes(b"something else")
    saver.add(checkpoint, parts, 5)
    with pytest.raises(CheckpointCorruptError, match=parts[0].file):
        saver.committed(LONG_S)
    assert saver.open_id == checkpoint
    saver.abandon()
    assert store.ids() == []


class SlowStore(CheckpointStore):
    """Reads and hashes for a given time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, keep=2)
        self.may_end = threading.Event()

    def commit(self, id: int, manifest: CheckpointManifest, *, is_last: bool = False) -> Checkpoint:
        assert self.may_end.wait(LONG_S)
        return super().commit(id, manifest)


def test_adding_the_last_part_does_not_wait_for_the_commit(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    saver = Saver(store, experiment_of(regions=REGIONS), DIGEST, attempt=3, health=LossHealth())
    checkpoint = saver.begin()
    saver.add(checkpoint, [part(tmp_path, checkpoint, name) for name in NAMES], 5)
    assert saver.committed() is None and saver.is_committing
    assert saver.open_id == checkpoint  # so that no other is begun
    saver.forget({"eu-ps0"})  # a region that is lost now has given its part
    assert saver.open_id == checkpoint
    store.may_end.set()
    saver.close()
    assert saver.committed() is not None and saver.open_id is None
    assert store.ids() == [checkpoint]


def test_saved_records_are_found_by_name(
    saver: Saver, store: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = saver.begin()
    saver.add(checkpoint, [part(tmp_path, checkpoint, name) for name in NAMES], 5)
    saver.close()
    found = store.latest()
    parts = {info.name: info for info in found.manifest.parts}
    resume = Resume(CheckpointPlaces(str(tmp_path)), found.manifest.id, parts)
    tensors, meta = resume.read("us-ps1")
    assert meta == {"of": "us-ps1"}
    assert torch.equal(tensors["x"], torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(CheckpointCorruptError, match=r"no part 'eu-ps1'.*us-ps1"):
        resume.read("eu-ps1")


@pytest.mark.parametrize(
    ("finite", "losses", "healthy"),
    [(True, [1.0, 0.5], True), (False, [1.0, 0.5], False), (True, [1.0, 9.0], False)],
)
def test_a_checkpoint_records_whether_the_run_was_diverging(
    finite: bool,
    losses: list[float],
    healthy: bool,
    saver: Saver,
    store: CheckpointStore,
    tmp_path: Path,
) -> None:
    for loss in losses:
        saver.health.on_step(loss)
        checkpoint = saver.begin()
        for name in NAMES:
            value = 1.0 if finite else float("nan")
            info = write_part(
                directory_of(tmp_path, checkpoint), name, {"x": torch.tensor([value])}, {}
            )
            saver.add(checkpoint, [info], 1)
        assert saver.committed(LONG_S) is not None
    assert store.manifest(checkpoint).healthy == healthy
    expected = checkpoint if healthy or not finite else checkpoint - 1
    assert store.latest().manifest.id == expected


def test_the_newest_healthy_checkpoint_is_never_removed(
    saver: Saver, store: CheckpointStore, tmp_path: Path
) -> None:
    for loss in (1.0, 0.5, 9.0, 9.0, 9.0, 9.0):
        saver.health.on_step(loss)
        checkpoint = saver.begin()
        saver.add(checkpoint, [part(tmp_path, checkpoint, name) for name in NAMES], 1)
        assert saver.committed(LONG_S) is not None
    assert store.ids() == [1, 4, 5]
    found = store.latest()
    assert found.manifest.id == 1 and len(found.problems) == 2


@pytest.mark.parametrize("error", [OSError("the disk is gone"), ValueError("what is this")])
@pytest.mark.parametrize("where", ["commit.verified", "retention.removed", "retention.uncommitted"])
def test_a_commit_that_fails_after_the_manifest_counts(
    where: str, error: Exception, tmp_path: Path
) -> None:
    armed: list[str] = []

    def fail(step: str) -> None:
        if step in armed:
            raise error

    store = CheckpointStore(tmp_path, keep=2, failpoint=fail)
    saver = Saver(store, experiment_of(regions=REGIONS), DIGEST, attempt=3, health=LossHealth())
    for _ in range(2):
        checkpoint = saver.begin()
        saver.add(checkpoint, [part(tmp_path, checkpoint, name) for name in NAMES], 5)
        assert saver.committed(LONG_S)
    armed.append(where)
    checkpoint = saver.begin()
    saver.add(checkpoint, [part(tmp_path, checkpoint, name) for name in NAMES], 6)
    if where == "commit.verified":  # before it
        with pytest.raises(RunDirectoryError, match=r"disk is gone|what is this"):
            saver.committed(LONG_S)
        saver.abandon()
        assert store.latest().manifest.id == checkpoint - 1
    else:
        assert saver.committed(LONG_S) and store.latest().manifest.id == checkpoint
    assert saver.open_id is None
    assert saver.begin() == checkpoint + 1


def test_files_that_cannot_be_removed_are_left(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise OSError("busy")

    checkpoint = saver.begin()
    monkeypatch.setattr("shutil.rmtree", fails)
    saver.abandon()
    monkeypatch.undo()
    assert saver.open_id is None and saver.begin() == checkpoint + 1


def test_the_next_run_actor_ignores_parts_of_an_open_checkpoint(
    saver: Saver, store: CheckpointStore, tmp_path: Path
) -> None:
    """A checkpoint of one run actor lacks parts, and the run actor dies; a region is gone since."""
    before = saver.begin()
    late = part(tmp_path, before, "eu-ps0")
    again = CheckpointStore(tmp_path, keep=2)
    after = Saver(again, experiment_of(regions=REGIONS), DIGEST, attempt=4, health=LossHealth())
    after.resume({"eu-ps0"}, again.newest_id())
    checkpoint = after.begin()
    assert checkpoint > before
    after.add(before, [late], 3)
    after.add(checkpoint, [part(tmp_path, checkpoint, AVERAGER_PART)], 4)
    assert after.committed(LONG_S) is None
    after.add(checkpoint, [part(tmp_path, checkpoint, "eu-ps0")], 4)
    assert after.committed(LONG_S)
    manifest = again.manifest(checkpoint)
    assert [each.name for each in manifest.parts] == [AVERAGER_PART, "eu-ps0"]
    assert manifest.extra["attempt"] == 4


def test_a_resume_uses_a_later_attempt_than_every_joined_region(
    saver: Saver, store: CheckpointStore, tmp_path: Path
) -> None:
    for attempt in (5, 4):  # brought up side by side; the later one entered first
        saver.expect({"us-ps0", "us-ps1"}, attempt)
    checkpoint = saver.begin()
    saver.add(checkpoint, [part(tmp_path, checkpoint, name) for name in NAMES], 9)
    assert saver.committed(LONG_S) is not None
    assert store.latest().manifest.extra["attempt"] == 5
