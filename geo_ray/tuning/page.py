"""The page and the table of a search."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Final

import numpy as np
from rich.box import SIMPLE_HEAD

from geo_ray.config.canonical import JSONValue
from geo_ray.observe.fitted_table import FittedTable
from geo_ray.observe.report.charts import Curve, curves_chart
from geo_ray.observe.report.page import html_page, write_html
from geo_ray.observe.report.sections import section, table
from geo_ray.observe.text import bytes_text, duration_text, number_text
from geo_ray.tuning.config import ObjectiveName
from geo_ray.tuning.objective import kind_of
from geo_ray.tuning.result import TrialRow, Tuning

_SHOWN: Final = 10  # trials in the terminal
_CURVES: Final = 40  # of the best trials
_TITLES: Final = {"time_to_target": "to target", "usd": "USD", "loss": "metric"}
_MARKS: Final = {
    "reached": "",
    "ended": "",
    "stopped": "ended early",
    "diverged": "diverged",
    "failed": "failed",
}


def tuning_table(tuning: Tuning, title: str) -> FittedTable:
    """The best trials for the terminal; the page has all of them."""
    shown = FittedTable(
        title=title,
        title_justify="left",
        caption=summary_text(tuning),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    shown.add_column("trial")
    for name in tuning.objectives:
        shown.add_column(_title(name, tuning), justify="right")
    shown.add_column("values", overflow="fold")
    for row in tuning.rows[:_SHOWN]:
        cells = [
            short_id(row),
            *(cell(n, s) for n, s in zip(tuning.objectives, row.scores, strict=True)),
        ]
        shown.add_row(*cells, _mark(row, tuning) + values_text(row.values))
    return shown


def summary_text(tuning: Tuning) -> str:
    """What a search came to, in a line or two."""
    count = {status: sum(r.status == status for r in tuning.rows) for status in _MARKS}
    parts = [f"{len(tuning.rows)} of {tuning.wanted} trials"]
    parts += [f"{count['reached']} reached the target"] if tuning.goal.target is not None else []
    parts += [f"{count['stopped']} ended early"] if count["stopped"] else []
    parts += [f"{count['diverged']} diverged"] if count["diverged"] else []
    parts += [f"{count['failed']} failed"] if count["failed"] else []
    lines = [", ".join(parts)]
    if not tuning.beats_base:
        lines.append("nothing tried beat the base, so there is no best.yaml")
    elif tuning.gain is not None:
        what = "sooner at the target" if tuning.objectives[0] == "time_to_target" else "cheaper"
        lines.append(f"the best is {tuning.gain:.2f} times {what} than the base")
    failed = next((row for row in tuning.rows if row.status == "failed"), None)
    if failed is not None:
        lines.append(
            f"{short_id(failed)} failed: {failed.why.splitlines()[0] if failed.why else ''}"
        )
    return "\n".join(lines)


def best_text(tuning: Tuning) -> str:
    """Describe the best trial in a line: its objectives, its metric at the end, and its values.

    "" if there is none.
    """
    best = tuning.best
    if best is None:
        return ""
    scores = [
        f"{cell(name, value)} {_title(name, tuning)}"
        if kind_of(value) == "met"
        else "target not reached"
        for name, value in zip(tuning.objectives, best.scores, strict=True)
        if name != "loss"
    ]
    if best.points:
        scores.append(f"{tuning.goal.metric} {number_text(best.points[-1].value)}")
    parts = dict.fromkeys(scores)  # both objectives may have missed the target
    return f"{', '.join(parts)} with {values_text(best.values) or 'no value changed'}"


def write_tuning_page(tuning: Tuning, title: str, path: Path) -> Path:
    """One self-contained HTML page: all trials, the front, curves, each key against the objective.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    note = (
        "Best first. Seconds are those of the run, virtual if trials were simulated. A trial that "
        "did not reach the target stands behind all that did, the nearest first."
    )
    body = section("Trials", _trials(tuning), note)
    if len(tuning.objectives) > 1:
        front = "Trials that no other beats in all objectives."
        body += section("Front", _front(tuning), front)
    body += section("Curves", _curves(tuning), f"Of the {_CURVES} best at most; the best is named.")
    body += section("Values", _values(tuning), "The first objective over each number searched.")
    body += _failures(tuning)
    told = escape(summary_text(tuning)).replace("\n", "<br>")
    head = f'<header><h1>{escape(title)}</h1><p class="sub">{told}</p></header>'
    return write_html(html_page(title, head + body), path)


def cell(objective: ObjectiveName, value: float) -> str:
    """An objective's number; a dash where a trial has none."""
    if kind_of(value) != "met":
        return "-"
    return duration_text(value) if objective == "time_to_target" else number_text(value)


