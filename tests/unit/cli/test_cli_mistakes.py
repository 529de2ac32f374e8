"""Mistakes on the command line are typed errors with the near name and the fix that fits."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from job_support import TEXT

from geo_ray.cli.lab import example_commands
from geo_ray.cli.main import root
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import load_text
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
        ["profile", "shpo.yaml"],
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--links", "lnks.json"], "there is no link table lnks.json; did you mean links.json?"),
        (["--profile", "p.json"], "there is no profile p.json"),
        (["--prices", "prics.json"], "there is no file of prices prics.json"),
        (["--links", "."], ". is a directory, no link table"),
    ],
)
def test_a_missing_file_of_a_plan_is_answered_as_others_are(options, message, here):
    Path("links.json").write_text("{}")
    error = error_of("plan", "shop.yaml", *options)
    assert isinstance(error, ConfigError) and error.message.startswith(message)
    assert "geo-ray p" in error.fix


def test_what_the_lab_advises_to_type_is_there_in_an_installed_release(tmp_path, monkeypatch):
    """The words are read as a shell would read them, and lead to a run in the lab's regions."""
    monkeypatch.chdir(tmp_path)
    begin, train = (shlex.split(line) for line in example_commands(("A", "B", "C")))
    assert CliRunner().invoke(root, begin[1:]).exit_code == 0
    assert train[:6] == ["geo-ray", "lab", "run", "A", "geo-ray", "train"]
    shown = CliRunner().invoke(root, ["config", "show", *train[6:]])
    assert shown.exit_code == 0, shown.output
    found = load_text(shown.output, [], Experiment, "shown")
    assert found.region_names == ("A", "B", "C") and found.cluster.kind == "existing"
    assert found.emulate is None and found.averager_region == "A"
