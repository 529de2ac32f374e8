"""Verbs that look at something, as functions."""

from __future__ import annotations

from pathlib import Path

import pytest

import geo_ray
from geo_ray import errors

ROOT = Path(__file__).parents[3]
CHANGES = {"train.steps": 2, "task.options": {"width": 2}, "data.generate.rows_per_shard": 512}


def test_shards_are_checked_and_a_report_is_written_anew(tmp_path: Path) -> None:
    run = geo_ray.simulate(ROOT / "configs" / "quickstart.yaml", CHANGES | {"run.dir": tmp_path})
    page = geo_ray.report(run.path, tmp_path / "page.html")
    assert page.read_text().startswith("<!doctype html>") or "<html" in page.read_text()[:200]
    manifest = str(next(run.path.rglob("manifest.json")))
    good = geo_ray.check_data(manifest)
    good.raise_if_bad()
    assert good.bad == () and good.table()["error"].null_count == len(good.verdicts)
    assert repr(good).startswith("<DataCheck: 0 of ")
    shard = next(run.path.rglob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-9] + b"wrong end")
    found = geo_ray.check_data(manifest)
    assert len(found.bad) == 1 and "<td>whole</td>" in found._repr_html_()
    with pytest.raises(errors.DataError):
        found.raise_if_bad()
    with pytest.raises(errors.ManifestError, match="mars"):
        geo_ray.check_data(manifest, region="mars")
    merged = geo_ray.merge_data([manifest], str(tmp_path / "merged.json"))
    assert geo_ray.check_data(merged.path).manifest == merged.manifest


def test_prices_are_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    table = geo_ray.prices()
    assert table.num_rows > 10 and {"amount", "currency", "unit", "age_s"} <= {*table.column_names}
    assert min(table["amount"].to_pylist()) > 0


def test_a_plan_is_a_value_and_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    changes = {
        "task.options": {"size": "0.1M"},
        "train": {"steps": 4, "eval_every": 2, "eval_batch_size": 64},
        "data.batch_size": 4,
        "emulate.step_s": 0.5,
        "run.dir": str(tmp_path),
        "optimizer.schedule": None,
    }
    config = ROOT / "configs" / "planned.yaml"
    planned = geo_ray.plan(config, changes, front=True)
    assert planned.front and planned.seconds > 0 and repr(planned).startswith("<Plan optimal: ")
    assert {"s", "USD"} == set(planned.terms()["unit"].to_pylist())
    assert set(planned.table()["region"].to_pylist()) == {r.region for r in planned.plan.regions}
    assert "<table>" in planned._repr_html_()
    saved = planned.save(tmp_path / "plan.json")
    runs = [geo_ray.simulate(config, changes, plan=each) for each in (planned, saved)]
    assert runs[0].summary.digest == runs[1].summary.digest and runs[0].summary.usd is not None
    with pytest.raises(errors.RunDirectoryError):
        geo_ray.replan(tmp_path, config, changes)
