"""What `geo-ray tune` finds on four continents, and whether that holds on real sockets. Needs root.

The job is `configs/four_continents.yaml`: the digits in four regions, with links as measured
between clouds. Its defaults are `asgd_ga` every 4 steps, at momentum SGD's rate 0.05. The search is
for the least time to a held-out loss that the defaults themselves set: where they have made
TARGET_SHARE of the way from their first evaluation to their last, simulated with the first seed of
the search and computed before it begins. It has 40 simulated trials with Optuna, the defaults being
the first, three seeds each of which the median counts, none ended early. It is free in strategy,
interval, outer rate and momentum, codec, batch, learning rate and the optimizer's momentum. A
worker takes 200 rows a second, which is what the job's own step of 0.08 s is with its batch of 16:
a smaller batch has shorter steps and crosses the WAN more often, a larger one costs what it takes.
Workers stay as they are: more machines are sooner anywhere.

What was found is measured against the defaults with seeds that the search has not seen: in the
simulator, and with `geo-ray train` in the WAN lab, a Ray node per region, real TCP, real gradients,
one after the other with every seed. Since part of a gain may be a learning rate that suits better,
the defaults are also given the best of three rates times three momenta, simulated with the seeds of
the search.

  time_to_target_gain       seconds to the target, defaults over best, on real sockets: median of
                            the ratios of SEEDS
  sim_time_to_target_gain   the same in the simulator, with the same seeds
  sim_gain_over_rates       the defaults with the best of their own rates and momenta over the best
                            trial, in the simulator
  target_loss               the target, by the rule above
  searched_gain             what the search itself says, with its own seeds
  search_s                  wall clock of the search, from the call to its result
  to_target_s_NAME          seconds to the target, real; sim_... simulated. The whole run if it was
                            not reached, which is too kind
  cpu_share_NAME            of the two cores, in the real runs; above 0.8 they would set the pace
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.common import support
from benchmarks.common.command import Run, geo_ray
from benchmarks.common.lab_runs import LabRuns, lab_runs
from benchmarks.strategies.sync_cloudless import CpuMeter
from geo_ray import tune
from geo_ray.api.tune import TuningResult
from geo_ray.base.load import dump_yaml, load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.lab.lab import Lab, start_ray
from geo_ray.lab.stats import LabStats

BASE: Final = support.REPOSITORY / "configs" / "four_continents.yaml"
HUB: Final = "us"
TARGET_SHARE: Final = 0.9  # of the defaults' way down
SEEDS: Final = (0, 1, 2)
SEARCHED: Final = (1000, 1001, 1002)
CHANGES: Final = (
    "train.eval_every=2",  # times to a target are those of evaluations: 0.17 s apart
    "emulate.step_s=null",
    "emulate.rows_per_s_by_region={us: [200], eu: [200], asia: [200], australia: [200]}",
    "train.step_timeout_s=600",
    "checkpoint.every_s=null",
)
OUTER: Final = ["diloco", "diloco_streaming", "decoupled", "async_local_sgd"]
SPACE: Final[dict[str, Any]] = {
    "strategy.kind": {"choice": ["asgd_ga", "sma", *OUTER]},
    "strategy.interval": [
        {"randint": [1, 12], "when": {"strategy.kind": "asgd_ga"}},
        {"lograndint": [6, 32], "when": {"strategy.kind": ["sma", *OUTER]}},
    ],
    "strategy.fragments": {"value": 2, "when": {"strategy.kind": "diloco_streaming"}},
    "strategy.outer.lr": {"uniform": [0.3, 1.2], "when": {"strategy.kind": OUTER}},
    "strategy.outer.momentum": {"uniform": [0.0, 0.8], "when": {"strategy.kind": OUTER}},
    "codec": {"choice": [None, "int8"]},
    "data.batch_size": {"choice": [8, 16, 32]},  # of 4, two cores would set the pace
    "optimizer.lr": {"loguniform": [0.01, 0.3]},
    "optimizer.momentum": {"uniform": [0.3, 0.95]},
}
"""Of `halos` and others whose steps are counted otherwise there is none: the same run for all."""


def search_file(target: float, trials: int, seeds: Sequence[int]) -> dict[str, Any]:
    """The search, as its file would have it."""
    return {
        "name": "four_continents",
        "base": str(BASE),
        "set": changes(target),
        "space": SPACE,
        "objectives": ["time_to_target"],
        "search": {"kind": "optuna", "trials": trials, "seed": 0},
        "trials": {"seeds": list(seeds)},
    }


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    trials, seeds, searched = (4, (0,), (1000,)) if options.quick else (40, SEEDS, SEARCHED)
    with lab_runs(options.out) as runs:
        target = runs.need("target", partial(target_of_defaults, searched[0]))
        found = runs.need("search", partial(searched_once, target, trials, searched))
        texts = {"defaults": found["defaults"], "best": found["best"]}
        rated = runs.need("rates", partial(best_rates, texts["defaults"], searched, options.quick))
        sim = {
            name: runs.need(f"simulated {name}", partial(simulated, text, seeds))
            for name, text in {**texts, "rated": rated}.items()
        }
        real = trained(runs, texts, seeds)
    figures = [
        support.ratio(
            "time_to_target_gain", seconds(real["defaults"]), seconds(real["best"]), ">= 1.3"
        ),
        support.ratio("sim_time_to_target_gain", sim["defaults"], sim["best"], ">= 1.3"),
        support.ratio("sim_gain_over_rates", sim["rated"], sim["best"]),
        support.Figure("target_loss", target, "loss"),
        support.Figure("searched_gain", found["gain"], "ratio"),
        support.Figure("search_s", found["wall_s"], "s", "<= 600"),
    ]
    for name in texts:
        shares = [run["cpu_fraction"] for run in real[name]]
        figures += [
            support.median(f"to_target_s_{name}", seconds(real[name]), "s"),
            support.median(f"sim_to_target_s_{name}", sim[name], "s"),
            support.median(f"cpu_share_{name}", shares, "share", "<= 0.8"),
        ]
    support.finish("tune_gain", machine, figures, options.out, runs.finish())


def changes(target: float) -> list[str]:
    """Of the job as it ships, for all that is measured."""
    return [*CHANGES, f"train.target={{metric: loss, value: {target}, direction: at_most}}"]


def target_of_defaults(seed: int) -> tuple[float, None]:
    """The loss at which the defaults have made their share of the way; 3 digits of it."""
    with tempfile.TemporaryDirectory() as scratch:
        text = dump_yaml(load_tree(BASE, CHANGES, Experiment))
        run = geo_ray("simulate", _file(scratch, text), {"seed": seed}, Path(scratch) / "run")
        losses = [e["metrics"]["loss"] for e in run.events("eval") if e["region"] is None]
    target = round(losses[0] - TARGET_SHARE * (losses[0] - losses[-1]), 3)
    support.say(f"target: a loss of {target}; from {losses[0]:.3f} to {losses[-1]:.3f}")
    return target, None


def searched_once(target: float, trials: int, seeds: Sequence[int]) -> tuple[dict[str, Any], None]:
    """The search; what it found as configurations."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "search"
        result: TuningResult = tune(search_file(target, trials, seeds), out=out, progress=True)
        wall_s = time.monotonic() - began_s
        assert result.experiment is not None
        best = dump_yaml(result.experiment)
    rows = [
        {"values": row.values, "status": row.status, "score": row.scores[0], "why": row.why}
        for row in result.tuning.rows
    ]
    defaults = dump_yaml(load_tree(BASE, changes(target), Experiment))
    value = {
        "wall_s": wall_s,
        "gain": result.tuning.gain,
        "values": result.best.values,
        "best": best,
        "defaults": defaults,
        "trials": rows,
    }
    support.say(f"search: {wall_s:.0f} s, gain {result.tuning.gain}, {result.best.values}")
    return value, None


