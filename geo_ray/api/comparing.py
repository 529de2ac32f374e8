"""`geo_ray.compare`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

from geo_ray.api.inputs import Config, FilePath, Overrides, own_threads_kept, source_of
from geo_ray.api.planning import FollowedPlan, plan_to_follow
from geo_ray.api.tables import Table
from geo_ray.api.watch import RunWatch, ShowProgress
from geo_ray.comparison.board import Row, Spread
from geo_ray.comparison.outcome import Outcome, outcome_of
from geo_ray.comparison.page import write_page
from geo_ray.comparison.run import Comparison, ComparisonPlan, Tell, default_jobs
from geo_ray.comparison.run import compare as compare_all
from geo_ray.comparison.save import save_comparison
from geo_ray.comparison.variants import parse_variant
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import load_tree, override_notes
from geo_ray.config.source import override_items
from geo_ray.errors import ConfigError, RunDirectoryError
from geo_ray.job import rundir
from geo_ray.job.build import check_device
from geo_ray.job.follow_plan import changes_of
from geo_ray.observe.html_view import html_view
from geo_ray.observe.text import bytes_text, duration_text, number_text
from geo_ray.planning.model.bill import Bill
from geo_ray.runtime.driver.run_cluster import Reporting, with_its_driver
from geo_ray.runtime.driver.train import train as train_to_end
from geo_ray.util.ticking import ticking

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """Several strategies on one workload, best first.

    Attributes:
        comparison: its rows, and all runs with their evaluations.
        path: its directory, with every run.
        page_path: the HTML page about it.
    """

    comparison: Comparison
    path: Path
    page_path: Path

    @property
    def rows(self) -> tuple[Row, ...]:
        """One per strategy, best first."""
        return tuple(self.comparison.rows)

    @property
    def best(self) -> Row:
        """The first of them."""
        return self.comparison.rows[0]

    def table(self) -> Table:
        """A row per strategy, best first; of what runs differ in, the median, low and high.

        ``standing`` says whether the runs tell it from the best: see `comparison.board.standing`.
        """
        return Table(
            [_flat(row) | {"standing": self.comparison.standing(row)} for row in self.rows]
        )

    def points(self) -> Table:
        """A row per evaluation of every run that counts."""
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
        shown = {
            "strategy": lambda row: row.label,
            "lr": lambda row: f"{row.lr:g}",
            "to target": lambda row: duration_text(row.to_target_s.median),
            "run": lambda row: duration_text(row.seconds.median),
            "WAN": lambda row: bytes_text(row.wan_bytes.median),
            f"final {metric}": lambda row: number_text(row.final.median),
            "to the best": self.comparison.standing,
        }
        if self.comparison.target is None:
            del shown["to target"]
        rows = [tuple(text(row) for text in shown.values()) for row in self.rows]
        title = f"Comparison of {len(rows)} strategies, best first; {self.comparison.links}"
        return html_view(title, tuple(shown), rows)


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

    Simulated, unless ``real``: seconds are then predictions.

    Args:
        config: a file, a mapping, or what `load_config` gave.
        strategies: each ``KIND:KEY=VALUE:...``, such as ``diloco:interval=16:codec=int4``.
        overrides: changes of single keys in all runs.
        plan: whose workers, batches, averager and prices to take.
        seeds: runs of each that count.
        rates: factors on the learning rate that each may choose from; a single one: no choice.
        real: train on the cluster; rates are still simulated.
        out: directory of everything; default: ``RUN.DIR/compare-NAME``.
        resume: go on with what lies in that directory.
        jobs: simulated runs side by side; default: as many as there are cores.
        progress: say on standard error which run has ended.
        base_dir: as for `geo_ray.train`.

    Raises:
        ConfigError: an argument is wrong; names it.
        RunDirectoryError: the directory exists, and ``resume`` is not set.
        GeoRayError: whatever ends the comparison early.
    """
    _check_numbers(seeds, jobs, rates)
    source = source_of(config, base_dir)
    changes = override_items(overrides)
    texts = strategies.split(",") if isinstance(strategies, str) else strategies
    variants = tuple(parse_variant(text, source.parent) for text in texts)
    if not variants:
        raise ConfigError("strategies: there are none", fix="Name one at least, such as 'sma'.")
    twice = _repeated([variant.label for variant in variants])
    if twice is not None:
        raise ConfigError(f"strategies: {twice} is there twice", fix="Name each strategy once.")
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
            fix="Go on with it by --resume (resume=True), or name another directory with --out "
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
    with own_threads_kept():
        watch = RunWatch(progress)
        rates_text = f" at {len(rates)} learning rates" if len(rates) > 1 else ""
        watch.tell(f"comparing {len(variants)} strategies{rates_text}, each run with {seeds} seeds")
        with ticking("running", watch.tell):
            comparison = compare_all(wanted, _teller(watch), partial(_train, source.parent))
    save_comparison(comparison, directory / "compare.json")
    title = f"{experiment.name}: {','.join(texts)}"
    page = write_page(comparison, title, directory / "compare.html")
    return ComparisonResult(comparison, directory, page)


def _check_numbers(seeds: int, jobs: int | None, rates: Sequence[float]) -> None:
    if seeds < 1:
        raise ConfigError(f"seeds: {seeds} runs of each", fix="Ask for one at least.")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs: {jobs} runs side by side", fix="Ask for one at least.")
    if not rates:
        raise ConfigError("rates: there are none", fix="Give one at least, such as 1.0.")
    for rate in rates:
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(
                f"rates: {rate} is no factor on a learning rate",
                fix="Give finite positive numbers, such as 0.5, 1.0 and 2.0.",
            )
    twice = _repeated(list(rates))
    if twice is not None:
        raise ConfigError(f"rates: {twice} is there twice", fix="Name each factor once.")


def _repeated(values: Sequence[T]) -> T | None:
    """The first value that is there more than once."""
    return next((value for value in values if values.count(value) > 1), None)


def _teller(watch: RunWatch) -> Tell:
    """What says which run has ended, and how long the rest will take."""
    began_s = time.monotonic()

    def tell(done: int, count: int, what: str) -> None:
        left_s = (time.monotonic() - began_s) / done * (count - done)
        left = f", about {left_s / 60:.0f} min left" if left_s > 60 else ""
        watch.tell(f"{done}/{count}{left}: {what}")

    return tell


def _train(base_dir: Path, experiment: Experiment, directory: Path) -> Outcome:
    """One real run; its outcome."""
    directory.mkdir(parents=True, exist_ok=True)
    run = rundir.create(experiment, base_dir)
    reporting = Reporting(lambda _: None, [], time.time())
    summary = train_to_end(with_its_driver(experiment), run, reporting)
    return outcome_of("", 1.0, experiment, summary, run.path)


def _flat(row: Row) -> dict[str, object]:
    found: dict[str, object] = {}
    for each in fields(row):
        name, value = each.name, getattr(row, each.name)
        if isinstance(value, Spread):
            found |= {name: value.median, f"{name}_low": value.low, f"{name}_high": value.high}
        else:
            found[name] = value
    return found
