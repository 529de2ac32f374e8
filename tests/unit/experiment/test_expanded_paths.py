"""``~`` and ``${VARIABLE}`` in paths of a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.api.train import run_to_resume
from geo_ray.base.model import expanded
from geo_ray.base.yaml import ConfigText
from geo_ray.runs import directory
from tests.support.train_support import experiment_of


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BUCKET", "of-mine")
    monkeypatch.delenv("MISSING", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("~/runs", "HOME/runs"),
        ("~", "HOME"),
        ("${HOME}/runs", "HOME/runs"),
        ("s3://${BUCKET}/runs", "s3://of-mine/runs"),
        ("runs~/a$b", "runs~/a$b"),
    ],
)
def test_what_a_path_means(written: str, meant: str, home: Path) -> None:
    assert expanded(written) == meant.replace("HOME", str(home))


@pytest.mark.parametrize(
    ("written", "said"),
    [("${MISSING}/x", "MISSING is not set"), ("~nobody-of-that-name/x", "~nob")],
)
def test_a_path_that_means_nothing_is_refused(written: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        expanded(written)


def test_the_run_directory_is_below_home(home: Path) -> None:
    experiment = experiment_of(home, run={"dir": "~/georuns"})
    assert experiment.run.dir == str(home / "georuns")
    with pytest.raises(ValueError, match="MISSING is not set"):
        experiment_of(home, run={"dir": "${MISSING}/runs"})


def test_a_run_is_found_again_below_home(home: Path) -> None:
    directory.create(experiment_of(home, name="a", run={"dir": str(home / "runs")}), home)
    text = "name: a\nrun: {dir: '~/runs', again: resume}\n"
    assert run_to_resume(ConfigText(text, home), ()) == home / "runs" / "a"
