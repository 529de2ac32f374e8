"""Mistakes on the command line are typed errors with the near name and the fix that fits."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import geo_ray
from geo_ray.base.errors import ConfigError, GeoRayError, RunDirectoryError
from geo_ray.base.load import load_text
from geo_ray.cli.lab import example_commands
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from tests.support.job_support import TEXT


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
    assert error.message == "no configuration shpo.yaml; did you mean shop.yaml?"


def test_only_configurations_are_listed_where_one_is_missing(here):
    (here / "notes.txt").write_text("")
    (here / "shop.json").write_text("")
    assert error_of("train", "zzz").message == "no configuration zzz; in . there is shop.yaml"
    (here / "other.yml").write_text("")
    assert error_of("train", "zzz").message.endswith("; in . there is other.yml, shop.yaml")
    assert error_of("train", "runs/zzz").message.endswith("; in runs there is no *.yaml or *.yml")
    assert error_of("train", "run/zzz").message.endswith("; did you mean runs?")


@pytest.mark.parametrize(
    "words",
    [
        ["export", "runs/reel", "--out", "m.pt"],
        ["train", "--resume", "runs/reel"],
        ["plan", "shop.yaml", "--from", "runs/reel"],
        ["checkpoints", "runs/reel"],
        ["report", "runs/reel"],
    ],
)
def test_a_missing_run_is_answered_with_the_near_one(words, here):
    error = error_of(*words)
    assert isinstance(error, RunDirectoryError)
    assert error.message == "no run runs/reel; did you mean runs/real?"


@pytest.mark.parametrize(
    ("change", "said", "fix"),
    [
        ("trainsteps=5", "trainsteps (--set): unknown key; did you mean train.steps?", "schema`"),
        ("train.checkpoint.every=40", "train.checkpoint (--set): unknown key; checkpoint is a "
         "top-level key", "schema train"),
        ("codec=topk", "did you mean {up: {kind: topk}}?", "schema codec"),
        ("strategy=sma", "did you mean {kind: sma}?", "schema strategy"),
        ("train.eval_evry=3", "did you mean eval_every?", "schema train"),
        ("train.interval=4", "unknown key; did you mean strategy.interval?", "schema train"),
        ("strategyinterval=4", "unknown key; did you mean strategy.interval?", "schema`"),
        ("strategy.kind=", "strategy.kind (--set): got null, expected one of", "schema strategy"),
        ("strategy.kind=3", "strategy.kind (--set): got 3, expected one of", "schema strategy"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_answered_with_what_was_meant(change, said, fix, here):
    error = error_of("simulate", "shop.yaml", "--set", change)
    assert said in error.message and fix in error.fix
    assert "1 problem:" in error.message


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("sma:interval=0", "strategy.interval (--strategies sma:interval=0): got 0, expected"),
        ("sma:intervall=3", "strategy.intervall (--strategies sma:intervall=3): unknown key"),
        ("sma:interval=[", "--strategies sma:interval=[, line 1: not valid YAML"),
        ("sma:interval", "--strategies sma:interval: 'interval' is not of the form"),
        ("sma,intervall=3", "--strategies intervall=3: 'intervall=3' is not a strategy; options"),
        ("smma", "--strategies smma: no strategy 'smma'; did you mean sma?"),
    ],
)
def test_a_wrong_variant_names_the_option_that_was_typed(variant, said, here):
    error = error_of("compare", "shop.yaml", "--strategies", variant)
    assert said in error.message and "--set" not in error.message


def test_what_all_variants_share_is_still_called_set(here):
    error = error_of("compare", "shop.yaml", "--strategies", "sma", "--set", "train.clip_norm=0")
    assert "train.clip_norm (--set): got 0" in error.message


def test_a_factor_that_makes_a_rate_too_large_is_named(here):
    error = error_of("compare", "shop.yaml", "--strategies", "sma", "--rates", "1e30")
    assert "optimizer.lr (--rates 1e+30): got" in error.message


@pytest.mark.parametrize(
    ("verb", "near"), [("trian", "train"), ("Simulat", "simulate"), ("confg", "config")]
)
def test_a_misspelt_verb_is_answered_with_the_near_one(verb, near):
    done = CliRunner().invoke(root, [verb, "shop.yaml"])
    assert done.exit_code == 2
    assert f"no command '{verb}'; did you mean {near}?" in done.output
    assert "did you mean" not in CliRunner().invoke(root, ["xyzzy"]).output


@pytest.mark.parametrize("group", [[], ["certs"], ["config"], ["data"], ["lab"], ["prices"]])
def test_no_verb_is_told_of_in_half_a_sentence(group):
    told = CliRunner().invoke(root, [*group, "--help"], terminal_width=80).output
    assert not [line for line in told.split("Commands:")[1].splitlines() if line.endswith("...")]


def test_one_typo_is_one_problem(here):
    (here / "typo.yaml").write_text(TEXT.replace("optimizer:", "optimiser:"))
    error = error_of("simulate", "typo.yaml")
    assert "1 problem:" in error.message and "optimiser (line 7)" in error.message


@pytest.mark.parametrize("verb", ["simulate", "train"])
@pytest.mark.parametrize(
    ("change", "absent"), [("train.steps", "torch"), ("train.stepz=3", "ray"), ("a.b=[", "torch")]
)
def test_mistakes_are_told_before_what_takes_long_is_imported(verb, change, absent, here):
    script = (
        "import sys\nfrom geo_ray.cli.main import root\n"
        "from geo_ray.base.errors import ConfigError\n"
        f"words = [{verb!r}, 'shop.yaml', '--set', {change!r}]\n"
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
        (["--links", "lnks.json"], "no link table lnks.json; did you mean links.json?"),
        (["--profile", "p.json"], "no profile p.json"),
        (["--prices", "prics.json"], "no price file prics.json"),
        (["--links", "."], ". is a directory, not a link table"),
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


def test_an_option_of_a_check_is_called_as_it_was_typed(here: Path) -> None:
    error = error_of("check", "sma", "--option", "interval=-3")
    assert "option.interval (--option)" in error.message and "--set" not in str(error)
    assert error.fix == "Correct --option."


def test_a_misspelt_strategy_is_answered_with_the_near_one(here: Path) -> None:
    assert error_of("check", "smaa").message.endswith("did you mean 'sma'?")


def test_a_run_that_is_not_there_has_no_file_that_cannot_be_read(here: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no run \S+/none\n"):
        geo_ray.open_run("runs/none")
