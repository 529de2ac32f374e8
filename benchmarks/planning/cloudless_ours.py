"""Ours against the paper's best on the Cloudless setting, and both against what is possible there.

The setting, the tuning, the target and the way of measuring are those of `sync_cloudless`: an
exchange takes as long as a step. The paper's ASGD-GA and SMA run at the interval that was best
for them; ours send int8 and go on while a message is under way. `limit` is `bsp` over links that
take no time: what is left to gain for any way of synchronising that needs as many steps as plain
training, since steps take the same time whatever is done between them.

  time_to_target_*        seconds on real actors, three seeds
  ours_over_paper         of the paper's best over our best
  limit_over_paper        of the paper's best over `limit`: nobody can be faster without fewer steps
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.common import support
from benchmarks.strategies import sync_cloudless as cloudless
from benchmarks.strategies.sync_cloudless import Case
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment

INT8 = {"codec": "{up: {kind: int8}, down: {kind: int8}}"}
PAPER = ("asgd_ga_f4", "sma_f4")
OURS = {
    "streaming": Case(
        "{kind: diloco_streaming, interval: 4, tau: 1, fragments: 2, outer: {kind: sgd}}",
        more=INT8,
    ),
    "eager": Case("{kind: diloco_eager, interval: 4, outer: {kind: sgd}}", more=INT8),
    "one_step_delay": Case(
        "{kind: one_step_delay, interval: 2, merge: correct, outer: {kind: sgd}}", more=INT8
    ),
}
LIMIT = {"limit": Case("{kind: bsp}", more={"emulate.link": "null"})}

# Here, since the processes that simulate import this file and find the cases by their names.
CASES = {name: cloudless.CASES[name] for name in PAPER} | OURS | LIMIT
cloudless.CASES.clear()
cloudless.CASES.update(CASES)


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    seeds = cloudless.SEEDS[:1] if options.quick else cloudless.SEEDS
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        config = root / "cloudless.yaml"
        config.write_text(cloudless.CONFIG, "utf-8")
        steps = load_tree(config, [], Experiment).train.steps
        if options.quick:
            found = cloudless.simulate_all(root, dict.fromkeys(CASES, 0.1), seeds, steps)
            busy = 0.0
        else:
            rates = cloudless.tune(root, steps)
            found, busy = cloudless.train_all(root, rates, seeds, steps)
    support.finish("cloudless_ours", machine, figures_of(found, busy), options.out)


def figures_of(found: cloudless.Outcomes, busy: float) -> list[support.Figure]:
    """Times, ratios of medians' best, final accuracies."""
    times_s = {name: [run.target_s for run in runs] for name, runs in found.items()}
    figures = []
    for name, runs in found.items():
        figures.append(support.median(f"time_to_target_{name}", times_s[name], "s"))
        accuracies = [run.accuracy for run in runs]
        figures.append(support.median(f"final_accuracy_{name}", accuracies, "1"))
    paper = min(PAPER, key=lambda name: statistics.median(times_s[name]))
    ours = min(OURS, key=lambda name: statistics.median(times_s[name]))
    support.say(f"best of the paper: {paper}; ours: {ours}")
    return [
        support.ratio("ours_over_paper", times_s[paper], times_s[ours], ">= 2"),
        support.ratio("limit_over_paper", times_s[paper], times_s["limit"]),
        *figures,
        support.Figure("cpu_fraction", busy, "ratio", "<= 0.8"),
    ]


if __name__ == "__main__":
    main()
