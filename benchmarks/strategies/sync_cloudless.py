"""How fast regions get to a target, by how they synchronise: the setting of Cloudless-Training.

Two regions, 100 Mbit/s and 30 ms one way between them, emulated in the transport; each worker's
step is padded so that one exchange (both directions' bytes and delays) takes as long as one step.
`digits` with a wider network (265 k parameters), batch 32, momentum SGD. Every strategy gives each
gradient the same total weight (`combine: mean`), trains the same number of samples, and has its
learning rate tuned on one grid in the simulator, on seeds that are not measured afterwards. Then
the chosen ones run on real actors, two runs at a time, three seeds.

Time to target: from the first step until the replicas, each with its three newest evaluations on
its region's held-out rows, average at most TARGET_LOSS and at least TARGET_ACCURACY.

`asgd` is the paper's baseline as we read it: every gradient is a message of its own, and the sender
stands still for it. The averager lives in one region (the hub), whose own messages would cost
nothing; between two parameter servers that send to each other both pay. So in `asgd` the hub's
steps are padded by the time of one exchange. `asgd_hub_free` is the same without that padding. For
the other strategies it makes no difference: either nobody waits, or all do.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import support
from benchmarks.common.command import geo_ray, kept_cluster
from geo_ray.base.load import load_tree
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.data import prepare_manifest
from geo_ray.simulator.world import World
from geo_ray.telemetry.events import Event, conform
from geo_ray.training.parameters import count_parameters

REGIONS = ("east", "west")
STEP_S = 0.23
RATE_MBPS, DELAY_S = 100, 0.03
TARGET_LOSS, TARGET_ACCURACY = 0.15, 0.95
SMOOTHED_OVER = 3
GRID = (0.02, 0.05, 0.1, 0.2)
TUNING_SEEDS, SEEDS = (10, 11), (0, 1, 2)
CONFIG = f"""
name: cloudless
task: {{use: digits, options: {{width: 48}}}}
data: {{generate: {{rows_per_shard: 128}}, batch_size: 32}}
regions: [{{name: east}}, {{name: west}}]
strategy: {{kind: asgd}}
optimizer: {{kind: momentum, lr: 0.05}}
train: {{steps: 160, eval_every: 4}}
averager: {{region: east}}
emulate: {{link: {{rate_mbps: {RATE_MBPS}, delay_s: {DELAY_S}}}, step_s: {STEP_S}}}
checkpoint: {{every_s: null}}
"""
HUB_PAYS = {"emulate.step_s_by_region": f"{{east: {2 * STEP_S}}}"}


@dataclass(frozen=True, slots=True)
class Case:
    """One way to synchronise.

    Attributes:
        strategy: the ``strategy`` section.
        of_paper: whether the paper's abstract names it as its own.
        more: further changes of the configuration.
    """

    strategy: str
    of_paper: bool = False
    more: Mapping[str, object] = field(default_factory=dict)

    def sets(self, lr: float, seed: int, steps: int) -> dict[str, object]:
        """Changes of the configuration for one run."""
        return {
            "strategy": self.strategy,
            "optimizer.lr": lr,
            "seed": seed,
            "train.steps": steps,
            **self.more,
        }


CASES = {
    "asgd": Case("{kind: asgd}", more=HUB_PAYS),
    "asgd_hub_free": Case("{kind: asgd}"),
    "asgd_ga_f4": Case("{kind: asgd_ga, interval: 4}", of_paper=True),
    "asgd_ga_f8": Case("{kind: asgd_ga, interval: 8}", of_paper=True),
    "ama_f4": Case("{kind: ama, interval: 4}", of_paper=True),
    "ama_f8": Case("{kind: ama, interval: 8}", of_paper=True),
    "sma_f4": Case("{kind: sma, interval: 4}", of_paper=True),
    "sma_f8": Case("{kind: sma, interval: 8}", of_paper=True),
    "asgd_when_busy": Case("{kind: asgd, wait: when_busy}"),
}
OURS = ("asgd_when_busy",)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to.

    Attributes:
        target_s: time to target; infinite if it was not reached.
        seconds: from the first step to the end.
        accuracy: of the common model at the end.
    """

    target_s: float
    seconds: float
    accuracy: float


