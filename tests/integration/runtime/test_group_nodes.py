"""A process group on two machines, one of which is lost, on nodes of the shared cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.telemetry.events import Event
from tests.support.train_support import train

pytestmark = pytest.mark.slow

HOSTS = {"hill-1": "127.0.0.51", "hill-2": "127.0.0.52", "hill-3": "127.0.0.53"}

LOOP = """
import json, os, time
from pathlib import Path
import torch, geo_ray
from torch import nn
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).parent
NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR")

def train(rank: geo_ray.GroupRank) -> None:
    import ray
    about = {name: os.environ[name] for name in NAMES}
    about["host"] = ray.util.get_node_ip_address()
    path = HERE / f"{rank.region}-{rank.rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(about))
    path.with_suffix(".tmp").rename(path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.randn(8, 8)
    with rank.join() as site, site.training(model) as sync:
        for x in sync.batches([rows]):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
            loss.backward()
            optimizer.step()
            time.sleep(0.0 if (HERE / "fast").exists() else 0.2)
            sync.step(rows=len(x), loss=loss)
"""


@pytest.fixture
def nodes(ray_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Three machines of a region, gone afterwards."""
    for name, host in HOSTS.items():
        flags = [f"--address={ray_cluster.address}", f"--labels={REGION_LABEL}=hill"]
        ray_cluster._start_node(name, host, [*flags, "--num-cpus=2"])
    for name in HOSTS:
        there = ray_cluster._directory(name) / "ray_current_cluster"
        ray_cluster._wait(there.is_file, name, time.monotonic() + 90)
    yield ray_cluster
    for name in HOSTS:
        ray_cluster._processes.kill(name)


def test_a_group_on_two_machines_survives_the_loss_of_one(
    nodes: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "my_loop.py").write_text(LOOP)
    ranks = {"cpus_per_rank": 0.5, "loop": "my_loop.py:train"}
    experiment = Experiment.model_validate_json(
        json.dumps(
            {
                "name": "tiny",
                "regions": [
                    {"name": "us-east", "group": ranks},
                    {"name": "hill", "group": {**ranks, "nodes": 2, "ranks_per_node": 2}},
                ],
                "strategy": {"kind": "diloco", "interval": 2},
                "train": {"steps": 3000},
                "serve": {"port": 0},
                "checkpoint": {"every_s": None},
                "cluster": {"kind": "existing"},
                "run": {"dir": str(tmp_path / "runs")},
            }
        )
    )
    lost: list[str] = []
    first: dict[int, dict[str, Any]] = {}

    def places() -> dict[int, dict[str, Any]]:
        return {rank: json.loads((tmp_path / f"hill-{rank}.json").read_text()) for rank in range(4)}

    def on_event(event: Event) -> None:
        if event.kind == "step" and event["region"] == "hill" and not lost:
            first.update(places())
            hosts = {host: name for name, host in HOSTS.items()}
            lost.append(hosts[first[2]["host"]])
            nodes._processes.kill(lost[0])
        if event.kind == "region_joined":
            (tmp_path / "fast").touch()

    done = train(experiment, tmp_path, sink=on_event)
    for found in (first, places()):
        hosts = [found[rank]["host"] for rank in range(4)]
        assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
        assert [found[rank]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
        assert {each["LOCAL_WORLD_SIZE"] for each in found.values()} == {"2"}
        assert {each["WORLD_SIZE"] for each in found.values()} == {"4"}
        assert {each["MASTER_ADDR"] for each in found.values()} == {hosts[0]}
    assert HOSTS[lost[0]] not in {each["host"] for each in places().values()}
    assert [event["region"] for event in done.of("region_joined")] == ["hill"]
    last = {event["region"]: event["step"] for event in done.of("step")}
    assert last["us-east"] == 3000
