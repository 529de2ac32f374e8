"""Searches the values of a configuration: trials, best trial, Pareto front, table and page.

`search` runs or resumes a search. The best trial is written as a configuration.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final

from ray.tune import Result, ResultGrid

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import TuningDirectoryError
from geo_ray.base.files import save_text
from geo_ray.base.overrides import apply_overrides
from geo_ray.base.tables import FittedTable
from geo_ray.base.text import bytes_text, duration_text, number_text
from geo_ray.base.yaml import YamlTree, write_yaml
from geo_ray.sweep import page
from geo_ray.sweep.ray_tune import TUNE_FOLDER, SearchPlan, run_search, sigterm_as_ctrl_c
from geo_ray.sweep.score import FAILED, Goal, Status, kind_of, score_key
from geo_ray.sweep.search_config import ObjectiveName
from geo_ray.sweep.space import Base, check_directory
from geo_ray.telemetry.charts import Curve, curves_chart
from geo_ray.telemetry.html_page import section, table

SEARCH_FILE: Final = "search.json"


def front(scores: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of the Pareto front, in order of the first objective.

    A trial dominates another if it is nowhere worse and somewhere better. Of equal ones the first
    stays.

    Args:
        scores: per trial one number per objective, to be minimized.
    """
    order = sorted(range(len(scores)), key=lambda place: (tuple(scores[place]), place))
    retained: list[int] = []
    for place in order:  # a later one never dominates an earlier one
        mine = scores[place]
        if not any(all(a <= b for a, b in zip(scores[k], mine, strict=True)) for k in retained):
            retained.append(place)
    return retained


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """An evaluation of a trial.

    Attributes:
        time_s: time of its run.
        samples: samples of all regions.
        value: value of the metric; None: not finite.
    """

    time_s: float
    samples: int
    value: float | None


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A trial.

    Attributes:
        id: id in Ray Tune.
        values: values by key.
        status: kind of end: target reached, finished, stopped early, diverged, or failed.
        scores: one per objective, to be minimized.
        reported: numbers of its newest report.
        points: its evaluations, in order.
        why: error of a failed trial; otherwise "".
    """

    id: str
    values: dict[str, JSONValue]
    status: Status
    scores: tuple[float, ...]
    reported: dict[str, float] = field(repr=False)
    points: tuple[TrialPoint, ...] = field(repr=False)
    why: str = ""

    @property
    def counts(self) -> bool:
        """Whether it may be the best: it was not stopped."""
        return self.status in ("reached", "ended")  # a diverged trial never is, whatever its score


@dataclass(frozen=True, slots=True)
class Tuning:
    """Results of a complete or partial search.

    Attributes:
        objectives: minimized objectives.
        goal: metric of the search.
        rows: its trials, best first.
        base: trial of the base configuration; None: there was none, or it failed.
        wanted: planned number of trials.
    """

    objectives: tuple[ObjectiveName, ...]
    goal: Goal
    rows: tuple[TrialRow, ...]
    base: TrialRow | None
    wanted: int

    @property
    def best(self) -> TrialRow | None:
        """The best trial; None if all failed, diverged or were stopped early."""
        return next((row for row in self.rows if row.counts), None)

    @property
    def front(self) -> tuple[TrialRow, ...]:
        """The Pareto front of the trials that reached the target or their end."""
        known = [row for row in self.rows if row.counts and _is_met(row)]
        return tuple(known[place] for place in front([row.scores for row in known]))

    @property
    def beats_base(self) -> bool:
        """Whether the best trial differs from the base, and is better in the first objective."""
        best, base = self.best, self.base
        if best is None or base is None:
            return True  # there is no base, or no best trial
        return best.id != base.id and best.scores[0] < base.scores[0]

    @property
    def gain(self) -> float | None:
        """Ratio of the base's first objective to the best one's; None if either is missing."""
        best = self.best
        if best is None or self.base is None or self.objectives[0] == "loss":
            return None
        ours, theirs = best.scores[0], self.base.scores[0]
        both = kind_of(ours) == kind_of(theirs) == "met" and ours > 0
        return theirs / ours if both else None


def ordered(rows: Sequence[TrialRow]) -> tuple[TrialRow, ...]:
    """Sort trials, best first: finished ones by objectives, then stopped, diverged, failed ones."""
    places = {"reached": 0, "ended": 0, "stopped": 1, "diverged": 2, "failed": 3}
    return tuple(sorted(rows, key=lambda row: (places[row.status], row.scores, row.id)))


def _is_met(row: TrialRow) -> bool:
    return all(kind_of(value) == "met" for value in row.scores)


def no_scores(objectives: Sequence[ObjectiveName]) -> tuple[float, ...]:
    """Return the scores of a trial without reports."""
    return (FAILED,) * len(objectives)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        tuning: its trials.
        grid: Ray Tune's result.
        interrupted: whether it was interrupted.
    """

    tuning: Tuning
    grid: ResultGrid
    interrupted: bool


