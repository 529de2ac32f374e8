"""`run.again: resume` continues the run of exactly that name, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from geo_ray import load_config
from geo_ray.api.train import is_unchanged, run_to_resume
from geo_ray.base.errors import (
    CheckpointMissingError,
    ConfigChangedError,
    RunDirectoryError,
    RunHeldError,
)
from geo_ray.base.load import digest, override_items, text_of
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory
from geo_ray.runs.remote import RunObjects
from geo_ray.runs.resume import check_resumable
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest
from geo_ray.storage.uri import join
from geo_ray.training.optimizers import OptimizerConfig
from tests.support.job_support import experiment as any_experiment
from tests.support.s3_support import new_prefix, s3_server, set_credentials


def found(tmp_path: Path, *overrides: str, **run: Any) -> Path | str | None:
    tree = {"name": "job", "run": {"dir": str(tmp_path / "runs")} | run}
    return run_to_resume(text_of(tree, tmp_path), override_items(overrides))


def experiment(tmp_path: Path, name: str = "job") -> Experiment:
    plain = any_experiment()
    run = plain.run.model_copy(update={"dir": str(tmp_path / "runs"), "again": "resume"})
    return plain.model_copy(update={"name": name, "run": run})


def test_a_new_run_is_made_unless_the_configuration_says_otherwise(tmp_path: Path) -> None:
    run = directory.create(experiment(tmp_path), tmp_path)
    assert found(tmp_path) is None
    assert found(tmp_path, again="new") is None
    assert found(tmp_path, again="resume") == run.path
    assert found(tmp_path, "run.again=new", again="resume") is None


def test_a_run_of_another_configuration_is_never_continued(tmp_path: Path) -> None:
    directory.create(experiment(tmp_path), tmp_path)
    directory.create(experiment(tmp_path, "job-2"), tmp_path)
    assert found(tmp_path, again="resume") == tmp_path / "runs" / "job"


def test_only_the_same_configuration_watches_a_run_that_is_driven(tmp_path: Path) -> None:
    wanted = experiment(tmp_path)
    source = text_of(wanted.model_dump(mode="json", exclude_unset=True), tmp_path)
    assert not is_unchanged(tmp_path / "runs" / "job", source, ())
    run = directory.create(wanted, tmp_path, exact=True)
    assert is_unchanged(run.path, source, ())
    assert is_unchanged(run.path, source, (f"train.steps={wanted.train.steps}",))
    assert not is_unchanged(run.path, source, ("train.steps=11",))


def test_a_run_that_never_saved_begins_again_in_its_own_directory(tmp_path: Path) -> None:
    assert found(tmp_path, again="resume") is None
    wanted = experiment(tmp_path)
    run = directory.create(wanted, tmp_path, exact=True)
    assert found(tmp_path, again="resume") == run.path
    check_resumable(run, wanted, wanted, begins=True)
    with pytest.raises(CheckpointMissingError):
        check_resumable(run, wanted, wanted)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_configuration_that_is_not_the_one_of_the_checkpoint_is_warned_of(
    is_same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = experiment(tmp_path)
    run = directory.create(wanted, tmp_path, exact=True)
    saved_with = digest(wanted) if is_same else "ab" * 32
    store = CheckpointStore(run.checkpoints)
    store.begin(0)
    fields = {"id": 0, "step": 5, "created": "-", "config_digest": saved_with, "parts": ()}
    store.commit(0, CheckpointManifest.model_validate(fields))
    check_resumable(run, wanted, wanted)
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    if is_same:
        assert warned == []
        return
    (text,) = warned
    assert f"(digest {digest(wanted)[:12]}) is not the configuration" in text
    assert "checkpoint 0 was saved with (digest abababababab)" in text


def test_regions_that_joined_continue_with_their_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    joined = {
        "name": "joined",
        "regions": [{"name": "eu", "join": True}, {"name": "us", "join": True}],
        "strategy": {"kind": "diloco", "interval": 4},
        "train": {"steps": 12},
    }
    saved = load_config(joined)
    run = directory.create(saved, tmp_path, exact=True)
    store = CheckpointStore(run.checkpoints)
    store.begin(0)
    fields = {"id": 0, "step": 5, "created": "-", "config_digest": digest(saved), "parts": ()}
    extra = {"extra": {"strategy": "diloco"}}
    store.commit(0, CheckpointManifest.model_validate(fields | extra))
    for strategy, refused in (({"kind": "diloco", "interval": 8}, False), ({"kind": "sma"}, True)):
        wanted = load_config(joined | {"strategy": strategy})
        if not refused:
            check_resumable(run, saved, wanted)
            continue
        with pytest.raises(ConfigChangedError, match=r"strategy\.kind is sma, but that of .* 0"):
            check_resumable(run, saved, wanted)


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ("adamw", "muon", True),
        ("momentum", "adamw", True),
        ("sgd", "muon", False),
        ("adamw", "sgd", False),
        ("muon", "sgd", True),
        ("muon", "muon", False),
    ],
)
def test_a_checkpoint_continues_with_its_kind_of_optimizer(
    before: str, now: str, refused: bool, tmp_path: Path
) -> None:
    def with_kind(kind: str) -> Experiment:
        optimizer: Any = TypeAdapter(OptimizerConfig).validate_python({"kind": kind})
        return experiment(tmp_path).model_copy(update={"optimizer": optimizer})

    saved = with_kind(before)
    run = directory.create(saved, tmp_path, exact=True)
    store = CheckpointStore(run.checkpoints)
    store.begin(0)
    fields = {"id": 0, "step": 5, "created": "-", "config_digest": digest(saved), "parts": ()}
    store.commit(0, CheckpointManifest.model_validate(fields))
    if not refused:
        check_resumable(run, saved, with_kind(now))
        return
    with pytest.raises(ConfigChangedError, match=f"is {now}, but .* the state of {before}"):
        check_resumable(run, saved, with_kind(now))


def test_a_directory_whose_making_was_interrupted_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "job"
    path.mkdir(parents=True)
    (path / directory.CONFIG_FILE).write_text("name: jo")
    assert found(tmp_path, again="resume") is None
    run = directory.create(experiment(tmp_path), tmp_path, exact=True)
    assert run.path == path
    assert directory.reopen(path)[1].name == "job"


def test_a_run_that_another_process_has_just_made_is_its(tmp_path: Path) -> None:
    directory.create(experiment(tmp_path), tmp_path, exact=True)
    with pytest.raises(RunHeldError, match="has just created"):
        directory.create(experiment(tmp_path), tmp_path, exact=True)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "job"
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(RunDirectoryError, match="exists already"):
        directory.create(experiment(tmp_path), tmp_path, exact=True)
    assert [each.name for each in path.iterdir()] == ["thesis.tex"]


def test_a_run_in_a_bucket_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3_server() as server:
        prefix = new_prefix(server)
        assert found(tmp_path, again="resume", dir=prefix) is None
        objects = RunObjects(join(prefix, "job"))
        assert objects.begin()
        assert found(tmp_path, again="resume", dir=prefix) is None, "its making was interrupted"
        wanted = experiment(tmp_path)
        run_config = wanted.run.model_copy(update={"dir": prefix})
        run = directory.create(wanted.model_copy(update={"run": run_config}), tmp_path, exact=True)
        objects.put_file(1, 1, directory.PLAN_FILE, run.path / directory.PLAN_FILE)
        assert found(tmp_path, again="resume", dir=prefix) == join(prefix, "job")
