"""A run whose name is taken says what it is called instead, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_support import experiment

from geo_ray.cli.follow import new_run


def test_a_run_with_a_taken_name_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = experiment(f"run.dir={tmp_path}")
    assert new_run(config, tmp_path, None, None).path == tmp_path / "trial"
    assert capsys.readouterr() == ("", "")
    assert new_run(config, tmp_path, None, None).path == tmp_path / "trial-2"
    out, told = capsys.readouterr()
    assert out == "" and told.startswith(f"this run is trial-2, as {tmp_path / 'trial'} is there")
    assert f"--resume {tmp_path / 'trial'} goes on" in told and "--set name=NAME" in told
    assert new_run(config, tmp_path, None, None).path == tmp_path / "trial-3"
    assert "trial-3" in capsys.readouterr().err