def search(
    plan: SearchPlan, notify: Callable[[str], None], *, resume: bool = False
) -> SearchResult:
    """Run all remaining trials.

    In the main thread, Ctrl-C ends the search; the finished trials are its result.

    Args:
        plan: the search.
        notify: called with every finished trial, and with long phases.
        resume: continue the search in its directory.

    Raises:
        TuningDirectoryError: the directory has no search, another one, or one with `pbt`.
        RunDirectoryError: the file of the trials cannot be read.
        ClusterError: the cluster does not start, or cannot be reached.
    """
    with sigterm_as_ctrl_c(), _claimed(plan, resume=resume):
        grid = run_search(plan, notify)
    found = [_row(grid[place], plan) for place in range(len(grid))]
    rows = ordered([row for row in found if row is not None])
    goal = Goal.of(plan.space.base.experiment().train.target)
    tuning = Tuning(plan.config.objectives, goal, rows, _base_row(plan, rows), plan.wanted)
    return SearchResult(tuning, grid, grid.num_terminated + grid.num_errors < plan.wanted)


@contextmanager
def _claimed(plan: SearchPlan, *, resume: bool) -> Iterator[None]:
    """Hold the directory of a search; removed if the search does not start."""
    was_there = plan.out.exists()
    _claim(plan, resume=resume)
    try:
        yield
    except BaseException:
        if not was_there and not (plan.out / TUNE_FOLDER).exists():
            shutil.rmtree(plan.out, ignore_errors=True)
        raise