Outcomes = dict[str, list[Outcome]]


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "cloudless.yaml").write_text(CONFIG, "utf-8")
        figures = quick(root) if options.quick else full(root)
        figures.insert(0, ratio_figure(root))
    support.finish("sync_cloudless", machine, figures, options.out)


def quick(root: Path) -> list[support.Figure]:
    """Everything in the simulator, without tuning; one pair for real."""
    steps, names = 100, ("asgd", "asgd_ga_f8")
    rates = dict.fromkeys(CASES, GRID[1])
    simulated = simulate_all(root, rates, SEEDS[:1], steps)
    real, busy = train_all(root, {name: rates[name] for name in names}, SEEDS[:1], steps)
    pair = real["asgd"], real["asgd_ga_f8"]
    seconds = [[outcome.seconds for outcome in outcomes] for outcomes in pair]
    return [
        *figures_of(simulated, "sim_"),
        support.ratio("quick_real_speedup_same_samples", *seconds),
        *errors_of(real, {name: simulated[name] for name in names}),
        support.Figure("cpu_fraction", busy, "ratio", "<= 0.8"),
    ]


def full(root: Path) -> list[support.Figure]:
    """Tune in the simulator, run the best for real, compare with what the simulator said."""
    steps = load_tree(root / "cloudless.yaml", [], Experiment).train.steps
    rates = tune(root, steps)
    simulated = simulate_all(root, rates, SEEDS, steps)
    support.say(f"simulated: {medians(simulated)}")
    real, busy = train_all(root, rates, SEEDS, steps)
    return [
        *(support.Figure(f"lr_{name}", lr, "1") for name, lr in rates.items()),
        *figures_of(real, ""),
        *errors_of(real, simulated),
        *figures_of(simulated, "sim_"),
        support.Figure("cpu_fraction", busy, "ratio", "<= 0.8"),
    ]


# ---------------------------------------------------------------------- simulated runs


def tune(root: Path, steps: int) -> dict[str, float]:
    """The learning rate with the shortest median time to target, for each case."""
    support.say(f"tuning {len(CASES)} cases on {GRID} in the simulator")
    jobs = [(name, lr, seed) for name in CASES for lr in GRID for seed in TUNING_SEEDS]
    found = dict(zip(jobs, simulate_jobs(root, jobs, steps), strict=True))
    best = {}
    for name in CASES:
        times_s = {
            lr: statistics.median(found[name, lr, seed].target_s for seed in TUNING_SEEDS)
            for lr in GRID
        }
        best[name] = min(times_s, key=lambda lr: times_s[lr])
        support.say(f"  {name}: lr {best[name]} of {times_s}")
    return best


def simulate_all(
    root: Path, rates: Mapping[str, float], seeds: Sequence[int], steps: int
) -> Outcomes:
    support.say(f"simulating {len(rates)} cases, {len(seeds)} seeds")
    jobs = [(name, lr, seed) for name, lr in rates.items() for seed in seeds]
    outcomes = simulate_jobs(root, jobs, steps)
    return by_name(zip(jobs, outcomes, strict=True))


def simulate_jobs(root: Path, jobs: Sequence[tuple[str, float, int]], steps: int) -> list[Outcome]:
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, get_context("spawn")) as pool:
        return list(pool.map(simulate_one, [(str(root), *job, steps) for job in jobs]))


def simulate_one(job: tuple[str, str, float, int, int]) -> Outcome:
    """One run on the virtual clock, without files but its data."""
    torch.set_num_threads(1)
    directory, name, lr, seed, steps = job
    root = Path(directory)
    sets = [f"{key}={value}" for key, value in CASES[name].sets(lr, seed, steps).items()]
    experiment = load_tree(root / "cloudless.yaml", sets, Experiment)
    task = load_task(experiment.task, root)
    with tempfile.TemporaryDirectory() as data:
        manifest, _ = prepare_manifest(experiment, task, root, Path(data))
        events: list[Event] = []

        def emit(kind: str, t_s: float, **fields: Any) -> Event:
            events.append(conform(kind, t_s, fields))
            return events[-1]

        World(experiment, task, manifest, emit).run()
    return outcome_of({"kind": e.kind, "t_s": e.t_s, **e.fields} for e in events)