def best_rates(text: str, seeds: Sequence[int], quick: bool) -> tuple[str, None]:
    """The defaults with the best of their own learning rates and momenta, by a full grid."""
    rates, momenta = [0.05, 0.1, 0.2], [0.7, 0.8, 0.9]
    grids = (rates[:2], momenta[2:]) if quick else (rates, momenta)
    with tempfile.TemporaryDirectory() as scratch:
        result: TuningResult = tune(
            {
                "base": yaml.safe_load(text),
                "space": {
                    "optimizer.lr": {"grid": grids[0]},
                    "optimizer.momentum": {"grid": grids[1]},
                },
                "search": {"trials": 1, "base_first": False},
                "trials": {"seeds": list(seeds)},
            },
            out=Path(scratch) / "rates",
            progress=True,
            base_dir=BASE.parent,
        )
        assert result.experiment is not None
        support.say(f"defaults with their own best rates: {result.best.values}")
        return dump_yaml(result.experiment), None


def simulated(text: str, seeds: Sequence[int]) -> tuple[list[float], None]:
    """Seconds to the target of one configuration by seed."""
    with tempfile.TemporaryDirectory() as scratch:
        found = []
        for seed in seeds:
            run = geo_ray(
                "simulate", _file(scratch, text), {"seed": seed}, Path(scratch) / str(seed)
            )
            found.append(_to_target_s(run, 0.0))
        return found, None


