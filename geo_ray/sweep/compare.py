"""Compare variants of a workload: runs, table, `compare.json` and page.

Simulated runs run in parallel, real ones in sequence. Each variant counts with its best learning
rate.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Literal

import numpy as np
from rich.box import SIMPLE_HEAD

from geo_ray.base.errors import NonFiniteError
from geo_ray.base.files import save_text
from geo_ray.base.tables import FittedTable
from geo_ray.base.text import bytes_text, duration_text, number_text
from geo_ray.base.yaml import ConfigSource
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.bill import Bill
from geo_ray.runs.recorder import links_text
from geo_ray.sweep.outcome import (
    Case,
    CaseDirectory,
    Outcome,
    Point,
    Variant,
    experiment_of,
    failed_outcome,
    load_outcome,
    save_outcome,
)
from geo_ray.sweep.pool import SimulatedCase, simulate_all
from geo_ray.telemetry.charts import (
    AXES,
    SAMPLES_AXIS,
    STEPS_AXIS,
    TIME_AXIS,
    WAN_AXIS,
    Curve,
    chart_view,
    switched,
)
from geo_ray.telemetry.events import finite
from geo_ray.telemetry.html_page import html_page, section, write_html
from geo_ray.telemetry.html_page import table as html_table
from geo_ray.telemetry.summary import Target


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several runs, the least and the largest; NaN if none has a value."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """A variant with its best learning rate.

    Attributes:
        label: the variant.
        rate: factor on the learning rate.
        lr: that learning rate; NaN if it is not known.
        runs: how many there are, and how many of them reached the target.
        reached: see ``runs``.
        to_target_s: seconds to the target, where it was reached.
        to_target_samples: the same in training samples.
        seconds: of a whole run.
        rounds: exchanges.
        wan_bytes: between regions.
        idle_share: of the regions' time.
        final: the metric at the end.
        usd: what a run costs until the target or its end; NaN without prices.
    """

    label: str
    rate: float
    lr: float
    runs: int
    reached: int
    to_target_s: Spread
    to_target_samples: Spread
    seconds: Spread
    rounds: Spread
    wan_bytes: Spread
    idle_share: Spread
    final: Spread
    usd: Spread


def goal_of(target: Target | None, outcomes: Sequence[Outcome]) -> tuple[str | None, bool]:
    """The metric that the comparison goes by, and whether more of it is better.

    The target's; without one the loss, or else the task's first metric, of which more is better.
    """
    if target is not None:
        return target.metric, target.direction == "at_least"
    names = [name for outcome in outcomes for name in outcome.eval]
    if "loss" in names:
        return "loss", False
    return (names[0] if names else None), True


def best_rate(outcomes: Sequence[Outcome], target: Target | None) -> float:
    """The learning rate of the best tuning runs of one variant.

    First the one that reaches the target soonest; of those that do not, the one with the best
    metric at its end; runs that failed come last.
    """
    goal = goal_of(target, outcomes)
    by_rate: dict[float, list[Outcome]] = {}
    for outcome in outcomes:
        by_rate.setdefault(outcome.rate, []).append(outcome)

    def merit(rate: float) -> tuple[float, float, float]:
        runs = by_rate[rate]
        times_s = [math.inf if r.time_to_target_s is None else r.time_to_target_s for r in runs]
        values = [_badness(run, *goal) for run in runs]
        return statistics.median(times_s), statistics.median(values), abs(math.log(rate))

    return min(by_rate, key=merit)


def row_of(outcomes: Sequence[Outcome], target: Target | None) -> Row:
    """Several seeds of one variant with one learning rate."""
    metric, _ = goal_of(target, outcomes)
    ended = [outcome for outcome in outcomes if outcome.failed is None]
    reached = [outcome for outcome in ended if outcome.time_to_target_s is not None]
    finals = [outcome.eval.get(metric) if metric else None for outcome in ended]
    return Row(
        label=outcomes[0].label,
        rate=outcomes[0].rate,
        lr=math.nan if outcomes[0].lr is None else outcomes[0].lr,
        runs=len(outcomes),
        reached=len(reached),
        to_target_s=spread([outcome.time_to_target_s for outcome in reached]),
        to_target_samples=spread([outcome.samples_to_target for outcome in reached]),
        seconds=spread([outcome.seconds for outcome in ended]),
        rounds=spread([outcome.rounds for outcome in ended]),
        wan_bytes=spread([outcome.wan_bytes for outcome in ended]),
        idle_share=spread([outcome.idle_share for outcome in ended]),
        final=spread(finals),
        usd=spread([outcome.usd for outcome in ended]),
    )


def ordered(rows: Sequence[Row], *, grows: bool) -> list[Row]:
    """Best first: most runs that reached the target, then the shortest time, then the metric.

    If no run reached a target, the metric ranks the rows, and time ranks those at the top that the
    metric does not tell apart: each of them is within noise of all others.

    Args:
        rows: in any order.
        grows: whether more of the metric is better.
    """
    sign = -1.0 if grows else 1.0

    def place(row: Row) -> tuple[float, float, float]:
        final = _last(sign * row.final.median)
        return -row.reached / row.runs, _last(row.to_target_s.median), final

    found = sorted(rows, key=place)
    if found[0].reached:
        return found
    alike = 1
    while alike < len(found) and all(
        standing(found[alike], other) == "within noise" for other in found[:alike]
    ):
        alike += 1
    return sorted(found[:alike], key=lambda row: _last(row.seconds.median)) + found[alike:]


Standing = Literal["best", "within noise", "behind", "one run"]


def standing(row: Row, best: Row) -> Standing:
    """What the runs say about a row and the best one.

    They are within noise if the ranges overlap of what ranks them: the seconds to the target,
    without an upper end where a run did not reach it, or the final metric if no run of both did.
    One run of each says nothing about noise.
    """
    if row is best:
        return "best"
    if max(row.runs, best.runs) == 1:
        return "one run"
    ranges = [
        (each.to_target_s.low, each.to_target_s.high if each.reached == each.runs else math.inf)
        if each.reached
        else (math.inf, math.inf)
        for each in (row, best)
    ]
    if not row.reached and not best.reached:
        ranges = [(each.final.low, each.final.high) for each in (row, best)]
    (low, high), (best_low, best_high) = ranges
    return "within noise" if low <= best_high and best_low <= high else "behind"


def spread(values: Sequence[float | None]) -> Spread:
    """Of the values that there are."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Spread(math.nan, math.nan, math.nan)
    return Spread(statistics.median(known), min(known), max(known))