def values_text(values: dict[str, JSONValue]) -> str:
    """A trial's values in a line."""
    return ", ".join(f"{key}={value_text(value)}" for key, value in values.items())


def value_text(value: JSONValue) -> str:
    """A value, with as many digits as a person reads."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def short_id(row: TrialRow) -> str:
    """A trial's number, without what all trials of a search have in common."""
    return row.id.rpartition("_")[2].lstrip("0") or "0"


def _mark(row: TrialRow, tuning: Tuning) -> str:
    texts = [_MARKS[row.status], "base" if row is tuning.base else ""]
    found = ", ".join(text for text in texts if text)
    return f"({found}) " if found else ""


def _title(objective: ObjectiveName, tuning: Tuning) -> str:
    return tuning.goal.metric if objective == "loss" else _TITLES[objective]


def _trials(tuning: Tuning) -> str:
    keys = list(dict.fromkeys(key for row in tuning.rows for key in row.values))
    headings = ["trial", "how it ended", *keys]
    headings += [_title(name, tuning) for name in tuning.objectives]
    headings += ["run", "samples", "WAN", f"{tuning.goal.metric} at the end"]
    return table(headings, [_cells(row, keys, tuning) for row in tuning.rows], left=2 + len(keys))


def _cells(row: TrialRow, keys: Sequence[str], tuning: Tuning) -> list[str]:
    status = f"{row.status}{', the base' if row is tuning.base else ''}"
    texts = [short_id(row), status]
    texts += [value_text(row.values[key]) if key in row.values else "" for key in keys]
    texts += [cell(n, s) for n, s in zip(tuning.objectives, row.scores, strict=True)]
    told: list[tuple[str, Callable[[float], str]]] = [
        ("time_s", duration_text),
        ("samples", number_text),
        ("wan_bytes", bytes_text),
        (tuning.goal.metric, number_text),
    ]
    texts += [text(row.told[key]) if key in row.told else "-" for key, text in told]
    return [escape(text) for text in texts]


def _front(tuning: Tuning) -> str:
    rows = tuning.front
    headings = ["trial", *(_title(name, tuning) for name in tuning.objectives), "values"]
    cells = [
        [
            short_id(row),
            *(escape(cell(n, s)) for n, s in zip(tuning.objectives, row.scores, strict=True)),
            escape(values_text(row.values)),
        ]
        for row in rows
    ]
    drawn = ""
    if rows:
        first, second = (_title(name, tuning) for name in tuning.objectives[:2])
        x, y = (np.asarray([r.scores[n] for r in rows], dtype=np.float64) for n in (0, 1))
        drawn = curves_chart(f"{second} over {first}", [Curve("front", x, y, 0)], x_label=first)
    return drawn + table(headings, cells)


def _curves(tuning: Tuning) -> str:
    metric = tuning.goal.metric
    best = tuning.best
    curves = []
    for place, row in enumerate(tuning.rows[:_CURVES]):
        known = [(p.time_s, p.value) for p in row.points if p.value is not None]
        x = np.asarray([x for x, _ in known], dtype=np.float64)
        y = np.asarray([y for _, y in known], dtype=np.float64)
        named = {id(best): "best", id(tuning.base): "base"}.get(id(row), "")
        curves.append(Curve(named, x, y, 0 if named == "best" else place + 1, faint=not named))
    return curves_chart(
        f"{metric} over time", curves, x_label="time", x_time=True, log=not tuning.goal.grows
    )


def _values(tuning: Tuning) -> str:
    name = tuning.objectives[0]
    drawn = []
    for key in dict.fromkeys(key for row in tuning.rows for key in row.values):
        known = [
            (float(value), row.scores[0])
            for row in tuning.rows
            if row.counts
            and kind_of(row.scores[0]) == "met"
            and isinstance(value := row.values.get(key), (int, float))
            and not isinstance(value, bool)
        ]
        if len({x for x, _ in known}) < 2:
            continue
        curves = [Curve("", np.asarray([x]), np.asarray([y]), 0) for x, y in sorted(known)]
        drawn.append(curves_chart(f"{_title(name, tuning)} over {key}", curves, x_label=key))
    return (
        "".join(drawn) or "<p>No number was searched, or too few trials came to their target.</p>"
    )


def _failures(tuning: Tuning) -> str:
    rows = [
        [short_id(row), escape(row.why).replace("\n", "<br>"), escape(values_text(row.values))]
        for row in tuning.rows
        if row.status == "failed"
    ]
    if not rows:
        return ""
    return section("Trials that failed", table(["trial", "how it ended", "values"], rows, left=3))
