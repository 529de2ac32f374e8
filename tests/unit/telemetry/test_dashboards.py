"""Dashboards and alerts ask for metrics that exist, by labels that they have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from geo_ray.cli.dashboards import dashboards as command
from geo_ray.telemetry.metrics import METRICS

PROMTOOL = shutil.which("promtool")
LABELS = {
    f"ray_{spec.name}{'_total' if spec.kind == 'counter' else ''}": set(spec.tag_keys)
    for spec in METRICS
}
WORDS = {"sum", "max", "min", "avg", "by", "on", "and", "rate", "increase", "changes", "offset"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "new"
    ran = CliRunner().invoke(command, [str(folder)])
    assert ran.exit_code == 0
    assert sorted(map(Path, ran.output.split())) == sorted(folder.iterdir())
    return folder


def queries(folder: Path) -> dict[str, str]:
    """Every query by where it stands."""
    found: dict[str, str] = {}
    for path in folder.glob("*.json"):
        page_state = json.loads(path.read_text())
        for panel in page_state["panels"]:
            for target in panel["targets"]:
                found[f"{path.name}/{panel['title']}/{target['refId']}"] = target["expr"]
        for variable in page_state["templating"]["list"]:
            if variable["type"] == "query":
                inner = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
                assert inner is not None and inner[2] in ("run", "region")
                found[f"{path.name}/{variable['name']}"] = inner[1]
    for rule in rules(folder):
        found[rule["alert"]] = rule["expr"]
    return found


def rules(folder: Path) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((folder / "geo_ray_alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def test_every_query_asks_for_metrics_that_exist(folder: Path) -> None:
    found = queries(folder)
    assert len(found) > 25
    asked = set()
    for place, query in found.items():
        names = set(re.findall(r"ray_\w+", query))
        assert names, place
        assert names <= set(LABELS), place
        asked |= names
        for name, inside in re.findall(r"(ray_\w+)\{([^}]*)\}", query):
            labels = set(re.findall(r'(\w+)=~?"', inside))
            assert labels <= LABELS[name], place
        for labels_text in re.findall(r"(?:by|on) \(([^)]*)\)", query):
            wanted = {word.strip() for word in labels_text.split(",")}
            assert any(wanted <= LABELS[name] for name in names), place
    assert asked == set(LABELS), "and no metric is shown nowhere"


def test_the_rule_of_names_bites() -> None:
    assert "ray_geo_ray_step_index" in LABELS
    assert "ray_geo_ray_step_index_total" not in LABELS
    assert "ray_geo_ray_samples_count" not in LABELS


def test_counters_are_asked_for_their_growth_and_gauges_are_not(folder: Path) -> None:
    for place, query in queries(folder).items():
        for name in re.findall(r"ray_\w+", query):
            grows = re.findall(rf"(rate|increase)\({name}\b", query)
            assert bool(grows) == name.endswith("_total"), place


def test_panels_have_places_of_their_own(folder: Path) -> None:
    for path in folder.glob("*.json"):
        page_state = json.loads(path.read_text())
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in page_state["panels"]]
        assert len(set(places)) == len(places)
        assert len({p["id"] for p in page_state["panels"]}) == len(places)
        assert all(p["datasource"]["uid"] == "${datasource}" for p in page_state["panels"])


def test_labels_that_an_alert_tells_are_those_that_it_has(folder: Path) -> None:
    for rule in rules(folder):
        told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        first = re.search(r"by \(([^)]*)\)", rule["expr"])
        assert first is not None
        assert told <= {word.strip() for word in first[1].split(",")}, rule["alert"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool, of the package prometheus, is not here")
def test_prometheus_takes_every_query(folder: Path, tmp_path: Path) -> None:
    plain = {
        "groups": [
            {
                "name": "dashboards",
                "rules": [
                    {"record": f"q{i}", "expr": re.sub(r"\$(run|region)", ".*", query)}
                    for i, query in enumerate(queries(folder).values())
                ],
            }
        ]
    }
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(plain))
    for file in (folder / "geo_ray_alerts.yaml", tmp_path / "plain.yaml"):
        ran = subprocess.run([str(PROMTOOL), "check", "rules", str(file)], capture_output=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


SERIES = """
rule_files: [{rules}]
tests:
- interval: 1m
  input_series:
  - {{series: 'ray_geo_ray_step_index{{run="a",region="eu"}}', values: '0+5x40'}}
  - {{series: 'ray_geo_ray_step_index{{run="a",region="us"}}', values: '0+5x10 50x30'}}
  - {{series: 'ray_geo_ray_step_index{{run="b",region="eu"}}', values: '7x40'}}
  - {{series: 'ray_geo_ray_workers_lost_count_total{{run="a",region="eu"}}', values: '0x5 5x34'}}
  alert_rule_test:
  - {{eval_time: 35m, alertname: GeoRayNoProgress, exp_alerts: [
      {{exp_labels: {{severity: critical, run: b}}, exp_annotations: {{
        summary: "Run b has taken no step for 15 minutes.",
        description: "`geo-ray status RUN` shows whether its run actor runs and which
          regions it waits for."}}}}]}}
  - {{eval_time: 35m, alertname: GeoRayRegionStalled, exp_alerts: [
      {{exp_labels: {{severity: warning, run: a, region: us}}, exp_annotations: {{
        summary: "Region us of a makes no progress while others train.",
        description: "`geo-ray watch RUN` shows whether it is lost, waits for its link or has
          left."}}}}]}}
  - {{eval_time: 35m, alertname: GeoRayStepsRefused, exp_alerts: []}}
"""


@pytest.mark.skipif(PROMTOOL is None, reason="promtool, of the package prometheus, is not here")
def test_alerts_fire_when_they_should(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "test.yaml"
    file.write_text(SERIES.format(rules=folder / "geo_ray_alerts.yaml"))
    ran = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
