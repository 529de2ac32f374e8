"""`geo-ray up --dry-run`, `status` and `down`, as far as they need no cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from geo_ray.cli.main import root
from geo_ray.errors import ClusterStateError, ConfigError, RunDirectoryError

CONFIG = str(Path(__file__).resolve().parents[3] / "configs" / "cluster_local.yaml")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(*arguments: str) -> Result:
    return CliRunner().invoke(root, arguments)


def test_a_dry_run_shows_what_would_be_rented(tmp_path: Path) -> None:
    done = said("up", CONFIG, "--provider", "local", "--dry-run", "--json")
    assert done.exception is None, done.output
    offer = json.loads(done.stdout)
    assert [each["role"] for each in offer["machines"] if each["count"]] == ["head"] + [
        "worker"
    ] * 3
    assert offer["usd_per_hour"] > 0
    assert list(tmp_path.iterdir()) == []
    shown = said("up", CONFIG, "--provider", "local", "--dry-run")
    assert "nothing was started" in shown.output
    for word in ("head", "us-east-1", "g4dn.xlarge", "spot", "USD/h"):
        assert word in shown.output


def test_what_is_not_there_is_told() -> None:
    for verb in ("status", "down"):
        done = said(verb, CONFIG)
        assert isinstance(done.exception, ClusterStateError)
        assert "geo-ray up" in str(done.exception)
    assert isinstance(said("status", "clusters/none").exception, RunDirectoryError)
    assert isinstance(said("down", "clusters/none").exception, ClusterStateError)


def test_a_configuration_without_machines_is_refused() -> None:
    quickstart = CONFIG.replace("cluster_local", "quickstart")
    done = said("up", quickstart, "--provider", "local", "--dry-run")
    assert isinstance(done.exception, ConfigError)
    assert "plan" in str(done.exception)
    typo = said("up", CONFIG, "--provider", "lokal")
    assert typo.exit_code == 2
