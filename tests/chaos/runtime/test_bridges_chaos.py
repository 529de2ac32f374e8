"""Bridges of a real run are killed; others take their places, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from test_train_faults import check_whole

from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.telemetry.events import Event
from tests.support.train_support import experiment_of, simulate, train

HOME, FAR = "us-east", "eu-west"
pytestmark = pytest.mark.timeout(900)  # whole runs


class Killer:
    """Kills the bridge of a region when it has made certain steps; an event sink."""

    def __init__(self, cluster: LocalCluster, region: str, steps: list[int]) -> None:
        self._cluster = cluster
        self._region = region
        self._steps = steps
        self.killed: list[int] = []
        self.killed_unix_s: list[float] = []

    def __call__(self, event: Event) -> None:
        if event.kind != "step" or event["region"] != self._region or not self._steps:
            return
        if event["step"] >= self._steps[0]:
            self._steps.pop(0)
            (pid,) = self._cluster.actor_pids(self._region, "BridgeActor")
            self.killed.append(pid)
            self.killed_unix_s.append(time.time())
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow  # test_leader_bridge_in_process.py and the simulator
def test_a_run_comes_out_as_if_nothing_had_happened(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 40, "eval_every": 20, "step_timeout_s": 60},
        "strategy": {"kind": "sma", "interval": 1},
        "codec": {"up": {"kind": "int8"}, "down": {"kind": "int8"}},
        "emulate": {"step_s": 0.15},
        "checkpoint": {"every_s": 2},
    }
    experiment = experiment_of(tmp_path, **sections)
    killer = Killer(ray_cluster, FAR, [5, 20])
    done = train(experiment, tmp_path, sink=killer)
    assert len(set(killer.killed)) == 2
    check_whole(done, simulate(experiment, tmp_path))
    assert [e["region"] for e in done.of("bridge_replaced")] == [FAR, FAR]
    assert not done.of("region_lost") and not done.of("worker_lost")
    assert done.summary.faults["bridge_replaced"] == 2
