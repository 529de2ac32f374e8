"""Which run a configuration goes on with when the same command is given again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_ray.api.start import run_to_go_on_with
from geo_ray.config.source import override_items, text_of
from geo_ray.job.far.objects import RunObjects
from geo_ray.stores.uri import join
from tests.s3_support import new_prefix, s3_server, set_credentials


def found(tmp_path: Path, *overrides: str, **run: Any) -> Path | str | None:
    tree = {"name": "job", "run": {"dir": str(tmp_path / "runs")} | run}
    return run_to_go_on_with(text_of(tree, tmp_path), override_items(overrides))


def saved(tmp_path: Path, name: str, checkpoint: int | None) -> Path:
    path = tmp_path / "runs" / name
    path.mkdir(parents=True)
    if checkpoint is not None:
        folder = path / "checkpoints" / f"ckpt-{checkpoint:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    return path


def test_a_new_run_is_made_unless_the_configuration_says_otherwise(tmp_path: Path) -> None:
    path = saved(tmp_path, "job", 1)
    assert found(tmp_path) is None
    assert found(tmp_path, again="new") is None
    assert found(tmp_path, again="resume") == path
    assert found(tmp_path, "run.again=new", again="resume") is None


def test_the_last_run_of_the_name_that_has_saved_is_gone_on_with(tmp_path: Path) -> None:
    assert found(tmp_path, again="resume") is None
    saved(tmp_path, "job", None)
    assert found(tmp_path, again="resume") is None, "it has saved nothing"
    second = saved(tmp_path, "job-2", 3)
    saved(tmp_path, "job-3", None)
    saved(tmp_path, "job-5", 9)  # of another name: job-4 is not there
    assert found(tmp_path, again="resume") == second


def test_a_run_in_a_bucket_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)
    with s3_server() as server:
        prefix = new_prefix(server)
        assert found(tmp_path, again="resume", dir=prefix) is None
        assert RunObjects(join(prefix, "job")).begin()
        assert found(tmp_path, again="resume", dir=prefix) == join(prefix, "job")
