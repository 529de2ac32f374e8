"""A run's driver is killed, and the next one goes on with its processes: on a real cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import geo_ray
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.runs.lease import LEASE_KEY, decode_record
from geo_ray.telemetry.summary import load_summary
from tests.support.driver_support import actors_of_runs, command, places_of_runs, slow_experiment
from tests.support.train_support import count, events_of, eventually, losses, simulate, write_config

STEPS = 120
pytestmark = [pytest.mark.timeout(900)]


def nothing_left(cluster: LocalCluster) -> bool:
    return not actors_of_runs(cluster) and not places_of_runs()


def check_undisturbed(experiment: Experiment, run_dir: Path, base_dir: Path) -> None:
    """The second driver's run is that of one driver: every step once, the same bits."""
    events = events_of(run_dir)
    kinds = [event.kind for event in events]
    assert kinds.count("run_started") == 1 and kinds.count("driver_attached") == 1
    assert kinds[-1] == "run_finished" and "worker_lost" not in kinds
    for region in experiment.region_names:
        steps = [e["step"] for e in events if e.kind == "step" and e["region"] == region]
        assert steps == list(range(1, experiment.train.steps + 1)), "no step was lost or done twice"
    lease = decode_record((run_dir / LEASE_KEY).read_bytes())
    assert (lease.epoch, lease.released) == (2, True)
    summary, undisturbed = load_summary(run_dir), simulate(experiment, base_dir)
    assert summary is not None and summary.digest == undisturbed.summary.digest
    assert losses(events) == pytest.approx(losses(undisturbed.events))


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
    waiting = geo_ray.status(run_dir)
    assert waiting.phase.startswith("trains on without a driver, waits ")
    assert waiting.fix == f"`geo-ray train --resume {run_dir}` goes on with it."
    with command(second, "--resume", str(run_dir)) as driver:
        assert driver.wait(200) == 0, second.read_text()
    check_undisturbed(experiment, run_dir, tmp_path)
    eventually(lambda: nothing_left(ray_cluster), "nothing is left")


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_a_driver_that_is_an_actor_is_started_again_by_itself(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=100)
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "front.log"
    with command(log, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "step") >= 20 or front.poll() is not None, "trains")
        assert front.poll() is None, log.read_text()
        driver = decode_record((run_dir / LEASE_KEY).read_bytes()).owner.pid
        assert driver != front.pid
        os.kill(driver, signal.SIGKILL)
        assert front.wait(200) == 0, log.read_text()
    assert "driver attached: nobody drove for" in log.read_text()
    check_undisturbed(experiment, run_dir, tmp_path)
    eventually(lambda: nothing_left(ray_cluster), "nothing is left")


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_nobody_comes_and_nothing_is_left(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    runs = {"dir": str(tmp_path / "runs"), "driverless_s": 10.0}
    experiment = slow_experiment(ray_cluster, tmp_path, steps=100_000, run=runs)
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "driver.log"
    with command(log, str(write_config(tmp_path, experiment))) as driver:
        eventually(lambda: count(run_dir, "step") >= 4 or driver.poll() is not None, "trains")
        assert driver.poll() is None, log.read_text()
        driver.kill()
        driver.wait(60)
    assert places_of_runs(), "they outlive their driver for a while"
    eventually(lambda: nothing_left(ray_cluster), "nothing is left")
    alone = geo_ray.status(run_dir)
    assert alone.phase == "cut off"
    assert alone.message == "nobody drove it for 10 s, so its processes have ended"
