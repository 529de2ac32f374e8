"""Two commands that want to drive one run: one does, whatever happens to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from geo_ray.base.errors import InterruptedRunError, LeaseLostError, RunHeldError
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.runs.lease import LEASE_KEY, decode_record
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.telemetry.summary import load_summary
from tests.support.train_support import (
    count,
    events_of,
    eventually,
    experiment_of,
    losses,
    simulate,
    write_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def command(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`geo-ray train ...` in a process of its own."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "geo_ray.cli.main", "train", "--plain", *arguments],
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def slow_experiment(cluster: LocalCluster, directory: Path, steps: int) -> Experiment:
    return experiment_of(
        directory,
        train={"steps": steps, "eval_every": 8, "step_timeout_s": 60},
        emulate={"step_s": 0.15},
        checkpoint={"every_s": 0.5},
        cluster={"kind": "existing", "address": cluster.address},
        run={"dir": str(directory / "runs")},
    )


def test_a_second_driver_is_refused(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=100_000)  # it will be stopped
    run_dir = Path(experiment.run.dir) / experiment.name
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with command(first, str(write_config(tmp_path, experiment))) as driver:
        eventually(lambda: count(run_dir, "checkpoint") or driver.poll() is not None, "saved")
        assert driver.poll() is None, first.read_text()
        with command(second, "--resume", str(run_dir)) as late:
            assert late.wait(120) == RunHeldError.exit_code, second.read_text()
        before = count(run_dir, "step")
        eventually(lambda: count(run_dir, "step") > before, "the first one goes on")
        driver.send_signal(signal.SIGINT)
        assert driver.wait(120) == InterruptedRunError.exit_code, first.read_text()
    said = second.read_text()
    assert f"[{RunHeldError.code}]" in said
    assert f"process {driver.pid}, since 20" in said
    assert "Traceback" not in said
    events = events_of(run_dir)
    assert [event.kind for event in events].count("run_started") == 1
    failures = [event["code"] for event in events if event.kind == "run_failed"]
    assert failures == [InterruptedRunError.code]
    lease = decode_record((run_dir / LEASE_KEY).read_bytes())
    assert (lease.epoch, lease.owner.pid, lease.released) == (1, driver.pid, True)


def test_a_driver_that_stood_still_writes_nothing_to_a_run_that_was_taken_over(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = slow_experiment(ray_cluster, tmp_path, steps=240)
    run_dir = Path(experiment.run.dir) / experiment.name
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with command(first, str(write_config(tmp_path, experiment))) as driver:
        eventually(lambda: count(run_dir, "checkpoint") >= 2 or driver.poll() is not None, "saved")
        assert driver.poll() is None, first.read_text()
        os.kill(driver.pid, signal.SIGSTOP)
        with command(second, "--resume", str(run_dir)) as late:
            eventually(
                lambda: count(run_dir, "driver_attached") or late.poll() is not None, "resumed"
            )
            assert late.poll() is None, second.read_text()
            os.kill(driver.pid, signal.SIGCONT)
            assert driver.wait(200) == LeaseLostError.exit_code, first.read_text()
            assert late.wait(200) == 0, second.read_text()
    assert f"[{LeaseLostError.code}]" in first.read_text()
    assert f"process {late.pid}" in first.read_text()
    events = events_of(run_dir)
    assert "run_failed" not in [event.kind for event in events]
    begun = max(i for i, event in enumerate(events) if event.kind == "driver_attached")
    assert events[-1].kind == "run_finished"
    for region in experiment.region_names:  # nobody else's steps lie between the second's
        steps = [e["step"] for e in events[begun:] if e.kind == "step" and e["region"] == region]
        assert steps == list(range(steps[0], 241))
    lease = decode_record((run_dir / LEASE_KEY).read_bytes())
    assert (lease.epoch, lease.owner.pid, lease.released) == (2, late.pid, True)
    store = CheckpointStore(run_dir / "checkpoints")
    epochs = [store.manifest(id).extra["lease_epoch"] for id in store.ids()]
    assert epochs == sorted(epochs, key=str)
    assert epochs[-1] == 2
    undisturbed = simulate(experiment, tmp_path)
    summary = load_summary(run_dir)
    assert summary is not None
    assert summary.digest == undisturbed.summary.digest
    assert losses(events) == pytest.approx(losses(undisturbed.events))