# ---------------------------------------------------------------------- real runs


def train_all(
    root: Path, rates: Mapping[str, float], seeds: Sequence[int], steps: int
) -> tuple[Outcomes, float]:
    """Run all cases on actors, two at a time on one cluster; and the share of the cores in use."""
    jobs = [(name, lr, seed) for seed in seeds for name, lr in rates.items()]
    done: list[tuple[tuple[str, float, int], Outcome]] = []
    busy: list[float] = []
    with kept_cluster(REGIONS, cpus_per_region=4.0) as (sets, environment), CpuMeter() as meter:

        def train(job: tuple[str, float, int]) -> tuple[Outcome, float]:
            name, lr, seed = job
            run = geo_ray(
                "train",
                root / "cloudless.yaml",
                {**CASES[name].sets(lr, seed, steps), **sets},
                root / f"{name}-{seed}",
                environment=environment,
            )
            kinds = ("step", "eval")
            outcome = outcome_of(event for kind in kinds for event in run.events(kind))
            ended_s = run.began_unix_s + run.line_s("writing the model")
            return outcome, meter.share(ended_s - outcome.seconds, ended_s)

        # Two that take about as long start together, so that neither loads its libraries while
        # the other trains.
        jobs.sort(key=lambda job: job[0] not in {"asgd", "asgd_hub_free"})
        with ThreadPoolExecutor(2) as pool:
            for first in range(0, len(jobs), 2):
                pair = jobs[first : first + 2]
                for job, (outcome, used) in zip(pair, pool.map(train, pair), strict=True):
                    support.say(f"{first + len(pair)}/{len(jobs)} {job}: {outcome}")
                    done.append((job, outcome))
                    busy.append(used)
    return by_name(done), statistics.median(busy)


