"""The result of a search: trials, best trial, Pareto front, `tune.json`, table and page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Final

import numpy as np
from rich.box import SIMPLE_HEAD

from geo_ray.base.canonical import JSONValue
from geo_ray.base.files import save_text
from geo_ray.base.tables import FittedTable
from geo_ray.base.text import bytes_text, duration_text, number_text
from geo_ray.sweep.objective import FAILED, Goal, Status, kind_of
from geo_ray.sweep.search_config import ObjectiveName
from geo_ray.telemetry.charts import Curve, curves_chart
from geo_ray.telemetry.events import finite
from geo_ray.telemetry.html_page import html_page, section, table, write_html


def front(scores: Sequence[Sequence[float]]) -> list[int]:
    """Places of those that none beats, in order of the first objective.

    One beats another if it is nowhere worse and somewhere better. Of equal ones the first stays.

    Args:
        scores: per trial one number per objective; less is better.
    """
    order = sorted(range(len(scores)), key=lambda place: (tuple(scores[place]), place))
    kept: list[int] = []
    for place in order:  # none that comes later beats one that came before
        mine = scores[place]
        if not any(all(a <= b for a, b in zip(scores[k], mine, strict=True)) for k in kept):
            kept.append(place)
    return kept


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """A trial at one evaluation.

    Attributes:
        time_s: of its run.
        samples: of all regions.
        value: of the metric; None: not finite.
    """

    time_s: float
    samples: int
    value: float | None


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A trial.

    Attributes:
        id: in Ray Tune.
        values: what it had, by key.
        status: how it ended: at its target, at its end, early, with a training loss that had
            exploded, or in an error.
        scores: one per objective; less is better.
        told: the numbers of its newest report.
        points: its evaluations, in order.
        why: what it failed with; "" if it did not.
    """

    id: str
    values: dict[str, JSONValue]
    status: Status
    scores: tuple[float, ...]
    told: dict[str, float] = field(repr=False)
    points: tuple[TrialPoint, ...] = field(repr=False)
    why: str = ""

    @property
    def counts(self) -> bool:
        """Whether it may be the best: it came to an end of its own."""
        return self.status in ("reached", "ended")  # not what diverged, whatever its score


@dataclass(frozen=True, slots=True)
class Tuning:
    """A search that was made, wholly or in part.

    Attributes:
        objectives: what was to be least.
        goal: the metric that it went by.
        rows: its trials, best first.
        base: the trial of the base configuration; None: it was none, or failed.
        wanted: how many trials there were to be.
    """

    objectives: tuple[ObjectiveName, ...]
    goal: Goal
    rows: tuple[TrialRow, ...]
    base: TrialRow | None
    wanted: int

    @property
    def best(self) -> TrialRow | None:
        """The first of them; None if all failed, diverged or were ended early."""
        return next((row for row in self.rows if row.counts), None)

    @property
    def front(self) -> tuple[TrialRow, ...]:
        """Trials that none beats in all objectives; those that came short are not among them."""
        known = [row for row in self.rows if row.counts and _is_met(row)]
        return tuple(known[place] for place in front([row.scores for row in known]))

    @property
    def beats_base(self) -> bool:
        """Whether the best is another trial than the base, and better in the first objective."""
        best, base = self.best, self.base
        if best is None or base is None:
            return True  # there is nothing to beat, or nothing to beat it with
        return best.id != base.id and best.scores[0] < base.scores[0]

    @property
    def gain(self) -> float | None:
        """The base's first objective over the best one's; None where one of them is no number."""
        best = self.best
        if best is None or self.base is None or self.objectives[0] == "loss":
            return None
        ours, theirs = best.scores[0], self.base.scores[0]
        both = kind_of(ours) == kind_of(theirs) == "met" and ours > 0
        return theirs / ours if both else None


def ordered(rows: Sequence[TrialRow]) -> tuple[TrialRow, ...]:
    """Best first: ended ones by their objectives, then stopped, diverged and failed ones."""
    places = {"reached": 0, "ended": 0, "stopped": 1, "diverged": 2, "failed": 3}
    return tuple(sorted(rows, key=lambda row: (places[row.status], row.scores, row.id)))


def _is_met(row: TrialRow) -> bool:
    return all(kind_of(value) == "met" for value in row.scores)


def no_scores(objectives: Sequence[ObjectiveName]) -> tuple[float, ...]:
    """Those of a trial that told nothing."""
    return (FAILED,) * len(objectives)


def save_tuning(tuning: Tuning, path: Path) -> Path:
    """Write it whole or not at all; numbers that are not finite become null.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    content = {
        "objectives": list(tuning.objectives),
        "goal": asdict(tuning.goal),
        "wanted": tuning.wanted,
        "gain": tuning.gain,
        "best": None if tuning.best is None else tuning.best.id,
        "base": None if tuning.base is None else tuning.base.id,
        "front": [row.id for row in tuning.front],
        "trials": [asdict(row) for row in tuning.rows],
    }
    return save_text(path, json.dumps(finite(content), indent=1) + "\n")


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
