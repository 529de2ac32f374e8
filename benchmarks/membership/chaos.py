"""A long run of real processes with a kill every 20 s and a cut of all links every 2 minutes.

Three regions on one machine, two workers each, SMA each four steps. Every 20 s one process of a
random role and region is killed without notice: a worker, a primary shard, a bridge, the bridge of
the averager's region among them, where a standby takes over. Every 2 minutes no link carries
anything for 5 s. Beside it a quiet run of the same configuration, before.

  goodput         steps that count, per second, over those of the quiet run
  digests         different models at the end, over the regions that are there
  loss_apart      final loss less that of the simulated quiet run, over the spread of its seeds
  memory_growth   memory of all processes in the last quarter of the run over that in the second
  kills, regions_lost, joined, bridges_replaced, starts (from checkpoints)    counts
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import support
from benchmarks.common.command import geo_ray
from benchmarks.membership.watched_run import WatchedRun
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.process_supervisor import descendants

HOME, SECOND, THIRD = "us-east", "eu-west", "ap-south"
REGIONS = (HOME, SECOND, THIRD)
ROLES = {"worker": "WorkerActor", "server": "PrimaryActor", "bridge": "BridgeActor"}
STEP_S = 0.25
KILL_EVERY_S, CUT_EVERY_S, CUT_S = 20.0, 120.0, 5.0
SETTLE_S = 20.0
MORE_STEPS, LAST_S = 80, 600.0
COUNTED = {
    "regions_lost": "region_lost",
    "joined": "region_joined",
    "bridges_replaced": "bridge_replaced",
    "starts": "run_started",
    "workers_replaced": "worker_replaced",
    "paused": "run_paused",
}
SEEDS = (0, 1, 2)


def config(steps: int, minutes: float, *, is_cut: bool) -> str:
    """The run."""
    number = int(minutes * 60 * 2 / CUT_EVERY_S) if is_cut else 0
    starts_s = [CUT_EVERY_S * (count + 1) for count in range(number)]
    outages = ", ".join(f"[{start_s}, {start_s + CUT_S}]" for start_s in starts_s)
    return f"""
name: chaos
task: {{use: digits}}
data: {{generate: {{split: {{kind: iid}}, rows_per_shard: 128}}, batch_size: 16}}
regions:
  - {{name: {HOME}, workers: 2}}
  - {{name: {SECOND}, workers: 2}}
  - {{name: {THIRD}, workers: 2}}
strategy: {{kind: sma, interval: 4}}
optimizer: {{kind: momentum, lr: 0.02}}
train:
  steps: {steps}
  eval_every: {steps}
  elastic: {{min_workers: 1, batch: fixed}}
  max_worker_restarts: 1000
averager: {{region: {HOME}, standby: auto, failover_s: 1.0}}
members: {{min: 1}}
emulate:
  link: {{rate_mbps: 100, delay_s: 0.02, outages: [{outages}]}}
  step_s: {STEP_S}
