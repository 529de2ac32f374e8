"""Compares strategies and codecs on one workload: variants, trials, table and page.

Each variant uses its best learning rate, which is tuned by simulated trials.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Literal

from geo_ray.base.errors import ConfigError
from geo_ray.base.load import load_tree
from geo_ray.base.overrides import OptionText, typed
from geo_ray.base.tables import FittedTable
from geo_ray.base.text import bytes_text, duration_text, nearest_word, number_text
from geo_ray.base.yaml import ConfigSource
from geo_ray.codecs.registry import CODECS, sections_of
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.actual_cost import Bill
from geo_ray.runs.recorder import links_text
from geo_ray.strategies.config import default_section
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.sweep import page
from geo_ray.sweep.runner import TRIALS_FILE, TrialsFile, progress_text, run_trials
from geo_ray.sweep.trial import Outcome, Point, TrialSpec, rate_of
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
from geo_ray.telemetry.html_page import section
from geo_ray.telemetry.html_page import table as html_table
from geo_ray.telemetry.summary import Target


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the workload.

    Attributes:
        label: the user's notation; its name in tables.
        overrides: changes of the workload's configuration, as for ``--set``.
    """

    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A run to make.

    Attributes:
        variant: its variant.
        rate: factor of the learning rate.
        seed: seed of the run.
    """

    variant: Variant
    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class CaseDirectory:
    """Unique directory names of a comparison's runs.

    Attributes:
        variants: all variants of the comparison.
        rates: all factors of learning rates.
    """

    variants: tuple[Variant, ...]
    rates: tuple[float, ...]

    def of(self, case: Case) -> str:
        """Return the name of a case; with a digest or all digits only where necessary."""
        name, rate = _safe(case.variant.label), f"{case.rate:g}"
        if sum(_safe(other.label).lower() == name.lower() for other in self.variants) > 1:
            whole = "\n".join((case.variant.label, *case.variant.overrides))
            name = f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
        if sum(f"{other:g}" == rate for other in self.rates) > 1:
            rate = repr(case.rate)
        return f"{name}_x{rate}_s{case.seed}"


def _safe(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label).strip("-")


def parse_variant(text: str, base_dir: Path = Path()) -> Variant:
    """Read ``KIND:KEY=VALUE:...``, or ``FILE.py:CLASS:KEY=VALUE:...`` for a custom strategy.

    Args:
        text: the user's notation.
        base_dir: base of a relative path.

    Raises:
        ConfigError: the strategy is unknown, or a part is not ``KEY=VALUE``.
    """
    kind, *parts = text.strip().split(":")
    section = {"kind": kind}
    if kind not in STRATEGIES:
        if "=" in kind:
            raise ConfigError(
                f"{typed('strategies', text)}: '{kind}' is not a strategy; options follow a "
                "strategy after a colon, and a comma separates strategies",
                fix=f"Write for example sma:{text.strip()}.",
            )
        if not parts or "=" in parts[0]:
            near = nearest_word(kind, STRATEGIES)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(
                f"{typed('strategies', text)}: no strategy '{kind}'{hint}",
                fix=f"Choose among {', '.join(STRATEGIES)}; or give a custom one, FILE.py:CLASS.",
            )
        section = {"use": f"{kind}:{parts.pop(0)}"}
    overrides = [f"strategy={json.dumps(section)}", *_default_kinds(section, parts, base_dir)]
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{typed('strategies', text)}: '{part}' is not of the form key=value",
                fix="Write for example diloco:interval=16:codec=int4.",
            )
        overrides += _overrides(key.strip(), value.strip())
    option = "strategies", text.strip()
    return Variant(text.strip(), tuple(OptionText(each, option) for each in overrides))


def _default_kinds(section: Mapping[str, str], parts: Sequence[str], base_dir: Path) -> list[str]:
    """Add the default kind to sections of the strategy of which single keys are given."""
    defaults = default_section(section, base_dir)
    names = [part.split(".")[0] for part in parts if "." in part.partition("=")[0]]
    kinds = {name: inner["kind"] for name in names if "kind" in (inner := defaults.get(name, {}))}
    return [f"strategy.{name}={{kind: {kind}}}" for name, kind in kinds.items()]


def _overrides(key: str, value: str) -> list[str]:
    if key in ("codec", "up", "down"):
        ways: tuple[str, ...] = ("up", "down") if key == "codec" else (key,)
        if key == "codec" and value in CODECS:
            ways = tuple(sections_of(value))
        return [f"codec.{way}={{kind: {value}}}" for way in ways]
    own = key.split(".")[0] not in Experiment.model_fields
    return [f"strategy.{key}={value}" if own else f"{key}={value}"]


def experiment_of(case: Case, config: ConfigSource, common: Sequence[str], out: Path) -> Experiment:
    """Return the configuration of a run.

    Args:
        case: the run.
        config: the workload.
        common: changes in all runs, as for ``--set``.
        out: directory of the runs.

    Raises:
        ConfigError: the configuration is invalid.
    """
    overrides = [
        *common,
        *case.variant.overrides,
        f"seed={case.seed}",
        "name=run",
        f'run.dir="{out}"',
        "checkpoint.every_s=null",
    ]
    experiment = load_tree(config, overrides, Experiment)
    if case.rate == 1.0:
        return experiment
    section, holder, last = rate_of(experiment)
    # Replace the whole section, because the file omits defaults.
    changed = holder.model_copy(update={last: getattr(holder, last) * case.rate})
    scaled = f"{section}={changed.model_dump_json()}"
    rate = OptionText(scaled, ("rates", f"{case.rate:g}"))
    return load_tree(config, [*overrides, rate], Experiment)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum over several runs; NaN without values."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """A variant with its best learning rate.

    Attributes:
        label: label of the variant.
        rate: factor of the learning rate.
        lr: the learning rate; NaN if unknown.
        runs: number of runs.
        reached: number of runs that reached the target.
        to_target_s: seconds to the target, if reached.
        to_target_samples: training samples to the target, if reached.
        seconds: seconds of a whole run.
        rounds: number of exchanges.
        wan_bytes: bytes between regions.
        idle_fraction: idle fraction of the regions' time.
        final: the metric at the end.
        usd: cost of a run until the target or its end; NaN without prices.
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
    idle_fraction: Spread
    final: Spread
    usd: Spread


