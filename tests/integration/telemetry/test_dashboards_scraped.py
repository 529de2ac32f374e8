"""What dashboards and alerts ask for is what Ray's metrics port really serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.telemetry.dashboards import write_dashboards
from geo_ray.telemetry.metrics import METRICS

RUN = "scraped-run"
DRIVER = Path(__file__).parents[2] / "support" / "metrics_server.py"
TESTS = DRIVER.parents[1]


@pytest.fixture
def pages(ray_cluster: LocalCluster) -> Iterator[list[str]]:
    """Where metrics are served while a driver feeds them."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {"RAY_metrics_report_interval_ms": "250", "PYTHONPATH": paths}
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER), ray_cluster.address, RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | environment,
        text=True,
    )
    assert driver.stdin is not None and driver.stdout is not None
    try:
        yield driver.stdout.readline().split()
    finally:
        driver.stdin.close()
        driver.stdout.close()
        assert driver.wait(60) == 0


def scraped(pages: list[str]) -> str:
    texts = []
    for url in pages:
        # Nodes that other tests have ended may be listed for a while.
        with suppress(OSError), urllib.request.urlopen(url, timeout=30) as answer:
            texts.append(answer.read().decode())
    return "\n".join(texts)


def test_every_metric_that_is_asked_for_is_served(pages: list[str], tmp_path: Path) -> None:
    text = "".join(path.read_text() for path in write_dashboards(tmp_path))
    asked = set(re.findall(r"ray_geo_ray_\w+", text))
    assert len(asked) == len(METRICS) and pages
    ends_s = time.monotonic() + 60
    while True:
        lines = [line for line in scraped(pages).splitlines() if f'run="{RUN}"' in line]
        found = {re.split(r"[{ ]", line)[0] for line in lines}
        if asked <= found or time.monotonic() > ends_s:
            break
        time.sleep(0.2)
    assert asked - found == set()
    for line in lines:
        labels = set(re.findall(r'(\w+)="', line))
        spec = next(s for s in METRICS if line.startswith((f"ray_{s.name}{{", f"ray_{s.name}_")))
        assert set(spec.tag_keys) <= labels, line