def _badness(outcome: Outcome, metric: str | None, grows: bool) -> float:
    value = outcome.eval.get(metric) if metric else None
    if value is None or outcome.failed is not None:
        return math.inf
    return -value if grows else value


def _last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def priced(outcome: Outcome, bill: Bill | None) -> Outcome:
    """The outcome with its dollars: until the target where it was reached, else of the whole run.

    They stay unknown without prices, for a run that failed, and where regions without a price have
    spoken to each other.
    """
    sent = outcome.sent_bytes
    if bill is None or sent is None or outcome.failed is not None:
        return outcome
    by_pair = {(src, dst): count for src, to in sent.items() for dst, count in to.items()}
    if bill.unpriced(by_pair):
        return outcome
    until_s = outcome.seconds if outcome.time_to_target_s is None else outcome.time_to_target_s
    return outcome.model_copy(update={"usd": sum(bill.usd(until_s, by_pair).values())})


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


def save_comparison(comparison: Comparison, path: Path) -> None:
    """Write it whole or not at all; numbers that are not finite become null.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    content = {
        "metric": comparison.metric,
        "links": comparison.links,
        "rows": [asdict(r) | {"standing": comparison.standing(r)} for r in comparison.rows],
        "runs": [outcome.model_dump() for outcome in comparison.outcomes],
        "tuning": [outcome.model_dump() for outcome in comparison.tuning],
    }
    save_text(path, json.dumps(finite(content), indent=1) + "\n")


_HEADINGS = (
    "strategy",
    "lr",
    "to target",
    "samples to it",
    "reached",
    "run",
    "rounds",
    "WAN",
    "idle",
    "final",
    "to the best",
    "USD",
)
_ON_PAGE_ONLY = ("samples to it", "rounds")
_WITH_TARGET_ONLY = ("to target", "samples to it", "reached")
_RANGED = ("to target", "samples to it", "run", "rounds", "WAN", "idle", "final", "USD")
_PLACES: Mapping[str, Callable[[Point], float]] = {
    TIME_AXIS: lambda point: point.t_s,
    STEPS_AXIS: lambda point: float("nan") if point.step is None else float(point.step),
    SAMPLES_AXIS: lambda point: float(point.samples),
    WAN_AXIS: lambda point: float(point.wan_bytes),
}


def cells(row: Row, comparison: Comparison) -> list[str]:
    """A row's values as text, with their range where runs differ."""
    return [
        row.label,
        f"x{row.rate:g}" if math.isnan(row.lr) else f"{row.lr:g}",
        _text(row.to_target_s, duration_text),
        _text(row.to_target_samples, number_text),
        f"{row.reached}/{row.runs}",
        _text(row.seconds, duration_text),
        _text(row.rounds, number_text),
        _text(row.wan_bytes, bytes_text),
        _text(row.idle_share, lambda share: f"{share:.0%}"),
        _text(row.final, number_text),
        comparison.standing(row),
        _text(row.usd, number_text),
    ]