def goal_of(target: Target | None, outcomes: Sequence[Outcome]) -> tuple[str | None, bool]:
    """Return the compared metric, and whether higher values are better.

    It is the target's metric; without a target the loss, or else the task's first metric, for which
    higher values are better.
    """
    if target is not None:
        return target.metric, target.direction == "at_least"
    names = [name for outcome in outcomes for name in outcome.eval]
    if "loss" in names:
        return "loss", False
    return (names[0] if names else None), True


def best_rate(outcomes: Sequence[Outcome], target: Target | None) -> float:
    """Return the learning rate of the best tuning runs of one variant.

    The rate that reaches the target first is best; among others, the one with the best final
    metric; failed runs come last.
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
    """Summarize several seeds of one variant with one learning rate."""
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
        idle_fraction=spread([outcome.idle_fraction for outcome in ended]),
        final=spread(finals),
        usd=spread([outcome.usd for outcome in ended]),
    )


def ordered(rows: Sequence[Row], *, grows: bool) -> list[Row]:
    """Sort rows, best first: most runs that reached the target, then time, then the metric.

    If no run reached a target, rows are ranked by the metric; among the top rows that the metric
    does not distinguish, by time: each of them is within noise of all others.

    Args:
        rows: rows in any order.
        grows: whether higher values of the metric are better.
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
    return sorted(found[:alike], key=_median_s) + found[alike:]


Standing = Literal["best", "within noise", "behind", "one run"]


def standing(row: Row, best: Row) -> Standing:
    """Return the statistical standing of a row relative to the best one.

    They are within noise if the ranges of the ranking value overlap: the seconds to the target,
    without an upper end if a run did not reach it, or the final metric if no run of both did.
    A single run of each does not determine the noise.
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
    """Return the spread of the existing values."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Spread(math.nan, math.nan, math.nan)
    return Spread(statistics.median(known), min(known), max(known))


def _badness(outcome: Outcome, metric: str | None, grows: bool) -> float:
    value = outcome.eval.get(metric) if metric else None
    if value is None or outcome.failed is not None:
        return math.inf
    return -value if grows else value


def _median_s(row: Row) -> float:
    return _last(row.seconds.median)


