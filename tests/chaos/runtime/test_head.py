"""The head of the cluster dies, and comes back on what it has stored, or does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.membership.stored_head import StoredHeadCluster
from geo_ray.base.errors import HeadLostError
from geo_ray.ray_cluster.settings import driver_environment
from geo_ray.telemetry.summary import load_summary
from tests.support.train_support import count, events_of, eventually, simulate, write_config
from tests.support.watched_runs import slow_experiment

REGIONS = ("us-east", "eu-west", "ap-south")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def training(
    cluster: StoredHeadCluster, config: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A program on the machine of the first region, not on the head's."""
    program = Path(__file__).parents[2] / "support" / "train_on_node.py"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(program), cluster.address, "127.0.0.3", str(config)],
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


def test_training_continues_while_the_head_restarts(tmp_path: Path) -> None:
    with (
        StoredHeadCluster(REGIONS, patience_s=60) as cluster,
        driver_environment(cluster.environment),
    ):
        runs = {"dir": str(tmp_path / "runs")}
        experiment = slow_experiment(cluster, tmp_path, steps=250, run=runs)
        run_dir = Path(experiment.run.dir) / experiment.name
        log = tmp_path / "front.log"
        with training(cluster, write_config(tmp_path, experiment), log) as front:
            eventually(lambda: count(run_dir, "step") >= 20 or front.poll() is not None, "trains")
            assert front.poll() is None, log.read_text()
            cluster.kill_head()
            before = count(run_dir, "step")
            eventually(lambda: "does not answer; training continues" in log.read_text(), "told")
            eventually(lambda: count(run_dir, "step") > before + 60, "it needs no head")
            cluster.start_head()
            assert front.wait(200) == 0, log.read_text()
    assert "answers again" in log.read_text()
    steps = [event for event in events_of(run_dir) if event.kind == "step"]
    assert len(steps) == 2 * 250, "no step was lost or done twice"
    assert not count(run_dir, "run_resumed") and not count(run_dir, "worker_lost")
    summary, undisturbed = load_summary(run_dir), simulate(experiment, tmp_path)
    assert summary is not None and summary.digest == undisturbed.summary.digest


def test_a_run_without_its_head_is_saved_and_resumed_on_another(
    tmp_path: Path,
) -> None:
    with (
        StoredHeadCluster(REGIONS, patience_s=30) as cluster,
        driver_environment(cluster.environment),
    ):
        runs = {"dir": str(tmp_path / "runs")}
        experiment = slow_experiment(cluster, tmp_path, steps=240, run=runs)
        run_dir = Path(experiment.run.dir) / experiment.name
        log = tmp_path / "front.log"
        with training(cluster, write_config(tmp_path, experiment), log) as front:
            eventually(lambda: count(run_dir, "step") >= 20 or front.poll() is not None, "trains")
            assert front.poll() is None, log.read_text()
            cluster.kill_head()
            assert front.wait(100) == HeadLostError.exit_code, log.read_text()
        told = log.read_text()
        assert f"[{HeadLostError.code}]" in told and "--resume runs/tiny" in told
        ended = events_of(run_dir)[-1]
        assert (ended.kind, ended["code"]) == ("run_failed", HeadLostError.code)
        assert "its state is saved" in ended["message"]
        assert (run_dir / "report.html").exists()
    with (
        StoredHeadCluster(REGIONS, patience_s=60) as cluster,
        driver_environment(cluster.environment),
    ):
        import geo_ray

        changes = {"cluster.address": cluster.address}
        with_address = geo_ray.train(resume=run_dir, overrides=changes)
        assert with_address.summary.digest == simulate(experiment, tmp_path).summary.digest
