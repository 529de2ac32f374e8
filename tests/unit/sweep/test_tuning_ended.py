"""A search that is ended from outside leaves a directory only if there is something in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from geo_ray.api.tune import plan_of
from geo_ray.base.errors import TuningDirectoryError
from geo_ray.sweep import ray_tune
from geo_ray.sweep.ray_tune import TUNE_FOLDER, SearchPlan
from geo_ray.sweep.runner import TrialsFile
from geo_ray.sweep.tune import search

SHIPPED = Path(__file__).parents[3] / "configs" / "tune.yaml"


@pytest.fixture
def plan(tmp_path: Path) -> SearchPlan:
    return plan_of(SHIPPED, out=tmp_path / "search")


def test_sigterm_while_the_cluster_starts_leaves_nothing(
    plan: SearchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    @contextmanager
    def cluster(_: SearchPlan) -> Iterator[None]:
        assert plan.out.is_dir()
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            yield
        finally:
            ended.append("the cluster is down")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray_tune, "_cluster", cluster)
    with pytest.raises(KeyboardInterrupt):
        search(plan, lambda text: None)
    assert not plan.out.exists() and signal.getsignal(signal.SIGTERM) is before


def test_what_trials_have_told_is_kept(plan: SearchPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets a handler of SIGTERM as it connects, which counts no more while trials run."""

    @contextmanager
    def cluster(_: SearchPlan) -> Iterator[None]:
        before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("Ray's handler was called"))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    class Tuner:
        def fit(self) -> None:
            (plan.out / TUNE_FOLDER).mkdir()
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ray_tune, "_cluster", cluster)
    monkeypatch.setattr(ray_tune, "_tuner", lambda *_: Tuner())
    with pytest.raises(KeyboardInterrupt):  # of Ctrl-C, which Ray Tune itself handles
        search(plan, lambda text: None)
    assert (plan.out / TUNE_FOLDER).is_dir()


def test_a_directory_that_was_there_stays(
    plan: SearchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan.out.mkdir()
    with pytest.raises(TuningDirectoryError):
        search(plan, lambda text: None)
    assert plan.out.is_dir()


def test_a_torn_line_costs_no_trial_but_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    file = TrialsFile(path)
    file.add({"lr": 0.1}, [{"loss": 1.0}])
    path.write_bytes(path.read_bytes() + b'{"values": {"lr": 0.')
    for lr in (0.3, 0.4):
        file.add({"lr": lr}, [{"loss": 1.0}])
    assert [trial.values["lr"] for trial in file.read(["lr"]).values()] == [0.1, 0.3, 0.4]
