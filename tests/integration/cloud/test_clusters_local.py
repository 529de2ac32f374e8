"""Life of a local cluster, including a preemption."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.job_submission import JobStatus, JobSubmissionClient

import geo_ray
from geo_ray.api.clusters import cluster_status
from geo_ray.cloud.cluster.state import ClusterState
from geo_ray.cloud.cluster.status import ClusterReport
from geo_ray.cloud.local import LocalProvider, read_catalog, write_catalog
from geo_ray.ray_cluster.settings import driver_environment
from tests.support.train_support import count, events_of

ROOT = Path(__file__).resolve().parents[3]
LONGEST_S = 300.0


def eventually(what: Callable[[], Any], why: Callable[[], object] = str) -> Any:
    deadline_s = time.monotonic() + LONGEST_S
    while not (found := what()):
        assert time.monotonic() < deadline_s, why()
        time.sleep(0.5)
    return found


def small(work: Path) -> Path:
    """The documented configuration with two regions, in a temporary directory."""
    tree = yaml.safe_load((ROOT / "configs" / "cluster_local.yaml").read_text())
    tree["name"] = "small"
    tree["regions"] = [each for each in tree["regions"] if each["name"] != "asia"]
    del tree["plan"]["regions"]["asia"]
    tree["run"]["dir"] = str(work / "runs")
    tree["provider"]["state"] = str(work / "clusters")
    tree["train"] |= {"steps": 100000, "eval_every": 0}
    tree["emulate"]["step_s"] = 0.2
    tree["autoscale"] |= {"every_s": 1.0, "drain_s": 10}
    path = work / "job" / "small.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def work() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gc", dir="/tmp"))
    yield path
    state = ClusterState.at(str(path / "clusters" / "small"))
    if state.read()[0] is not None:
        geo_ray.down(state.uri, at_once=True)
    shutil.rmtree(path)


@pytest.mark.timeout(900)
def test_a_cluster_from_nothing_to_nothing(work: Path) -> None:
    config = small(work)
    told: list[str] = []
    made = geo_ray.up(config, provider="local", longest_s=0, notify=told.append)
    root = Path(made.state.uri) / "cloud"
    write_catalog(root, read_catalog(root).model_copy(update={"owner_pid": os.getpid()}))
    assert made.report.job_server is not None
    assert made.report.head is not None
    assert {node_group.region: node_group.planned for node_group in made.report.node_groups} == {
        "us": 1,
        "eu": 1,
    }
    cloud = LocalProvider(root)
    secret = Path(made.environment["RAY_AUTH_TOKEN_PATH"])
    assert secret.stat().st_mode & 0o077 == 0

    def report() -> ClusterReport:
        return cluster_status(made.state.uri)

    def is_full() -> bool:
        return all(
            node_group.ready == node_group.planned == 1 for node_group in report().node_groups
        )

    with driver_environment(made.environment):
        client = JobSubmissionClient(made.report.job_server)
        entry = "geo-ray train small.yaml"
        env = {"working_dir": str(config.parent)}
        job = client.submit_job(entrypoint=entry, runtime_env=env)  # no machine may be there yet
        run = work / "runs" / "small"

        def steps() -> int:
            return count(run, "step")

        def logs() -> object:
            return client.get_job_logs(job), report().model_dump_json(indent=1)

        eventually(lambda: steps() > 6, logs)
        eventually(is_full, logs)
        before = report()
        assert before.acts
        assert before.left_s is not None
        assert before.to_finish_usd is not None
        assert before.spent_usd > 0
        assert any(each.alternatives for each in before.decisions)

        (taken,) = [row for row in before.machines if row.region == "eu"]
        cloud.preempt(taken.id, notice_s=30.0)
        eventually(lambda: taken.id not in {row.id for row in report().machines}, logs)
        eventually(is_full, logs)
        assert any("the cloud reclaims it" in each.reason for each in report().decisions)
        there = steps()
        eventually(lambda: steps() > there + 6, logs)
        (drained,) = (event for event in events_of(run) if event.kind == "region_drained")
        assert (drained["region"], drained["cause"]) == ("eu", "notice")
        eventually(lambda: count(run, "region_joined") == 1, logs)  # on the other machine
        assert count(run, "region_lost") == 0

        client.stop_job(job)
        eventually(lambda: client.get_job_status(job).is_terminal(), logs)
        assert client.get_job_status(job) == JobStatus.STOPPED
        assert "its state is saved" in client.get_job_logs(job)
        job = client.submit_job(entrypoint=entry, runtime_env=env)
        there = steps()
        eventually(lambda: steps() > there + 5, logs)
        assert [path.name for path in (work / "runs").iterdir()] == ["small"], "it was resumed"

        again = geo_ray.up(config, provider="local", longest_s=0, notify=told.append)
        assert again.report.head is not None
        assert again.report.head.id == made.report.head.id
        assert any("completing it" in line for line in told)

    said: list[str] = []
    ended = geo_ray.down(config, notify=said.append)  # while it trains
    assert ended.in_order, said
    assert any("is saved" in line for line in said)
    last = events_of(run)[-1]
    assert (last.kind, last["code"]) == ("run_failed", "INTERRUPTED"), "it was saved first"
    assert {machine.state.value for machine in cloud.list_machines("small")} == {"ended"}
    assert not secret.exists()
    host, _, port = str(made.report.address).rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0
    assert report().phase == "down"
    again = geo_ray.down(config)
    assert (again.was_down, again.machines) == (True, 0)
