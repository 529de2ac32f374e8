"""The page and the table of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.markup import escape as plain
from rich.table import Table

from geo_ray.compare.board import Row, Spread
from geo_ray.compare.outcome import Outcome, Point
from geo_ray.compare.run import Comparison
from geo_ray.observe.report.charts import Curve, curves_chart
from geo_ray.observe.report.page import html_page, write_html
from geo_ray.observe.report.sections import section
from geo_ray.observe.report.sections import table as html_table
from geo_ray.observe.text import bytes_text, duration_text, number_text

_HEADINGS = (
    "strategy",
    "rate",
    "to target",
    "samples to it",
    "reached",
    "run",
    "rounds",
    "WAN",
    "idle",
    "final",
    "USD",
)
_ON_PAGE_ONLY = ("samples to it", "run", "rounds")
_AXES: tuple[tuple[str, str, Callable[[Point], float]], ...] = (
    ("over time", "time", lambda point: point.t_s),
    ("over samples", "samples of all regions", lambda point: float(point.samples)),
    ("over bytes", "MB between regions", lambda point: point.wan_bytes / 1e6),
)


def cells(row: Row) -> list[str]:
    """A row's values as text, with their range where runs differ."""
    return [
        row.label,
        f"x{row.rate:g}",
        _text(row.to_target_s, duration_text),
        _text(row.to_target_samples, number_text),
        f"{row.reached}/{row.runs}",
        _text(row.seconds, duration_text),
        _text(row.rounds, number_text),
        _text(row.wan_bytes, bytes_text),
        _text(row.idle_share, lambda share: f"{share:.0%}"),
        _text(row.final, number_text),
        _text(row.usd, number_text),
    ]


def result_table(comparison: Comparison) -> Table:
    """The table for the terminal, best first; the page has more columns."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    priced = any(row.usd.median == row.usd.median for row in comparison.rows)
    hidden = _ON_PAGE_ONLY if priced else (*_ON_PAGE_ONLY, "USD")
    shown = [place for place, heading in enumerate(_HEADINGS) if heading not in hidden]
    for heading in (_HEADINGS[place] for place in shown):
        name = f"{heading} {comparison.metric}" if heading == "final" else heading
        table.add_column(
            name, justify="left" if heading == "strategy" else "right", overflow="fold"
        )
    for row in comparison.rows:
        texts = cells(row)
        table.add_row(*(plain(texts[place]) for place in shown))
    return table


def write_page(comparison: Comparison, title: str, path: Path) -> Path:
    """One self-contained HTML page: the table, curves, and how learning rates were chosen.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    rows = [[escape(cell) for cell in cells(row)] for row in comparison.rows]
    headings = [*_HEADINGS[:-2], f"final {comparison.metric}", "USD"]
    charts = "".join(
        curves_chart(
            f"{comparison.metric} {how}",
            _curves(comparison, where),
            x_label=axis,
            x_time=axis == "time",
        )
        for how, axis, where in _AXES
    )
    note = "Medians over seeds, with the least and the largest; best first. Learning rates are \
factors on the configured one, chosen for each strategy by the same runs. USD are until the target \
where it was reached, else of the whole run, without the start."
    body = (
        section("Result", html_table(headings, rows), note)
        + section("Curves", charts, "A line per run; the first seed of a strategy is named.")
        + section("Learning rates that were tried", _tuning(comparison))
    )
    body = f"<header><h1>{escape(title)}</h1></header>{body}"
    return write_html(html_page(title, body), path)


def _curves(comparison: Comparison, where: Callable[[Point], float]) -> list[Curve]:
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
        [escape(text) for text in _tuning_cells(outcome, comparison.metric)]
        for outcome in sorted(comparison.tuning, key=lambda o: (o.label, o.rate))
    ]
    return html_table(["strategy", "rate", "to target", "final"], rows)


def _tuning_cells(outcome: Outcome, metric: str | None) -> Sequence[str]:
    final = outcome.failed or number_text(outcome.eval.get(metric) if metric else None)
    return [outcome.label, f"x{outcome.rate:g}", duration_text(outcome.time_to_target_s), final]


def _text(values: Spread, text: Callable[[float], str]) -> str:
    if values.median != values.median:  # no value at all
        return "-"
    middle, low, high = text(values.median), text(values.low), text(values.high)
    return middle if low == high else f"{middle} ({low} to {high})"
