"""Commands report every few seconds that a phase without other output still runs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import geo_ray
from geo_ray.api import check, compare, train, tune
from geo_ray.api.check import check_run
from geo_ray.base import output
from geo_ray.sweep import ray_tune as tuning_run

CONFIGS = Path(__file__).parents[3] / "configs"
CONFIG = CONFIGS / "four_continents.yaml"
TARGET = "train.target={metric: loss, value: 0.2, direction: at_most}"
SEARCH = {"base": str(CONFIG), "set": [TARGET], "space": {"strategy.interval": {"randint": [1, 8]}}}


class ReachedError(Exception):
    """The phase was reported."""


@pytest.mark.parametrize(
    ("verb", "arguments", "place", "phase"),
    [
        (geo_ray.train, (CONFIG,), (train, "new_run"), "preparing the run"),
        (geo_ray.simulate, (CONFIG,), (train, "new_run"), "preparing the run"),
        (check_run, (CONFIG,), (check, "checked_run"), "checking the run"),
        (geo_ray.compare, (CONFIG, "sma"), (compare, "compare_all"), "running"),
        (geo_ray.tune, (SEARCH,), (tune, "plan_of"), "checking the search"),
        (geo_ray.tune, (SEARCH,), (tuning_run, "_cluster"), "starting the cluster of the trials"),
        (geo_ray.tune, (SEARCH,), (tuning_run, "_tuner"), "running trials"),
    ],
)
def test_a_long_phase_is_reported(
    verb: Any,
    arguments: tuple[Any, ...],
    place: tuple[Any, str],
    phase: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    told: list[str] = []
    is_told = threading.Event()

    def tell(_: object, text: str) -> None:
        told.append(text)
        if text.startswith(f"{phase} ("):
            is_told.set()

    def blocked(*_: object, **__: object) -> None:
        assert is_told.wait(60), told
        raise ReachedError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(output, "REPORT_EVERY_S", 0.01)
    monkeypatch.setattr("geo_ray.api.display.RunWatch.notify", tell)
    if place[1] == "_tuner":
        monkeypatch.setattr(tuning_run, "connect", lambda *_, **__: threading.Lock())
    monkeypatch.setattr(*place, blocked)
    with pytest.raises(ReachedError):
        verb(*arguments, progress=True)
