"""What geo_ray costs one region without a WAN: samples/s over those of a plain PyTorch loop.

The same model (`bytelm`), batch, AdamW and number of compute threads (one), on the same cores. The
plain loop is as lean as such a loop gets: rows in memory, gradients dropped by `zero_grad`, loss
not even read. geo_ray runs as users run it, `geo-ray train` on a local cluster: one worker, one
parameter server, rows streamed from Parquet shards, each gradient checked and pushed, parameters
pulled. Both take turns. Samples/s are those of the steady state: the first steps are left out.

`*_one_core` repeats it with everything, Ray's own processes included, on a single core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import support
from benchmarks.common.command import geo_ray
from geo_ray.base.load import load_tree
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment

WARM_UP_STEPS = 5
RAY_NICENESS = 15
"""Ray starts its workers with this priority; the plain loop gets the same."""
LR = 0.001
CONFIG = """
name: overhead
task: {{use: bytelm, options: {{size: {size}}}}}
data: {{generate: {{rows_per_shard: 1024}}, batch_size: {batch}}}
regions: [{{name: here}}]
strategy: {{kind: sma}}
optimizer: {{kind: adamw, lr: {lr}, weight_decay: 0.01}}
train: {{steps: {steps}, eval_every: 0, eval_batch_size: 64}}
checkpoint: {{every_s: null}}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One model.

    Attributes:
        size: preset of `bytelm`.
        batch: rows per step.
        steps: steps of one run, warm-up included.
    """

    size: str
    batch: int
    steps: int


CASES = (Case("1M", 8, 205), Case("10M", 4, 35))


def main() -> None:
    if sys.argv[1:2] == ["--plain-loop"]:
        print(plain_loop(Path(sys.argv[2])))
        return
    options = support.parse(__doc__)
    machine = support.hardware()
    pairs = 1 if options.quick else 3
    figures = []
    for case in CASES[:1] if options.quick else CASES:
        name = f"bytelm_{case.size.lower()}"
        figures += measure(name, case, pairs, None, ">= 0.9")
        if not options.quick:
            figures += measure(f"{name}_one_core", case, 1, {0}, None)
    support.finish("overhead", machine, figures, options.out)


def measure(
    name: str, case: Case, pairs: int, cores: set[int] | None, target: str | None
) -> list[support.Figure]:
    """Samples/s of both, in pairs that run one after the other."""
    ours, plain, outside = [], [], []
    for number in range(pairs):
        with tempfile.TemporaryDirectory() as directory:
            config = Path(directory) / "overhead.yaml"
            values = {"size": case.size, "batch": case.batch, "steps": case.steps, "lr": LR}
            config.write_text(CONFIG.format(**values), "utf-8")
            support.say(f"{name}, pair {number + 1} of {pairs}: plain loop")
            before = plain_speed(config, cores)
            support.say(f"{name}, pair {number + 1} of {pairs}: geo-ray train")
            speed, exchange = our_speed(config, case, cores)
            ours.append(speed)
            outside.append(exchange)
            after = plain_speed(config, cores)
            plain.append((before + after) / 2)
            support.say(f"{name}: {ours[-1]:.2f} over {plain[-1]:.2f} samples/s")
    return [
        support.median(f"{name}_samples_per_s", ours, "samples/s"),
        support.median(f"{name}_plain_samples_per_s", plain, "samples/s"),
        support.ratio(f"{name}_over_plain", ours, plain, target),
        support.median(f"{name}_outside_worker_share", outside, "ratio"),
    ]


def our_speed(config: Path, case: Case, cores: set[int] | None) -> tuple[float, float]:
    """Samples/s of a real run after its warm-up, from its events.

    And the share of that time in which the worker waited for its parameter server.
    """
    run = geo_ray("train", config, {}, config.parent / "runs", cores=cores)
    steps = list(run.events("step"))
    assert len(steps) == case.steps
    counted = steps[WARM_UP_STEPS:]
    seconds = float(counted[-1]["t_s"] - steps[WARM_UP_STEPS - 1]["t_s"])
    computed_s = sum(step["compute_s"] for step in counted)
    return case.batch * len(counted) / seconds, 1.0 - computed_s / seconds


def plain_speed(config: Path, cores: set[int] | None) -> float:
    """Samples/s of the plain loop in a process of its own."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--plain-loop", str(config)],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.nice(RAY_NICENESS),
        )
    finally:
        os.sched_setaffinity(0, before)
    return float(done.stdout)


def plain_loop(config: Path) -> float:
    """Train with nothing but PyTorch; samples/s after the warm-up."""
    torch.set_num_threads(1)
    experiment = load_tree(config, [], Experiment)
    task = load_task(experiment.task, config.parent)
    rows = task.dataset(experiment.seed).train  # type: ignore[attr-defined]
    order = np.random.default_rng(0).permutation(len(next(iter(rows.values()))))
    module = task.model(experiment.seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.01, fused=True)
    batch, steps, began_s = experiment.data.batch_size, experiment.train.steps, 0.0
    for step in range(steps):
        if step == WARM_UP_STEPS:
            began_s = time.perf_counter()
        picked = order[step * batch : (step + 1) * batch]
        columns = {name: values[picked] for name, values in rows.items()}
        loss = task.loss(module, task.collate(columns, torch.device("cpu")))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return batch * (steps - WARM_UP_STEPS) / (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
