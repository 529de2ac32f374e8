"""Carries a comparison out: simulated runs side by side, real ones one after another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_ray.comparison.board import Row, Standing, best_rate, goal_of, ordered, row_of, standing
from geo_ray.comparison.outcome import (
    Outcome,
    failed_outcome,
    load_outcome,
    save_outcome,
)
from geo_ray.comparison.pool import SimulatedCase, simulate_all
from geo_ray.comparison.price import priced
from geo_ray.comparison.variants import Case, CaseDirectory, Variant, experiment_of
from geo_ray.config.experiment import Experiment
from geo_ray.config.source import ConfigSource
from geo_ray.errors import NonFiniteError
from geo_ray.job.start.links_text import links_text
from geo_ray.observe.metrics.summary import Target
from geo_ray.planning.model.bill import Bill

TUNING_SEED = 1_000
"""Seed of the runs that choose learning rates; those that are reported have others."""


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """What is compared, and how.

    Attributes:
        config: the workload.
        common: changes to all runs, as for ``--set``.
        variants: ways to do it.
        rates: factors on the learning rate that each variant may choose from.
        seeds: of the runs that count.
        out: directory of everything.
        jobs: simulated runs side by side.
        real: train on the local cluster instead of simulating; rates are still simulated.
        bill: prices; None without any.
    """

    config: ConfigSource
    common: tuple[str, ...]
    variants: tuple[Variant, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    out: Path
    jobs: int
    real: bool = False
    bill: Bill | None = None

    @property
    def names(self) -> CaseDirectory:
        """What the directories of its runs are called."""
        return CaseDirectory(self.variants, self.rates)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out.

    Attributes:
        rows: one per variant, best first.
        tuning: the runs that chose learning rates.
        outcomes: the runs that count.
        metric: what it goes by; None if the task has none.
        target: that runs were to reach; None if there is none.
        links: which links the runs had, for people.
    """

    rows: list[Row]
    tuning: list[Outcome]
    outcomes: list[Outcome]
    metric: str | None
    target: Target | None = None
    links: str = ""

    def standing(self, row: Row) -> Standing:
        """What the runs say about a row and the best one."""
        return standing(row, self.rows[0])


Tell = Callable[[int, int, str], None]
"""``tell(done, all, what)``."""


def compare(
    plan: ComparisonPlan, tell: Tell, train: Callable[[Experiment, Path], Outcome]
) -> Comparison:
    """Choose each variant's learning rate, then run every seed with it.

    Args:
        plan: what to do; runs that were made before with the same configuration are not repeated.
        tell: hears of every run that ended.
        train: a real run of an experiment, given its directory; used only if the plan says so.

    Raises:
        ConfigError: a variant does not fit the workload; before anything runs.
    """
    rates = plan.rates if len(plan.rates) > 1 else ()
    trial = [Case(v, rate, TUNING_SEED) for v in plan.variants for rate in rates]
    count = len(trial) + len(plan.variants) * len(plan.seeds)
    for case in trial or [Case(v, 1.0, plan.seeds[0]) for v in plan.variants]:
        experiment_of(case, plan.config, plan.common, plan.out)
    done = 0

    def told(outcomes: Iterator[Outcome]) -> list[Outcome]:
        nonlocal done
        found = []
        for outcome in outcomes:
            done += 1
            found.append(priced(outcome, plan.bill))
            tell(done, count, f"{outcome.label} x{outcome.rate:g} seed {outcome.seed}")
        return found

    tuning = told(_simulated(plan, trial))
    workload = experiment_of(Case(plan.variants[0], 1.0, 0), plan.config, plan.common, plan.out)
    target = workload.train.target
    best = {
        v.label: best_rate([o for o in tuning if o.label == v.label], target)
        if rates
        else plan.rates[0]
        for v in plan.variants
    }
    cases = [Case(v, best[v.label], seed) for v in plan.variants for seed in plan.seeds]
    runs = _real(plan, cases, train) if plan.real else _simulated(plan, cases)
    outcomes = told(runs)
    metric, grows = goal_of(target, outcomes)
    rows = [row_of([o for o in outcomes if o.label == v.label], target) for v in plan.variants]
    links = links_text(workload, simulated=not plan.real)
    return Comparison(ordered(rows, grows=grows), tuning, outcomes, metric, target, links)


def _simulated(plan: ComparisonPlan, cases: Sequence[Case]) -> Iterator[Outcome]:
    todo = []
    for case in cases:
        directory = plan.out / "simulated" / plan.names.of(case)
        experiment = experiment_of(case, plan.config, plan.common, directory)
        known = load_outcome(directory, experiment)
        if known is None:
            todo.append(
                SimulatedCase(
                    case.variant.label,
                    case.rate,
                    experiment.model_dump_json(),
                    str(directory),
                    str(plan.config.parent.absolute()),
                )
            )
        else:
            yield known
    if not todo:
        return
    yield from simulate_all(todo, plan.jobs)


def _real(
    plan: ComparisonPlan, cases: Sequence[Case], train: Callable[[Experiment, Path], Outcome]
) -> Iterator[Outcome]:
    for case in cases:
        directory = plan.out / "real" / plan.names.of(case)
        experiment = experiment_of(case, plan.config, plan.common, directory)
        outcome = load_outcome(directory, experiment)
        if outcome is None:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            try:
                outcome = train(experiment, directory)
            except NonFiniteError as error:
                outcome = failed_outcome(case.variant.label, case.rate, experiment, str(error))
            outcome = outcome.model_copy(update={"label": case.variant.label, "rate": case.rate})
            save_outcome(outcome, directory)
        yield outcome


def default_jobs() -> int:
    """As many simulated runs side by side as there are cores."""
    return max(1, len(os.sched_getaffinity(0)))
