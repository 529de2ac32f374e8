"""A trial as Ray Tune runs it: one configuration, simulated or real.

Reports at each evaluation.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ray import tune

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import ConfigError, GeoRayError
from geo_ray.base.load import override_items
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.simulator.run import simulate
from geo_ray.sweep.objective import FAILED, Goal, Standing, score, together, usd_of
from geo_ray.sweep.search_config import ObjectiveName, PricesConfig
from geo_ray.sweep.space import Base, base_of
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Summary
from geo_ray.telemetry.totals import SentUntil

_LAST_STEPS: Final = 5
_EXPLODED: Final = 1.5
"""A mean loss of the last steps above so many times that of the first step is worse than no
training at all, whatever the noise of a batch is."""


class TrialWatch:
    """A sink of events.

    Args:
        experiment: the run.
        prices: of it; None without any.
        tell: hears of the standing at every evaluation of all regions together.
        before: what an earlier stretch of the same run has come to; None: it begins.
    """

    def __init__(
        self,
        experiment: Experiment,
        prices: PricesConfig | None,
        tell: Callable[[Standing, Event], None],
        before: Standing | None = None,
    ) -> None:
        self._target = experiment.train.target
        self._workers = {region.name: region.workers for region in experiment.regions}
        self._prices = prices
        self._tell = tell
        self._before = before or Standing(0.0, 0, 0.0, None)
        self._sent = SentUntil(math.inf)
        self._samples = 0
        self._first_losses: dict[str, float] = {}
        self._last_losses: dict[str, deque[float]] = {}
        self._newest = self._before
        self.goal = Goal.of(self._target)

    @property
    def standing(self) -> Standing:
        """At the newest evaluation."""
        return self._newest

    @property
    def wan_bytes(self) -> float:
        """Between regions so far, of this stretch."""
        return sum(self._sent.by_link().values())

    def feed(self, event: Event) -> None:
        """Take the next event."""
        self._sent.feed(event)
        if event.kind == "step":
            self._samples += event["samples"]
            region, loss = event["region"], event["loss"]
            loss = math.inf if loss is None else float(loss)
            self._first_losses.setdefault(region, loss)
            self._last_losses.setdefault(region, deque(maxlen=_LAST_STEPS)).append(loss)
        elif event.kind == "eval" and event["region"] is None:
            reached = self._target is not None and self._target.reached(event)
            now = self._at(event.t_s, event["metrics"].get(self.goal.metric), reached=reached)
            self._newest = now
            self._tell(now, event)

    @property
    def diverged(self) -> bool:
        """Whether the training loss of a region is not finite, or far above that of step 1."""
        for region, first in self._first_losses.items():
            last = sum(self._last_losses[region]) / len(self._last_losses[region])
            if not math.isfinite(last) or (first > 0 and last > _EXPLODED * first):
                return True
        return False

    def ended(self, summary: Summary) -> Standing:
        """How it stands after its end."""
        value = summary.eval.get(self.goal.metric)
        now = self._at(summary.seconds, value, reached=False)
        self._newest = Standing(
            now.time_s,
            now.samples,
            now.usd,
            now.value,
            now.reached_s,
            now.reached_usd,
            ended=True,
        )
        return self._newest

    def _at(self, t_s: float, value: float | None, *, reached: bool) -> Standing:
        before = self._before
        usd = before.usd + usd_of(self._prices, self._workers, t_s, self._sent.by_link())
        time_s = before.time_s + t_s
        known_s, known_usd = self._newest.reached_s, self._newest.reached_usd
        if reached and known_s is None:
            known_s, known_usd = time_s, usd
        return Standing(time_s, before.samples + self._samples, usd, value, known_s, known_usd)


def report_of(
    standing: Standing, goal: Goal, objectives: Sequence[ObjectiveName]
) -> dict[str, Any]:
    """What Ray Tune is told: flat plain numbers; what is not known is left out."""
    found: dict[str, Any] = {
        "time_s": standing.time_s,
        "samples": standing.samples,
        "usd": standing.usd,
        goal.metric: standing.value,
        "reached_s": standing.reached_s,
        "reached_usd": standing.reached_usd,
    }
    known = {k: v for k, v in found.items() if v is not None and math.isfinite(v)}
    scores = {score_key(name): score(name, standing, goal) for name in objectives}
    return known | {"behind": goal.behind(standing.value)} | scores


def failed_report(objectives: Sequence[ObjectiveName], why: str) -> dict[str, Any]:
    """What Ray Tune is told of a trial that failed: numbers behind all others, and why."""
    scores: Mapping[str, float] = {score_key(name): FAILED for name in objectives}
    none_yet = {"time_s": 0.0, "samples": 0}
    return {**none_yet, "behind": FAILED, **scores, "status": "failed", "why": why}


def score_key(objective: ObjectiveName) -> str:
    """The name of an objective's number among those that Ray Tune is told."""
    return f"score_{objective}"


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