def _last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def priced(outcome: Outcome, bill: Bill | None) -> Outcome:
    """Return the outcome with its cost: until the target if reached, else of the whole run.

    The cost is unknown without prices, for failed runs, and if regions without a price exchanged
    bytes.
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
"""Seed of the tuning runs; reported runs have other seeds."""


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """Settings of a comparison.

    Attributes:
        config: the workload.
        common: changes in all runs, as for ``--set``.
        variants: compared variants.
        rates: factors for the tuning of learning rates.
        seeds: seeds of the reported runs.
        out: output directory.
        jobs: parallel simulated runs.
        real: train on real actors; learning rates are still tuned in simulation.
        bill: prices; None without prices.
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
        """Names of its runs' directories."""
        return CaseDirectory(self.variants, self.rates)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of a comparison.

    Attributes:
        rows: one per variant, best first.
        tuning: tuning runs of learning rates.
        outcomes: reported runs.
        metric: compared metric; None if the task has none.
        target: target of the runs, or None.
        links: description of the links.
    """

    rows: list[Row]
    tuning: list[Outcome]
    outcomes: list[Outcome]
    metric: str | None
    target: Target | None = None
    links: str = ""

    def standing(self, row: Row) -> Standing:
        """Return the statistical standing of a row relative to the best one."""
        return standing(row, self.rows[0])


def compare(plan: ComparisonPlan, notify: Callable[[str], None]) -> Comparison:
    """Tune each variant's learning rate, then run every seed with it.

    Recorded trials of an interrupted comparison are not repeated.

    Args:
        plan: settings of the comparison.
        notify: called with every finished trial.

    Raises:
        ConfigError: a variant does not fit the workload; raised before any run.
    """
    rates = plan.rates if len(plan.rates) > 1 else ()
    tried = [Case(v, rate, TUNING_SEED) for v in plan.variants for rate in rates]
    count = len(tried) + len(plan.variants) * len(plan.seeds)
    for case in tried or [Case(v, 1.0, plan.seeds[0]) for v in plan.variants]:
        experiment_of(case, plan.config, plan.common, plan.out)
    began_s, done = time.monotonic(), 0

    def outcomes_of(cases: Sequence[Case], *, real: bool = False) -> list[Outcome]:
        nonlocal done
        found = []
        folder = plan.out / ("real" if real else "simulated")
        trials = [_trial(case, plan, folder) for case in cases]
        file = TrialsFile(folder / TRIALS_FILE)
        for outcome in run_trials(trials, file, None if real else plan.jobs):
            done += 1
            found.append(priced(outcome, plan.bill))
            what = f"{outcome.label} x{outcome.rate:g} seed {outcome.seed}"
            notify(progress_text(done, count, time.monotonic() - began_s, done, what))
        return found

    tuning = outcomes_of(tried)
    workload = experiment_of(Case(plan.variants[0], 1.0, 0), plan.config, plan.common, plan.out)
    target = workload.train.target
    best = {
        v.label: best_rate([o for o in tuning if o.label == v.label], target)
        if rates
        else plan.rates[0]
        for v in plan.variants
    }
    cases = [Case(v, best[v.label], seed) for v in plan.variants for seed in plan.seeds]
    outcomes = outcomes_of(cases, real=plan.real)
    metric, grows = goal_of(target, outcomes)
    rows = [row_of([o for o in outcomes if o.label == v.label], target) for v in plan.variants]
    links = links_text(workload, simulated=not plan.real)
    return Comparison(ordered(rows, grows=grows), tuning, outcomes, metric, target, links)


def _trial(case: Case, plan: ComparisonPlan, folder: Path) -> TrialSpec:
    directory = folder / plan.names.of(case)
    experiment = experiment_of(case, plan.config, plan.common, directory)
    return TrialSpec(case.variant.label, case.rate, experiment, plan.config.parent.absolute())


def save_comparison(comparison: Comparison, path: Path) -> None:
    """Write the comparison as JSON.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    content = {
        "metric": comparison.metric,
        "links": comparison.links,
        "rows": [asdict(r) | {"standing": comparison.standing(r)} for r in comparison.rows],
        "runs": [outcome.model_dump() for outcome in comparison.outcomes],
        "tuning": [outcome.model_dump() for outcome in comparison.tuning],
    }
    page.save_results(content, path)


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


def _place(point: Point, axis: str) -> float:
    step = math.nan if point.step is None else float(point.step)
    places = (point.t_s, step, float(point.samples), float(point.wan_bytes))
    return places[(TIME_AXIS, STEPS_AXIS, SAMPLES_AXIS, WAN_AXIS).index(axis)]


