"""A request to stop is left only where somebody will take it."""

from __future__ import annotations

from pathlib import Path

import geo_ray
from benchmarks.observe.made_run import eventful, made_run
from geo_ray.runs.remote import REQUESTS


def test_nothing_is_asked_of_a_run_that_is_finished(tmp_path: Path) -> None:
    made = made_run(tmp_path, 2)
    eventful(made, 4)
    made.finish()
    made.close()
    geo_ray.stop(made.path)
    assert not (made.path / REQUESTS / "stop").exists()


def test_a_run_that_goes_on_is_asked(tmp_path: Path) -> None:
    made = made_run(tmp_path, 2)
    eventful(made, 4)
    geo_ray.stop(made.path)
    assert (made.path / REQUESTS / "stop").exists()
    made.close()
