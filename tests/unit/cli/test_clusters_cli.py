"""`geo-ray up --dry-run`, `status` and `down`, as far as they need no cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from geo_ray.base.errors import ClusterStateError, ConfigError, RunDirectoryError
from geo_ray.cli.cluster_tables import offer_lines, offer_table
from geo_ray.cli.main import root
from geo_ray.cloud.cluster.offer import ClusterOffer, OfferedMachines

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
    for word in ("head", "us-east-1", "g4dn.xlarge", "spot", "USD/h", "every 256 steps, int4"):
        assert word in shown.output


def test_a_budget_that_has_not_the_head_in_it_is_told_before_anything_is_rented() -> None:
    def told(budget_usd: float | None) -> list[str]:
        return offer_lines(
            ClusterOffer.model_construct(
                usd_per_hour=4.0, total_usd=6.0, head_usd=2.0, budget_usd=budget_usd
            )
        )

    assert told(None) == told(8.0)
    assert told(None) == ["4 USD/h for machines; the run: 6 USD as planned, 2 USD for the head"]
    assert "plan.budget_usd is 7.9" in told(7.9)[1]
    head = json.loads(said("up", CONFIG, "--provider", "local", "--dry-run", "--json").stdout)
    assert head["head_usd"] == pytest.approx(0.384 * head["total_s"] / 3600)
    assert head["budget_usd"] == 20


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


def test_what_is_not_rented_says_why() -> None:
    def row(region: str, market: str, count: int, score: float | None, note: str = "") -> Any:
        return OfferedMachines(
            region=region,
            role="worker",
            at=region,
            type="m5.large",
            market=market,
            count=count,
            usd_per_hour=score,
            usd_per_million_rows=score,
            note=note,
        )

    machines = (
        row("us", "on_demand", 1, 2.0),
        row("us", "spot", 0, 1.0),
        row("us", "on_demand", 0, 3.0),
        row("eu", "spot", 1, 1.0),
        row("eu", "spot", 0, 0.5, "skipped for 60 s"),
        row("eu", "on_demand", 0, None),
    )
    offer = ClusterOffer.model_construct(machines=machines)
    whys = list(offer_table(offer).columns[-1].cells)
    floor = "cheaper, but preemptible (autoscale.floor)"
    assert whys == ["", floor, "dearer", "", "skipped for 60 s", "dearer"]
