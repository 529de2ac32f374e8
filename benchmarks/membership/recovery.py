"""Seconds from SIGKILL of one of a run's processes until it trains at full rate again.

Three regions on one machine, real processes, steps of a given length (`emulate.step_s`), SMA each
four steps. A role's process is killed, again and again, each time when the run has trained at full
rate for 8 s. Full rate: in the 4 s from then on there are 0.9 of the steps, over all regions, of
those 8 s. So a role that nobody waits for may take 0 s.

  worker      of a region with two, which goes on with one meanwhile (`train.elastic`)
  worker1     the only one of a region
  server      the primary shard of a region
  bridge      of a region that does not host the averager
  home        the primary shard of the averager's region, where nobody stands by: the run goes on
              from its newest checkpoint
  host        the bridge of the region that hosts the averager: the standby takes over
  front       the user's command; `geo-ray train --resume` at once, as a job's retry would
  driver      the actor that drives the run, on a cluster that stands: it comes back by itself
  head        every process of the cluster's head, and the driver on its machine; the head is
              started again on its stored state, then `--resume`, from the newest checkpoint
  process_s   for comparison: a Python process that imports torch and Ray, and ends
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import support
from benchmarks.membership.stored_head import StoredHeadCluster
from benchmarks.membership.watched_run import WatchedRun
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster.local_cluster import LocalCluster

HOME, SECOND, THIRD = "us-east", "eu-west", "ap-south"
REGIONS = (HOME, SECOND, THIRD)
QUIET_S, WINDOW_S, SHARE = 8.0, 4.0, 0.9
PATIENCE_S = 120.0  # for a recovery
START_S = 180.0
ACTORS = {
    "worker": ("WorkerActor", SECOND),
    "worker1": ("WorkerActor", THIRD),
    "server": ("PrimaryActor", SECOND),
    "bridge": ("BridgeActor", SECOND),
    "leader": ("PrimaryActor", HOME),
    "host": ("BridgeActor", None),
}
COMMANDS = ("front", "driver", "head")
ATTACHES = ("driver",)
STEP_S = 0.25


def config(role: str) -> str:
    """The run that a role's process is killed of."""
    standby = f", standby: {SECOND}, failover_s: 1.0" if role == "host" else ""
    return f"""
name: recovery
task: {{use: digits}}
data: {{generate: {{split: {{kind: iid}}, rows_per_shard: 128}}, batch_size: 16}}
regions:
  - {{name: {HOME}, workers: 2}}
  - {{name: {SECOND}, workers: 2}}
  - {{name: {THIRD}, workers: 1}}
strategy: {{kind: sma, interval: 4}}
optimizer: {{kind: momentum, lr: 0.05}}
train:
  steps: 1000000
  eval_every: 0
  elastic: {{min_workers: 1, batch: fixed}}
averager: {{region: {HOME}{standby}}}
members: {{min: 1}}
emulate: {{step_s: {STEP_S}}}
checkpoint: {{every_s: 5}}
"""


def rate_per_s(steps_s: Sequence[float], from_s: float, for_s: float) -> float:
    """Steps per second in ``[from_s, from_s + for_s)``."""
    return sum(from_s <= step_s < from_s + for_s for step_s in steps_s) / for_s


def full_again_s(steps_s: Sequence[float], since_s: float, quiet_per_s: float) -> float | None:
    """Seconds after ``since_s`` from which a window is at full rate; None if there is none yet."""
    if not steps_s:
        return None
    starts_s = [since_s, *(step_s for step_s in steps_s if step_s > since_s)]
    for start_s in starts_s:
        if start_s + WINDOW_S > steps_s[-1]:
            return None
        if rate_per_s(steps_s, start_s, WINDOW_S) >= SHARE * quiet_per_s:
            return start_s - since_s
    return None


