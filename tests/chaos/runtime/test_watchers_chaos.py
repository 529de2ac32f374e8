"""The processes that watch a run are killed, stop it, or are many: on a real cluster."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import geo_ray
from geo_ray.base.errors import InterruptedRunError, RunHeldError
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.telemetry.summary import load_summary
from tests.support.train_support import count, events_of, eventually, losses, simulate, write_config
from tests.support.watched_runs import check_nothing_left, command, lease, slow_experiment

STEPS = 160  # longer than a command takes to start
pytestmark = [pytest.mark.timeout(900)]


@pytest.mark.slow  # test_run_actor_chaos.py: the run actor is killed while training goes on
@pytest.mark.usefixtures("connected")
def test_a_run_outlives_its_starter_and_is_watched_again(
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
        assert front.wait(400) == 0, second.read_text()
    assert "watching it" in second.read_text() and "model.safetensors" in second.read_text()
    events = events_of(run_dir)
    assert [event.kind for event in events].count("run_started") == 1
    assert events[-1].kind == "run_finished"
    for region in experiment.region_names:
        steps = [e["step"] for e in events if e.kind == "step" and e["region"] == region]
        assert steps == list(range(1, STEPS + 1)), "no step was lost or done twice"
    assert (lease(run_dir).token, lease(run_dir).released) == (1, True)
    summary, undisturbed = load_summary(run_dir), simulate(experiment, tmp_path)
    assert summary is not None and summary.digest == undisturbed.summary.digest
    assert losses(events) == pytest.approx(losses(undisturbed.events))
    assert (run_dir / "report.html").exists()
    check_nothing_left(ray_cluster)


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_a_run_without_a_watcher_is_saved_and_ended(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    runs = {"dir": str(tmp_path / "runs"), "unattended_s": 2.0}
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
    assert "had no watcher" in ended["message"] and "is saved" in ended["message"]
    eventually(lambda: (run_dir / "report.html").exists(), "the report is there")
    check_nothing_left(ray_cluster)


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_a_detached_run_is_stopped_from_another_terminal(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    runs = {"dir": str(tmp_path / "runs"), "unattended_s": 1.0}
    experiment = slow_experiment(ray_cluster, tmp_path, steps=100_000, run=runs)
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "front.log"
    with command(log, "--detach", str(write_config(tmp_path, experiment))) as front:
        assert front.wait(400) == 0, log.read_text()
    assert "geo-ray stop" in log.read_text()
    before = count(run_dir, "step")
    eventually(lambda: count(run_dir, "step") > before + 30, "nobody has to watch it")
    geo_ray.stop(run_dir)
    eventually(lambda: count(run_dir, "run_failed"), "it ends")
    assert "is saved" in events_of(run_dir)[-1]["message"]
    check_nothing_left(ray_cluster)


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_a_job_that_is_killed_while_its_run_is_saved_leaves_a_checkpoint(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    """`ray job stop` sends SIGTERM, and SIGKILL soon after."""
    experiment = slow_experiment(ray_cluster, tmp_path, steps=100_000)
    run_dir = Path(experiment.run.dir) / experiment.name
    log = tmp_path / "front.log"
    with command(log, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "step") >= 4 or front.poll() is not None, "trains")
        assert front.poll() is None, log.read_text()
        front.send_signal(signal.SIGTERM)
        eventually(lambda: count(run_dir, "stop_requested"), "it was passed on")
        front.kill()
        front.wait(60)
    eventually(lambda: count(run_dir, "run_failed"), "it ends")
    ended = events_of(run_dir)[-1]
    assert ended["code"] == InterruptedRunError.code and "is saved" in ended["message"]
    check_nothing_left(ray_cluster)


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_a_second_command_watches_the_run_and_may_stop_it(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=100_000)
    run_dir = Path(experiment.run.dir) / experiment.name
    first, second, third = (tmp_path / f"{name}.log" for name in ("first", "second", "third"))
    with command(first, str(write_config(tmp_path, experiment))) as front:
        eventually(lambda: count(run_dir, "step") >= 4 or front.poll() is not None, "trains")
        assert front.poll() is None, first.read_text()
        with command(third, "--resume", str(run_dir), "--set", "train.steps=7") as other:
            assert other.wait(400) == RunHeldError.exit_code, third.read_text()
        with command(second, "--resume", str(run_dir)) as late:
            eventually(
                lambda: "watching it" in second.read_text() or late.poll() is not None, "watches"
            )
            assert late.poll() is None, second.read_text()
            late.send_signal(signal.SIGINT)
            assert late.wait(400) == InterruptedRunError.exit_code, second.read_text()
        assert front.wait(400) == InterruptedRunError.exit_code, first.read_text()
    assert f"[{RunHeldError.code}]" in third.read_text() and "Traceback" not in third.read_text()
    kinds = [event.kind for event in events_of(run_dir)]
    assert (kinds.count("run_started"), kinds.count("run_failed")) == (1, 1)
    assert (lease(run_dir).token, lease(run_dir).released) == (1, True)
    check_nothing_left(ray_cluster)


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_an_event_function_that_raises_ends_the_run(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=100_000)

    def spoil(event: geo_ray.Event) -> None:
        if event.kind == "step":
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        geo_ray.train(experiment, on_event=spoil)
    assert not geo_ray.open_run(tmp_path / "runs" / "tiny").finished
    check_nothing_left(ray_cluster)
