"""A run whose task is a file of the user's, on another path or another machine."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from geo_ray.api.run import open_run
from geo_ray.api.train import ReadyRun, resumed_run
from geo_ray.base.errors import ConfigChangedError, ConfigError
from geo_ray.base.load import dump_yaml
from geo_ray.runs import directory
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest
from tests.support.job_support import experiment
from tests.support.observe_support import started, write
from tests.support.watched_runs import run_begins

TASK = '''
from geo_ray.data.tasks.digits import Digits

class Mine(Digits):
    """The same under another name."""
'''


class Project:
    """A directory with a configuration in ``configs``, from which a run was started."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._monkeypatch = root, monkeypatch
        (root / "configs").mkdir(parents=True)
        (root / "my_task.py").write_text(TASK)
        self.runs = root.parent / "shared"
        made = experiment(f"run.dir={self.runs}", "task={use: ../my_task.py:Mine}")
        (root / "configs" / "a.yaml").write_text(dump_yaml(made))
        self.enter(root)
        self.run = directory.create(made, root / "configs").path
        store = CheckpointStore(self.run / "checkpoints")
        store.begin(0)
        fields = {"id": 0, "step": 5, "created": "-", "config_digest": "ab" * 32, "parts": ()}
        store.commit(0, CheckpointManifest.model_validate(fields))

    def enter(self, place: Path) -> Path:
        self._monkeypatch.chdir(place)
        return place

    def copied(self, name: str) -> Path:
        """Another copy of the project; this one is gone."""
        place = self.root.parent / name
        shutil.copytree(self.root, place)
        shutil.rmtree(self.root)
        return self.enter(place)

    def resumed(self, config: Path | None = None, *allowed: str) -> ReadyRun:
        return resumed_run(self.run, config, (), None, allowed=allowed)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(tmp_path / "project", monkeypatch)


def test_it_goes_on_in_a_copy_of_the_project(project: Project) -> None:
    place = project.copied("elsewhere")
    ready = project.resumed()
    assert ready.run.base_dir == place / "configs" and ready.is_changed
    run_begins(ready)
    assert json.loads((project.run / "plan.json").read_text())["base_dir"] == str(place / "configs")
    project.enter(project.runs)
    assert project.resumed().run.base_dir == place / "configs", "from anywhere on this machine"


def test_it_goes_on_with_the_files_next_to_the_configuration_that_is_given(
    project: Project,
) -> None:
    place = project.copied("elsewhere")
    project.enter(project.runs)
    with pytest.raises(ConfigError, match=r"my_task\.py.*does not exist in") as caught:
        project.resumed()
    assert "geo-ray train CONFIG --resume RUN" in caught.value.fix
    ready = project.resumed(place / "configs" / "a.yaml")
    assert ready.run.base_dir == place / "configs"


def test_a_task_that_has_changed_must_be_named(project: Project) -> None:
    file = project.root / "my_task.py"
    file.write_text(TASK + "# edited\n")
    for config in (None, project.root / "configs" / "a.yaml"):
        with pytest.raises(ConfigChangedError, match="is not the file with which the run was made"):
            project.resumed(config)
        ready = project.resumed(config, "../my_task.py")
        assert ready.is_changed
    run_begins(ready)
    assert not project.resumed().is_changed


def test_the_files_that_the_run_was_made_with_are_preferred(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    other = project.root.parent / "other"
    shutil.copytree(project.root, other)
    (other / "my_task.py").write_text("raise SystemExit\n")
    project.enter(other)
    assert project.resumed().run.base_dir == project.root / "configs"
    assert "uses its original files" in caplog.text


def test_nothing_is_taken_from_the_run_itself(project: Project) -> None:
    """Whoever can write to the run's directory or bucket could run code here."""
    project.copied("elsewhere")
    (project.run / "my_task.py").write_text(TASK)
    project.enter(project.runs)
    with pytest.raises(ConfigError, match="does not exist in"):
        project.resumed()


@pytest.mark.parametrize("how", ["absolute", "base_dir", "link"])
def test_nothing_in_the_run_is_imported_however_it_is_named(project: Project, how: str) -> None:
    run, ran = project.run, project.root / "ran"
    (run / "my_task.py").write_text(f"open({str(ran)!r}, 'w')\n")
    saved, plan = run / "config.lock.yaml", json.loads((run / "plan.json").read_text())
    named = {"absolute": f"{run}/my_task.py", "base_dir": "my_task.py", "link": "../my_task.py"}
    saved.write_text(saved.read_text().replace("../my_task.py", named[how]))
    if how == "base_dir":
        plan["base_dir"] = str(run)
    elif how == "link":
        (project.root / "my_task.py").unlink()
        (project.root / "my_task.py").symlink_to(run / "my_task.py")
    plan["task_sha256"] = hashlib.sha256((run / "my_task.py").read_bytes()).hexdigest()
    (run / "plan.json").write_text(json.dumps(plan))
    write(run / "events.jsonl", [started()])
    with pytest.raises(ConfigError, match="is in the run's own directory"):
        project.resumed()
    with pytest.raises(ConfigError, match="is in the run's own directory"):
        open_run(run).model()
    assert not ran.exists()


def test_a_run_is_opened_with_the_files_of_a_copy_of_the_project(project: Project) -> None:
    place = project.copied("elsewhere")
    write(project.run / "events.jsonl", [started()])
    assert open_run(project.run).directory.base_dir == place / "configs"
    project.enter(project.runs)
    found = open_run(project.run, base_dir=place / "configs")
    assert found.directory.base_dir == place / "configs"
