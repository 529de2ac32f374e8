"""Compares strategies and codecs on one workload: variants, trials, table and page.

Each variant counts with its best learning rate. Simulated trials choose the rate.
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
    """One way to do it.

    Attributes:
        label: as the user wrote it; its name in tables.
        overrides: what it changes in the workload's configuration, as for ``--set``.
    """

    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One run to be made.

    Attributes:
        variant: of what.
        rate: factor on the learning rate.
        seed: of the run.
    """

    variant: Variant
    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class CaseDirectory:
    """Names of the directories of a comparison's runs, no two of them the same.

    Attributes:
        variants: all of the comparison.
        rates: all factors on learning rates that it may take.
    """

    variants: tuple[Variant, ...]
    rates: tuple[float, ...]

    def of(self, case: Case) -> str:
        """The name of one case; with a digest or all digits only where another has the same."""
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
    """Read ``KIND:KEY=VALUE:...``, or ``FILE.py:CLASS:KEY=VALUE:...`` for a strategy of the user's.

    Args:
        text: as the user wrote it.
        base_dir: where a relative path starts.

    Raises:
        ConfigError: there is no such strategy, or a part is no ``KEY=VALUE``.
    """
    kind, *parts = text.strip().split(":")
    section = {"kind": kind}
    if kind not in STRATEGIES:
        if "=" in kind:
            raise ConfigError(
                f"{typed('strategies', text)}: '{kind}' is no strategy; its options follow a "
                "strategy after a colon, and a comma begins the next strategy",
                fix=f"Write for example sma:{text.strip()}.",
            )
        if not parts or "=" in parts[0]:
            near = nearest_word(kind, STRATEGIES)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(
                f"{typed('strategies', text)}: there is no strategy '{kind}'{hint}",
                fix=f"Choose among {', '.join(STRATEGIES)}; or name your own, FILE.py:CLASS.",
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
    """Sections of the strategy of which single keys are given are still of their default kind."""
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
    """The configuration of one run.

    Args:
        case: which.
        config: the workload.
        common: what the user changes in all of them, as for ``--set``.
        out: directory that holds the runs.

    Raises:
        ConfigError: it cannot be.
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
    # The whole section, since what is a default is not in the file.
    changed = holder.model_copy(update={last: getattr(holder, last) * case.rate})
    scaled = f"{section}={changed.model_dump_json()}"
    rate = OptionText(scaled, ("rates", f"{case.rate:g}"))
    return load_tree(config, [*overrides, rate], Experiment)


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
        idle_fraction: of the regions' time.
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
    idle_fraction: Spread
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
        idle_fraction=spread([outcome.idle_fraction for outcome in ended]),
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
    return sorted(found[:alike], key=_median_s) + found[alike:]


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


def _median_s(row: Row) -> float:
    return _last(row.seconds.median)


def _last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def priced(outcome: Outcome, bill: Bill | None) -> Outcome:
    """The outcome with its dollars: until the target where it was reached, else of the whole run.

    They stay unknown without prices, for a run that failed, and where regions without a price
    exchanged bytes.
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
        real: train on real actors; learning rates are still chosen by simulation.
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


def compare(plan: ComparisonPlan, notify: Callable[[str], None]) -> Comparison:
    """Choose each variant's learning rate, then run every seed with it.

    Trials that an interrupted comparison has recorded are not run again.

    Args:
        plan: what to do.
        notify: told every trial that ends.

    Raises:
        ConfigError: a variant does not fit the workload; before anything runs.
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
        RunDirectoryError: it cannot be written.
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
        _text(row.idle_fraction, _percent_text),
        _text(row.final, number_text),
        comparison.standing(row),
        _text(row.usd, number_text),
    ]


def result_table(comparison: Comparison) -> FittedTable:
    """The table for the terminal, best first; the page has more columns."""
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
    """One self-contained HTML page: the table, curves, failures, and how rates were chosen.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    note = "Medians over seeds, below them the least and the largest; best first. A row is within \
noise of the best if their ranges overlap. Learning rates were chosen for each strategy by the \
same runs. USD are until the target where it was reached, else of the whole run, without the start."
    metric = comparison.metric or "no metric"
    known = [point for outcome in comparison.outcomes for point in outcome.points]
    axes = [axis for axis in AXES if any(_place(point, axis) > 0 for point in known)] or [TIME_AXIS]
    charts = "".join(chart_view(axis, metric, _curves(comparison, axis)) for axis in axes)
    lines = "A line per run; the first seed of a strategy is named."
    body = (
        section("Result", _result(comparison), f"{_noise_text(comparison)} {note}".strip())
        + _failures(comparison)
        + switched(axes, section("Curves", charts, lines))
        + section("Learning rates that were tried", _tuning(comparison))
    )
    return page.write_page(title, comparison.links, body, path)


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
    rows = [
        [escape(run.label), _rate(run), str(run.seed), page.lines(run.failed or "")]
        for run in _failed(comparison)
    ]
    note = "They have no part in the medians, and count as runs that did not reach the target."
    headings = ["strategy", "lr", "seed", "how it ended"]
    return page.failures("Runs that failed", headings, rows, 4, note)


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
        return "<p>One rate only: the configured one.</p>"
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
    """The learning rate, or the factor on it where the rate is not known."""
    return f"x{outcome.rate:g}" if outcome.lr is None else f"{outcome.lr:g}"


def _percent_text(fraction: float) -> str:
    return f"{fraction:.0%}"


def _text(values: Spread, text: Callable[[float], str]) -> str:
    if values.median != values.median:  # no value at all
        return "-"
    middle, low, high = text(values.median), text(values.low), text(values.high)
    return middle if low == high else f"{middle} ({low} to {high})"
