"""Verbs that look at something, as functions."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

import geo_ray
from geo_ray.api.certs import certs, init_certs, issue_cert, renew_ca, renew_certs
from geo_ray.api.data import check_data, merge_data
from geo_ray.api.plan import PlanInputs, replan
from geo_ray.api.prices import prices
from geo_ray.base import errors

ROOT = Path(__file__).parents[3]
PLANNED = {
    "task.options": {"size": "0.1M"},
    "train": {"steps": 4, "eval_every": 2, "eval_batch_size": 64},
    "data.batch_size": 4,
    "emulate.step_s": 0.5,
    "optimizer.schedule": None,
}
CHANGES = {"train.steps": 2, "task.options": {"width": 2}, "data.generate.rows_per_shard": 512}


def test_shards_are_checked_and_a_report_is_written_anew(tmp_path: Path) -> None:
    run = geo_ray.simulate(ROOT / "configs" / "quickstart.yaml", CHANGES | {"run.dir": tmp_path})
    page = geo_ray.report(run.path, tmp_path / "page.html")
    assert page.read_text().startswith("<!doctype html>") or "<html" in page.read_text()[:200]
    manifest = str(next(run.path.rglob("manifest.json")))
    good = check_data(manifest)
    good.raise_if_bad()
    assert good.bad == () and set(good.table()["error"]) == {None}
    assert repr(good).startswith("<DataCheck: 0 of ")
    shard = next(run.path.rglob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-9] + b"wrong end")
    found = check_data(manifest)
    assert len(found.bad) == 1 and "<td>whole</td>" in found._repr_html_()
    with pytest.raises(errors.DataError):
        found.raise_if_bad()
    with pytest.raises(errors.ManifestError, match="mars"):
        check_data(manifest, region="mars")
    merged = merge_data([manifest], str(tmp_path / "merged.json"))
    assert check_data(merged.path).manifest == merged.manifest


def test_prices_are_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    table = prices().table()
    some = prices(cloud="aws", region="us-east-1")
    assert 0 < len(some.book.records) < table.num_rows and "us-east-1" in some._repr_html_()
    assert table.num_rows > 10 and {"amount", "currency", "unit", "age_s"} <= {*table.column_names}
    assert min(table["amount"]) > 0
    with pytest.raises(errors.PriceUnknownError, match="'us-east-11'; did you mean us-east-1"):
        prices(region="us-east-11")


def test_certificates_are_made_listed_and_renewed(tmp_path: Path) -> None:
    ca = init_certs(tmp_path)
    assert ca == tmp_path / "ca.pem" and ca.with_suffix(".key").exists()
    home = issue_cert(tmp_path, "eu", days=10, hosts=["eu.example"])
    assert sorted(path.name for path in home.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
    with pytest.raises(errors.CertificateError):
        issue_cert(tmp_path, "eu")
    found = certs(tmp_path)
    assert [row["state"] for row in found.table().to_pylist()] == ["good", "renew soon"]
    assert found.bad == () and repr(found) == "<Certificates: 0 of 2 not valid>"
    later = replace(found, at=found.at + timedelta(days=11))
    assert [entry.name for entry in later.bad] == ["eu"] and "EXPIRED" in later._repr_html_()
    assert renew_certs(tmp_path) == {"eu": home / "cert.pem"}
    assert renew_ca(tmp_path) == ("eu",)
    assert {row["state"] for row in certs(tmp_path).table().to_pylist()} == {"good"}


def test_a_plan_is_a_value_and_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    changes = PLANNED | {"run.dir": str(tmp_path)}
    config = ROOT / "configs" / "planned.yaml"
    planned = geo_ray.plan(config, changes, front=True)
    assert planned.front and planned.seconds > 0 and repr(planned).startswith("<Plan optimal: ")
    assert {"s", "USD"} == set(planned.terms()["unit"])
    assert set(planned.table()["region"]) == {r.region for r in planned.plan.regions}
    assert "<table>" in planned._repr_html_()
    saved = planned.save(tmp_path / "plan.json")
    runs = [geo_ray.simulate(config, changes, plan=each) for each in (planned, saved)]
    assert runs[0].summary.digest == runs[1].summary.digest and runs[0].summary.usd is not None
    with pytest.raises(errors.RunDirectoryError):
        replan(tmp_path, config, changes)


def test_what_is_left_of_a_run_is_planned_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    config = ROOT / "configs" / "planned.yaml"
    changes = PLANNED | {"run.dir": "runs", "train": {"steps": 5000, "eval_every": 0}}
    planned = geo_ray.plan(config, changes)

    def stop(event: geo_ray.Event) -> None:
        if event.kind == "step" and event["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        geo_ray.simulate(config, changes, plan=planned, on_event=stop)
    run = geo_ray.open_run("runs/planned")
    stays = replan(run, config, changes)
    assert not stays.changed and "stays" in stays.reason and 0 < stays.seconds < planned.seconds
    rented = {(m.type, m.market) for region in planned.plan.regions for m in region.machines}
    assert {(m.type, m.market) for r in stays.plan.regions for m in r.machines} == rented
    # What was rented becomes far dearer.
    known = prices(cloud="aws").book.records
    dear = [
        record.model_dump(mode="json") | {"amount": 100 * record.amount, "lowest": None}
        for record in known
        if record.item == "instance" and (record.type, record.market) in rented
    ]
    Path("dear.json").write_text(json.dumps({"records": dear}))
    inputs = PlanInputs(prices=["dear.json"])
    other = replan(run.path, config, changes, inputs=inputs)
    assert other.changed and other.plan.steps == planned.plan.steps
    assert not {(m.type, m.market) for r in other.plan.regions for m in r.machines} & rented
