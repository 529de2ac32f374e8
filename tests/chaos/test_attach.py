"""A run's driver is killed, and the next one goes on with its processes: on a real cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from driver_support import actors_of_runs, command, places_of_runs, slow_experiment
from train_support import count, events_of, eventually, losses, simulate, write_config

from geo_ray.lease.record import LEASE_KEY, decode_record
from geo_ray.observe.metrics.summary import load_summary
from geo_ray.runtime.cluster.local import LocalCluster

STEPS = 240  # longer than a command takes to start
pytestmark = [pytest.mark.timeout(400)]


def nothing_left(cluster: LocalCluster) -> bool:
    return not actors_of_runs(cluster) and not places_of_runs()


@pytest.mark.usefixtures("connected")
def test_a_driver_is_killed_and_the_next_one_attaches(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    runs = {"dir": str(tmp_path / "runs")}
    experiment = slow_experiment(ray_cluster, tmp_path, steps=STEPS, run=runs)
    run_dir = Path(experiment.run.dir) / experiment.name
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with command(first, str(write_config(tmp_path, experiment))) as driver:
        eventually(lambda: count(run_dir, "step") >= 20 or driver.poll() is not None, "trains")
        assert driver.poll() is None, first.read_text()
        driver.kill()
        driver.wait(60)
    with command(second, "--resume", str(run_dir)) as driver:
        assert driver.wait(200) == 0, second.read_text()
    events = events_of(run_dir)
    kinds = [event.kind for event in events]
    assert kinds.count("run_started") == 1 and kinds.count("driver_attached") == 1
    assert kinds[-1] == "run_finished" and "worker_lost" not in kinds
    for region in experiment.region_names:
        steps = [e["step"] for e in events if e.kind == "step" and e["region"] == region]
        assert steps == list(range(1, STEPS + 1)), "no step was lost or done twice"
    lease = decode_record((run_dir / LEASE_KEY).read_bytes())
    assert (lease.epoch, lease.released) == (2, True)
    summary, undisturbed = load_summary(run_dir), simulate(experiment, tmp_path)
    assert summary is not None and summary.digest == undisturbed.summary.digest
    assert losses(events) == pytest.approx(losses(undisturbed.events))
    eventually(lambda: nothing_left(ray_cluster), "nothing is left")