def _claim(plan: SearchPlan, *, resume: bool) -> None:
    """Create the directory of a new search, or check that an existing one is of this search.

    Raises:
        TuningDirectoryError: it exists already, or has another search.
    """
    file = plan.out / SEARCH_FILE
    content = {"digest": plan.digest, "config": plan.config.model_dump(mode="json")}
    check_directory(plan.out, resume=resume)
    if not resume:
        plan.out.mkdir(parents=True)
        save_text(file, json.dumps(content, indent=1) + "\n")
        return
    if plan.config.schedule.kind == "pbt":
        raise TuningDirectoryError(
            "a search with schedule.kind pbt cannot be resumed, because its trials have become "
            "copies of each other",
            fix="Start a new search with --out.",
        )
    try:
        known = json.loads(file.read_text("utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        raise TuningDirectoryError(
            f"{plan.out} is not a search: it has no {SEARCH_FILE}",
            fix="Give the directory of a search, or omit --resume and give a new one.",
        ) from None
    if known != plan.digest:
        raise TuningDirectoryError(
            f"{plan.out} belongs to another search: its base, space, objectives or trials have "
            "changed",
            fix="Restore the file, or start a new search with --out.",
        )


def _row(result: Result, plan: SearchPlan) -> TrialRow | None:
    """Return the result of a trial; None: it has not begun."""
    reported: dict[str, Any] = dict(result.metrics or {})
    drawn = _drawn(result)
    if drawn is None:
        return None
    objectives = plan.config.objectives
    why = str(reported.get("why") or "")
    status: Status = reported.get("status") or ("failed" if result.error else "stopped")
    if result.error is not None and not why:
        status, why = "failed", str(result.error).strip().splitlines()[-1]
    scores = tuple(float(reported[score_key(n)]) for n in objectives if score_key(n) in reported)
    if status == "failed" or len(scores) < len(objectives):
        scores = no_scores(objectives)
    numbers = {k: float(v) for k, v in reported.items() if _is_number(v)}
    return TrialRow(
        id=Path(result.path).name,
        values=plan.space.values(drawn),
        status=status,
        scores=scores,
        reported=numbers,
        points=_points(result, Goal.of(plan.space.base.experiment().train.target).metric),
        why=why,
    )


def _drawn(result: Result) -> dict[str, Any] | None:
    """Return the values of a trial; without reports they are only in its folder."""
    if result.config:
        return dict(result.config)
    try:
        found: dict[str, Any] = json.loads((Path(result.path) / "params.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _points(result: Result, metric: str) -> tuple[TrialPoint, ...]:
    frame = result.metrics_dataframe
    if frame is None or metric not in frame.columns:
        return ()
    columns = frame[["time_s", "samples", metric]].astype(float).to_numpy()
    return tuple(
        TrialPoint(float(t_s), int(samples), float(value) if math.isfinite(value) else None)
        for t_s, samples, value in columns
        if math.isfinite(samples)
    )


def _base_row(plan: SearchPlan, rows: Sequence[TrialRow]) -> TrialRow | None:
    """Return the trial of the base."""
    drawn = plan.space.base_draw()
    if drawn is None:
        return None
    values = plan.space.values(drawn)
    return next(
        (row for row in rows if row.values == values and row.status not in ("failed", "diverged")),
        None,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def save_tuning(tuning: Tuning, path: Path) -> Path:
    """Write the search as JSON.

    Raises:
        RunDirectoryError: the file cannot be written.
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
    return page.save_results(content, path)


_SHOWN: Final = 10  # trials shown in the terminal
_CURVES: Final = 40  # best trials with curves
_TITLES: Final = {"time_to_target": "to target", "usd": "USD", "loss": "metric"}
_MARKS: Final = {
    "reached": "",
    "ended": "",
    "stopped": "ended early",
    "diverged": "diverged",
    "failed": "failed",
}


def tuning_table(tuning: Tuning, title: str) -> FittedTable:
    """Return the best trials for the terminal; the page has all of them."""
    shown = page.terminal_table(summary_text(tuning), title=title, title_justify="left")
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
    """Summarize a search in a line or two."""
    count = {status: sum(r.status == status for r in tuning.rows) for status in _MARKS}
    parts = [f"{len(tuning.rows)} of {tuning.wanted} trials"]
    parts += [f"{count['reached']} reached the target"] if tuning.goal.target is not None else []
    parts += [f"{count['stopped']} stopped early"] if count["stopped"] else []
    parts += [f"{count['diverged']} diverged"] if count["diverged"] else []
    parts += [f"{count['failed']} failed"] if count["failed"] else []
    lines = [", ".join(parts)]
    if not tuning.beats_base:
        lines.append("no trial beat the base, so there is no best.yaml")
    elif tuning.gain is not None:
        what = "faster to the target" if tuning.objectives[0] == "time_to_target" else "cheaper"
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
    """Write a self-contained HTML page: trials, Pareto front, curves, keys against the objective.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    note = (
        "Best first. Seconds are those of the run, virtual if trials were simulated. A trial that "
        "did not reach the target ranks after all that did, the nearest first."
    )
    body = section("Trials", _trials(tuning), note)
    if len(tuning.objectives) > 1:
        front = "The Pareto front of all objectives."
        body += section("Front", _front(tuning), front)
    body += section(
        "Curves", _curves(tuning), f"At most the {_CURVES} best; the best one has a label."
    )
    body += section("Values", _values(tuning), "The first objective over each searched number.")
    body += _failures(tuning)
    return page.write_page(title, summary_text(tuning), body, path)


def cell(objective: ObjectiveName, value: float) -> str:
    """Return an objective's value; a dash without a value."""
    if kind_of(value) != "met":
        return "-"
    return duration_text(value) if objective == "time_to_target" else number_text(value)


def values_text(values: dict[str, JSONValue]) -> str:
    """Return a trial's values in a line."""
    return ", ".join(f"{key}={value_text(value)}" for key, value in values.items())


def value_text(value: JSONValue) -> str:
    """Return a value with a readable number of digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def short_id(row: TrialRow) -> str:
    """Return a trial's number, without the common prefix of a search."""
    return row.id.rpartition("_")[2].lstrip("0") or "0"


def _mark(row: TrialRow, tuning: Tuning) -> str:
    texts = [_MARKS[row.status], "base" if row is tuning.base else ""]
    found = ", ".join(text for text in texts if text)
    return f"({found}) " if found else ""


def _title(objective: ObjectiveName, tuning: Tuning) -> str:
    return tuning.goal.metric if objective == "loss" else _TITLES[objective]


def _trials(tuning: Tuning) -> str:
    keys = list(dict.fromkeys(key for row in tuning.rows for key in row.values))
    headings = ["trial", "status", *keys]
    headings += [_title(name, tuning) for name in tuning.objectives]
    headings += ["run", "samples", "WAN", f"{tuning.goal.metric} at the end"]
    return table(headings, [_cells(row, keys, tuning) for row in tuning.rows], left=2 + len(keys))


def _cells(row: TrialRow, keys: Sequence[str], tuning: Tuning) -> list[str]:
    status = f"{row.status}{', the base' if row is tuning.base else ''}"
    texts = [short_id(row), status]
    texts += [value_text(row.values[key]) if key in row.values else "" for key in keys]
    texts += [cell(n, s) for n, s in zip(tuning.objectives, row.scores, strict=True)]
    reported: list[tuple[str, Callable[[float], str]]] = [
        ("time_s", duration_text),
        ("samples", number_text),
        ("wan_bytes", bytes_text),
        (tuning.goal.metric, number_text),
    ]
    texts += [text(row.reported[key]) if key in row.reported else "-" for key, text in reported]
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
        line = page.curve("front", [(row.scores[0], row.scores[1]) for row in rows], 0)
        drawn = curves_chart(f"{second} over {first}", [line], x_label=first)
    return drawn + table(headings, cells)


def _curves(tuning: Tuning) -> str:
    metric = tuning.goal.metric
    best = tuning.best
    curves: list[Curve] = []
    for place, row in enumerate(tuning.rows[:_CURVES]):
        points = [(p.time_s, p.value) for p in row.points if p.value is not None]
        named = {id(best): "best", id(tuning.base): "base"}.get(id(row), "")
        color = 0 if named == "best" else place + 1
        curves.append(page.curve(named, points, color, faint=not named))
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
        curves = [page.curve("", [point], 0) for point in sorted(known)]
        drawn.append(curves_chart(f"{_title(name, tuning)} over {key}", curves, x_label=key))
    return (
        "".join(drawn) or "<p>No numbers were searched, or too few trials reached their target.</p>"
    )


def _failures(tuning: Tuning) -> str:
    rows = [
        [short_id(row), page.lines(row.why), escape(values_text(row.values))]
        for row in tuning.rows
        if row.status == "failed"
    ]
    return page.failures("Failed trials", ["trial", "reason", "values"], rows, 3)


_OWN_CLASS: Final = re.compile(r"(.+\.py)(:\w+)")
_NO_PATHS: Final = ("name", "run", "seed")


def write_best(base: Base, values: Mapping[str, JSONValue], note: str, path: Path) -> Path:
    """Write the base with a trial's values, as YAML for `geo-ray train`.

    Relative file names become absolute.

    Args:
        base: base of the search.
        values: values of the trial by key.
        note: description, written as a comment.
        path: output file.

    Raises:
        RunDirectoryError: the file cannot be written.
        ConfigError: the values do not form a valid configuration.
    """
    base.experiment(values)  # validate before anything is written
    tree = apply_overrides(YamlTree(dict(base.tree())), base.overrides(values)).value
    assert isinstance(tree, dict)  # noqa: S101 - as the base's
    placed = {
        key: value if key in _NO_PATHS else _placed(value, Path(base.parent))
        for key, value in tree.items()
    }
    comment = "".join(f"# {line}\n" for line in note.splitlines())
    save_text(path, comment + write_yaml(placed))
    return path


def _placed(value: JSONValue, parent: Path) -> JSONValue:
    """Return the tree with absolute paths."""
    if isinstance(value, dict):
        return {key: _placed(each, parent) for key, each in value.items()}
    if isinstance(value, list):
        return [_placed(each, parent) for each in value]
    if not isinstance(value, str):
        return value
    own = _OWN_CLASS.fullmatch(value)
    file, rest = (own[1], own[2]) if own else (value, "")
    is_path = "/" in file or "." in file
    if is_path and not Path(file).is_absolute() and (parent / file).exists():
        return str((parent / file).absolute()) + rest
    return value
