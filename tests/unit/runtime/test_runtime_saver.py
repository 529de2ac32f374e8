"""Parts of a checkpoint come from many processes in any order; the saver commits the whole."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.checkpoint.parts import write_part
from geo_ray.checkpoint.store import CheckpointStore, directory_of
from geo_ray.config.experiment import Experiment
from geo_ray.errors import CheckpointCorruptError, CheckpointMissingError
from geo_ray.runtime.actors.parts import AVERAGER_PART
from geo_ray.runtime.actors.spec import Resume
from geo_ray.runtime.control.saver import Saver, part_names

REGIONS = [{"name": "us", "ps_shards": 2}, {"name": "eu"}]
DIGEST = "d" * 64
NAMES = ["averager", "eu-ps0", "us-ps0", "us-ps1"]


def experiment_of(regions: list[dict[str, object]]) -> Experiment:
    tree = {
        "name": "tiny",
        "task": {"use": "digits"},
        "data": {"generate": {}},
        "regions": regions,
        "strategy": {"kind": "sma"},
        "optimizer": {"kind": "sgd"},
        "train": {"steps": 1},
    }
    return Experiment.model_validate_json(json.dumps(tree))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep=2)


@pytest.fixture
def saver(store: CheckpointStore) -> Saver:
    return Saver(store, experiment_of(regions=REGIONS), DIGEST, epoch=3)


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
    sizes = [
        saver.add(checkpoint, [parts[name] for name in groups[i][0]], groups[i][1]) for i in order
    ]
    assert sizes[:2] == [None, None]
    assert sizes[2] == sum(info.bytes for info in parts.values())
    assert saver.open_id is None
    assert saver.step == 44
    found = store.latest()
    assert found.manifest.step == 44
    assert found.manifest.extra == {"epoch": 3, "codecs": {"up": None, "down": None}}
    assert found.manifest.config_digest == DIGEST
    assert [info.name for info in found.manifest.parts] == NAMES


def test_late_parts_of_an_abandoned_checkpoint_are_not_mixed_into_the_next(
    saver: Saver, tmp_path: Path
) -> None:
    first = saver.begin()
    late = [part(tmp_path, first, name) for name in NAMES]
    saver.abandon()
    assert saver.add(first, late, 5) is None
    second = saver.begin()
    assert second > first
    assert saver.add(first, late, 5) is None
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
    with pytest.raises(CheckpointCorruptError, match=parts[0].file):
        saver.add(checkpoint, parts, 5)
    saver.abandon()
    assert store.ids() == []


def test_what_was_saved_is_found_by_name(
    saver: Saver, store: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = saver.begin()
    saver.add(checkpoint, [part(tmp_path, checkpoint, name) for name in NAMES], 5)
    found = store.latest()
    resume = Resume(str(found.path), {info.name: info for info in found.manifest.parts})
    tensors, meta = resume.read("us-ps1")
    assert meta == {"of": "us-ps1"}
    assert torch.equal(tensors["x"], torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(CheckpointCorruptError, match=r"no part 'eu-ps1'.*us-ps1"):
        resume.read("eu-ps1")
