"""FedGSync over FedAT: five kinds of data, twenty sites of very unequal speed, virtual clock.

Sites 0, 5, 10, 15 have the labels 0 and 5, sites 1, 6, 11, 16 the labels 1 and 6, and so on. Eight
sites are 5 to 20 times as slow as the others: in all groups (*spread*), or so that all sites of
one group and half of another are slow (*packed*). Learning rates are chosen per strategy on one
grid.

  time_*, ratio_*  virtual seconds to the target accuracy; fedat's over fedgsync's, equal seeds
  accuracy_*       at the end, after the same number of rows (nobody stops at the target), less
                   that of fedssgd
  groups_*         adjusted Rand index of the groups that fedgsync found

FedAT is a weak baseline here: it is slower than fedssgd, and fedasync, which is not run, reaches
the target first.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from sklearn.metrics import adjusted_rand_score

from benchmarks.common import support
from benchmarks.common.compared import compared, finals, of, to_target_s
from geo_ray.base.load import load_text
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.data import prepare_manifest
from geo_ray.simulator.world import World

SITES, GROUPS, STEP_S = 20, 5, 0.05
SLOW_S = (0.25, 0.5, 0.75, 1.0, 0.25, 0.5, 0.75, 1.0)
WHERE = {"spread": (0, 6, 12, 18, 4, 5, 11, 17), "packed": (0, 5, 10, 15, 1, 6, 2, 3)}
FEDSSGD, FEDAT, FEDGSYNC = "fedssgd", "fedat:interval=4", "fedgsync:interval=4"
TARGET = 0.85


def config(where: str, steps: int) -> str:
    """The workload."""
    slow = dict(zip(WHERE[where], SLOW_S, strict=True))
    speeds = ", ".join(f"s-{i:02d}: {s}" for i, s in slow.items())
    return f"""
name: grouped
task: {{use: digits, options: {{width: 8}}}}
data:
  generate: {{split: {{kind: label_groups, groups: {GROUPS}}}, rows_per_shard: 128}}
  batch_size: 8
regions: [{{name: s, copies: {SITES}}}]
strategy: {{kind: {FEDGSYNC.split(":")[0]}, interval: 4}}
optimizer: {{kind: sgd, lr: 0.1}}
train:
  steps: {steps}
  count: total
  eval_every: {max(1, steps // 60)}
  target: {{metric: accuracy, value: {TARGET}, direction: at_least, stop: false}}
emulate:
  link: {{rate_mbps: 20, delay_s: 0.05}}
  step_s: {STEP_S}
  step_s_by_region: {{{speeds}}}
checkpoint: {{every_s: null}}
"""


def rand_index(where: str, seed: int) -> float:
    """How well the groups of a run are those of the data."""
    overrides = [f"seed={seed}", "train.target=null", "train.eval_every=0"]
    experiment = load_text(config(where, 8), overrides, Experiment, "grouped")
    with tempfile.TemporaryDirectory() as scratch:
        task = load_task(experiment.task, Path(scratch))
        manifest, _ = prepare_manifest(experiment, task, Path(scratch), Path(scratch))
        world = World(experiment, task, manifest, _ignore)
        world.run()
    numbers = world.averager.state.numbers
    found = [numbers[f"group/{name}"] for name in experiment.region_names]
    return float(adjusted_rand_score([i % GROUPS for i in range(SITES)], found))


def _ignore(kind: str, t_s: float, **fields: Any) -> Any:
    """Events are of no interest."""


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    seeds, rates = (1, (1.0,)) if options.quick else (3, (1.0, 2.0))
    figures = []
    for where in ("spread",) if options.quick else tuple(WHERE):
        variants = [FEDSSGD, FEDAT, FEDGSYNC]
        comparison = compared(config(where, 60 if options.quick else 1200), variants, rates, seeds)
        base = statistics.median(finals(of(comparison, FEDSSGD), "accuracy"))
        for label in variants:
            runs, name = of(comparison, label), f"{where}_{label.split(':')[0]}"
            figures.append(support.median(f"time_{name}", to_target_s(runs), "s"))
            less = [value - base for value in finals(runs, "accuracy")]
            target = ">= -0.01" if label == FEDGSYNC else None
            figures.append(support.median(f"accuracy_{name}", less, "share", target))
        fedat, ours = (to_target_s(of(comparison, label)) for label in (FEDAT, FEDGSYNC))
        figures.append(support.ratio(f"ratio_{where}_fedat_over_fedgsync", fedat, ours, ">= 1.28"))
        indices = [rand_index(where, seed) for seed in range(seeds)]
        figures.append(support.median(f"groups_{where}", indices, "index", ">= 0.8"))
    support.finish("grouped_sites", machine, figures, options.out)


if __name__ == "__main__":
    main()
