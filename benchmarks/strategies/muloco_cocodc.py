"""`muloco` and `cocodc` beside `diloco` and `diloco_streaming`, at equal bytes.

Simulated with real gradients: REGIONS regions train the byte-level language model (70,464
parameters, two blocks) on equal parts of one text, 16 H steps of 16 rows of 32 bytes each. Every
strategy sends the model once per H steps (`--interval`): `diloco` and `muloco` the whole,
`diloco_streaming` a quarter every H/4 steps, `cocodc` too, each quarter at least once in 2 H.
Streamed answers are merged 3 H/16 steps after sending. `bsp` with both inner optimizers is the
reference: data-parallel training, which sends H times as much. All rates follow the same schedule
(wsd). Each strategy's rate (factors of 2, until the best is not the smallest or the largest), outer
momentum, and its own option (merge, compensation) are the best on seed TUNED; streaming strategies
take the rate of `diloco`. The figures are those of the seeds JUDGED, which chose nothing.

  loss_CASE          nats per byte on held-out text, of the model at the end
  mb_CASE            sent and received by all regions; `quarter` sends the largest quarter of the
                     elements in two bits (`chunked_topk`), answers in int4
  gain_muloco_...    loss of `diloco` less that of `muloco`, by seed
  steps_cocodc       steps until the loss that `diloco_streaming` has at its last evaluation
                     before the end, over the steps of the latter (live models, interpolated)
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import support
from geo_ray.base.canonical import canonical_json
from geo_ray.base.load import load_text
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import use_one_thread
from geo_ray.runs.data import prepare_manifest
from geo_ray.simulator.world import World

REGIONS, ROUNDS = 4, 16
TUNED, JUDGED = 0, (11, 12, 13)
NESTEROV = {"kind": "nesterov", "lr": 0.7}
RATES = {"adamw": (0.002, 0.004, 0.008), "muon": (0.008, 0.016, 0.032)}
MOMENTA = (0.0, 0.3, 0.6)
BSP = {"kind": "bsp"}
INT4 = {"up": {"kind": "int4"}, "down": {"kind": "int4"}}
QUARTER = {"up": {"kind": "chunked_topk", "keep": 1024}, "down": {"kind": "int4"}}


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy with its options.

    Attributes:
        strategy: section, without the outer momentum.
        optimizer: kind of the inner one.
        lr: its rate.
        momentum: of the outer optimizer.
        codec: section.
        regions: number of them.
    """

    strategy: Mapping[str, Any]
    optimizer: str
    lr: float
    momentum: float
    codec: Mapping[str, Any] = field(default_factory=dict)
    regions: int = REGIONS

    def config(self, seed: int, steps: int) -> Experiment:
        """The run."""
        streams = "tau" in self.strategy
        outer = {"outer": {**NESTEROV, "momentum": self.momentum}}
        inner = {"kind": self.optimizer, "lr": self.lr, "weight_decay": 0.01}
        inner |= {"beta2": 0.95} if self.optimizer == "adamw" else {}  # as beside the matrices
        schedule = {"kind": "wsd", "warmup_steps": steps // 16, "decay_steps": steps // 4}
        sections = {
            "name": "muloco-cocodc",
            "seed": seed,
            "task": {
                "use": "bytelm",
                "options": {
                    "size": "0.1M",
                    "dim": 48,
                    "layers": 2,
                    "heads": 3,
                    "context": 32,
                    "max_bytes": 400_000,
                },
            },
            "data": {"generate": {"split": {"kind": "iid"}}, "batch_size": 16},
            "regions": [{"name": f"r{number}"} for number in range(self.regions)],
            "strategy": {**self.strategy, **({} if self.strategy == BSP else outer)},
            "optimizer": {**inner, "schedule": schedule},
            "codec": dict(self.codec),
            "train": {
                "steps": steps,
                "eval_every": steps // ROUNDS,
                "evaluate": "live" if streams else "outer",
            },
            "emulate": {"step_s": 0.1, "link": {"rate_mbps": 100, "delay_s": 0.1}},
            "checkpoint": {"every_s": None},
        }
        return load_text(canonical_json(sections), [], Experiment, "muloco-cocodc")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        loss: at the end.
        curve: steps and losses of the evaluations before the end, mean over regions.
        mb: of all exchanges.
    """

    loss: float
    curve: tuple[tuple[int, float], ...]
    mb: float


def outcome(job: tuple[Case, int, int]) -> Outcome:
    """Simulate one case with one seed and number of steps."""
    case, seed, steps = job
    use_one_thread()
    config = case.config(seed, steps)
    sent, ends = [0], [float("nan")]
    curve: dict[int, list[float]] = {}

    def feed(kind: str, t_s: float, **fields: Any) -> None:
        if kind == "exchange":
            sent[0] += fields["bytes_sent"] + fields["bytes_received"]
        elif kind == "eval":
            loss = float(fields["metrics"]["loss"])
            if fields.get("final"):
                ends[0] = loss
            elif fields["region"] is None:
                curve.setdefault(fields["step"], []).append(loss)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        task = load_task(config.task, folder)
        manifest, _ = prepare_manifest(config, task, folder, folder)
        World(config, task, manifest, feed).run()
    points = [(step, sum(found) / len(found)) for step, found in sorted(curve.items())]
    return Outcome(ends[0], tuple(points), sent[0] / 1e6)


class Runs:
    """Runs cases in parallel and remembers them in a file, so that an interrupted one goes on."""

    def __init__(self, memory: Path, steps: int) -> None:
        self._memory, self._steps = memory, steps
        self._known: dict[str, Any] = json.loads(memory.read_text()) if memory.exists() else {}

    def of(self, cases: Iterable[Case], seeds: Sequence[int]) -> list[list[Outcome]]:
        """The outcomes of every case, by seed."""
        jobs = [(case, seed, self._steps) for case in cases for seed in seeds]
        new = [job for job in jobs if self._key(job) not in self._known]
        with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
            for job, found in zip(new, pool.imap(outcome, new), strict=True):
                self._known[self._key(job)] = asdict(found)
                self._memory.write_text(json.dumps(self._known))
                support.say(f"{job[0]} seed {job[1]}: {found.loss:.4f}, {found.mb:.2f} MB")
        all_ = [Outcome(**self._known[self._key(job)]) for job in jobs]
        return [all_[i : i + len(seeds)] for i in range(0, len(all_), len(seeds))]

    def best(self, cases: Sequence[Case]) -> Case:
        """The case with the smallest loss on the tuning seed."""
        found = [runs[0].loss for runs in self.of(cases, (TUNED,))]
        chosen = min(zip(found, range(len(found)), strict=True))[1]
        support.say(f"chosen: {cases[chosen]} with {found[chosen]:.4f}")
        return cases[chosen]

    def best_rate(self, strategy: Mapping[str, Any], optimizer: str) -> Case:
        """The best rate and momentum; rates beyond the grid are tried while its edge is best."""
        rates = list(RATES[optimizer])
        while True:
            best = self.best(
                [
                    Case(strategy, optimizer, lr, momentum)
                    for lr in rates
                    for momentum in (MOMENTA[:1] if strategy == BSP else MOMENTA)
                ]
            )
            if best.lr == rates[0]:
                rates.insert(0, rates[0] / 2)
            elif best.lr == rates[-1]:
                rates.append(2 * rates[-1])
            else:
                return best

    def _key(self, job: tuple[Case, int, int]) -> str:
        return canonical_json([asdict(job[0]), job[1], job[2]]).decode()


def reached(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """The step at which a curve falls to a loss, between evaluations on a straight line."""
    before: Sequence[float] | None = None
    for step, value in curve:
        if value <= loss:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = (step, value)
    return None


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--interval", type=int, default=32, help="H; a multiple of 16")
    parser.add_argument("--cases", default="", help="names separated by commas; default: all")
    options = parser.parse_args()
    machine = support.hardware()
    every = 16 if options.quick else options.interval
    seeds = JUDGED[:1] if options.quick else JUDGED
    runs = Runs(options.out.with_suffix(".runs.json"), every * (4 if options.quick else ROUNDS))
    interval = {"interval": every}
    streamed = {"fragments": 4, "tau": 3 * every // 16}
    asked = set(options.cases.split(",")) if options.cases else None
    diloco = runs.best_rate({"kind": "diloco", **interval}, "adamw")
    muloco = runs.best_rate({"kind": "muloco", **interval}, "muon")
    references = {
        f"bsp_{kind}": runs.best_rate(BSP, kind)
        for kind in ("adamw", "muon")
        if asked is None or f"bsp_{kind}" in asked
    }
    once = {"kind": "diloco_streaming", **interval, **streamed}
    streaming = runs.best(
        [
            Case({**once, "merge": merge}, "adamw", diloco.lr, momentum)
            for merge in ("mix", "correct")
            for momentum in MOMENTA
        ]
    )
    # 8 exchanges in 2 H steps: 0.76 * 2 H / (3 H / 16) = 8.1.
    twice = {"kind": "cocodc", "interval": 2 * every, **streamed, "utilization": 0.76}
    cocodc = runs.best(
        [
            Case({**twice, "compensation": strength}, "adamw", diloco.lr, momentum)
            for strength in (0.0, 0.1, 0.5)
            for momentum in MOMENTA
        ]
    )
    cases = {
        "diloco": diloco,
        "muloco": muloco,
        **references,
        "diloco_streaming": streaming,
        "cocodc": cocodc,
        "diloco_int4": changed(diloco, codec=INT4),
        "muloco_int4": changed(muloco, codec=INT4),
        "cocodc_uncompensated": changed(cocodc, strategy={**cocodc.strategy, "compensation": 0.0}),
        "streaming_muon": changed(streaming, optimizer="muon", lr=muloco.lr),
        "diloco_quarter": changed(diloco, codec=QUARTER),
        "muloco_quarter": changed(muloco, codec=QUARTER),
        "diloco_8_regions": changed(diloco, regions=8),
        "muloco_8_regions": changed(muloco, regions=8),
    }
    cases = {name: case for name, case in cases.items() if asked is None or name in asked}
    found = dict(zip(cases, runs.of(cases.values(), seeds), strict=True))
    figures = []
    for name, each in found.items():
        figures.append(support.median(f"loss_{name}", [run.loss for run in each], "nats"))
        figures.append(support.median(f"mb_{name}", [run.mb for run in each], "MB"))
    for suffix in ("", "_int4", "_quarter", "_8_regions"):
        if f"muloco{suffix}" not in found:
            continue
        pairs = zip(found[f"diloco{suffix}"], found[f"muloco{suffix}"], strict=True)
        gains = [plain.loss - ours.loss for plain, ours in pairs]
        figures.append(support.median(f"gain_muloco{suffix}", gains, "nats"))
    ratios = []
    for plain, ours in zip(found["diloco_streaming"], found["cocodc"], strict=True):
        step, loss = plain.curve[-1]
        at = reached(ours.curve, loss)
        ratios += [] if at is None else [at / step]
    figures.append(support.median("steps_cocodc", ratios, "ratio"))
    support.finish("muloco_cocodc", machine, figures, options.out)


def changed(case: Case, **values: Any) -> Case:
    """The case with other values."""
    return Case(**({**{f: getattr(case, f) for f in Case.__slots__}} | values))


if __name__ == "__main__":
    main()
