"""A run whose name is taken says what it is called instead, and why."""

from __future__ import annotations

from pathlib import Path

from job_support import experiment

from geo_ray.api.start import new_run
from geo_ray.config.source import text_of


def test_a_run_with_a_taken_name_says_so(tmp_path: Path) -> None:
    config = text_of(experiment(f"run.dir={tmp_path}"), tmp_path)
    told: list[str] = []
    assert new_run(config, (), None, told.append).run.path == tmp_path / "trial"
    assert told == []
    assert new_run(config, (), None, told.append).run.path == tmp_path / "trial-2"
    assert told[0].startswith(f"this run is trial-2, as {tmp_path / 'trial'} is there")
    assert f"--resume {tmp_path / 'trial'} goes on" in told[0] and "--set name=NAME" in told[0]
    assert new_run(config, (), None, told.append).run.path == tmp_path / "trial-3"
    assert "trial-3" in told[1]
