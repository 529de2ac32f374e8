"""Clusters on an existing head, with real Ray and real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.util import list_named_actors

from geo_ray.api.clusters import _asked
from geo_ray.cloud.cluster.down import EndedCluster, end_cluster
from geo_ray.cloud.cluster.providers import token_path
from geo_ray.cloud.cluster.spec import ClusterSpec
from geo_ray.cloud.cluster.state import ClusterState, ExistingHead
from geo_ray.cloud.cluster.up import await_machines, make_cluster
from geo_ray.cloud.local import LocalProvider, write_catalog
from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.detached import NAME_PREFIX, NAMESPACE
from geo_ray.ray_cluster.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[3]
LONGEST_S = 300.0


def until(what: Callable[[], object], why: Callable[[], object] = str) -> None:
    deadline_s = time.monotonic() + LONGEST_S
    while not what():
        assert time.monotonic() < deadline_s, why()
        time.sleep(0.1)


@pytest.fixture
def work() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def asked(ray_cluster: LocalCluster, work: Path) -> ClusterSpec:
    """Specification of a cluster of one region on the shared head."""
    tree = yaml.safe_load((ROOT / "configs" / "cluster_local.yaml").read_text())
    tree["name"] = "existing"
    tree["regions"] = [{"name": "us"}]
    tree["plan"]["regions"] = {"us": tree["plan"]["regions"]["us"]}
    tree["provider"]["state"] = str(work / "clusters")
    tree["autoscale"] = {"every_s": 0.5, "drain_s": 5.0, "retry": {"missing_s": 2.0}}
    words: Any = (tree, (), "local", None, "optimal", None, None, lambda _: None)
    found: ClusterSpec = _asked(*words)
    with connect(ExistingClusterConfig(), [], namespace="existing") as cluster:
        assert cluster.dashboard is not None
        port = int(cluster.dashboard.rpartition(":")[2])
    existing = ExistingHead(stack="demo", machine="i-0head", address=ray_cluster.address)
    head = found.record.head.model_copy(update={"existing": existing, "dashboard_port": port})
    record = found.record.model_copy(update={"head": head})
    assert found.catalog is not None
    write_catalog(
        found.state.path / "cloud", found.catalog.model_copy(update={"owner_pid": os.getpid()})
    )
    token = token_path(record, found.state)
    token.parent.mkdir(parents=True)
    shutil.copy(os.environ["RAY_AUTH_TOKEN_PATH"], token)
    return ClusterSpec(record, found.state, found.catalog)


@dataclass
class Serving:
    """The cluster service of the head, as started by systemd."""

    state: ClusterState
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "geo_ray.cloud.cluster.serve", "--stays", self.state.uri]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def serving(asked: ClusterSpec, work: Path) -> Iterator[Serving]:
    serving = Serving(asked.state, work / "serve.log")
    serving.start()
    yield serving
    serving.kill()


def autoscalers() -> list[str]:
    query: Any = list_named_actors
    found = [each["name"] for each in query(all_namespaces=True) if each["namespace"] == NAMESPACE]
    return sorted(name for name in found if name.startswith(f"{NAME_PREFIX}existing"))


@pytest.mark.slow  # test_clusters_local.py has a head of its own
@pytest.mark.timeout(900)
def test_clusters_come_and_go_on_an_existing_head(asked: ClusterSpec, serving: Serving) -> None:
    state = asked.state
    told: list[str] = []

    def up() -> str:
        report = await_machines(make_cluster(asked, told.append), state, LONGEST_S, told.append)
        assert report.head is None and report.acts
        (node_group,) = report.node_groups
        assert node_group.ready == node_group.planned == 1, serving.log.read_text()
        (machine,) = report.machines
        return machine.id

    def down() -> EndedCluster:
        ended = end_cluster(state, told.append)
        assert ended.stack == "demo"
        return ended

    first = up()
    with connect(ExistingClusterConfig(), [], namespace="existing"):
        nodes = [n["Labels"].get("geo-ray/machine") for n in ray.nodes() if n["Alive"]]
        assert nodes.count(first) == 1, "it joined the head that was there"
        assert autoscalers() == [f"{NAME_PREFIX}existing#1"]
        assert down().in_order, told
        until(lambda: not autoscalers(), lambda: serving.log.read_text())

        assert up() != first
        assert autoscalers() == [f"{NAME_PREFIX}existing#2"]

        # What serves the head dies when the cluster is taken down: its successor tidies up.
        serving.kill()
        record, tag = state.read()
        assert record is not None
        tag = state.write(record.model_copy(update={"phase": "down"}), tag)
        assert autoscalers()
        serving.start()
        until(lambda: not autoscalers(), serving.log.read_text)

        state.write(record.model_copy(update={"phase": "up"}), tag)
        down()
        assert not living(state)
        # In the moment that it was up again, an autoscaler may have been made; it goes with it.
        until(lambda: not autoscalers(), serving.log.read_text)
        assert ray.cluster_resources(), "the head lives"


def living(state: ClusterState) -> list[str]:
    listed = LocalProvider(state.path / "cloud").list_machines("existing")
    return [machine.id for machine in listed if machine.state.value != "ended"]
