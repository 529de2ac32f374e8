"""Whoever started a run may die, and so may its driver: real processes on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from geo_ray.runtime.driver.driver_actor import driver_name

from geo_ray.base.errors import DriverLostError, InterruptedRunError
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.runs.lease import LEASE_KEY, decode_record
from geo_ray.telemetry.summary import load_summary
from tests.support.driver_support import actors_of_runs, command, places_of_runs, slow_experiment
from tests.support.train_support import count, events_of, eventually, losses, simulate, write_config

STEPS = 160  # longer than a command takes to start
pytestmark = [pytest.mark.timeout(900)]


def nothing_left(cluster: LocalCluster) -> bool:
    return not actors_of_runs(cluster) and not places_of_runs()


@pytest.mark.slow  # test_attach.py: the driver is killed while training goes on
@pytest.mark.usefixtures("connected")
def test_a_run_outlives_who_started_it_and_is_watched_again(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=STEPS)
    run_dir = Path(experiment.run.dir) / experiment.name
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with command(first, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "step") >= 6 or front.poll() is not None, "trains")
        assert front.poll() is None, first.read_text()
        front.kill()
        front.wait(60)
    before = count(run_dir, "step")
    eventually(lambda: count(run_dir, "step") > before + 4, "training goes on")
    with command(second, "--resume", str(run_dir)) as front:
        assert front.wait(200) == 0, second.read_text()
    assert "watching it" in second.read_text() and "model.safetensors" in second.read_text()
    events = events_of(run_dir)
    assert [event.kind for event in events].count("run_started") == 1
    assert events[-1].kind == "run_finished"
    for region in experiment.region_names:
        steps = [e["step"] for e in events if e.kind == "step" and e["region"] == region]
        assert steps == list(range(1, STEPS + 1)), "no step was lost or done twice"
    lease = decode_record((run_dir / LEASE_KEY).read_bytes())
    assert (lease.epoch, lease.released) == (1, True)
    summary, undisturbed = load_summary(run_dir), simulate(experiment, tmp_path)
    assert summary is not None and summary.digest == undisturbed.summary.digest
    assert losses(events) == pytest.approx(losses(undisturbed.events))
    assert (run_dir / "report.html").exists()
    eventually(lambda: nothing_left(ray_cluster), "nothing is left")


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_a_run_that_nobody_watches_is_saved_and_ended(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    runs = {"dir": str(tmp_path / "runs"), "unattended_s": 2.0, "driver": "actor"}
    experiment = slow_experiment(ray_cluster, tmp_path, steps=100_000, run=runs)
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "front.log"
    with command(log, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "step") >= 4 or front.poll() is not None, "trains")
        assert front.poll() is None, log.read_text()
        front.kill()
        front.wait(60)
    eventually(lambda: count(run_dir, "run_failed"), "it ends")
    ended = events_of(run_dir)[-1]
    assert ended["code"] == InterruptedRunError.code
    assert "nobody has watched" in ended["message"] and "is saved" in ended["message"]
    eventually(lambda: (run_dir / "report.html").exists(), "the report is there")
    eventually(lambda: nothing_left(ray_cluster), "nothing is left")


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_the_driver_dies_and_the_run_is_resumed(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=60)
    run_dir = Path(experiment.run.dir) / experiment.name
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with command(first, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "checkpoint") or front.poll() is not None, "saved")
        assert front.poll() is None, first.read_text()
        driver = ray.get_actor(driver_name(run_dir), namespace=f"geo_ray-{experiment.name}")
        ray.kill(driver, no_restart=True)  # as if its node were gone
        assert front.wait(100) == DriverLostError.exit_code, first.read_text()
    assert f"[{DriverLostError.code}]" in first.read_text()
    assert "--resume runs/tiny" in first.read_text()
    with command(second, "--resume", str(run_dir)) as front:
        assert front.wait(200) == 0, second.read_text()
    kinds = [event.kind for event in events_of(run_dir)]
    assert kinds[-1] == "run_finished" and kinds.count("driver_attached") == 1
    assert decode_record((run_dir / LEASE_KEY).read_bytes()).epoch == 2
    summary = load_summary(run_dir)
    assert summary is not None
    assert summary.digest == simulate(experiment, tmp_path).summary.digest
    eventually(lambda: nothing_left(ray_cluster), "nothing is left")


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_a_detached_run_is_stopped_from_another_terminal(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    import geo_ray

    runs = {"dir": str(tmp_path / "runs"), "unattended_s": 1.0}
    experiment = slow_experiment(ray_cluster, tmp_path, steps=100_000, run=runs)
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "front.log"
    with command(log, "--detach", str(write_config(tmp_path, experiment))) as front:
        assert front.wait(100) == 0, log.read_text()
    assert "geo-ray stop" in log.read_text()
    before = count(run_dir, "step")
    eventually(lambda: count(run_dir, "step") > before + 30, "nobody has to watch it")
    geo_ray.stop(run_dir)
    eventually(lambda: count(run_dir, "run_failed"), "it ends")
    assert "is saved" in events_of(run_dir)[-1]["message"]
    eventually(lambda: nothing_left(ray_cluster), "nothing is left")
