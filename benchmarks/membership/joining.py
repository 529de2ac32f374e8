"""What it takes that a region joins a run of 10 M parameters over links of 100 Mbit/s.

Three regions on one machine, real processes, one worker each, steps of a given length
(`emulate.step_s`), DeepFM, SGD with momentum, SMA each 32 steps; each pair of regions has a link of
its own (100 Mbit/s, 20 ms one way). The third is absent at first, then asked to join, once per run.

  transfer_s       the state's bytes over the link's rate: what no way of joining can undercut
  copy_s           from the border, at which the state is copied, until the newcomer trains
  copy_ratio       copy_s over transfer_s
  steps_lost       1 less the length of a quiet round (median of those before the request) over that
                   of a round of the others in which the copy was on its way (mean)
  start_steps_lost the same for the rounds in which the newcomer's processes started beside them
  start_s          from the request to the border
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.common import support
from benchmarks.common.command import command
from benchmarks.membership.watched_run import WatchedRun
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster.local_cluster import LocalCluster

HOME, SECOND, THIRD = "us-east", "eu-west", "ap-south"
RATE_MBPS: Final = 100.0
STEP_S: Final = 0.5
INTERVAL: Final = 32
QUIET_ROUNDS: Final = 4
START_S: Final = 240.0
JOIN_S: Final = 400.0
CONFIG = f"""
name: joining
task:
  use: ctr
  options: {{rows: 4000, heldout_rows: 100, fields: 10, vocabulary: 58000, dim: 16}}
data: {{generate: {{split: {{kind: iid}}, rows_per_shard: 128}}, batch_size: 8}}
regions: [{{name: {HOME}}}, {{name: {SECOND}}}, {{name: {THIRD}}}]
strategy: {{kind: sma, interval: {INTERVAL}}}
optimizer: {{kind: momentum, lr: 0.001}}
train: {{steps: 1000000, eval_every: 0}}
averager: {{region: {HOME}}}
members: {{min: 1, absent: [{THIRD}]}}
emulate:
  link: {{rate_mbps: {RATE_MBPS}, delay_s: 0.02}}
  step_s: {STEP_S}
"""


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    found: dict[str, list[float]] = {}
    for number in range(1 if options.quick else 3):
        support.say(f"run {number + 1}")
        for name, value in one().items():
            support.say(f"  {name} {value:.3f}")
            found.setdefault(name, []).append(value)
    figures = [
        support.median("steps_lost", found["steps_lost"], "ratio", "<= 0.02"),
        support.median("copy_ratio", found["copy_ratio"], "ratio", "<= 1.5"),
        support.median("copy_s", found["copy_s"], "s"),
        support.median("transfer_s", found["transfer_s"], "s"),
        support.median("round_s", found["round_s"], "s"),
        support.median("start_s", found["start_s"], "s"),
        support.median("start_steps_lost", found["start_steps_lost"], "ratio"),
    ]
    support.finish("joining", machine, figures, options.out)


def one() -> dict[str, float]:
    """The figures of one run."""
    with (
        tempfile.TemporaryDirectory(prefix="joining-") as name,
        LocalCluster(LocalClusterConfig(), (HOME, SECOND, THIRD), 4) as cluster,
    ):
        path = Path(name) / "joining.yaml"
        path.write_text(CONFIG)
        sets = {"cluster": f"{{kind: existing, address: '{cluster.address}'}}"}
        run = WatchedRun(Path(name) / "runs" / "joining", path, sets, cluster.environment)
        run.start()
        try:
            until(
                run,
                lambda event: (
                    event["kind"] == "step" and event["step"] > QUIET_ROUNDS * INTERVAL + 8
                ),
            )
            asked_s = time.time() - run.origin_unix_s
            command("members", str(run.directory), "add", THIRD)
            joined = until(run, lambda event: event["kind"] == "region_joined")
            last_s = joined["t_s"] + 2 * INTERVAL * STEP_S  # the end of the copy's round
            until(run, lambda event: event["kind"] == "step" and event["t_s"] > last_s)
        finally:
            run.end()
    return figures(run.events, joined, asked_s)


def figures(
    events: Sequence[dict[str, Any]], joined: dict[str, Any], asked_s: float
) -> dict[str, float]:
    """See the module's docstring."""
    began_s, ended_s = joined["t_s"] - joined["took_s"], joined["t_s"]
    transfer_s = joined["bytes"] * 8 / (RATE_MBPS * 1e6)
    rounds = [r for region in (HOME, SECOND) for r in rounds_of(events, region)]
    quiet_s = statistics.median(to_s - from_s for from_s, to_s in rounds if to_s < asked_s)
    return {
        "copy_s": ended_s - began_s,
        "transfer_s": transfer_s,
        "copy_ratio": (ended_s - began_s) / transfer_s,
        "start_s": began_s - asked_s,
        "round_s": quiet_s,
        "start_steps_lost": lost(rounds, quiet_s, asked_s, began_s),
        "steps_lost": lost(rounds, quiet_s, began_s, ended_s),
    }


def rounds_of(events: Sequence[dict[str, Any]], region: str) -> list[tuple[float, float]]:
    """From the last step before an exchange to the last before the next: s, s.

    Each is one exchange and `INTERVAL` steps, so that rounds compare whatever part of one is
    waiting.
    """
    ends_s = [
        event["t_s"]
        for event in events
        if event["kind"] == "step" and event["region"] == region and event["step"] % INTERVAL == 0
    ]
    return list(pairwise(ends_s))


def lost(
    rounds: Sequence[tuple[float, float]], quiet_s: float, from_s: float, to_s: float
) -> float:
    """Share of the steps lost in the rounds that overlap with a time."""
    lengths_s = [end - start for start, end in rounds if start < to_s and end > from_s]
    return 1 - quiet_s / statistics.mean(lengths_s)


def until(run: WatchedRun, done: Any) -> dict[str, Any]:
    """Follow a run until an event for which ``done`` is true, which is returned."""
    for event in run.follow(START_S + JOIN_S):
        if done(event):
            return event
    raise RuntimeError(f"it did not happen in {START_S + JOIN_S:.0f} s\n{run.tail()}")


if __name__ == "__main__":
    main()