def cells(row: Row, comparison: Comparison) -> list[str]:
    """Return a row's values as text, with their range if runs differ."""
    return [
        row.label,
        f"x{row.rate:g}" if math.isnan(row.lr) else f"{row.lr:g}",
        _text(row.to_target_s, duration_text),
        _text(row.to_target_samples, number_text),
        f"{row.reached}/{row.runs}",
        _text(row.seconds, duration_text),
        _text(row.rounds, number_text),
        _text(row.wan_bytes, bytes_text),
        _text(row.idle_fraction, _percent_text),
        _text(row.final, number_text),
        comparison.standing(row),
        _text(row.usd, number_text),
    ]


def result_table(comparison: Comparison) -> FittedTable:
    """Return the table for the terminal, best first; the page has more columns."""
    captions = [_noise_text(comparison), _failures_text(comparison), comparison.links]
    table = page.terminal_table(
        "\n".join(text for text in captions if text),
        leave_out=("idle", "lr", "WAN", "reached"),
        whole=("to the best",),
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
    """Write a self-contained HTML page: the table, curves, failures, and tuning runs.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    note = "Medians over seeds, with minimum and maximum; best first. A row is within noise of the \
best if their ranges overlap. The same runs tuned the learning rate of each strategy. USD cover \
the time until the target if reached, else the whole run, without the start."
    metric = comparison.metric or "no metric"
    known = [point for outcome in comparison.outcomes for point in outcome.points]
    axes = [axis for axis in AXES if any(_place(point, axis) > 0 for point in known)] or [TIME_AXIS]
    charts = "".join(chart_view(axis, metric, _curves(comparison, axis)) for axis in axes)
    lines = "A line per run; the first seed of a strategy has a label."
    body = (
        section("Result", _result(comparison), f"{_noise_text(comparison)} {note}".strip())
        + _failures(comparison)
        + switched(axes, section("Curves", charts, lines))
        + section("Tuning of learning rates", _tuning(comparison))
    )
    return page.write_page(title, comparison.links, body, path)


def _shown(comparison: Comparison) -> list[int]:
    """Return the indices of the columns with different values."""
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
    """Return a cell with its range on a separate line, so that the table stays narrow."""
    if _HEADINGS[place] in _RANGED and text.endswith(")"):
        middle, _, around = text[:-1].partition(" (")
        return f'{escape(middle)}<br><span class="range">{escape(around)}</span>'
    if _HEADINGS[place] == "strategy":
        return escape(text).replace(":", ":<wbr>")
    return escape(text)


def _failures(comparison: Comparison) -> str:
    rows = [
        [escape(run.label), _rate(run), str(run.seed), page.lines(run.failed or "")]
        for run in _failed(comparison)
    ]
    note = "They are excluded from medians, and count as runs that did not reach the target."
    headings = ["strategy", "lr", "seed", "reason"]
    return page.failures("Failed runs", headings, rows, 4, note)


def _noise_text(comparison: Comparison) -> str:
    """Return a note on strategies whose metric is within noise of the best."""
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
    places = {row.label: number for number, row in enumerate(comparison.rows)}
    named: set[str] = set()
    curves = []
    for outcome in sorted(comparison.outcomes, key=lambda o: (places[o.label], o.seed)):
        label = "" if outcome.label in named else outcome.label
        named.add(outcome.label)
        points = [(_place(p, axis), _value(p, comparison.metric)) for p in outcome.points]
        curves.append(page.curve(label, points, places[outcome.label], faint=not label))
    return curves


def _value(point: Point, metric: str | None) -> float:
    value = point.metrics.get(metric) if metric else None
    return float("nan") if value is None else value


def _tuning(comparison: Comparison) -> str:
    if not comparison.tuning:
        return "<p>Only one rate: the configured one.</p>"
    rows = [
        _tuning_cells(outcome, comparison)
        for outcome in sorted(comparison.tuning, key=attrgetter("label", "rate"))
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
    """Return the learning rate, or its factor if the rate is unknown."""
    return f"x{outcome.rate:g}" if outcome.lr is None else f"{outcome.lr:g}"


def _percent_text(fraction: float) -> str:
    return f"{fraction:.0%}"


def _text(values: Spread, text: Callable[[float], str]) -> str:
    if values.median != values.median:  # no values
        return "-"
    middle, low, high = text(values.median), text(values.low), text(values.high)
    return middle if low == high else f"{middle} ({low} to {high})"
