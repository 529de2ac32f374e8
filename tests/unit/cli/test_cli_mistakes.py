"""Mistakes on the command line are typed errors with the near name and the fix that fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from job_support import TEXT

from geo_ray.cli.main import root
from geo_ray.errors import ConfigError, GeoRayError, RunDirectoryError


def error_of(*words: str) -> GeoRayError:
    error = CliRunner().invoke(root, list(words)).exception
    assert isinstance(error, GeoRayError), error
    return error


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.yaml").write_text(TEXT)
    (tmp_path / "runs" / "real").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "shpo.yaml"],
        ["train", "shpo.yaml"],
        ["plan", "shpo.yaml"],
        ["compare", "shpo.yaml", "--strategies", "sma"],
        ["config", "show", "shpo.yaml"],
    ],
)
def test_a_missing_configuration_is_answered_with_the_near_one(words, here):
    error = error_of(*words)
    assert isinstance(error, ConfigError)
    assert error.message == "there is no configuration shpo.yaml; did you mean shop.yaml?"


@pytest.mark.parametrize(
    "words",
    [
        ["export", "runs/reel", "--out", "m.pt"],
        ["train", "--resume", "runs/reel"],
        ["plan", "shop.yaml", "--from", "runs/reel"],
    ],
)
def test_a_missing_run_is_answered_with_the_near_one(words, here):
    error = error_of(*words)
    assert isinstance(error, RunDirectoryError)
    assert error.message == "there is no run runs/reel; did you mean runs/real?"


@pytest.mark.parametrize(
    ("change", "said", "fix"),
    [
        ("trainsteps=5", "trainsteps (--set): unknown key; did you mean train.steps?", "schema`"),
        ("train.checkpoint.every=40", "train.checkpoint (--set): unknown key; checkpoint is a key "
         "of the whole file", "schema train"),
        ("codec=topk", "did you mean {up: {kind: topk}}?", "schema codec"),
        ("strategy=sma", "did you mean {kind: sma}?", "schema strategy"),
        ("train.eval_evry=3", "did you mean eval_every?", "schema train"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_answered_with_what_was_meant(change, said, fix, here):
    error = error_of("simulate", "shop.yaml", "--set", change)
    assert said in error.message and fix in error.fix
    assert "1 problem:" in error.message


def test_one_typo_is_one_problem(here):
    (here / "typo.yaml").write_text(TEXT.replace("optimizer:", "optimiser:"))
    error = error_of("simulate", "typo.yaml")
    assert "1 problem:" in error.message and "optimiser (line 7)" in error.message


@pytest.mark.parametrize(
    ("change", "absent"), [("train.steps", "torch"), ("train.stepz=3", "ray"), ("a.b=[", "torch")]
)
def test_mistakes_are_told_before_what_takes_long_is_imported(change, absent, here):
    script = (
        "import sys\nfrom geo_ray.cli.main import root\nfrom geo_ray.errors import ConfigError\n"
        f"words = ['simulate', 'shop.yaml', '--set', {change!r}]\n"
        "try:\n    root.main(args=words, standalone_mode=False)\n"
        f"except ConfigError:\n    sys.exit({absent!r} in sys.modules)\nsys.exit(2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
