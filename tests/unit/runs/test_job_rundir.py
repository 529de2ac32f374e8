"""The directory of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from geo_ray.base.errors import ConfigChangedError, ConfigError, RunDirectoryError
from geo_ray.base.load import digest, load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.directory import (
    CONFIG_FILE,
    PLAN_FILE,
    check_changes,
    create,
    followed_plan,
    hyperparameters,
    reopen,
)
from geo_ray.storage.folders import LocalRoot
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog
from tests.support.job_support import experiment


def into(path: Path, *overrides: str) -> Experiment:
    return experiment(f"run.dir={path}", *overrides)


def test_a_new_run_has_its_configuration_and_its_plan(tmp_path):
    config = into(tmp_path / "deep" / "runs")
    run = create(config, tmp_path)
    assert run.path == tmp_path / "deep" / "runs" / "trial"
    assert run.path.is_absolute() and run.base_dir == tmp_path
    assert digest(load_tree(run.path / CONFIG_FILE, [], Experiment)) == digest(config)
    plan = json.loads((run.path / PLAN_FILE).read_text())
    assert plan["averager_region"] == "eu"
    assert [r["ps_shards"] for r in plan["regions"]] == [1, 2]
    assert plan["predicted_seconds"] is None and followed_plan(run) is None
    assert {run.checkpoints.parent, Path(run.data).parent, run.model.parent} == {run.path}


def test_hyperparameters_are_the_keys_that_influence_the_result(tmp_path):
    config = into(tmp_path, "members.absent=[us]", "observe={export: [{kind: tensorboard}]}")
    found = hyperparameters(create(config, tmp_path).path)
    tree = config.model_dump(mode="json")
    for key, value in found.items():
        at = tree
        for part in key.split("."):
            at = next(i for i in at if i["name"] == part) if isinstance(at, list) else at[part]
        assert value == (json.dumps(at) if isinstance(at, list) else at)
    assert {key.split(".")[0] for key in found} >= {"seed", "task", "optimizer", "regions"}
    assert found["members.absent"] == '["us"]' and found["regions.us.ps_shards"] == 2
    silent = {"run", "cluster", "observe", "checkpoint", "provider", "transport", "lan", "name"}
    assert not silent & {key.split(".")[0] for key in found}
    assert None not in found.values()


def test_a_new_run_survives_a_loss_of_power(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync

    def noted(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    run = create(into(tmp_path / "deep" / "runs"), tmp_path)
    EventLog(run.path / EVENTS_FILE).close()
    LocalRoot(run.checkpoints).claim(0)
    made = [run.checkpoints, run.checkpoints / "ckpt-00000000", *run.path.iterdir()]
    assert {path.parent for path in made} <= synced
    assert {tmp_path, tmp_path / "deep", tmp_path / "deep" / "runs"} <= synced
    written = {path.name.split(".")[1] for path in synced if path.suffix == ".tmp"}
    assert written == {"config", "plan"}  # whole under another name before they are there


def test_a_taken_name_gets_a_number(tmp_path):
    paths = [create(into(tmp_path), tmp_path).path.name for _ in range(3)]
    assert paths == ["trial", "trial-2", "trial-3"]


def test_relative_directories_start_where_the_user_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = create(experiment(), Path("configs"))
    assert run.path == tmp_path / "runs" / "trial"
    assert run.base_dir == tmp_path / "configs"


def test_what_is_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(RunDirectoryError, match="file"):
            create(into(place), tmp_path)
    (tmp_path / "trial").write_text("")
    with pytest.raises(RunDirectoryError, match=r"trial exists already"):
        create(into(tmp_path), tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(RunDirectoryError, match="/proc"):
        create(into(Path("/proc/geo_ray")), tmp_path)


def test_a_run_is_opened_again(tmp_path, monkeypatch):
    config = into(tmp_path)
    run = create(config, tmp_path)
    monkeypatch.chdir(tmp_path)
    again, saved = reopen(Path("trial"))
    assert again == run and digest(saved) == digest(config)


@pytest.mark.parametrize("plan", [None, "", "[]", "{}", "null", "3"])
def test_other_directories_are_no_runs(tmp_path, plan):
    if plan is not None:
        (tmp_path / PLAN_FILE).write_text(plan)
    with pytest.raises(RunDirectoryError, match="not a run directory") as caught:
        reopen(tmp_path)
    assert "geo-ray train" in caught.value.fix


def test_a_run_without_its_configuration_is_an_error(tmp_path):
    run = create(into(tmp_path), tmp_path)
    (run.path / CONFIG_FILE).write_text("name: trial\nnonsense: 1\n")
    with pytest.raises(ConfigError, match="nonsense"):
        reopen(run.path)
    (run.path / CONFIG_FILE).unlink()
    with pytest.raises(ConfigError, match=r"config\.lock\.yaml"):
        reopen(run.path)


def test_another_configuration_is_drift_unless_it_is_meant(tmp_path):
    saved, wanted = into(tmp_path), into(tmp_path, "optimizer.lr=0.5", "regions.0.workers=3")
    check_changes(saved, into(tmp_path), ())
    with pytest.raises(ConfigChangedError) as caught:
        check_changes(saved, wanted, ["regions.1"])
    assert "optimizer.lr: 0.1 -> 0.5" in caught.value.message
    assert "regions.0.workers: 2 -> 3" in caught.value.message
    named = check_changes(saved, wanted, ["optimizer", "regions.0.workers"])
    assert set(named) == {"optimizer.lr", "regions.0.workers"}