def result_table(comparison: Comparison) -> FittedTable:
    """The table for the terminal, best first; the page has more columns."""
    captions = [_noise_text(comparison), _failures_text(comparison), comparison.links]
    table = FittedTable(
        leave_out=("idle", "lr", "WAN", "reached"),
        whole=("to the best",),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="\n".join(text for text in captions if text) or None,
        caption_justify="left",
    )
    shown = [place for place in _shown(comparison) if _HEADINGS[place] not in _ON_PAGE_ONLY]
    for place in shown:
        left = _HEADINGS[place] == "strategy"
        table.add_column(
            _heading(place, comparison), justify="left" if left else "right", overflow="fold"
        )
    for row in comparison.rows:
        texts = cells(row, comparison)
        table.add_row(*(texts[place] for place in shown))
    return table


def write_page(comparison: Comparison, title: str, path: Path) -> Path:
    """One self-contained HTML page: the table, curves, failures, and how rates were chosen.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    note = "Medians over seeds, below them the least and the largest; best first. A row is within \
noise of the best if their ranges overlap. Learning rates were chosen for each strategy by the \
same runs. USD are until the target where it was reached, else of the whole run, without the start."
    metric = comparison.metric or "no metric"
    known = [point for outcome in comparison.outcomes for point in outcome.points]
    axes = [axis for axis in AXES if any(_PLACES[axis](point) > 0 for point in known)] or [
        TIME_AXIS
    ]
    charts = "".join(chart_view(axis, metric, _curves(comparison, axis)) for axis in axes)
    lines = "A line per run; the first seed of a strategy is named."
    body = (
        section("Result", _result(comparison), f"{_noise_text(comparison)} {note}".strip())
        + _failures(comparison)
        + switched(axes, section("Curves", charts, lines))
        + section("Learning rates that were tried", _tuning(comparison))
    )
    told = f'<p class="sub">{escape(comparison.links)}</p>' if comparison.links else ""
    body = f"<header><h1>{escape(title)}</h1>{told}</header>{body}"
    return write_html(html_page(title, body), path)


def _shown(comparison: Comparison) -> list[int]:
    """The places of the columns in which there is something to see."""
    priced = any(row.usd.median == row.usd.median for row in comparison.rows)
    empty: tuple[str, ...] = () if priced else ("USD",)
    if comparison.target is None:
        empty += _WITH_TARGET_ONLY
    return [place for place, name in enumerate(_HEADINGS) if name not in empty]


def _heading(place: int, comparison: Comparison) -> str:
    name = _HEADINGS[place]
    return f"{name} {comparison.metric}" if name == "final" else name


def _result(comparison: Comparison) -> str:
    shown = _shown(comparison)
    rows = []
    for row in comparison.rows:
        texts = cells(row, comparison)
        rows.append([_cell(place, texts[place]) for place in shown])
    return html_table([_heading(place, comparison) for place in shown], rows)


def _cell(place: int, text: str) -> str:
    """A cell whose range is on a line of its own, so that the table stays narrow."""
    if _HEADINGS[place] in _RANGED and text.endswith(")"):
        middle, _, around = text[:-1].partition(" (")
        return f'{escape(middle)}<br><span class="range">{escape(around)}</span>'
    if _HEADINGS[place] == "strategy":
        return escape(text).replace(":", ":<wbr>")
    return escape(text)


def _failures(comparison: Comparison) -> str:
    failed = _failed(comparison)
    if not failed:
        return ""
    rows = [
        [
            escape(run.label),
            _rate(run),
            str(run.seed),
            escape(run.failed or "").replace("\n", "<br>"),
        ]
        for run in failed
    ]
    note = "They have no part in the medians, and count as runs that did not reach the target."
    table = html_table(["strategy", "lr", "seed", "how it ended"], rows, left=4)
    return section("Runs that failed", table, note)


def _noise_text(comparison: Comparison) -> str:
    """Name the strategies whose metric does not tell them from the best, which is the fastest."""
    best = comparison.rows[0]
    alike = [row.label for row in comparison.rows if comparison.standing(row) == "within noise"]
    if best.reached or not alike:
        return ""
    return (
        f"{comparison.metric} of {best.label} and {', '.join(alike)} is within noise; the fastest "
        f"is {best.label}, {duration_text(best.seconds.median)}."
    )


def _failures_text(comparison: Comparison) -> str:
    failed = _failed(comparison)
    if not failed:
        return ""
    reason = (failed[0].failed or "").splitlines()[0]
    return f"{len(failed)} of {len(comparison.outcomes)} runs failed; {failed[0].label}: {reason}"


def _failed(comparison: Comparison) -> list[Outcome]:
    return [outcome for outcome in comparison.outcomes if outcome.failed is not None]


def _curves(comparison: Comparison, axis: str) -> list[Curve]:
    where = _PLACES[axis]
    places = {row.label: number for number, row in enumerate(comparison.rows)}
    named: set[str] = set()
    curves = []
    for outcome in sorted(comparison.outcomes, key=lambda o: (places[o.label], o.seed)):
        label = "" if outcome.label in named else outcome.label
        named.add(outcome.label)
        known = [(where(p), _value(p, comparison.metric)) for p in outcome.points]
        x = np.asarray([x for x, _ in known], dtype=np.float64)
        y = np.asarray([y for _, y in known], dtype=np.float64)
        curves.append(Curve(label, x, y, places[outcome.label], faint=not label))
    return curves


def _value(point: Point, metric: str | None) -> float:
    value = point.metrics.get(metric) if metric else None
    return float("nan") if value is None else value


def _tuning(comparison: Comparison) -> str:
    if not comparison.tuning:
        return "<p>One rate only: the configured one.</p>"
    rows = [
        _tuning_cells(outcome, comparison)
        for outcome in sorted(comparison.tuning, key=lambda o: (o.label, o.rate))
    ]
    headings = ["strategy", "lr", "to target", "final"]
    if comparison.target is None:
        headings.remove("to target")
    return html_table(headings, rows)


def _tuning_cells(outcome: Outcome, comparison: Comparison) -> list[str]:
    metric = comparison.metric
    final = escape(number_text(outcome.eval.get(metric) if metric else None))
    if outcome.failed is not None:
        final = f'<span class="range">{escape(outcome.failed.splitlines()[0])}</span>'
    found = [escape(outcome.label), _rate(outcome)]
    if comparison.target is not None:
        found.append(escape(duration_text(outcome.time_to_target_s)))
    return [*found, final]


def _rate(outcome: Outcome) -> str:
    """The learning rate; of a file of an older release the factor on it."""
    return f"x{outcome.rate:g}" if outcome.lr is None else f"{outcome.lr:g}"


def _text(values: Spread, text: Callable[[float], str]) -> str:
    if values.median != values.median:  # no value at all
        return "-"
    middle, low, high = text(values.median), text(values.low), text(values.high)
    return middle if low == high else f"{middle} ({low} to {high})"
