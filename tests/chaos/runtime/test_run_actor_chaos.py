"""A run's actor, or its supervisor, is killed in every phase: on a real cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

import geo_ray
from geo_ray.base.errors import RunActorLostError
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.lease import LEASE_KEY
from geo_ray.runtime.supervisor import NAMESPACE, supervisor_name
from geo_ray.storage.manifest import MANIFEST_FILE
from geo_ray.telemetry.summary import load_summary
from tests.support.train_support import count, events_of, eventually, losses, simulate, write_config
from tests.support.watched_runs import (
    check_nothing_left,
    command,
    kill_run_actor,
    lease,
    slow_experiment,
)

STEPS = 120
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("connected")]


def check_result(experiment: Experiment, run_dir: Path, base_dir: Path) -> None:
    """The run has the result of one that nothing happened to."""
    events = events_of(run_dir)
    assert events[-1].kind == "run_finished" and (run_dir / "report.html").exists()
    assert "run_failed" not in [event.kind for event in events]
    assert lease(run_dir).released
    summary, undisturbed = load_summary(run_dir), simulate(experiment, base_dir)
    assert summary is not None and summary.digest == undisturbed.summary.digest
    assert losses(events) == pytest.approx(losses(undisturbed.events))


def check_undisturbed(experiment: Experiment, run_dir: Path, base_dir: Path) -> None:
    """The second run actor has continued with the processes: every step once, the same bits."""
    events = events_of(run_dir)
    kinds = [event.kind for event in events]
    assert kinds.count("run_started") == 1 and kinds.count("run_actor_attached") == 1
    assert "worker_lost" not in kinds
    for region in experiment.region_names:
        steps = [e["step"] for e in events if e.kind == "step" and e["region"] == region]
        assert steps == list(range(1, experiment.train.steps + 1)), "no step was lost or done twice"
    assert lease(run_dir).token == 2
    check_result(experiment, run_dir, base_dir)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_run_actor_is_killed_and_the_next_one_attaches(
    number: signal.Signals, ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=STEPS)
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "front.log"
    with command(log, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "step") >= 20 or front.poll() is not None, "trains")
        assert front.poll() is None, log.read_text()
        assert kill_run_actor(run_dir, number) != front.pid
        assert geo_ray.status(run_dir).phase != "cut off"
        assert front.wait(400) == 0, log.read_text()
    assert "restarting it" in log.read_text()
    assert "run actor attached after" in log.read_text()
    check_undisturbed(experiment, run_dir, tmp_path)
    check_nothing_left(ray_cluster)


def placing(run_dir: Path, log: str) -> bool:
    return "placing processes" in log


def creating(run_dir: Path, log: str) -> bool:
    return "starting workers, parameter servers" in log


def saving(run_dir: Path, log: str) -> bool:
    folders = (run_dir / "checkpoints").glob("ckpt-*")
    return count(run_dir, "checkpoint") > 0 and any(
        not (each / MANIFEST_FILE).exists() for each in folders
    )


def ending(run_dir: Path, log: str) -> bool:
    return "writing the model and the summary" in log or "saving the last checkpoint" in log


def finished(run_dir: Path, log: str) -> bool:
    return count(run_dir, "run_finished") > 0 and not (run_dir / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("phase", [placing, creating, saving, ending, finished])
def test_a_run_actor_is_killed_in(
    phase: Callable[[Path, str], bool], ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=40, regions=[{"name": "us-east"}])
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "front.log"
    with command(log, str(write_config(tmp_path, experiment))) as front:
        eventually(
            lambda: (
                front.poll() is not None
                or ((run_dir / LEASE_KEY).exists() and phase(run_dir, log.read_text()))
            ),
            "the phase has come",
        )
        kill_run_actor(run_dir)
        assert front.wait(400) == 0, log.read_text()
    check_result(experiment, run_dir, tmp_path)
    check_nothing_left(ray_cluster)


@pytest.mark.slow
def test_the_best_model_survives_a_killed_run_actor(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    keep = {"metric": "accuracy", "mode": "max"}
    train = {"steps": 60, "eval_every": 4, "step_timeout_s": 60, "keep_best": keep}
    experiment = slow_experiment(ray_cluster, tmp_path, steps=60, train=train)
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "front.log"
    with command(log, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "best_kept") or front.poll() is not None, "one is kept")
        kill_run_actor(run_dir)
        assert front.wait(400) == 0, log.read_text()
    check_undisturbed(experiment, run_dir, tmp_path)
    run, undisturbed = geo_ray.open_run(run_dir), simulate(experiment, tmp_path / "again")
    assert run.summary.best == undisturbed.summary.best
    assert run.best_path.read_bytes() == undisturbed.run.best_model.read_bytes()


@pytest.mark.slow
def test_a_run_actor_of_a_local_cluster_is_killed(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=60, cluster={"kind": "local"})
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "front.log"
    with command(log, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "step") >= 10 or front.poll() is not None, "trains")
        kill_run_actor(run_dir)
        assert front.wait(400) == 0, log.read_text()
    check_undisturbed(experiment, run_dir, tmp_path)


@pytest.mark.slow
def test_a_run_actor_that_hangs_is_replaced_and_writes_nothing_more(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=700)  # longer than it may hang
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "front.log"
    with command(log, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "checkpoint") >= 2 or front.poll() is not None, "saved")
        assert front.poll() is None, log.read_text()
        os.kill(lease(run_dir).owner.pid, signal.SIGSTOP)
        assert front.wait(400) == 0, log.read_text()
    check_undisturbed(experiment, run_dir, tmp_path)
    check_nothing_left(ray_cluster)


@pytest.mark.slow
def test_the_supervisor_is_killed_and_the_run_is_resumed(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=60)
    run_dir = Path(experiment.run.dir) / experiment.name
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with command(first, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "checkpoint") or front.poll() is not None, "saved")
        assert front.poll() is None, first.read_text()
        name = supervisor_name(RunDirectory(run_dir, tmp_path))
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        assert front.wait(400) == RunActorLostError.exit_code, first.read_text()
    assert f"[{RunActorLostError.code}]" in first.read_text()
    assert "--resume runs/tiny" in first.read_text()
    check_nothing_left(ray_cluster)
    with command(second, "--resume", str(run_dir)) as front:
        assert front.wait(400) == 0, second.read_text()
    begun = [event for event in events_of(run_dir) if event.kind == "run_started"]
    assert begun[-1]["cause"] == "they have ended with their supervisor"
    check_result(experiment, run_dir, tmp_path)
    assert lease(run_dir).token == 2
    check_nothing_left(ray_cluster)
