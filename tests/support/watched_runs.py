"""Commands in processes of their own that watch runs on the shared cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from geo_ray.api.train import ReadyRun
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.process_supervisor import descendants
from geo_ray.runs.lease import LEASE_KEY, LeaseRecord, decode_record
from geo_ray.runtime.run_actor import WatchedProgress
from geo_ray.runtime.run_client import RunRequest
from geo_ray.telemetry.events import conform
from tests.support.observe_support import started
from tests.support.train_support import eventually, experiment_of

ACTORS = (
    b"ray::RunLoopActor",
    b"ray::Supervisor",
    b"ray::WorkerA",
    b"ray::PrimaryA",
    b"ray::ShardS",
    b"ray::BridgeA",
)


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


def slow_experiment(
    shared: LocalCluster, directory: Path, steps: int, **changes: Any
) -> Experiment:
    """A run that takes long enough for things to happen to it."""
    tree: dict[str, Any] = {
        "train": {"steps": steps, "eval_every": 8, "step_timeout_s": 60},
        "emulate": {"step_s": 0.15},
        "checkpoint": {"every_s": 0.5},
        "cluster": {"kind": "existing", "address": shared.address},
        "run": {"dir": str(directory / "runs")},
    }
    return experiment_of(directory, **(tree | changes))


def lease(run_dir: Path) -> LeaseRecord:
    """The lease of a run."""
    return decode_record((run_dir / LEASE_KEY).read_bytes())


def run_begins(ready: ReadyRun) -> None:
    """What the run actor does as a run of the user's request begins."""
    request = RunRequest(ready.experiment, ready.run, None, ready.is_changed, ready.plan)
    event = conform("run_started", 0.0, started()[2])
    WatchedProgress(request.order(0.0, 0)).on_event(event)


def kill_run_actor(run_dir: Path, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to the process that holds the run's lease; its id."""
    pid = lease(run_dir).owner.pid
    os.kill(pid, number)
    return pid


def actors_of_runs(cluster: LocalCluster) -> list[str]:
    """Command lines of all actors of runs that the cluster has."""
    found = []
    for pid in descendants(cluster._processes._supervisor.pid):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(ACTORS):
            found.append(title.decode(errors="replace"))
    return found


def places_of_runs() -> list[str]:
    """Names of reservations that stand, on the cluster that this process is connected to."""
    from ray.util.placement_group import placement_group_table

    table: dict[str, dict[str, Any]] = placement_group_table()
    return [each["name"] for each in table.values() if each["state"] != "REMOVED"]


def check_nothing_left(cluster: LocalCluster) -> None:
    """All processes and reservations of runs end."""
    eventually(lambda: not actors_of_runs(cluster) and not places_of_runs(), "nothing is left")
