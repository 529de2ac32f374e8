"""The unmodified product over the lab: one Ray node per namespace, `geo-ray train` inside one.

Nodes have addresses of their own, ask for a token, and encrypt what Ray itself says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from geo_ray.base.errors import ClusterStartError
from geo_ray.lab.lab import Lab, RayOptions, environment_of, start_ray
from geo_ray.lab.topology import DefaultLink, LabRegionConfig, Topology
from tests.support.lab_support import needs_lab

TRAIN_S = 300.0  # never reached
EXPERIMENT = """
name: over_the_lab
cluster: {kind: existing}
task: {use: digits}
data:
  generate: {split: {kind: iid}, rows_per_shard: 128}
  batch_size: 16
regions: [{name: A, workers: 1}, {name: B, workers: 1}]
strategy: {kind: sma, interval: 4}
optimizer: {kind: momentum, lr: 0.05}
train: {steps: 8, eval_every: 8}
averager: {region: A}
"""


@needs_lab
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_the_unmodified_product_trains_over_the_lab(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    topology = Topology(
        link=DefaultLink(rate_mbps=100.0, delay_s=0.005),
        regions=(LabRegionConfig(name="A"), LabRegionConfig(name="B")),
    )
    with Lab(topology) as lab:
        environment = start_ray(lab, RayOptions(cpus=6, tls=True))
        assert environment_of(Lab.attach(lab.lab_id)) == environment
        root = Path(environment["RAY_AUTH_TOKEN_PATH"]).parent
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_USE_TLS"] == "1"
        assert not _speaks_plainly(lab, environment["RAY_ADDRESS"])
        with pytest.raises(ClusterStartError):
            start_ray(lab)
        lab.reset()
        argv = [sys.executable, "-m", "geo_ray.cli.main", "train", "e.yaml", "--plain"]
        with lab.popen(
            "A",
            argv,
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as train:
            said, _ = train.communicate(timeout=TRAIN_S)
        assert train.returncode == 0, said[-3000:]
        stats = lab.stats()
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["steps"] == 8
    # what the two regions said to each other has crossed the links, and nothing went elsewhere
    assert stats.links["A", "B"].out_bytes > 100_000 < stats.links["B", "A"].out_bytes
    assert not root.exists()


def _speaks_plainly(lab: Lab, address: str) -> bool:
    """Whether the head answers a greeting that is not encrypted."""
    code = (
        "from geo_ray.ray_cluster.connect import wait_for_ray; import sys;"
        "wait_for_ray(sys.argv[1], 3.0)"
    )
    plain = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    argv = [sys.executable, "-c", code, address]
    with lab.popen("B", argv, env=plain, stderr=subprocess.DEVNULL) as asked:
        return asked.wait(60) == 0
