"""Kills the queue actor repeatedly while its jobs arrive, start, train and end."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayError
from ray.job_submission import JobSubmissionClient

import geo_ray
from geo_ray.api.queue import (
    QueueUser,
    new_queue_token,
    queue_report,
    start_queue,
    stop_queue,
    submit_job,
)
from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.scheduler.queue.actor import find_queue
from geo_ray.scheduler.queue.config import QueueConfig

LONGEST_S = 900.0


def job(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "task": {"use": "digits", "options": {"width": 2}},
        "data": {"generate": {"rows_per_shard": 128, "split": {"kind": "iid"}}, "batch_size": 8},
        "regions": [{"name": "us-east", "cpus_per_worker": 0.5, "cpus_per_server": 0.25}],
        "strategy": {"kind": "sma", "interval": 4},
        "optimizer": {"kind": "momentum", "lr": 0.05},
        "train": {"steps": 60, "eval_every": 0},
        "emulate": {"step_s": 0.05},
    }


@pytest.mark.slow  # without Ray, at every point: tests/property/scheduler/queue
@pytest.mark.timeout(1000)
def test_a_queue_whose_actor_dies_all_the_time(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    token, key = new_queue_token()
    user = QueueUser("red", token)
    config = QueueConfig.model_validate(
        {
            "name": "dies",
            "policy": "fifo",
            "slot_s": 2.0,
            "state": str(tmp_path / "queues"),
            "runs": str(tmp_path / "runs"),
            "regions": {"us-east": {"cpus": 1.0}},  # room for one of them
            "tenants": {"red": {"key": key}},
        }
    )
    place = start_queue(config, address=ray_cluster.address)
    kills = 0
    try:
        for name in ("a", "b"):
            submit_job(place, job(name), user=user, wait_s=0.0)
        deadline_s = time.monotonic() + LONGEST_S
        with connect(ExistingClusterConfig(address=ray_cluster.address), [], namespace="kills"):
            while True:
                rows = queue_report(place).jobs
                if len(rows) == 2 and all(row.state == "ended" for row in rows):
                    break
                assert time.monotonic() < deadline_s, rows
                actor: Any = find_queue("dies")
                with suppress(RayError):  # it is being started anew
                    if ray.get(actor.served.remote(), timeout=20.0).iterations > kills % 4:
                        ray.kill(actor, no_restart=False)
                        kills += 1
                time.sleep(0.5)
    finally:
        stop_queue(config, address=ray_cluster.address)
    assert kills > 2
    assert {row.name: row.outcome for row in rows} == {"a": "finished", "b": "finished"}
    first, second = sorted(rows, key=lambda row: row.segments[0].since_unix_s)
    assert first.segments[-1].until_unix_s is not None
    assert second.segments[0].since_unix_s >= first.segments[-1].until_unix_s
    with connect(ExistingClusterConfig(address=ray_cluster.address), [], namespace="looks") as at:
        jobs = JobSubmissionClient(f"http://{at.dashboard}").list_jobs()
    names = sorted(str(each.submission_id) for each in jobs)
    ids = sorted(row.id for row in rows)
    mine = [name for name in names if name.startswith("geoq-dies.")]
    assert mine == [f"geoq-dies.{each}.1" for each in ids]
    for each in ids:
        assert geo_ray.open_run(tmp_path / "runs" / "dies" / each).summary.steps == 60
