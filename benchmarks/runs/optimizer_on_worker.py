"""What it saves that a worker keeps parameters and optimizer, for a model of 10.7 M parameters.

`geo-ray train` as users run it: two regions on a local cluster, one worker each, DiLoCo over AdamW
with 16 local steps. Runs with `train.optimizer_on` server and worker alternate.

  step_s_*           median seconds of a step between two exchanges, from one step to the next
  between_steps_s_*  of them, those in which the worker does not compute; on a worker, the
                     optimizer's step is a part of computing
  exchange_s_*       median seconds by which a step with an exchange takes longer
  memory_*           peak of all processes together over the size of the model
  startup_s_*        from the command to the first step
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from benchmarks.common import support
from benchmarks.common.command import Run, geo_ray
from benchmarks.common.memory import memory_peak
from benchmarks.runs.large_model import tell
from benchmarks.runs.startup import interpreter_s

INTERVAL = 16
SIDES = ("server", "worker")
CONFIG = f"""
name: optimizer-on-worker
task:
  use: bytelm
  options: {{size: 10M, context: 32, max_bytes: 50_000}}
data: {{generate: {{rows_per_shard: 4096}}, batch_size: 2}}
regions: [{{name: here}}, {{name: there}}]
strategy: {{kind: diloco, interval: {INTERVAL}}}
optimizer: {{kind: adamw, lr: 1.0e-4}}
train: {{eval_every: 0}}
checkpoint: {{every_s: null}}
"""


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    found: dict[str, list[float]] = {}
    for number in range(1 if options.quick else 5):
        for side in SIDES:
            support.say(f"run {number + 1}, optimizer on the {side}")
            for name, value in measure(side, (4 if options.quick else 12) * INTERVAL).items():
                found.setdefault(f"{name}_{side}", []).append(value)
    figures = [
        support.median(name, values, "ratio" if name.startswith("memory") else "s")
        for name, values in sorted(found.items())
    ]
    support.finish("optimizer_on_worker", machine, figures, options.out)


def measure(side: str, steps: int) -> dict[str, float]:
    """The figures of one training."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "run.yaml"
        config.write_text(CONFIG, "utf-8")
        before_s = interpreter_s()
        with memory_peak() as peak:
            sets = {"train.optimizer_on": side, "train.steps": steps}
            run = geo_ray("train", config, sets, config.parent / "runs")
        model_bytes = next(run.events("exchange"))["bytes_before"]
        support.say(f"{model_bytes / 4e6:.2f} M parameters")
        tell(peak, model_bytes)
        (started,) = run.events("run_started")
        first_s = min(step["start_s"] for step in run.events("step"))
        return {
            **steps_of(run),
            "memory": peak.bytes / model_bytes,
            "startup_s": before_s + run.summary["startup_s"] + first_s - started["t_s"],
        }


def steps_of(run: Run) -> dict[str, float]:
    """Seconds of steps, by whether an exchange lies between two of them."""
    plain, idle, exchanged = [], [], []
    for region in ("here", "there"):
        events = [event for event in run.events("step") if event["region"] == region]
        for before, after in pairwise(events[1:]):
            seconds = after["t_s"] - before["t_s"]
            if before["step"] % INTERVAL == 0:
                exchanged.append(seconds)
            else:
                plain.append(seconds)
                idle.append(after["wait_s"])
    step_s = statistics.median(plain)
    return {
        "step_s": step_s,
        "between_steps_s": statistics.median(idle),
        "exchange_s": statistics.median(exchanged) - step_s,
    }


if __name__ == "__main__":
    main()
