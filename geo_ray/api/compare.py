"""`compare` and `profile_loss`."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from geo_ray.api.config import Config, FilePath, Overrides, preserving_threads, source_of
from geo_ray.api.display import RunWatch, ShowProgress, Table, progress_bar
from geo_ray.api.plan import FollowedPlan, plan_to_follow
from geo_ray.base.errors import ConfigError, RunDirectoryError
from geo_ray.base.load import load_tree, override_items, override_notes
from geo_ray.base.notebooks import html_view
from geo_ray.base.output import ticking
from geo_ray.base.text import bytes_text, duration_text, number_text
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.actual_cost import Bill
from geo_ray.planner.loss import LossProfile, MeasuredLoss, differences
from geo_ray.runs import directory as rundir
from geo_ray.runs.build import check_device, parameter_count
from geo_ray.runs.follow_plan import changes_of, model_id
from geo_ray.runs.planning import default_loss_path, subject_of
from geo_ray.sweep.compare import (
    Comparison,
    ComparisonPlan,
    Row,
    Spread,
    parse_variant,
    save_comparison,
    write_page,
)
from geo_ray.sweep.compare import compare as compare_all
from geo_ray.sweep.loss import (
    LossTask,
    LossWanted,
    codecs_held_at,
    loss_cases,
    measure_loss,
    opened,
    still_to_do,
)
from geo_ray.sweep.runner import default_jobs

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """Results of several strategies on one workload, best first.

    Attributes:
        comparison: rows of the table, and all runs with their evaluations.
        path: directory with all runs.
        page_path: the HTML page.
    """

    comparison: Comparison
    path: Path
    page_path: Path

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of the comparison, one per strategy, best first."""
        return tuple(self.comparison.rows)

    @property
    def best(self) -> Row:
        """The best row."""
        return self.comparison.rows[0]

    def table(self) -> Table:
        """Return a row per strategy, best first, with median, low and high over the runs.

        ``standing`` states whether the runs distinguish it from the best; see
        `geo_ray.sweep.compare.standing`.
        """
        return Table(
            [_flat(row) | {"standing": self.comparison.standing(row)} for row in self.rows]
        )

    def points(self) -> Table:
        """Return a row per evaluation of every measured run."""
        rows = [
            {
                "strategy": run.label,
                "rate": run.rate,
                "seed": run.seed,
                "time_s": point.t_s,
                "samples": point.samples,
                "wan_bytes": point.wan_bytes,
                **point.metrics,
            }
            for run in self.comparison.outcomes
            for point in run.points
        ]
        return Table(rows)

    def __repr__(self) -> str:
        metric = self.comparison.metric or "no metric"
        rows = "; ".join(f"{row.label} {number_text(row.final.median)}" for row in self.rows)
        return f"<Comparison by {metric}: {rows}>"

    def _repr_html_(self) -> str:
        metric = self.comparison.metric or ""
        headings = ["strategy", "lr", "to target", "run", "WAN", f"final {metric}", "to the best"]
        rows = [
            [
                row.label,
                f"{row.lr:g}",
                duration_text(row.to_target_s.median),
                duration_text(row.seconds.median),
                bytes_text(row.wan_bytes.median),
                number_text(row.final.median),
                self.comparison.standing(row),
            ]
            for row in self.rows
        ]
        if self.comparison.target is None:
            for cells in (headings, *rows):
                del cells[2]
        title = f"Comparison of {len(rows)} strategies, best first; {self.comparison.links}"
        return html_view(title, headings, rows)


