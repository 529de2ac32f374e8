"""How much sooner training ends if only what matters is waited for (`codec.up: dgt`).

Three networks in the shapes of VGG-11, AlexNet (parameters in fully connected layers) and GoogLeNet
(in convolutions); a server and two regions, which share the server's line of 8 Mbit/s; pulls are
plain in every variant. The keys (share, `late: merge`, `late_scaled`, small blocks) are not the
defaults, which save less: 18 instead of 31 percent on VGG without loss. Two parts:

Simulated, with real gradients on a virtual clock: how many steps it takes, and how long.
  time_*     seconds until the accuracy is reached, over those of all reliable; same seeds.
  saving_*   the same in percent.
  steps_*    steps until then, over those of all reliable.
  final_*    accuracy at the end, less that of all reliable.
  order_*    steps until then with ranked blocks, over those with shuffled ones; equal share.

Measured, in the WAN lab: how long a step takes. Every region is a process with the product's
bridge, parameter server and worker in a namespace; real TCP (TLS), real UDP, packets lost both
ways. Needs root; `--emulated` does without, on links that share nothing.
  step_*     seconds of a step, over those of all reliable.
  real_*     step_* times steps_*: the time until the accuracy, with steps as long as measured.
  model_*    seconds of a step, over the simulated ones.
  late_*, unsent_*, lost_*  shares of lossy blocks: merged late; never left; never merged, which
             are those of the last step and what was lost on the way.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.codecs.dgt_fleet import Sites, fleet
from benchmarks.codecs.dgt_runs import (
    CLIENTS,
    SERVER,
    Case,
    Simulated,
    experiment_of,
    manifest_of,
    simulate,
)
from benchmarks.common import support
from benchmarks.common.lab_runs import LabRuns, lab_runs
from geo_ray.lab.stats import LabStats

STEPS, SHORT_STEPS, LAB_STEPS, WARM = 150, 20, 9, 2
LAB_SEEDS = (21, 22, 23)
SEEDS = (*LAB_SEEDS, 24)  # not those by which shares and learning rate were chosen
LOSSES = (0.0, 0.01, 0.03)
ABLATIONS = {"vgg": ("random", "drop", "put_back"), "googlenet": ("random",)}
BOTH = ("reliable", "dgt")
PAPER = {"vgg": 0.635, "alexnet": 0.656, "googlenet": 0.806}
LAB_SHAPES = ("vgg", "googlenet")

Found = dict[Case, Simulated]
Measured = dict[Case, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke check, under 3 minutes")
    parser.add_argument("--emulated", action="store_true", help="without the lab and without root")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the result")
    options = parser.parse_args()
    machine = support.hardware()
    with lab_runs(options.out) as runs, tempfile.TemporaryDirectory() as directory:
        if options.quick:
            cases = [Case("vgg", 0.0, variant, SEEDS[0]) for variant in (*BOTH, "random")]
            found = simulated(cases, 150, Path(directory))
            cases = [
                Case("vgg", loss, variant, SEEDS[0]) for loss in (0.0, 0.03) for variant in BOTH
            ]
            lab = measured(runs, cases, options.emulated, Path(directory))
        else:
            lab = measured(runs, lab_cases(), options.emulated, Path(directory))
            found = simulated(long_cases(), STEPS, Path(directory))
    figures = [*training_figures(found), *step_figures(lab, found)]
    support.finish("dgt", machine, figures, options.out, runs.finish())


def long_cases() -> list[Case]:
    return [
        Case(shape, loss, variant, seed)
        for shape in PAPER
        for loss in LOSSES
        for variant in (*BOTH, *(ABLATIONS.get(shape, ()) if loss == 0.0 else ()))
        for seed in SEEDS
    ]


def lab_cases() -> list[Case]:
    """Variants side by side: what else the machine does hits all alike."""
    return [
        Case(shape, loss, variant, seed)
        for shape in LAB_SHAPES
        for loss in LOSSES
        for seed in LAB_SEEDS
        for variant in BOTH
    ]


# ------------------------------------------------------------------ the two parts


def simulated(cases: list[Case], steps: int, directory: Path) -> Found:
    """One process per core; the virtual clock does not mind.

    All reliable loses nothing: where packets are lost it trains to the bit as where none are, and
    only how long its steps take is simulated anew.
    """
    spawn = multiprocessing.get_context("spawn")
    found: Found = {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        jobs = [
            pool.submit(simulate, case, SHORT_STEPS if is_known(case) else steps, directory)
            for case in cases
        ]
        for case, job in zip(cases, jobs, strict=True):
            found[case] = job.result()
            if is_known(case):
                same = found[replace(case, loss=0.0)]
                found[case] = replace(same, step_s=found[case].step_s)
            support.say(f"simulated: {case} {found[case]}")
    return found


def is_known(case: Case) -> bool:
    """Whether the same training without loss tells how it ends."""
    return case.variant == "reliable" and case.loss > 0.0


def measured(runs: LabRuns, cases: list[Case], emulated: bool, directory: Path) -> Measured:
    """One after the other, in the lab; one that the lab spoiled is repeated alone."""
    manifests: dict[tuple[str, int], str] = {}
    found: Measured = {}
    with fleet(emulated) as sites:
        for case in cases:
            tree = experiment_of(case, LAB_STEPS, evaluate=False, emulated=emulated)
            key = (case.shape, case.seed)
            if key not in manifests:
                manifests[key] = manifest_of(tree, directory / f"lab-{case.shape}-{case.seed}")
            found[case] = runs.need(
                str(case), partial(train, sites, case.loss, tree, manifests[key])
            )
            support.say(f"measured: {case} {json.dumps(found[case])}")
    return found


def train(
    sites: Sites, loss: float, tree: dict[str, Any], manifest: str
) -> tuple[dict[str, float], LabStats | None]:
    """One training, and the lab's counters."""
    sites.lose(loss)
    sites.reset()
    return of_answers(sites.train(tree, manifest)), sites.stats()


