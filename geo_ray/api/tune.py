"""`geo_ray.tune`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from geo_ray.api.config import FilePath, Overrides, preserving_threads
from geo_ray.api.display import RunWatch, ShowProgress, Table
from geo_ray.base.errors import ConfigError, InterruptedRunError, TrialsFailedError
from geo_ray.base.load import load_tree, override_items, text_of
from geo_ray.base.notebooks import html_view
from geo_ray.base.output import ticking
from geo_ray.base.yaml import ConfigSource
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import check_device
from geo_ray.sweep.ray_tune import SearchPlan, check_installed
from geo_ray.sweep.search_config import TuningConfig
from geo_ray.sweep.space import Space, base_of_search, directory_of
from geo_ray.sweep.tune import (
    SearchResult,
    TrialRow,
    Tuning,
    best_text,
    cell,
    save_tuning,
    search,
    short_id,
    summary_text,
    values_text,
    write_best,
    write_tuning_page,
)

SearchFile: TypeAlias = FilePath | Mapping[str, Any] | TuningConfig
"""A YAML file of a search, a mapping of its keys, or a loaded search."""


@dataclass(frozen=True, repr=False)
class TuningResult:
    """A finished search.

    Attributes:
        tuning: trials, best first.
        path: directory of the search.
        best_path: file with the best trial's configuration; None if no trial beat the base.
        page_path: the HTML page.
        grid: Ray Tune's ``ResultGrid``.
        experiment: the best trial's configuration; None if no trial beat the base.
    """

    tuning: Tuning
    path: Path
    best_path: Path | None
    page_path: Path
    grid: Any = field(compare=False)
    experiment: Experiment | None

    @property
    def best(self) -> TrialRow:
        """The best trial.

        Raises:
            TrialsFailedError: no trial finished.
        """
        found = self.tuning.best
        if found is None:
            raise _no_trial(self.tuning)
        return found

    def table(self) -> Table:
        """Return a row per trial, best first: values by key, scores and status."""
        names = [f"score_{name}" for name in self.tuning.objectives]
        return Table(
            [
                {"trial": row.id, "status": row.status}
                | row.values
                | dict(zip(names, row.scores, strict=True))
                | {"why": row.why}
                for row in self.tuning.rows
            ]
        )

    def __repr__(self) -> str:
        best = best_text(self.tuning) or "none"
        return f"<Tuning: {summary_text(self.tuning).splitlines()[0]}; best: {best}>"

    def _repr_html_(self) -> str:
        heads = ("trial", "status", *self.tuning.objectives, "values")
        rows = [
            (
                short_id(row),
                row.status,
                *(cell(n, s) for n, s in zip(self.tuning.objectives, row.scores, strict=True)),
                values_text(row.values),
            )
            for row in self.tuning.rows
        ]
        return html_view(summary_text(self.tuning), heads, rows)


def tune(
    config: SearchFile,
    overrides: Overrides = (),
    *,
    out: FilePath | None = None,
    resume: bool = False,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
) -> TuningResult:
    """Search for the values of a configuration with the earliest target or the lowest cost.

    In the main thread, Ctrl-C ends the search, saves the results of its trials, and raises
    `InterruptedRunError`.

    Args:
        config: file of the search, or a mapping of its keys.
        overrides: changed values of that file by dotted key.
        out: output directory; default: ``runs/tune-NAME``.
        resume: continue the search in that directory; finished trials are not repeated.
        progress: report finished trials on standard error.
        base_dir: base of relative paths; default: the file's directory.

    Raises:
        ConfigError: the file, its base or its space is invalid; before any trial starts.
        SearchMissingError: the search algorithm is not installed.
        TuningDirectoryError: the directory exists without ``resume``, or has another search.
        TrialsFailedError: all trials failed.
        InterruptedRunError: the search was interrupted.
    """
    watch = RunWatch(progress)
    with preserving_threads():
        with ticking("checking the search", watch.notify):
            plan = plan_of(config, overrides, out=out, base_dir=base_dir)
        kind = plan.config.trials.kind
        watch.notify(f"{plan.wanted} {kind} trials, {plan.jobs} in parallel; results in {plan.out}")
        if plan.config.search.base_first and plan.space.base_draw() is None:
            watch.notify("the base is not a trial: it has values outside the space")
        found = search(plan, watch.notify, resume=resume)
    return _finish(plan, found, _command(config, out))


def plan_of(
    config: SearchFile,
    overrides: Overrides = (),
    *,
    out: FilePath | None = None,
    base_dir: FilePath | None = None,
) -> SearchPlan:
    """Read and check a search; start and write nothing.

    Raises:
        ConfigError: the file, its base or its space is invalid.
        SearchMissingError: the search algorithm is not installed.
    """
    source = _source_of(config, base_dir)
    tuning = load_tree(source, override_items(overrides), TuningConfig, _ADVICE)
    check_installed(tuning.search)
    base = base_of_search(tuning, source.parent)
    start = base.experiment()
    if start.strategy.kind == "auto":
        raise ConfigError(
            "base: its strategy is auto, which cannot be tuned",
            fix="Choose a strategy in the base; the space may contain strategy.kind.",
        )
    _check(tuning, start)
    space = Space.of(tuning, base)
    tried = space.check()
    if tuning.trials.kind == "simulated":
        check_device(start)
    named = None if out is None else Path(out)
    return SearchPlan(tuning, space, directory_of(tuning, start, named), tried)


_ADVICE = "Correct the named key; docs/guides/tuning.md describes the file."


def _source_of(config: SearchFile, base_dir: FilePath | None) -> ConfigSource:
    if isinstance(config, (str, os.PathLike)):
        return Path(config)
    return text_of(config, Path(base_dir or Path.cwd()).absolute())


def _check(tuning: TuningConfig, start: Experiment) -> None:
    """Check a search against its base.

    Raises:
        ConfigError: an objective has no target, a region has no price, or there are no evaluations.
    """
    if "time_to_target" in tuning.objectives and start.train.target is None:
        raise ConfigError(
            "objectives: time_to_target requires train.target in the base",
            fix="Add set: ['train.target={metric: loss, value: 0.2, direction: at_most}'] to the "
            "search, with a value that a good run reaches.",
        )
    if not start.train.eval_every:
        raise ConfigError(
            "base: train.eval_every is 0, but trials are compared by evaluations",
            fix="Set train.eval_every.",
        )
    prices = tuning.prices
    if prices is not None:
        names = set(start.region_names)
        known = set(prices.worker_usd_per_h)
        if missing := sorted(names - known):
            raise ConfigError(
                f"prices.worker_usd_per_h: region {', '.join(missing)} has no price",
                fix="Give every region of the base a price.",
            )
        if others := sorted((known | set(prices.egress_usd_per_gb)) - names):
            raise ConfigError(
                f"prices: the base has no region {', '.join(others)}",
                fix=f"Its regions are {', '.join(sorted(names))}.",
            )


def _finish(plan: SearchPlan, found: SearchResult, command: str) -> TuningResult:
    tuning = found.tuning
    save_tuning(tuning, plan.out / "tune.json")
    page = write_tuning_page(tuning, f"Search {plan.config.name}", plan.out / "tune.html")
    best_path = experiment = None
    if tuning.best is not None and tuning.beats_base:
        note = f"The best of {len(tuning.rows)} trials of the search {plan.config.name}."
        best_path = write_best(plan.space.base, tuning.best.values, note, plan.out / "best.yaml")
        experiment = plan.space.base.experiment(tuning.best.values)
    if found.interrupted:
        raise InterruptedRunError(
            f"the search was interrupted; {summary_text(tuning).splitlines()[0]} are in {plan.out}",
            fix=f"Continue with `{command} --resume`, or tune(..., resume=True).",
        )
    if tuning.best is None:
        raise _no_trial(tuning)
    return TuningResult(tuning, plan.out, best_path, page, found.grid, experiment)


def _no_trial(tuning: Tuning) -> TrialsFailedError:
    why: Sequence[str] = [row.why for row in tuning.rows if row.why] or ["no cause was reported"]
    return TrialsFailedError(f"none of {len(tuning.rows)} trials finished; the first: {why[0]}")


def _command(config: SearchFile, out: FilePath | None) -> str:
    name = str(config) if isinstance(config, (str, os.PathLike)) else "SEARCH"
    words = ["geo-ray", "tune", name, *(["--out", str(out)] if out is not None else [])]
    return shlex.join(words)
