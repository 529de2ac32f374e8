"""Mean completion time of the elastic policies beside FIFO, Tiresias and Optimus.

Jobs like those of the Pollux trace: made up in its format, since the traces are not shipped, with
its mix of applications, 160 jobs in 8 hours (--quick: 30), on 16 machines of 8 accelerators, slots
of 60 s. Each job's batch may grow to four times its own; gradient noise balances at four times.

On this load no job waits, `ones` may use four times the workers that a job asks for, and `optimus`
pays 30 s for changes in each slot of 60 s. With fewer accelerators `ones` is the slower one.

  ones_under_*    1 - mean completion of `ones` over that of another policy
  pollux_under_*  the same of `pollux`
"""

from __future__ import annotations

import csv
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.common import support
from geo_ray.scheduler.policies.registry import POLICIES
from geo_ray.scheduler.replay import outcome_of, replay_jobs
from geo_ray.scheduler.schedule import check_schedule
from geo_ray.scheduler.traces import cluster_jobs, read_trace
from geo_ray.scheduler.workload import LoadShape, generated_cluster

MIX = {"cifar10": 0.38, "ncf": 0.34, "bert": 0.10, "deepspeech2": 0.12, "yolov3": 0.05,
       "imagenet": 0.01}  # fmt: skip
TARGETS = {"fifo": None, "tiresias": ">= 0.45", "optimus": ">= 0.41"}


def written(path: Path, jobs: int, seed: int) -> Path:
    """A workload in the format of Pollux's."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("name", "time", "application", "num_replicas", "batch_size"))
        for number, at_s in enumerate(np.sort(rng.uniform(0, jobs * 180, jobs))):
            name = str(rng.choice(list(MIX), p=list(MIX.values())))
            replicas = int(rng.choice((1, 2, 4, 8), p=(0.4, 0.25, 0.2, 0.15)))
            writer.writerow((f"{name}-{number}", f"{at_s:.0f}", name, replicas, 32 * replicas))
    return path


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    jobs, seeds = (30, range(1)) if options.quick else (160, range(3))
    means: dict[str, list[float]] = defaultdict(list)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            traced = read_trace(written(Path(folder) / "trace.csv", jobs, seed), "pollux")
        cluster = generated_cluster(LoadShape(max(4, jobs // 10), jobs, 20_000, slot_s=60.0), seed)
        for name in (*TARGETS, "ones", "pollux"):
            done = replay_jobs(cluster, cluster_jobs(traced, cluster, seed), POLICIES[name]())
            check_schedule(done)
            outcome = outcome_of(done)
            means[name].append(outcome.completion.mean_s)
            mean_h = outcome.completion.mean_s / 3600
            support.say(f"seed {seed}, {name}: mean {mean_h:.2f} h, {outcome.ended} ended")
    figures = []
    for own in ("ones", "pollux"):
        for name, target in TARGETS.items():
            less = [1 - a / b for a, b in zip(means[own], means[name], strict=True)]
            asked = target if own == "ones" else None
            figures.append(
                support.Figure(
                    f"{own}_under_{name}", statistics.mean(less), "fraction", asked, None, less
                )
            )
    support.finish("ones", machine, figures, options.out)


if __name__ == "__main__":
    main()