def compare(
    config: Config,
    strategies: Sequence[str] | str,
    overrides: Overrides = (),
    *,
    plan: FollowedPlan | None = None,
    seeds: int = 3,
    rates: Sequence[float] = (0.5, 1.0, 2.0),
    real: bool = False,
    out: FilePath | None = None,
    resume: bool = False,
    jobs: int | None = None,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
) -> ComparisonResult:
    """Run one workload with several strategies, each with its best learning rate.

    Runs are simulated unless ``real`` is set; seconds are then predictions.

    Args:
        config: a file, a mapping, or a result of `load_config`.
        strategies: each ``KIND:KEY=VALUE:...``, such as ``diloco:interval=16:codec=int4``.
        overrides: changed values in all runs.
        plan: a plan whose workers, batches, averager and prices are used.
        seeds: measured runs per strategy.
        rates: factors for the learning rate; each strategy uses its best one.
        real: train on the cluster; learning rates are still tuned in simulation.
        out: output directory; default: ``RUN.DIR/compare-NAME``.
        resume: continue the comparison in that directory.
        jobs: parallel simulated runs; default: number of cores.
        progress: report finished runs on standard error.
        base_dir: as for `geo_ray.train`.

    Raises:
        ConfigError: an argument is invalid; names it.
        RunDirectoryError: the directory exists, and ``resume`` is not set.
        GeoRayError: the comparison ends early.
    """
    _check_numbers(seeds, jobs, rates)
    source = source_of(config, base_dir)
    changes = override_items(overrides)
    texts = strategies.split(",") if isinstance(strategies, str) else strategies
    variants = tuple(parse_variant(text, source.parent) for text in texts)
    if not variants:
        raise ConfigError("strategies: empty", fix="Give at least one, such as 'sma'.")
    twice = _repeated([variant.label for variant in variants])
    if twice is not None:
        raise ConfigError(f"strategies: {twice} is listed twice", fix="List each strategy once.")
    experiment = load_tree(source, changes, Experiment)
    for note in override_notes(source, changes):
        _log.warning("%s", note)
    if not real or len(rates) > 1 or experiment.cluster.kind == "local":
        check_device(experiment)
    bill = None
    if plan is not None:
        followed = plan_to_follow(plan)
        changes = (*changes, *changes_of(followed, experiment, exchanges=False))
        bill = Bill.of(followed)
    directory = Path(out or rundir.local_root(experiment) / f"compare-{experiment.name}").absolute()
    if directory.exists() and not resume:
        raise RunDirectoryError(
            f"{directory} exists",
            fix="Continue it with --resume (resume=True), or choose another directory with --out "
            "(out=...).",
        )
    wanted = ComparisonPlan(
        config=source,
        common=changes,
        variants=variants,
        rates=tuple(rates),
        seeds=tuple(range(seeds)),
        out=directory,
        jobs=jobs or default_jobs(),
        real=real,
        bill=bill,
    )
    with preserving_threads():
        watch = RunWatch(progress)
        rates_text = f" at {len(rates)} learning rates" if len(rates) > 1 else ""
        watch.notify(
            f"comparing {len(variants)} strategies{rates_text}, each run with {seeds} seeds"
        )
        with ticking("running", watch.notify):
            comparison = compare_all(wanted, watch.notify)
    save_comparison(comparison, directory / "compare.json")
    title = f"{experiment.name}: {','.join(texts)}"
    page = write_page(comparison, title, directory / "compare.html")
    return ComparisonResult(comparison, directory, page)


def _check_numbers(seeds: int, jobs: int | None, rates: Sequence[float]) -> None:
    if seeds < 1:
        raise ConfigError(f"seeds: {seeds} runs of each", fix="Use at least one.")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs: {jobs} parallel runs", fix="Use at least one.")
    if not rates:
        raise ConfigError("rates: empty", fix="Give at least one, such as 1.0.")
    for rate in rates:
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(
                f"rates: {rate} is not a factor of a learning rate",
                fix="Give finite positive numbers, such as 0.5, 1.0 and 2.0.",
            )
    twice = _repeated(list(rates))
    if twice is not None:
        raise ConfigError(f"rates: {twice} is listed twice", fix="List each factor once.")


def _repeated(values: Sequence[T]) -> T | None:
    """Return the first duplicate value, or None."""
    return next((value for value in values if values.count(value) > 1), None)


def _flat(row: Row) -> dict[str, object]:
    found: dict[str, object] = {}
    for each in fields(row):
        name, value = each.name, getattr(row, each.name)
        if isinstance(value, Spread):
            found |= {name: value.median, f"{name}_low": value.low, f"{name}_high": value.high}
        else:
            found[name] = value
    return found


@dataclass(frozen=True, repr=False)
class LossProfileResult:
    """Measured loss of intervals and codecs.

    Attributes:
        profile: all measurements.
        path: file of the profile.
        left_out: reasons why an interval or codec was not measured.
    """

    profile: LossProfile
    path: Path
    left_out: tuple[str, ...] = ()

    def table(self) -> Table:
        """Return a row per interval and codec: mean relative loss, and the upper bound for plans.

        Codecs are compared with the same interval without a codec, intervals with plain training.
        """
        found = differences(self.profile)
        return Table(
            [
                {
                    "interval": interval,
                    "codec": codec,
                    "loss": _mean(self.profile.by_key[interval, codec].losses),
                    "mean": each.mean,
                    "upper": each.upper,
                }
                for (interval, codec), each in found.items()
            ]
        )

    def loss(self, interval: int, codec: str | None = None) -> float:
        """Return the relative loss that plans use for an interval, in local steps, and a codec."""
        return MeasuredLoss.of(self.profile).loss(interval, codec, trains_on=False)

    def __repr__(self) -> str:
        profile = self.profile
        runs = f"{len(profile.points) + 1} x {len(profile.seeds)} runs of {profile.steps} steps"
        return f"<LossProfile {self.path}: {runs}>"

    def _repr_html_(self) -> str:
        headings = ("interval", "codec", "mean", "counts")
        rows = [
            (str(interval), codec or "none", f"{each.mean:+.2%}", f"{each.upper:.2%}")
            for (interval, codec), each in differences(self.profile).items()
        ]
        return html_view(repr(self)[1:-1], headings, rows)