def of_answers(answers: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step without the first ones, and what became of lossy blocks."""
    ends_s: dict[int, float] = {}
    for answer in answers.values():
        for number, _, end_s in answer["steps"]:
            ends_s[number] = max(end_s, ends_s.get(number, 0.0))
    order = sorted(ends_s)
    first, last = order[WARM - 1], order[-1]
    found = {"step_s": (ends_s[last] - ends_s[first]) / (last - first)}
    loose = {region: answer["status"]["loose"] for region, answer in answers.items()}
    sent = sum(loose[region]["sent"]["blocks"] for region in CLIENTS)
    unsent = sum(loose[region]["sent"]["unsent"] for region in CLIENTS)
    if sent + unsent:
        came = loose[SERVER]["blocks"]
        made = sent + unsent
        arrived = came["late"] + came["on_time"]
        found |= {"late": came["late"] / made, "unsent": unsent / made}
        found["lost"] = (sent - arrived) / made
    return found


# ------------------------------------------------------------------ figures


def label_of(shape: str, loss: float, variant: str) -> str:
    return f"{shape}_loss_{loss:g}" + ("" if variant == "dgt" else f"_{variant}")


def groups(cases: Any) -> list[tuple[str, float, str]]:
    return list(dict.fromkeys((case.shape, case.loss, case.variant) for case in cases))


def seeds_of(cases: Any) -> list[int]:
    return list(dict.fromkeys(case.seed for case in cases))


def step_pairs(found: Found, shape: str, loss: float, variant: str) -> list[tuple[float, float]]:
    """Steps until the target: of a variant and of all reliable, by seed."""
    return [
        (found[case].reached, found[replace(case, variant="reliable")].reached)
        for case in found
        if (case.shape, case.loss, case.variant) == (shape, loss, variant)
    ]


def training_figures(found: Found) -> list[support.Figure]:
    figures = []
    for shape, loss, variant in groups(found):
        label = label_of(shape, loss, variant)
        runs = [found[Case(shape, loss, variant, seed)] for seed in seeds_of(found)]
        plain = [found[Case(shape, loss, "reliable", seed)] for seed in seeds_of(found)]
        times_s = [run.reached_s for run in runs], [run.reached_s for run in plain]
        if variant == "reliable":
            figures.append(support.median(f"reached_s_{label}", times_s[0], "s"))
            accuracies = [run.accuracy for run in runs]
            figures.append(support.median(f"accuracy_{label}", accuracies, "share"))
            continue
        steps = step_pairs(found, shape, loss, variant)
        figures.append(support.ratio(f"steps_{label}", *split(steps)))
        is_asked = variant == "dgt"
        most = PAPER[shape]
        time = support.ratio(f"time_{label}", *times_s, f"<= {most:.3f}" if is_asked else None)
        figures.append(time)
        saving = [100 * (1 - one) for one in time.runs]
        wanted = f">= {100 * (1 - most):.1f}" if is_asked else None
        figures.append(support.median(f"saving_{label}", saving, "%", wanted))
        gains = [run.accuracy - other.accuracy for run, other in zip(runs, plain, strict=True)]
        wanted = ">= -0.01" if is_asked else None
        figures.append(support.median(f"final_{label}", gains, "share", wanted))
        if variant == "random":
            ranked = [found[Case(shape, loss, "dgt", seed)].reached for seed in seeds_of(found)]
            # One that never got there counts as if it had at the end: that favours it.
            shuffled = [min(run.reached, STEPS) for run in runs]
            label = label_of(shape, loss, "dgt")
            figures.append(support.ratio(f"order_{label}", ranked, shuffled, "<= 1"))
    return figures


def step_figures(lab: Measured, found: Found) -> list[support.Figure]:
    figures = []
    for shape, loss, variant in groups(lab):
        label = label_of(shape, loss, variant)
        seeds = seeds_of(lab)
        runs = [lab[Case(shape, loss, variant, seed)] for seed in seeds]
        times_s = [run["step_s"] for run in runs]
        figures.append(support.median(f"step_s_{label}", times_s, "s"))
        model = [found.get(Case(shape, loss, variant, seed)) for seed in seeds]
        pairs = [(s, m.step_s) for s, m in zip(times_s, model, strict=True) if m]
        figures.append(support.ratio(f"model_{label}", *split(pairs)))
        if variant != "dgt":
            continue
        plain_s = [lab[Case(shape, loss, "reliable", seed)]["step_s"] for seed in seeds]
        step = support.ratio(f"step_{label}", times_s, plain_s)
        figures.append(step)
        for what in ("late", "unsent", "lost"):
            figures.append(support.median(f"{what}_{label}", [run[what] for run in runs], "share"))
        steps = [a / b for a, b in step_pairs(found, shape, loss, variant)]
        if steps and step.value is not None:
            real = step.value * statistics.median(steps)
            target = f"<= {PAPER[shape]:.3f}"
            figures.append(support.Figure(f"real_{label}", real, "ratio", target))
    return figures


def split(pairs: Any) -> tuple[list[float], list[float]]:
    return [a for a, _ in pairs], [b for _, b in pairs]


if __name__ == "__main__":
    main()
