"""What dashboards and alerts ask for is what Ray's metrics port really serves."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from observe_support import events, small_run, started, wan

from geo_ray.observe.dashboards.write import write_dashboards
from geo_ray.observe.metrics.metrics import METRICS
from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.control.metrics import RayMetrics

RUN = "scraped-run"


@pytest.fixture
def served(
    ray_cluster: object, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """This process is connected, and hands its metrics on at once."""
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "250")
    request.getfixturevalue("connected")
    yield


def scraped() -> str:
    texts = []
    for node in ray_private.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            texts.append(answer.read().decode())
    return "\n".join(texts)


def test_every_metric_that_is_asked_for_is_served(served: None, tmp_path: Path) -> None:
    metrics = RayMetrics()
    faults = [
        ("worker_lost", 5.0, {"region": "east", "worker": 0, "cause": "x"}),
        ("worker_replaced", 6.0, {"region": "east", "worker": 0, "epoch": 1}),
        ("step_refused", 7.0, {"region": "east", "step": 3, "cause": "nan"}),
        ("checkpoint", 8.0, {"id": "1", "step": 4, "bytes": 99}),
    ]
    rows = [started(run=RUN), *small_run()[1:], *faults, wan("east", "west", 9.0, reply=9999)]
    for event in events(rows):
        metrics.feed(event)
    text = "".join(path.read_text() for path in write_dashboards(tmp_path))
    asked = set(re.findall(r"ray_geo_ray_\w+", text))
    assert len(asked) == len(METRICS)
    ends_s = time.monotonic() + 30
    while True:
        lines = [line for line in scraped().splitlines() if f'run="{RUN}"' in line]
        found = {re.split(r"[{ ]", line)[0] for line in lines}
        if asked <= found or time.monotonic() > ends_s:
            break
        time.sleep(0.2)
    assert asked - found == set()
    for line in lines:
        labels = set(re.findall(r'(\w+)="', line))
        spec = next(s for s in METRICS if line.startswith((f"ray_{s.name}{{", f"ray_{s.name}_")))
        assert set(spec.tag_keys) <= labels, line