@dataclass(frozen=True, slots=True)
class LossGrid:
    """Measurements of `profile_loss`.

    Attributes:
        intervals: intervals in steps; default: the configured one, and those of the section
            ``plan`` or 1, 4, 16 and 64, if at least two of them fit into the steps.
        codecs: codecs, None for no codec; default: those that a plan chooses from.
        steps: local steps of each run.
        seeds: runs per point.
        jobs: parallel runs; default: number of cores.
        fresh: repeat existing measurements.
    """

    intervals: Sequence[int] | None = None
    codecs: Sequence[str | None] | None = None
    steps: int = 200
    seeds: int = 3
    jobs: int | None = None
    fresh: bool = False


def profile_loss(
    config: Config,
    overrides: Overrides = (),
    *,
    grid: LossGrid | None = None,
    out: FilePath | None = None,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
) -> LossProfileResult:
    """Measure the loss of long intervals and codecs with short simulated runs, for `plan`.

    Args:
        config: a file, a mapping, or a result of `load_config`.
        overrides: changed values by dotted key.
        grid: points to measure; identical existing measurements are reused.
        out: output file; default: ``RUN.DIR/profiles/loss/NAME.json``.
        progress: report progress on standard error.
        base_dir: as for `geo_ray.train`.

    Raises:
        ConfigError: there is nothing to measure, or plans do not support the strategy or codec.
        ProfileError: no points can be compared.
        GeoRayError: a run ends early; finished measurements are saved.
    """
    grid = grid or LossGrid()
    _check(grid)
    watch = RunWatch(progress)
    with preserving_threads():
        source = source_of(config, base_dir)
        experiment = load_tree(source, override_items(overrides), Experiment)
        path = default_loss_path(experiment) if out is None else Path(out)
        check_device(experiment)
        wanted = LossWanted(grid.steps, grid.intervals, grid.codecs)
        cases = loss_cases(experiment, source.parent, wanted)
        model_params = parameter_count(load_task(experiment.task, source.parent), experiment.seed)
        model = model_id(experiment, source.parent, model_params)
        task = LossTask(
            cases,
            subject_of(experiment, source.parent, model),
            source.parent,
            cases.steps,
            tuple(experiment.seed + number for number in range(grid.seeds)),
            grid.jobs or default_jobs(),
        )
        file = opened(path, task, fresh=grid.fresh)
        known, at = file.known, codecs_held_at(task, file.known)
        if at is not None and at != cases.codecs_at:
            cases = loss_cases(experiment, source.parent, replace(wanted, codecs_at=at))
            task = replace(task, cases=cases)
        for text in cases.left_out:
            watch.notify(f"not measured: {text}")
        todo = still_to_do(task, known)
        if len(todo) < len(cases.all):
            watch.notify(
                f"{len(cases.all) - len(todo)} of {len(cases.all)} are known from {file.writes}"
            )
        if not experiment.strategy.traits.in_rounds and not experiment.links():
            watch.notify("no links are emulated: updates arrive without delay")
        found = known if len(todo) < len(cases.all) else None
        title = f"Measuring loss, {cases.steps} steps each"
        with progress_bar(title, len(todo) * grid.seeds, "runs", progress) as advance:
            for found in measure_loss(task, known, partial(advance, 1)):
                file.keep(found)  # after each case, so that an interrupt loses little
        file.finish()
    assert found is not None, "there is at least one interval"  # noqa: S101
    return LossProfileResult(found, path, cases.left_out)


def _check(grid: LossGrid) -> None:
    if grid.seeds < 2:
        raise ConfigError(
            f"seeds: {grid.seeds} are too few to estimate noise", fix="Give 2 or more."
        )
    if grid.steps < 1 or (grid.jobs or 1) < 1:
        raise ConfigError("steps and jobs: must be positive", fix="Give whole numbers.")
    if grid.intervals is not None and (not grid.intervals or min(grid.intervals) < 1):
        raise ConfigError(
            f"intervals: {list(grid.intervals)} are not positive", fix="Give whole numbers."
        )


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if len(known) == len(losses) else None