class CpuMeter:
    """Notes twice a second how busy all cores of the machine are."""

    def __enter__(self) -> CpuMeter:
        self._samples: list[tuple[float, int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def share(self, start_unix_s: float, end_unix_s: float) -> float:
        """Share of the cores that was in use between two times of day."""
        inside = [s for s in self._samples if start_unix_s <= s[0] <= end_unix_s]
        (_, busy, total), (_, busy_end, total_end) = inside[0], inside[-1]
        return (busy_end - busy) / max(1, total_end - total)

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            line = Path("/proc/stat").read_text("utf-8").splitlines()[0]
            ticks = [int(number) for number in line.split()[1:9]]
            idle = ticks[3] + ticks[4]  # and waiting for disks
            self._samples.append((time.time(), sum(ticks) - idle, sum(ticks)))


# ---------------------------------------------------------------------- what came of them


def outcome_of(events: Iterable[Mapping[str, Any]]) -> Outcome:
    """Fold a run's step and eval events."""
    seen = list(events)
    began_s = min(event["start_s"] for event in seen if event["kind"] == "step")
    ended_s = max(event["t_s"] for event in seen if event["kind"] == "step")
    evals = sorted((e for e in seen if e["kind"] == "eval"), key=lambda event: event["t_s"])
    combined = [event for event in evals if event["region"] is None]
    target_s = reached_s([event for event in evals if event["region"] is not None])
    return Outcome(target_s - began_s, ended_s - began_s, combined[-1]["metrics"]["accuracy"])


def reached_s(evals: Sequence[Mapping[str, Any]]) -> float:
    """When the replicas were good enough; infinite if never."""
    newest: dict[str, list[Mapping[str, Any]]] = {region: [] for region in REGIONS}
    for event in evals:
        newest[event["region"]].append(event)
        window = [e for held in newest.values() for e in held[-SMOOTHED_OVER:]]
        if len(window) < SMOOTHED_OVER * len(REGIONS):
            continue
        rows = sum(e["samples"] for e in window)
        loss, accuracy = (
            sum(e["metrics"][name] * e["samples"] for e in window) / rows
            for name in ("loss", "accuracy")
        )
        if loss <= TARGET_LOSS and accuracy >= TARGET_ACCURACY:
            return float(event["t_s"])
    return math.inf


def by_name(done: Iterable[tuple[tuple[str, float, int], Outcome]]) -> Outcomes:
    """Outcomes by case, in the order of seeds."""
    found: Outcomes = {}
    for (name, _, _), outcome in sorted(done, key=lambda item: item[0][2]):
        found.setdefault(name, []).append(outcome)
    return {name: found[name] for name in CASES if name in found}


def medians(outcomes: Outcomes) -> dict[str, float]:
    return {
        name: round(statistics.median(o.target_s for o in runs), 2)
        for name, runs in outcomes.items()
    }


def figures_of(outcomes: Outcomes, prefix: str) -> list[support.Figure]:
    """Times, accuracies and speed-ups; pairs are of the same seed."""
    figures = []
    times_s = {name: [o.target_s for o in runs] for name, runs in outcomes.items()}
    accuracy = {name: [o.accuracy for o in runs] for name, runs in outcomes.items()}
    speedups = {}
    for name in outcomes:
        figures.append(support.median(f"{prefix}time_to_target_{name}", times_s[name], "s"))
        figures.append(support.median(f"{prefix}final_accuracy_{name}", accuracy[name], "1"))
    for name in outcomes:
        if name != "asgd":
            # seconds of asgd over seconds of this: a speed over a speed
            inverse = [1 / t for t in times_s[name]], [1 / t for t in times_s["asgd"]]
            speedups[name] = support.ratio(f"{prefix}speedup_{name}", *inverse)
    figures += speedups.values()
    paper = best(speedups, [name for name, case in CASES.items() if case.of_paper])
    ours = best(speedups, [*OURS, *(name for name, case in CASES.items() if case.of_paper)])
    lost = statistics.median(accuracy["asgd"]) - statistics.median(accuracy[paper])
    free = [1 / t for t in times_s[paper]], [1 / t for t in times_s["asgd_hub_free"]]
    seconds = [
        [1 / o.seconds for o in outcomes[paper]],
        [1 / o.seconds for o in outcomes["asgd_hub_free"]],
    ]
    goal = None if prefix else ">= 1.7"
    return [
        support.Figure(
            f"{prefix}best_paper_strategy_speedup",
            speedups[paper].value,
            f"ratio ({paper})",
            goal,
            statistics.median(times_s["asgd"]),
            speedups[paper].runs,
        ),
        support.Figure(
            f"{prefix}final_accuracy_loss_points",
            100 * lost,
            f"points ({paper})",
            None if prefix else "<= 0.5",
        ),
        support.Figure(
            f"{prefix}best_speedup_of_ours",
            speedups[ours].value,
            f"ratio ({ours})",
            None,
            statistics.median(times_s["asgd"]),
            speedups[ours].runs,
        ),
        support.ratio(f"{prefix}best_paper_strategy_speedup_over_hub_free", *free, goal),
        support.ratio(f"{prefix}best_paper_strategy_speedup_same_samples", *seconds),
        *figures,
    ]


def best(speedups: Mapping[str, support.Figure], names: Sequence[str]) -> str:
    return max(names, key=lambda name: speedups[name].value or 0.0)


def errors_of(real: Outcomes, simulated: Outcomes) -> list[support.Figure]:
    """How far the simulator's predictions are off, by case."""
    figures = []
    for name, runs in real.items():
        pairs = list(zip(simulated[name], runs, strict=True))
        figures.append(
            support.median(
                f"sim_error_seconds_{name}",
                [abs(s.seconds / r.seconds - 1) for s, r in pairs],
                "ratio",
                "<= 0.1",
            )
        )
        figures.append(
            support.median(
                f"sim_error_time_to_target_{name}",
                [abs(s.target_s / r.target_s - 1) for s, r in pairs],
                "ratio",
            )
        )
    return figures


def ratio_figure(root: Path) -> support.Figure:
    """Seconds of one exchange over seconds of one step."""
    experiment = load_tree(root / "cloudless.yaml", [], Experiment)
    size_bytes = 4 * count_parameters(load_task(experiment.task, root).model(0))
    exchange_s = 2 * (size_bytes * 8e-6 / RATE_MBPS + DELAY_S)
    return support.Figure("transfer_over_compute", exchange_s / STEP_S, "ratio")


if __name__ == "__main__":
    main()
