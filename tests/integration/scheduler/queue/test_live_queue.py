"""The queue on a real cluster: a job, a killed actor, a drained region, and the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.job_submission import JobSubmissionClient

import geo_ray
from geo_ray.api.queue import (
    QueueUser,
    cancel_job,
    new_queue_token,
    queue_report,
    start_queue,
    stop_queue,
    submit_job,
)
from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.detached import end_queues
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.scheduler.queue.actor import find_queue
from geo_ray.scheduler.queue.config import QueueConfig

LONGEST_S = 300.0
TOKEN, KEY = new_queue_token()
USER = QueueUser("red", TOKEN)


def eventually(what: Callable[[], Any], why: Callable[[], object] = str) -> Any:
    deadline_s = time.monotonic() + LONGEST_S
    while not (found := what()):
        assert time.monotonic() < deadline_s, why()
        time.sleep(0.3)
    return found


def queue_config(work: Path, **regions: dict[str, float]) -> QueueConfig:
    return QueueConfig.model_validate(
        {
            "name": "live",
            "policy": "fifo",
            "slot_s": 2.0,
            "state": str(work / "queues"),
            "runs": str(work / "runs"),
            "regions": {"us-east": {"cpus": 4.0}, "eu-west": {"cpus": 4.0}} | regions,
            "tenants": {"red": {"key": KEY}},
        }
    )


JOB: dict[str, Any] = {
    "name": "long",
    "task": {"use": "digits", "options": {"width": 2}},
    "data": {"generate": {"rows_per_shard": 128, "split": {"kind": "iid"}}, "batch_size": 8},
    "regions": [
        {"name": name, "cpus_per_worker": 0.5, "cpus_per_server": 0.25}
        for name in ("us-east", "eu-west")
    ],
    "strategy": {"kind": "sma", "interval": 4},
    "optimizer": {"kind": "momentum", "lr": 0.05},
    "train": {"steps": 100_000, "eval_every": 0},
    "members": {"min": 1},
    "emulate": {"step_s": 0.2},
    "checkpoint": {"every_s": 60.0},
}


@pytest.mark.timeout(900)
def test_a_job_runs_grows_smaller_and_is_saved(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    config = queue_config(tmp_path)
    place = start_queue(config, address=ray_cluster.address)
    try:
        answer = submit_job(place, JOB, user=USER, wait_s=LONGEST_S)
        assert answer.is_processed

        def row() -> Any:
            return queue_report(place).job("long")

        run = tmp_path / "runs" / "live" / row().id

        def states() -> dict[str, str]:
            return {r["region"]: r["state"] for r in geo_ray.members(run).to_pylist()}

        eventually(lambda: row().done > 0, row)
        assert states() == {"us-east": "member", "eu-west": "member"}

        with connect(ExistingClusterConfig(address=ray_cluster.address), [], namespace="kills"):
            actor: Any = find_queue("live")
            ray.kill(actor, no_restart=False)
        smaller = queue_config(tmp_path, **{"eu-west": {"cpus": 0.0}})
        assert start_queue(smaller, address=ray_cluster.address) == place
        eventually(lambda: states()["eu-west"] == "left", states)
        assert row().segments[-1].workers == {"us-east": 1}
        assert row().state == "running"

        cancel_job(place, "long", user=USER, wait_s=LONGEST_S)
        eventually(lambda: row().state == "ended", row)
        assert row().outcome == "cancelled"
        assert row().attempts == 1
        assert geo_ray.checkpoints(run).num_rows > 0
        assert geo_ray.status(run).phase == "stopped"
    finally:
        stop_queue(config, address=ray_cluster.address)
    assert start_queue(config, address=ray_cluster.address) == place
    with connect(ExistingClusterConfig(address=ray_cluster.address), [], namespace="looks") as at:
        assert end_queues() == ["geo-ray-queue-live"]  # as `geo-ray down` does
        eventually(lambda: find_queue("live") is None)
        jobs = JobSubmissionClient(f"http://{at.dashboard}").list_jobs()
    mine = [job for job in jobs if str(job.submission_id).startswith("geoq-live.")]
    assert [job.status.is_terminal() for job in mine] == [True]
