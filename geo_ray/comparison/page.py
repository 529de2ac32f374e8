"""The page and the table of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD

from geo_ray.comparison.board import Row, Spread
from geo_ray.comparison.outcome import Outcome, Point
from geo_ray.comparison.run import Comparison
from geo_ray.observe.fitted_table import FittedTable
from geo_ray.observe.report.charts import Curve
from geo_ray.observe.report.page import html_page, write_html
from geo_ray.observe.report.sections import section
from geo_ray.observe.report.sections import table as html_table
from geo_ray.observe.report.views import AXES, SAMPLES, STEPS, TIME, WAN, switched, view
from geo_ray.observe.text import bytes_text, duration_text, number_text

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
    TIME: lambda point: point.t_s,
    STEPS: lambda point: float("nan") if point.step is None else float(point.step),
    SAMPLES: lambda point: float(point.samples),
    WAN: lambda point: float(point.wan_bytes),
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
    axes = [axis for axis in AXES if any(_PLACES[axis](point) > 0 for point in known)] or [TIME]
    charts = "".join(view(axis, metric, _curves(comparison, axis)) for axis in axes)
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