def trained(
    runs: LabRuns, texts: Mapping[str, str], seeds: Sequence[int]
) -> dict[str, list[dict[str, float]]]:
    """Real runs in the WAN lab, both configurations with every seed, in turns.

    Raises:
        LabLateError: the relay did not keep time, three times in a row.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in texts}
    with tempfile.TemporaryDirectory() as scratch, Lab("four-continents") as lab:
        environment = start_ray(lab)
        for seed in seeds:
            for name, text in texts.items():
                path = _file(scratch, text)
                train = partial(train_in, lab, environment, path, seed)
                found[name].append(runs.need(f"{name}, seed {seed}", train, attempts=3))
                support.say(f"{name}, seed {seed}: {found[name][-1]}")
    return found


def train_in(
    lab: Lab, environment: Mapping[str, str], path: Path, seed: int
) -> tuple[dict[str, float], LabStats]:
    """One real run, and the lab's counters."""
    sets = {
        "seed": seed,
        "emulate.links": "[]",  # the lab's links are as they are
        "cluster": "{kind: existing, connect_timeout_s: 120}",
    }
    lab.reset()
    with tempfile.TemporaryDirectory() as folder, CpuMeter() as meter:
        run = geo_ray(
            "train",
            path,
            sets,
            Path(folder),
            environment=environment,
            timeout_s=600.0,
            popen=partial(lab.popen, HUB),
        )
        stats = lab.stats()
        steps = list(run.events("step"))
        began_s = min(step["start_s"] for step in steps)
        ended_s = max(step["t_s"] for step in steps)
        share = meter.share(run.origin_unix_s + began_s, run.origin_unix_s + ended_s)
        return {"to_target_s": _to_target_s(run, began_s), "cpu_fraction": share}, stats


def seconds(runs: Sequence[Mapping[str, float]]) -> list[float]:
    """Those to the target."""
    return [run["to_target_s"] for run in runs]


def _to_target_s(run: Run, began_s: float) -> float:
    reached_s = run.summary["time_to_target_s"]
    return float(run.summary["seconds"] if reached_s is None else reached_s) - began_s


def _file(folder: str, text: str) -> Path:
    path = Path(folder) / "run.yaml"
    path.write_text(text, "utf-8")
    return path


if __name__ == "__main__":
    main()
