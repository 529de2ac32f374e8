"""Four uneven regions on four continents, by wall clock to one held-out loss. Needs root.

A byte-level transformer of 10 M parameters (40 MB in fp32, no codec), rows dealt without skew, the
links of the preset `four-continents`; a step takes 0.7 s in `us` and three times as long in
`australia`, and HALoS' question is asked: what does it cost that the others wait? Every strategy
trains as many rows in all (`count: pool`) and speaks every 12 local steps. HALoS' paper
(arXiv 2506.04531) finds 7.5 for synchronous training over `halos`, in a simulator, with four
workers per region, a network of 70 M parameters and 12.9 G tokens.

What is not like there: one worker per region, so that the lower level of `halos` has nothing to
combine and passes changes on as they are (its rate 1, no momentum); a batch of 4 x 64 bytes, since
the gradients are real and two cores have to compute those of all regions without setting the pace;
and runs of a few minutes, in which a byte's loss falls from 5.6 to about TARGET_LOSS. So what is
measured is the price of waiting, and of acting on old updates early in training; not final quality.
Outer learning rates and momenta are the best of two to four in the simulator, on the smallest model
(`size: 0.1M`), with a seed that does not count; AdamW's rate is the better of 0.001 and 0.0003 for
`halos` on the large one, the same for all.

Real: `geo-ray train` unmodified in the WAN lab, a Ray node per region, real TCP and real gradients,
one seed, or those of `--seeds`, and then nothing is simulated. Simulated: `geo-ray simulate`, real
gradients on a virtual clock, three seeds, the first of them that of the real run.

  to_target_s_NAME       seconds from the start of training until the combined evaluation of all
                         regions' outer models is at TARGET_LOSS, on real sockets; linear between
                         two evaluations. The whole run if it was not reached.
  seconds_NAME           of the whole run; loss_NAME at its end; wan_mb_NAME its bytes, both ways
  ratio_X_over_halos     seconds to the target of X over those of halos; the same for decoupled
  sim_...                the same in the simulator, medians of three seeds
  sim_error_NAME         |simulated / real - 1| of the seconds to the target, same seed
  cpu_share_NAME         of the two cores, in the real run; above 0.8 they would set the pace
  halos_order_holds      1 if halos was first and both asynchronous strategies were before diloco
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import support
from benchmarks.common.command import Run, geo_ray
from benchmarks.common.compared import compared, of
from benchmarks.common.lab_runs import LabRuns, lab_runs
from benchmarks.strategies.sync_cloudless import CpuMeter
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.lab.lab import Lab, start_ray
from geo_ray.lab.stats import LabStats
from geo_ray.sweep.compare import parse_variant
from geo_ray.sweep.trial import Outcome

TASK = Path(__file__).with_name("four_continents_task.py")
LINKS = support.REPOSITORY / "configs" / "four_continents.yaml"
HUB = "us"
STEP_S = {"us": 0.7, "eu": 0.9, "asia": 1.2, "australia": 2.1}
STEPS, EVERY = 84, 6
LOCAL = 6  # local steps of a push of halos
START = (0.0, math.log(256))  # every byte alike
TARGET_LOSS = 2.95
SEEDS = 3
VARIANTS = {
    "diloco": "diloco:interval=12:outer.lr=0.7:outer.momentum=0.6",
    "streaming": "diloco_streaming:interval=12:fragments=4:tau=2:outer.lr=0.7:outer.momentum=0.6",
    "decoupled": "decoupled:interval=12:fragments=4:outer.lr=0.3:outer.momentum=0.3",
    "halos": (
        f"halos:local_steps={LOCAL}:interval=2:local.lr=1:local.momentum=0:local.period=1"
        ":outer.lr=1.2:outer.momentum=0.3:alpha=0.5"
        ":train.mode=async"
    ),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """What one run came to.

    Attributes:
        points: (seconds since the first step, held-out loss of all regions' outer models); the
            first is that of a model that knows nothing.
        seconds: of the whole run.
        wan_mb: between regions, both ways.
        cpu_fraction: of the machine's cores; None if simulated.
    """

    points: list[tuple[float, float]]
    seconds: float
    wan_mb: float
    cpu_fraction: float | None = None

    @property
    def loss(self) -> float:
        """At the end."""
        return self.points[-1][1]

    def to_target_s(self, target: float) -> float:
        """When the loss came to ``target``; the whole run if it did not, which is too kind."""
        for (t0_s, before), (t1_s, after) in pairwise(self.points):
            if after <= target < before:
                return t0_s + (t1_s - t0_s) * (before - target) / (before - after)
        return self.seconds


Curves = Mapping[str, Sequence[Curve]]


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--seeds", help="only real runs, with these seeds, separated by commas")
    options = parser.parse_args()
    machine = support.hardware()
    names, size, steps, seeds = tuple(VARIANTS), "10M", STEPS, SEEDS
    target = TARGET_LOSS
    if options.quick:
        names, size, steps, seeds, target = ("diloco", "halos"), "0.1M", 24, 1, 5.0
    labels = {name: label_of(name, steps) for name in names}
    text = config(size, steps, 0.4 if options.quick else 1.0)
    if options.seeds is not None:
        wanted = [int(seed) for seed in options.seeds.split(",")]
        with lab_runs(options.out) as runs:
            by_seed = [trained(runs, config(size, steps, seed=s), labels, s) for s in wanted]
        real = {name: [curves[name] for curves in by_seed] for name in names}
        figures = figures_of(real, target, "")
        for name in names:
            shares = [curve.cpu_fraction or 0.0 for curve in real[name]]
            figures.append(support.median(f"cpu_share_{name}", shares, "share", "<= 0.8"))
        support.finish("four_continents", machine, figures, options.out, runs.finish())
        return
    with lab_runs(options.out) as runs:
        real = {name: [curve] for name, curve in trained(runs, text, labels, 0).items()}
    comparison = compared(text, list(labels.values()), (1.0,), seeds)
    sim = {name: [curve_of(run) for run in of(comparison, labels[name])] for name in names}
    figures = [*figures_of(real, target, ""), *figures_of(sim, target, "sim_")]
    for name in names:
        ours, predicted = real[name][0], sim[name][0]
        error = abs(predicted.to_target_s(target) / ours.to_target_s(target) - 1)
        figures += [
            support.Figure(f"sim_error_{name}", error, "ratio"),
            support.Figure(f"cpu_share_{name}", ours.cpu_fraction, "share", "<= 0.8"),
        ]
    support.finish("four_continents", machine, figures, options.out, runs.finish())


def label_of(name: str, steps: int) -> str:
    """The variant; a step of halos is a push of several."""
    label = VARIANTS[name]
    if name != "halos":
        return label
    return f"{label}:train.steps={steps // LOCAL}:train.eval_every={EVERY // LOCAL}"


def config(size: str, steps: int, factor: float = 1.0, seed: int = 0) -> str:
    """The workload for the simulator, as YAML; ``factor`` is on the seconds of a step."""
    step_s = ", ".join(f"{region}: {factor * seconds:g}" for region, seconds in STEP_S.items())
    sets = [
        f"task={{use: '{TASK}:FewHeldOut', options: {{size: {size}, context: 64}}}}",
        "data.batch_size=4",
        "optimizer={kind: adamw, lr: 0.0003}",
        "strategy={kind: diloco, interval: 12}",
        f"train={{steps: {steps}, eval_every: {EVERY}, count: total, step_timeout_s: 600}}",
        f"emulate.step_s_by_region={{{step_s}}}",
        "checkpoint.every_s=null",
        f"seed={seed}",
    ]
    return load_tree(LINKS, sets, Experiment).model_dump_json()


def trained(runs: LabRuns, text: str, labels: Mapping[str, str], seed: int) -> dict[str, Curve]:
    """One real run of each variant, all in one lab.

    Raises:
        LabLateError: the relay did not keep time, three times in a row.
    """
    with tempfile.TemporaryDirectory() as scratch, Lab("four-continents") as lab:
        path = Path(scratch) / "four_continents.yaml"
        path.write_text(text, "utf-8")
        environment = start_ray(lab)
        curves = {}
        for name, label in labels.items():
            support.say(f"{name} on real sockets")
            train = partial(train_in, lab, environment, path, label)
            curves[name] = runs.need(f"{name}, seed {seed}", train, lambda v: Curve(**v), 3)
            support.say(f"{name}: {curves[name]}")
        return curves


def train_in(
    lab: Lab, environment: Mapping[str, str], path: Path, label: str
) -> tuple[dict[str, Any], LabStats]:
    """One real run, and the lab's counters."""
    changes = dict(change.split("=", 1) for change in parse_variant(label).overrides)
    sets = {
        **changes,
        "emulate.links": "[]",  # the lab's links are as they are
        "cluster": "{kind: existing, connect_timeout_s: 120}",
    }
    lab.reset()
    with tempfile.TemporaryDirectory() as runs, CpuMeter() as meter:
        run = geo_ray(
            "train",
            path,
            sets,
            Path(runs),
            environment=environment,
            timeout_s=1800.0,
            popen=partial(lab.popen, HUB),
        )
        stats = lab.stats()
        return asdict(real_curve(run, meter)), stats


def real_curve(run: Run, meter: CpuMeter) -> Curve:
    """Fold a run's events."""
    steps = list(run.events("step"))
    began_s = min(step["start_s"] for step in steps)
    ended_s = max(event["t_s"] for event in [*steps, *run.events("exchange")])
    points = [START] + [
        (event["t_s"] - began_s, event["metrics"]["loss"])
        for event in run.events("eval")
        if event["region"] is None
    ]
    wan = run.summary["wan_bytes"]
    return Curve(
        points,
        ended_s - began_s,
        (wan["update"] + wan["reply"]) / 1e6,
        meter.share(run.origin_unix_s + began_s, run.origin_unix_s + ended_s),
    )


def curve_of(run: Outcome) -> Curve:
    """The same of a simulated run."""
    points = [START] + [(point.t_s, point.metrics["loss"] or math.inf) for point in run.points]
    return Curve(points, run.seconds, run.wan_bytes / 1e6)


def figures_of(curves: Curves, target: float, prefix: str) -> list[support.Figure]:
    """Times, ratios and what they cost."""
    figures = []
    times_s = {name: [run.to_target_s(target) for run in runs] for name, runs in curves.items()}
    for name, runs in curves.items():
        figures += [
            support.median(f"{prefix}to_target_s_{name}", times_s[name], "s"),
            support.median(f"{prefix}seconds_{name}", (run.seconds for run in runs), "s"),
            support.median(f"{prefix}loss_{name}", (run.loss for run in runs), "nats/byte"),
            support.median(f"{prefix}wan_mb_{name}", (run.wan_mb for run in runs), "MB"),
        ]
    for base in ("halos", "decoupled"):
        figures += [
            support.ratio(f"{prefix}ratio_{name}_over_{base}", times_s[name], times_s[base])
            for name in times_s
            if base in times_s and name != base
        ]
    if len(times_s) == len(VARIANTS):
        middle = {name: statistics.median(times) for name, times in times_s.items()}
        holds = middle["halos"] == min(middle.values()) and middle["decoupled"] < middle["diloco"]
        figures.append(support.Figure(f"{prefix}halos_order_holds", float(holds), "1 or 0"))
    return figures


if __name__ == "__main__":
    main()
