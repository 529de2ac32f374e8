"""With which regions a run goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from geo_ray.base.errors import CheckpointCorruptError, ConfigError
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.resume import left_out, lost_before, saved_rows, without_lost
from geo_ray.runtime.checkpoints import Saver, part_names
from geo_ray.runtime.policies import LossHealth
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.folders import directory_of
from geo_ray.storage.manifest import CheckpointManifest, PartInfo, shard_part_name
from geo_ray.storage.parts import write_part
from geo_ray.training.assignment import Ledger
from tests.support.job_support import experiment

LONG_S = 60.0


def three(*overrides: str) -> Experiment:
    regions = "regions=[{name: us}, {name: eu, ps_shards: 2}, {name: asia}]"
    return experiment(regions, *overrides)


PARTS = {"us-ps0", "eu-ps0", "eu-ps1", "asia-ps0", "averager"}


def manifest_of(*regions: str, **extra: object) -> CheckpointManifest:
    names = [name for name in sorted(PARTS) if name.partition("-")[0] in (*regions, "averager")]
    parts = tuple(
        PartInfo(name=n, file=f"{n}.safetensors", bytes=1, sha256="0" * 64) for n in names
    )
    return CheckpointManifest.model_validate(
        {
            "id": 7,
            "step": 3,
            "created": "2026-01-01T00:00:00+00:00",
            "config_digest": "d" * 64,
            "parts": parts,
            "extra": extra,
        }
    )


def test_a_run_goes_on_with_the_regions_that_its_checkpoint_has() -> None:
    asked = three("averager.standby=eu")
    assert without_lost(asked, PARTS) == (asked, ())
    left, lost = without_lost(asked, PARTS - {"us-ps0"})
    assert lost == ("us",) and left.present_names == ("eu", "asia")
    assert left.averager_region == "eu" and left.averager.standby == "auto"
    assert part_names(left) == PARTS - {"us-ps0"}
    left, lost = without_lost(asked, PARTS - {"asia-ps0"})  # its standby stands by as before
    assert lost == ("asia",) and left.averager_region == "us" and left.averager.standby == "eu"
    absent = three("averager.standby=eu", "members.absent=[asia]")
    assert without_lost(absent, PARTS - {"asia-ps0"}) == (absent, ())
    joined, lost = without_lost(absent, PARTS)  # it has joined since
    assert not lost and joined.present_names == ("us", "eu", "asia")
    halved, lost = without_lost(asked, PARTS - {"eu-ps1"})  # a part of a region is no region
    assert lost == ("eu",) and halved.averager_region == "us"


def test_who_is_away_leaves_there_and_is_not_lost() -> None:
    asked = three("members={absent: [asia], min: 1}", "averager={region: us, standby: eu}")
    assert without_lost(asked, PARTS, ["asia"]) == (asked, ())
    left, lost = without_lost(three(), PARTS, ["asia"])
    assert lost == () and left.present_names == ("us", "eu")
    left, lost = without_lost(three(), PARTS - {"us-ps0"}, ["asia"])
    assert lost == ("us",) and left.present_names == ("eu",) and left.averager_region == "eu"
    moved, _ = without_lost(three("averager={region: us, standby: eu}"), PARTS, ["us"])
    assert (moved.averager_region, moved.averager.standby) == ("eu", "auto")


@pytest.mark.parametrize(
    ("least", "before", "lost", "away", "expected"),
    [
        ("1", "us eu asia", (), "asia", ("asia",)),
        ("1", "us eu", (), "asia", ()),  # it had left, or never came
        ("1", "us eu asia", (), "us asia", ("us", "asia")),
        ("null", "us eu asia", (), "us asia", ("us", "asia")),
        ("2", "us eu", ("asia",), "eu", ("eu",)),  # the run pauses until the lost one is back
        ("2", "us eu", (), "eu", "us would remain, but at least 2"),
        ("2", "us eu", ("asia",), "eu asia", "us would remain, but at least 2"),
        ("1", "eu", (), "eu", "no region would remain, but at least 1"),
        ("3", "us eu asia", (), "eu", "us, asia would remain, but at least 3"),
    ],
)
def test_too_few_are_refused_where_somebody_asks_for_it(
    least: str,
    before: str,
    lost: tuple[str, ...],
    away: str,
    expected: tuple[str, ...] | str,
) -> None:
    asked, manifest = three(f"members.min={least}"), manifest_of(*before.split(), lost=list(lost))
    names = away.split()
    if isinstance(expected, tuple):
        assert left_out(asked, manifest, names, asked=True) == expected
        assert left_out(asked, manifest, names, asked=False) == expected
        return
    with pytest.raises(ConfigError, match=f"members.absent.*checkpoint 7.*{expected}"):
        left_out(asked, manifest, names, asked=True)
    assert left_out(asked, manifest, names, asked=False) == (), "all of them take part again"


def part(root: Path, checkpoint: int, name: str, meta: dict[str, object]) -> PartInfo:
    return write_part(directory_of(root, checkpoint), name, {"x": torch.ones(2)}, meta)  # type: ignore[arg-type]


def saved(
    saver: Saver, store: CheckpointStore, root: Path, metas: dict[str, dict[str, object]]
) -> CheckpointManifest:
    checkpoint = saver.begin()
    saver.add(checkpoint, [part(root, checkpoint, name, meta) for name, meta in metas.items()], 1)
    assert saver.committed(LONG_S) is not None
    return store.latest().manifest


def test_a_checkpoint_tells_who_was_lost_and_not_asked_to_leave(tmp_path: Path) -> None:
    whole = experiment("regions=[{name: us}, {name: eu}, {name: asia}]")
    store = CheckpointStore(tmp_path, keep=2)
    saver = Saver(store, whole, "d" * 64, attempt=1, health=LossHealth())
    saver.forget({"eu-ps0"})
    saver.forget({"asia-ps0"})  # was asked to leave
    metas: dict[str, dict[str, object]] = {"us-ps0": {}, "averager": {}}

    def lost(*names: str) -> CheckpointManifest:
        saver.note_lost(names, {})
        return saved(saver, store, tmp_path, metas)

    manifest = lost("eu")
    left, missing = without_lost(whole, set(metas))
    assert missing == ("eu", "asia") and lost_before(manifest, left) == ("eu",)
    assert lost_before(manifest, whole) == ()  # it is there
    assert lost_before(lost(), left) == ()
    older = manifest.model_copy(update={"extra": {"token": 1}})
    assert lost_before(older, left) == ()


def test_rows_of_who_took_no_part_are_kept_from_one_checkpoint_to_the_next(tmp_path: Path) -> None:
    whole = experiment("regions=[{name: us}, {name: eu}, {name: asia}]")
    store = CheckpointStore(tmp_path, keep=2)
    saver = Saver(store, whole, "d" * 64, attempt=1, health=LossHealth())
    of_eu, of_asia = Ledger(cursor=40, applied=40).export(), Ledger(cursor=8, applied=8).export()
    saver.forget({"asia-ps0"})
    saver.note_lost([], {"asia": of_asia})
    metas: dict[str, dict[str, object]] = {"averager": {}}
    metas |= {shard_part_name(n, 0): {"control": {"ledger": of_eu}} for n in ("us", "eu")}
    saved(saver, store, tmp_path, metas)
    assert saved_rows(store.latest(), ["eu"]) == {"eu": of_eu, "asia": of_asia}
    assert saved_rows(store.latest(), []) == {"asia": of_asia}
    metas["eu-ps0"] = {"control": {}}
    saved(saver, store, tmp_path, metas)
    with pytest.raises(CheckpointCorruptError, match="no sample ledger"):
        saved_rows(store.latest(), ["eu"])