class Recovery:
    """One run, whose processes of one role are killed."""

    def __init__(
        self, role: str, cluster: LocalCluster | StoredHeadCluster, directory: Path
    ) -> None:
        self._role, self._cluster = role, cluster
        path = directory / "recovery.yaml"
        path.write_text(config(role))
        sets = {"cluster": f"{{kind: existing, address: '{cluster.address}'}}"}
        self._run = WatchedRun(directory / "runs" / "recovery", path, sets, cluster.environment)
        self._random = random.Random(role)
        self._steps_s: list[float] = []
        self.driven_s: list[float] = []
        """Seconds until a driver was there again, of those that are missed."""

    def measure(self, kills: int) -> list[float]:
        """Seconds of each recovery, of as many kills as this run is good for."""
        # Who flaps is made to wait, and a run starts anew by itself three times.
        most = min(kills, {"server": 2, "leader": 3}.get(self._role, kills))
        self._run.start()
        try:
            return [self._one(number) for number in range(most)]
        finally:
            self._run.end()

    def _one(self, number: int) -> float:
        quiet_per_s = self._train_quietly()
        time.sleep(self._random.uniform(0.0, 4 * STEP_S))  # anywhere in a round
        self._note(self._run.look())
        killed_s = time.time()
        for pid in self._pids(number):
            os.kill(pid, signal.SIGKILL)
        attached = self._attached()
        if isinstance(self._cluster, StoredHeadCluster):
            self._cluster.kill_head()
            self._cluster.start_head()
        if self._role in {"front", "head"}:
            assert self._run.process is not None
            self._run.process.kill()
            self._run.process.wait()
            self._run.start("--resume", str(self._run.directory))
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            for event in self._run.follow(0.2):
                self._note([event])
            found_s = full_again_s(self._steps_s, killed_s, quiet_per_s)
            if self._role in ATTACHES and len(self._attached()) == len(attached):
                continue
            if found_s is not None:
                if self._role in ATTACHES:
                    driven_s = self._attached()[-1] - killed_s
                    self.driven_s.append(driven_s)
                    support.say(f"{self._role} {number + 1}: driven after {driven_s:.1f} s")
                support.say(f"{self._role} {number + 1}: {found_s:.1f} s")
                return found_s
        raise RuntimeError(f"{self._role}: no full rate in {PATIENCE_S} s\n{self._run.tail()}")

    def _attached(self) -> list[float]:
        """Times of day at which another driver was there."""
        return [e["unix_s"] for e in self._run.events if e["kind"] == "run_actor_attached"]

    def _train_quietly(self) -> float:
        """Wait until the run has trained evenly for a while; steps per second in it."""
        until_s = time.monotonic() + START_S
        wanted = len(REGIONS) / STEP_S
        while time.monotonic() < until_s:
            for event in self._run.follow(0.5):
                self._note([event])
            if not self._steps_s:
                continue
            from_s = self._steps_s[-1] - QUIET_S
            halves = [rate_per_s(self._steps_s, from_s + at_s, QUIET_S / 2) for at_s in (0, 4)]
            if min(halves) > 0.6 * wanted and min(halves) > 0.9 * max(halves):
                return statistics.mean(halves)
        raise RuntimeError(f"{self._role}: no even rate in {START_S} s\n{self._run.tail()}")

    def _note(self, events: Sequence[dict[str, Any]]) -> None:
        self._steps_s += [event["unix_s"] for event in events if event["kind"] == "step"]
        self._steps_s.sort()

    def _pids(self, number: int) -> list[int]:
        if self._role in {"front", "head"}:
            return []
        assert isinstance(self._cluster, LocalCluster)
        if self._role == "driver":
            nodes = [None, *REGIONS]
            return [pid for node in nodes for pid in self._cluster.actor_pids(node, "RunLoopActor")]
        actor, region = ACTORS[self._role]
        if self._role == "server":
            region = (SECOND, THIRD)[number]
        return self._cluster.actor_pids(region or self._host(), actor)[:1]

    def _host(self) -> str:
        moves = [e["region"] for e in self._run.events if e["kind"] == "averager_moved"]
        return str(moves[-1]) if moves else HOME


def cluster_for(role: str) -> LocalCluster | StoredHeadCluster:
    """The cluster that a role's run trains on."""
    if role == "head":
        return StoredHeadCluster(REGIONS, patience_s=60)
    return LocalCluster(LocalClusterConfig(), REGIONS, 8)


def process_s() -> float:
    """Seconds that a Python process takes to import torch and Ray, and to end."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, ray"], check=True)
    return time.perf_counter() - began_s


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--roles", default=",".join((*ACTORS, *COMMANDS)))
    parser.add_argument("--kills", type=int, default=7, help="of each role")
    options = parser.parse_args()
    machine = support.hardware()
    roles = ["worker"] if options.quick else options.roles.split(",")
    kills = 1 if options.quick else options.kills
    figures = [support.median("process_s", [process_s() for _ in range(3)], "s")]
    for role in roles:
        found_s, driven_s = list[float](), list[float]()
        while len(found_s) < kills:
            with (
                tempfile.TemporaryDirectory(prefix="recovery-") as directory,
                cluster_for(role) as cluster,
            ):
                run = Recovery(role, cluster, Path(directory))
                found_s += run.measure(kills - len(found_s))
                driven_s += run.driven_s
        found_s.sort()
        figures += [
            support.median(f"{role}_p50", found_s, "s", "<= 10"),
            support.Figure(f"{role}_worst", found_s[-1], "s", "<= 20", None, found_s),
        ]
        if driven_s:
            driven_s.sort()
            worst = support.Figure(f"{role}_driven_worst", driven_s[-1], "s", None, None, driven_s)
            figures += [support.median(f"{role}_driven_p50", driven_s, "s"), worst]
    support.finish("recovery", machine, figures, options.out)


if __name__ == "__main__":
    main()
