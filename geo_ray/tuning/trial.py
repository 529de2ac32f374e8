"""A trial as Ray Tune runs it: one configuration, simulated or real, in a process of Ray's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune

from geo_ray.config.canonical import JSONValue
from geo_ray.config.experiment import Experiment
from geo_ray.config.source import override_items
from geo_ray.errors import ConfigError, GeoRayError
from geo_ray.job import rundir
from geo_ray.observe.events.schema import Event
from geo_ray.sim.run import simulate
from geo_ray.tuning.candidate import Base, base_of
from geo_ray.tuning.config import ObjectiveName, PricesConfig
from geo_ray.tuning.objective import Standing, score, together
from geo_ray.tuning.watch import TrialWatch, failed_report, report_of, score_key

Trial = Callable[[dict[str, Any]], None]
"""What `ray.tune.Tuner` takes."""


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """What all trials of a search have in common; it travels to every process of them.

    Attributes:
        base: what they start from.
        objectives: what is to be least; the first one is what early ends go by.
        seeds: runs of each; empty: one, with the base's seed.
        prices: for `usd`.
        runs: where real trials leave their runs; None: nobody keeps them.
    """

    base: Base
    objectives: tuple[ObjectiveName, ...] = ("time_to_target",)
    seeds: tuple[int, ...] = ()
    prices: PricesConfig | None = None
    runs: str | None = None


def trainable(
    config: str | os.PathLike[str] | Mapping[str, Any] | Experiment,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    objectives: Sequence[ObjectiveName] = ("time_to_target", "loss"),
    seeds: Sequence[int] = (),
    prices: PricesConfig | None = None,
    base_dir: str | os.PathLike[str] | None = None,
) -> Trial:
    """A function for ``ray.tune.Tuner`` that simulates a configuration with a trial's values.

    Its ``param_space`` has values by key, as a search's file has them: ``strategy.kind``,
    ``regions.us.workers``, ``codec``, ``optimizer.lr``. At every evaluation it reports ``time_s``,
    ``samples``, the metric, and ``score_time_to_target``, ``score_loss`` and so on, of which less
    is better; a trial that fails or diverges reports numbers behind all others, and why.

    Args:
        config: a file, a mapping of its keys, or an experiment.
        overrides: changes of single keys in all trials.
        objectives: what is reported a ``score_`` of.
        seeds: runs of each trial; of several the median counts. Default: one, the base's.
        prices: for the objective `usd`.
        base_dir: where relative paths start; default: the file's directory, or the working one.

    Raises:
        ConfigError: the configuration is wrong by itself, or `usd` has no prices.
    """
    if "usd" in objectives and prices is None:
        raise ConfigError("prices: the objective usd needs them", fix="Give prices=PricesConfig().")
    base = base_of(config, override_items(overrides), base_dir)
    base.experiment()
    spec = TrialSpec(base, tuple(objectives), tuple(seeds), prices)

    def trial(values: dict[str, Any]) -> None:
        simulated_trial(values, spec)

    return trial


def simulated_trial(values: Mapping[str, JSONValue], spec: TrialSpec) -> None:
    """Simulate a candidate with every seed, and report to Ray Tune; failing is a result.

    At every evaluation of the first seed it reports how that run stands. After the last seed it
    reports the medians.
    """

    def tell(standing: Standing, watch: TrialWatch) -> None:
        tune.report(report_of(standing, watch.goal, spec.objectives))

    try:
        _simulated(values, spec, tell)
    except GeoRayError as error:
        tune.report(failed_report(spec.objectives, str(error)))


def _simulated(
    values: Mapping[str, JSONValue],
    spec: TrialSpec,
    tell: Callable[[Standing, TrialWatch], None],
) -> None:
    ended: list[tuple[Standing, TrialWatch]] = []
    for number, experiment in enumerate(experiments_of(values, spec)):
        with tempfile.TemporaryDirectory(prefix="geo-ray-trial-") as scratch:
            own = experiment.model_copy(update={"run": replace_dir(experiment, scratch)})
            told = tell if number == 0 else _nothing
            watch = watch_of(own, spec, told)
            run = rundir.create(own, Path(spec.base.parent))
            summary = simulate(own, run, lambda _: None, [watch.feed])
            ended.append((watch.ended(summary), watch))
    tune.report(final_report(ended, spec))


def experiments_of(values: Mapping[str, JSONValue], spec: TrialSpec) -> list[Experiment]:
    """The runs of a candidate, one per seed, without checkpoints.

    Raises:
        ConfigError: it cannot be.
    """
    plain = ("name=run", "checkpoint.every_s=null")
    if not spec.seeds:
        return [spec.base.experiment(values, plain)]
    return [spec.base.experiment(values, (*plain, f"seed={seed}")) for seed in spec.seeds]


def replace_dir(experiment: Experiment, directory: str) -> Any:
    """The section `run` with another directory."""
    return experiment.run.model_copy(update={"dir": directory})


def watch_of(
    experiment: Experiment,
    spec: TrialSpec,
    tell: Callable[[Standing, TrialWatch], None],
    before: Standing | None = None,
) -> TrialWatch:
    """What follows one run of a trial."""

    def told(standing: Standing, _: Event) -> None:
        tell(standing, watch)

    watch = TrialWatch(experiment, spec.prices, told, before)
    return watch


def final_report(ended: Sequence[tuple[Standing, TrialWatch]], spec: TrialSpec) -> dict[str, Any]:
    """What Ray Tune is told at the end of a trial: medians over its seeds."""
    goal = ended[0][1].goal
    reports = [report_of(standing, goal, spec.objectives) for standing, _ in ended]
    # Never before what was reported on the way: schedulers take time to grow.
    first = ended[0][0]
    found = reports[0] | {
        score_key(name): together([score(name, standing, goal) for standing, _ in ended])
        for name in spec.objectives
    }
    for key in ("reached_s", "reached_usd", goal.metric):
        known = [report[key] for report in reports if key in report]
        found |= {key: together(known)} if len(known) == len(reports) else {}
        if key in found and len(known) < len(reports):
            del found[key]
    reached = all(standing.reached_s is not None for standing, _ in ended)
    diverged = any(watch.diverged for _, watch in ended)
    return found | {
        "time_s": first.time_s,
        "samples": first.samples,
        "wan_bytes": together([watch.wan_bytes for _, watch in ended]),
        "status": "reached" if reached else "diverged" if diverged else "ended",
    }


def _nothing(standing: Standing, watch: TrialWatch) -> None:
    pass