checkpoint: {{every_s: 10, restarts: 1000}}
"""


def memory_bytes() -> int:
    """Memory of all processes below this one; pages that several share count once."""
    total = 0
    for pid in descendants(os.getpid()):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


class Trouble:
    """Kills something every now and then."""

    def __init__(self, cluster: LocalCluster, run: WatchedRun, seed: int) -> None:
        self._cluster, self._run = cluster, run
        self._random = random.Random(seed)
        self.kills: Counter[str] = Counter()

    def strike(self) -> None:
        """Kill one process."""
        role = self._random.choice(list(ROLES))
        region = self._random.choice(REGIONS)
        pids = self._cluster.actor_pids(region, ROLES[role])
        if not pids:
            return
        moves = [e["region"] for e in self._run.events if e["kind"] == "averager_moved"]
        home = moves[-1] if moves else HOME
        name = "host" if role == "bridge" and region == home else role
        os.kill(self._random.choice(pids), signal.SIGKILL)
        self.kills[name] += 1
        support.say(f"killed the {name} of {region}")


def steps_per_s(events: Sequence[dict[str, Any]]) -> float:
    """Steps that count, of all regions, per second from the first to the last.

    By the time of day: the run's own clock stands still while it starts anew.
    """
    steps = {(e["region"], e["step"]): e["unix_s"] for e in events if e["kind"] == "step"}
    times_s = sorted(steps.values())
    return (len(times_s) - 1) / (times_s[-1] - times_s[0])


def train(
    directory: Path, steps: int, minutes: float, seed: int | None
) -> tuple[WatchedRun, Trouble, list[int]]:
    """One run to its end; with trouble if there is a seed for it.

    If that takes longer than ``minutes``, it is saved then, and resumed for a few more steps, so
    that all regions come back and it ends as a run does.
    """
    directory.mkdir()
    path = directory / "chaos.yaml"
    path.write_text(config(steps, minutes, is_cut=seed is not None))
    memory: list[int] = []
    with LocalCluster(LocalClusterConfig(), REGIONS, 8) as cluster:
        sets = {"cluster": f"{{kind: existing, address: '{cluster.address}'}}"}
        run = WatchedRun(directory / "runs" / "chaos", path, sets, cluster.environment)
        trouble = Trouble(cluster, run, seed or 0)
        run.start()
        try:
            next_s, limit_s = float("inf"), 60 * minutes
            for event in run.follow(120 + limit_s):
                if next_s == float("inf") and event["kind"] == "step":
                    next_s = time.monotonic() + SETTLE_S
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + KILL_EVERY_S
                    memory.append(memory_bytes())
                    if seed is not None:
                        trouble.strike()
            if run.process is not None and run.process.poll() is None:
                finish_early(run)
        finally:
            run.end()
    return run, trouble, memory


def finish_early(run: WatchedRun) -> None:
    """Save a run, and let it take a few more steps in peace."""
    run.end()
    run.look()
    steps = max(e["step"] for e in run.events if e["kind"] == "step") + MORE_STEPS
    support.say(f"its time is over: goes on to step {steps}")
    run.start("--resume", str(run.directory), "--set", f"train.steps={steps}")
    for _ in run.follow(LAST_S):
        pass
    if run.process is not None and run.process.poll() is None:
        raise RuntimeError(f"not over after {LAST_S:.0f} s more\n{run.tail()}")


def final_loss(directory: Path) -> float:
    """Of the last evaluation over all regions."""
    lines = (directory / "events.jsonl").read_text("utf-8").splitlines()
    evals = [e for e in map(json.loads, lines) if e["kind"] == "eval" and e["region"] is None]
    return float(evals[-1]["metrics"]["loss"])


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="as many steps as fit; at most so long"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    machine = support.hardware()
    minutes = 1.0 if options.quick else options.minutes
    steps = int(minutes * 60 / STEP_S / 4) * 4
    quiet_steps = min(steps, 480)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        directory = Path(name)
        quiet, _, _ = train(directory / "quiet", quiet_steps, minutes, None)
        quiet_per_s = steps_per_s(quiet.events)
        support.say(f"quiet: {quiet_per_s:.2f} steps/s")
        run, trouble, memory = train(directory / "chaos", steps, minutes, options.seed)
        losses = []
        steps = max(e["step"] for e in run.events if e["kind"] == "step")
        for seed in SEEDS:
            path = directory / f"simulated-{seed}.yaml"
            path.write_text(config(steps, minutes, is_cut=False))
            done = geo_ray("simulate", path, {"seed": seed}, directory / f"simulated-{seed}")
            losses.append(final_loss(done.directory))
        finished = next(e for e in reversed(run.events) if e["kind"] == "run_finished")
        loss = final_loss(run.directory)
    quarter = len(memory) // 4
    growth = (
        statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter])
        if quarter
        else None
    )
    spread = max(losses) - min(losses)
    kinds = Counter(event["kind"] for event in run.events)
    figures = [
        support.Figure(
            "goodput", steps_per_s(run.events) / quiet_per_s, "ratio", ">= 0.8", quiet_per_s
        ),
        support.Figure("digests", len(set(finished["digests"].values())), "count", "<= 1"),
        support.Figure("regions_at_the_end", len(finished["digests"]), "count"),
        support.Figure("loss_apart", (loss - losses[0]) / spread, "ratio", "<= 1", losses[0]),
        support.Figure("memory_growth", growth, "ratio", "<= 1.05"),
        support.Figure("minutes", run.events[-1]["t_s"] / 60, "min"),
        support.Figure("kills", sum(trouble.kills.values()), "count"),
        *(support.Figure(f"kills_{role}", n, "count") for role, n in sorted(trouble.kills.items())),
        *(support.Figure(name, kinds[kind], "count") for name, kind in COUNTED.items()),
    ]
    support.finish("chaos", machine, figures, options.out)


if __name__ == "__main__":
    main()
