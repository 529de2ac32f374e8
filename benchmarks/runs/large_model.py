"""What a model of 99.5 M parameters costs: exchanges, memory, checkpoints, start-up.

`geo-ray train` as users run it: two regions on a local cluster, one worker each, DiLoCo over AdamW,
a model of 0.4 GB in fp32. Nothing is emulated, so an exchange is as fast as processes and loopback.

  exchange_gb_per_s       size of the model over the seconds of an exchange, which moves it to the
                          averager and back: from when the last region begins to send until all
                          have merged. Median over the rounds without a checkpoint, TLS off.
  exchange_gb_per_s_tls   the same with TLS on
  memory_over_model       peak of all processes together, Ray's included, over the model's size
  checkpoint_standstill_s how much longer than usual a region did not compute, in the step that a
                          checkpoint held up most: its time between two steps, without the
                          exchange and the computing in it, less the median of steps beside which
                          nothing was saved
  driver_silence_s        longest time between two rounds of polling (which note WAN traffic once a
                          second)
  startup_s               from the command to the first step, TLS off

There is little text: a run ends with an evaluation of all rows that are held out, and of a model of
this size on two cores a few are enough.
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import support
from benchmarks.common.command import Run, geo_ray
from benchmarks.common.memory import MemoryPeak, memory_peak
from benchmarks.runs.startup import interpreter_s

REGIONS = 2
INTERVAL = 2
TLS = {"off": "off", "on": "required"}
CONFIG = f"""
name: large-model
task:
  use: bytelm
  options: {{size: 50M, dim: 768, layers: 14, heads: 12, context: 32, max_bytes: 50_000}}
data: {{generate: {{rows_per_shard: 4096}}, batch_size: 2}}
regions: [{{name: here}}, {{name: there}}]
strategy: {{kind: diloco, interval: {INTERVAL}}}
optimizer: {{kind: adamw, lr: 1.0e-4}}
train: {{eval_every: 0}}
checkpoint: {{every_s: 8}}
"""


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    found: dict[str, list[float]] = {}
    cases = ["off"] if options.quick else ["off", "on"]
    for number in range(1 if options.quick else 3):
        for tls in cases:
            support.say(f"run {number + 1}, TLS {tls}")
            for name, value in measure(tls, 6 if options.quick else 16).items():
                found.setdefault(name, []).append(value)
    figures = [
        support.median("exchange_gb_per_s", found["exchange_off"], "GB/s", ">= 0.5"),
        support.median("exchange_gb_per_s_tls", found.get("exchange_on", []), "GB/s", ">= 0.3"),
        support.median("memory_over_model", found["memory"], "ratio", "<= 20"),
        support.median("checkpoint_standstill_s", found["standstill"], "s", "<= 1"),
        support.median("driver_silence_s", found["silence"], "s", "<= 2"),
        support.median("startup_s", found["startup_off"], "s", "<= 40"),
    ]
    support.finish("large_model", machine, figures, options.out)


def measure(tls: str, steps: int) -> dict[str, float]:
    """The figures of one training."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "large.yaml"
        config.write_text(CONFIG, "utf-8")
        before_s = interpreter_s()
        with memory_peak() as peak:
            sets = {"transport.tls": TLS[tls], "train.steps": steps}
            run = geo_ray("train", config, sets, config.parent / "runs")
        model_bytes = next(run.events("exchange"))["bytes_before"]
        tell(peak, model_bytes)
        (started,) = run.events("run_started")
        first_s = min(step["start_s"] for step in run.events("step"))
        return {
            f"exchange_{tls}": model_bytes / exchange_s(run) / 1e9,
            f"startup_{tls}": before_s + run.summary["startup_s"] + first_s - started["t_s"],
            "memory": peak.bytes / model_bytes,
            "standstill": standstill_s(run),
            "silence": silence_s(run),
        }


def exchange_s(run: Run) -> float:
    """Median seconds of a round, of those that no checkpoint was written beside."""
    rounds: dict[int, list[dict[str, Any]]] = {}
    for event in run.events("exchange"):
        rounds.setdefault(event["round"], []).append(event)
    saved_s = checkpoints_s(run)
    spans = {
        (max(event["start_s"] for event in events), max(event["t_s"] for event in events))
        for events in rounds.values()
        if len(events) == REGIONS
    }
    apart = [e - b for b, e in spans if all(e < since or b > until for since, until in saved_s)]
    support.say(f"exchanges: {', '.join(f'{e - b:.2f}' for b, e in sorted(spans))} s")
    if not apart:  # too short a run, or too busy a machine
        support.say("all of them were beside a checkpoint: the median is of these")
    return statistics.median(apart or [e - b for b, e in spans])


def checkpoints_s(run: Run) -> list[tuple[float, float]]:
    """From when to when each checkpoint was taken and written."""
    return [(event["start_s"], event["t_s"]) for event in run.events("checkpoint")]


def standstill_s(run: Run) -> float:
    """See the module's docstring; the first steps make the optimizer's state and are left out."""
    exchanges, saved_s = list(run.events("exchange")), checkpoints_s(run)
    beside: list[float] = []
    apart: list[float] = []
    for event in run.events("step"):
        if event["step"] <= INTERVAL:
            continue
        end_s = event["t_s"]
        begin_s = end_s - event["wait_s"] - event["compute_s"]
        exchanged_s = sum(
            max(0.0, min(end_s, other["t_s"]) - max(begin_s, other["start_s"]))
            for other in exchanges
            if other["region"] == event["region"]
        )
        is_beside = any(begin_s < until and end_s > since for since, until in saved_s)
        (beside if is_beside else apart).append(event["wait_s"] - exchanged_s)
    support.say(f"idle beside checkpoints: {', '.join(f'{s:.2f}' for s in sorted(beside))} s")
    support.say(f"idle apart from them: {', '.join(f'{s:.2f}' for s in sorted(apart))} s")
    if not apart:
        support.say("no step was apart from checkpoints: nothing is subtracted")
    return max(beside) - (statistics.median(apart) if apart else 0.0)


def silence_s(run: Run) -> float:
    """The longest pause between two rounds of polling."""
    times_s = sorted({event["t_s"] for event in run.events("wan")})
    return max(after - before for before, after in pairwise(times_s))


def tell(peak: MemoryPeak, model_bytes: int) -> None:
    """Show who held what at the peak."""
    for size, command in sorted(peak.by_process.values(), reverse=True)[:12]:
        support.say(f"  {size / model_bytes:5.2f} models: {command}")
    support.say(f"  {peak.bytes / model_bytes:5.2f} models: all {len(peak.by_process)} processes")


if __name__ == "__main__":
    main()
