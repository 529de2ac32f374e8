"""The report of a run: one self-contained HTML page without scripts.

The header describes the end of the run and how to continue after a failure; curves can be viewed
over several x axes.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TypeAlias

import numpy as np

from geo_ray.base.errors import RunDirectoryError
from geo_ray.base.text import bytes_text, codec_text, duration_text, number_text, saving_text
from geo_ray.base.version import __version__
from geo_ray.telemetry.charts import (
    ALL,
    AXES,
    MANY,
    SAMPLES_AXIS,
    STEPS_AXIS,
    TIME_AXIS,
    WAN_AXIS,
    Curve,
    Floats,
    bytes_at,
    chart_view,
    smooth,
    switched,
)
from geo_ray.telemetry.columns import RegionRecord, RunRecord, record, standing
from geo_ray.telemetry.event_log import EVENTS_FILE, LOGS_DIRECTORY, Ending, ending_of, read_events
from geo_ray.telemetry.events import FAULT_KINDS, Event
from geo_ray.telemetry.html_page import empty_note, html_page, section, write_html
from geo_ray.telemetry.participation import (
    absences,
    lanes,
    members_section,
    participation_of,
    timeline,
)
from geo_ray.telemetry.run_map import map_figure, map_of_record
from geo_ray.telemetry.sections import (
    cost_section,
    exchanges_section,
    incidents_section,
    machines_section,
    regions_section,
    wan_section,
)
from geo_ray.telemetry.summary import Best, Summary, load_cost, load_summary
from geo_ray.telemetry.totals import newest_noise
from geo_ray.telemetry.view import MachinesView

MOST_REGIONS = 12  # listed regions
SILENT_REGIONS = 5  # in larger runs, only the longest inactive regions are listed
_TAGS = {Ending.FINISHED: "tag done", Ending.GOING: "tag"}
_CAUSES = {
    Ending.CUT_OFF: "The events end without an error, and no process writes them. The run's "
    "process was killed (by hand, by a scheduler, or by the system when memory was exhausted), or "
    "its machine went down.",
    Ending.UNKNOWN: "The events have no end: the run is active, or was interrupted. This file "
    "system has no locks that show whether a process still writes them.",
    Ending.NOT_BEGUN: "There are no events: the run is still starting, or it ended before training "
    "began without a recorded error.",
}


def tag(ending: Ending, *, early: bool = False) -> str:
    """Give the label after the run's name.

    Args:
        ending: state of the run's end.
        early: whether the run ended on request before all its steps.
    """
    text = "stopped early" if early and ending is Ending.FINISHED else ending.value
    return f'<span class="{_TAGS.get(ending, "tag cut")}">{escape(text)}</span>'


def ended_note(run_dir: Path, run: RunRecord, ending: Ending) -> str:
    """Give a box about the end of the run and how to continue; empty if the run finished."""
    if ending is Ending.FINISHED:
        return ""
    if ending is Ending.GOING:
        sentence = "This page was written while the run was active; its numbers end there."
        return f'<div class="ended going"><p>{sentence}</p></div>'
    run_dir = run_dir.absolute()  # the page may be opened from another directory
    totals = run.totals
    rows: list[tuple[str, str]] = []
    head = _CAUSES.get(ending, "")
    if totals.failed is not None:
        failed = totals.failed
        head = f"<code>{escape(failed['code'])}</code> {_lines(failed['message'])}"
        rows.append(("fix", _lines(_named(failed["fix"], run_dir))))
        where = _where(failed["message"], list(run.regions))
        if where:
            rows.append(("where", escape(where)))
    if totals.started is None:
        rows.append(("when", "before training began"))
    else:
        rows += [("when", _when(run_dir, run)), ("reached", _reached(run))]
        rows += _last_fault(run)
        rows.append(("complete", "no: the numbers below cover the run up to this end"))
    logs = sorted((run_dir / LOGS_DIRECTORY).glob("*"))
    if logs:
        count = "1 file" if len(logs) == 1 else f"{len(logs)} files"
        text = f"output of the actors is in {run_dir / LOGS_DIRECTORY} ({count})"
        rows.append(("logs", escape(text)))
    rows.append(("resume", _going_on(run_dir, run)))
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{text}</dd>" for name, text in rows)
    return f'<div class="ended"><p class="cause">{head}</p><dl>{listed}</dl></div>'


def _when(run_dir: Path, run: RunRecord) -> str:
    totals = run.totals
    text = f"{duration_text(totals.elapsed_s)} after the run began"
    if totals.started is not None and totals.started["simulated"]:
        return escape(f"{text}, in simulated time")
    written = time.gmtime((run_dir / EVENTS_FILE).stat().st_mtime)
    return escape(f"{text}; the last event is of {time.strftime('%Y-%m-%d %H:%M:%S', written)} UTC")


def _reached(run: RunRecord) -> str:
    """Return the last step of each region, the longest inactive region first."""
    planned = run.totals.started.fields.get("steps") if run.totals.started else None
    stood: list[tuple[float, str]] = []
    for name, region in run.regions.items():
        step = run.totals.region(name).steps.step
        t_s = float(np.max(region.steps["t_s"])) if len(region.steps) else 0.0
        whole = f" of {planned[name]:,}" if planned and name in planned else ""
        when = f" at {duration_text(t_s)}" if step else ""
        stood.append((t_s, f"{name}: step {step:,}{whole}{when}"))
    stood.sort(key=itemgetter(0))
    texts = [text for _, text in stood]
    if len(stood) > MOST_REGIONS:
        texts = [*texts[:SILENT_REGIONS], f"{len(stood) - SILENT_REGIONS} others after these"]
    return "<br>".join(map(escape, texts))


def _last_fault(run: RunRecord) -> list[tuple[str, str]]:
    kinds = {*FAULT_KINDS} - {"worker_replaced", "bridge_replaced"}
    faults = [event for event in run.incidents if event.kind in kinds]
    if not faults:
        return []
    last = faults[-1]
    worker = f" worker {last['worker']}" if "worker" in last.fields else ""
    what = f"{last.kind.replace('_', ' ')}: {last['region']}{worker}"
    cause = f": {last['cause']}" if last.fields.get("cause") else ""
    return [("last fault", escape(f"{what}, at {duration_text(last.t_s)}{cause}"))]


def _where(message: str, regions: Sequence[str]) -> str:
    """Return the regions and workers that a message names, as ``eu-west worker 1``."""
    found = []
    for name in regions:
        match = re.search(rf"(?<![\w.-]){re.escape(name)}(?:/(\d+))?(?![\w-])", message)
        if match is not None:
            found.append(name + (f" worker {match[1]}" if match[1] else ""))
    return ", ".join(found)


def _going_on(run_dir: Path, run: RunRecord) -> str:
    started = run.totals.started
    if started is not None and started["simulated"]:
        return "a simulated run cannot be resumed: simulate it again"
    if not run.checkpoints:
        return "no checkpoint was written: start the run again"
    newest = run.checkpoints[-1]
    command = escape(f"geo-ray train --resume {shlex.quote(str(run_dir))}")
    whence = f"from checkpoint {newest['id']} of step {newest['step']:,}"
    return f"<code>{command}</code> {escape(whence)} at {escape(duration_text(newest.t_s))}"


def _named(fix: str, run_dir: Path) -> str:
    return fix.replace("--resume RUN", f"--resume {shlex.quote(str(run_dir))}")


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")


_Returns: TypeAlias = Mapping[str, tuple[float, ...]]
"""Times in seconds at which each region became a member again after an absence."""


def curve_sections(run: RunRecord) -> str:
    """Draw training loss and evaluations over time, steps, samples, and bytes if there are any."""
    so_far = _SoFar.of(run)
    ranges = participation_of(run.changes).until(run.totals.elapsed_s)
    returns = {
        name: tuple(end_s for _, end_s in absences(of_region)) for name, of_region in ranges.items()
    }
    axes = [axis for axis in AXES if axis != WAN_AXIS or so_far.wan_bytes.any()]
    return switched(axes, _loss(run, so_far, axes, returns) + _evals(run, so_far, axes, returns))


@dataclass(frozen=True, slots=True)
class _SoFar:
    """Totals over all regions as functions of time.

    Attributes:
        samples_s: times of steps that were not repeated, rising, float64 (N,).
        samples: training samples by then, float64 (N,).
        wan_s: times of the byte counts, rising, float64 (M,).
        wan_bytes: bytes between regions by then, float64 (M,).
    """

    samples_s: Floats
    samples: Floats
    wan_s: Floats
    wan_bytes: Floats

    @staticmethod
    def of(run: RunRecord) -> _SoFar:
        steps = [(region.steps, region.standing()) for region in run.regions.values()]
        t_s = np.concatenate([np.zeros(0), *(columns["t_s"][stand] for columns, stand in steps)])
        counts = np.concatenate([np.zeros(0), *(c["samples"][stand] for c, stand in steps)])
        order = np.argsort(t_s, kind="stable")
        return _SoFar(
            t_s[order],
            np.cumsum(counts[order]),
            run.wan_total["t_s"],
            run.wan_total["bytes"],
        )

    def samples_at(self, t_s: Floats) -> Floats:
        known = np.concatenate([[0.0], self.samples])
        return known[np.searchsorted(self.samples_s, t_s, side="right")]

    def wan_at(self, t_s: Floats) -> Floats:
        return bytes_at(self.wan_s, self.wan_bytes, t_s)


def _loss(run: RunRecord, so_far: _SoFar, axes: list[str], returns: _Returns) -> str:
    charts = ""
    for axis in axes:
        curves: list[Curve] = []
        for index, (name, region) in enumerate(run.regions.items()):
            t_s, x, loss = _loss_over(axis, region, so_far)
            after = _after(t_s, [*returns.get(name, ()), *_places(_on(axis, run))])
            breaks = tuple(x[after].tolist())
            bold = smooth(loss, breaks=after)
            if len(run.regions) <= MANY and not np.array_equal(bold, loss, equal_nan=True):
                curves.append(Curve("", x, loss, index, faint=True, breaks=breaks))
            curves.append(Curve(name, x, bold, index, breaks=breaks))
        curves.sort(key=attrgetter("faint"), reverse=True)
        whose = " of the region" if axis == SAMPLES_AXIS else ""
        charts += chart_view(
            axis, "training loss", curves, whose=whose, log=True, at=_on(axis, run)
        )
    note = (
        "Bold: moving mean; the number next to a name is its end. Faint: every step. The final "
        "loss in the table is a different mean: over the rows of the last 20 steps."
    )
    if len(run.regions) > MANY:
        note = "Moving mean of each region; a line shows its name under the pointer."
    resumed = resumptions(run)
    if resumed:
        times = ", ".join(duration_text(t_s) for t_s, _ in resumed)
        note += (
            f" The run was resumed at {times}, the dashed lines; curves over time have gaps there."
        )
    return section("Training loss", f'<div class="charts">{charts}</div>', note)


def resumptions(run: RunRecord) -> list[tuple[float, str]]:
    """Return the times of resumes, and their descriptions."""
    times_s = [event.t_s for event in run.incidents if event.kind == "run_started"]
    return [(t_s, f"resumed at {duration_text(t_s)}") for t_s in times_s]


def _places(marks: list[tuple[float, str]]) -> list[float]:
    """Return the positions of the marks."""
    return [place for place, _ in marks]


def _after(t_s: Floats, starts: list[float]) -> list[int]:
    """Return the indices of the first points after returns of a region and after resumes."""
    return [int(index) for index in np.searchsorted(t_s, sorted(starts)) if index < len(t_s)]


def _loss_over(axis: str, region: RegionRecord, so_far: _SoFar) -> tuple[Floats, Floats, Floats]:
    """Return times, places and losses."""
    steps, stands = region.steps, region.standing()
    t_s, loss = steps["t_s"], steps["loss"]
    if axis == TIME_AXIS:
        return t_s, t_s, loss
    if axis == WAN_AXIS:
        return t_s, so_far.wan_at(t_s), loss
    x = steps["step"] if axis == STEPS_AXIS else steps["samples"]
    return t_s[stands], (x[stands] if axis == STEPS_AXIS else np.cumsum(x[stands])), loss[stands]


def _on(axis: str, run: RunRecord) -> list[tuple[float, str]]:
    """Return the marks of an axis; resumes have a unique place only on the time axis."""
    return resumptions(run) if axis == TIME_AXIS else []


def _evals(run: RunRecord, so_far: _SoFar, axes: list[str], returns: _Returns) -> str:
    series: list[tuple[str | None, str, int]] = [
        (name, name, index) for index, name in enumerate(run.regions)
    ]
    series.append((None, "all regions", ALL))  # last, so on top
    charts = ""
    for metric in dict.fromkeys(metric for _, metric in run.evals):
        for axis in axes:
            curves = []
            for region, label, index in series:
                if (region, metric) not in run.evals:
                    continue
                t_s, x, value = _eval_over(axis, run, so_far, (region, metric))
                starts = [*returns.get(region or "", ()), *_places(_on(axis, run))]
                breaks = tuple(x[_after(t_s, starts)].tolist())
                curves.append(Curve(label, x, value, index, breaks=breaks))
            whose = " of all regions" if axis == SAMPLES_AXIS else ""
            charts += chart_view(axis, f"held-out {metric}", curves, whose=whose, at=_on(axis, run))
    body = f'<div class="charts">{charts}</div>' if charts else empty_note("no evaluations")
    return section("Evaluation on held-out rows", body)


def _eval_over(
    axis: str, run: RunRecord, so_far: _SoFar, of: tuple[str | None, str]
) -> tuple[Floats, Floats, Floats]:
    """Return times, places and values."""
    columns = run.evals[of]
    t_s, value = columns["t_s"], columns["value"]
    if axis == TIME_AXIS:
        return t_s, t_s, value
    if axis == WAN_AXIS:
        return t_s, so_far.wan_at(t_s), value
    stands = standing(columns["step"])
    x = columns["step"] if axis == STEPS_AXIS else so_far.samples_at(t_s)
    return t_s[stands], x[stands], value[stands]


LOCK_FILE = "config.lock.yaml"
REPORT_FILE = "report.html"
_FINGERPRINT = 12  # digits


def load_record(run_dir: Path) -> RunRecord:
    """Read all events of a run for a page; the record is empty if the run did not begin.

    Raises:
        RunDirectoryError: ``run_dir`` is not a run, or its events cannot be read.
    """
    path = run_dir / EVENTS_FILE
    if path.is_file():
        return record(read_events(path))
    if not (run_dir / LOCK_FILE).is_file():
        what = "has no events.jsonl" if run_dir.is_dir() else "is not a directory"
        raise RunDirectoryError(
            f"{run_dir} is not a run: it {what}",
            fix="Give a directory written by `geo-ray train` or `geo-ray simulate`.",
        )
    return record(())


def render_report(
    run_dir: Path, run: RunRecord | None = None, machines: MachinesView | None = None
) -> str:
    """Render the page of a finished, failed, interrupted or active run.

    Args:
        run_dir: directory with `events.jsonl`; `summary.json`, `cost.json` and `config.lock.yaml`
            are used if present.
        run: result of `load_record`; read if None.
        machines: machines of the run; None if unknown.

    Returns:
        HTML.

    Raises:
        RunDirectoryError: ``run_dir`` is not a run, or a file in it cannot be read.
    """
    run = run or load_record(run_dir)
    started = run.totals.started
    ending = ending_of(run_dir, run.totals)
    if started is None:
        name = run_dir.resolve().name
        head = f"<header><h1>{escape(name)} {tag(ending)}</h1></header>"
        return html_page(name, head + ended_note(run_dir, run, ending) + _config(run_dir))
    # A resumed, active run has the summary of the previous run segment.
    summary = load_summary(run_dir) if ending is Ending.FINISHED else None
    parts = [
        _header(run, started, summary, ending),
        ended_note(run_dir, run, ending),
        _facts(run, started, summary),
        cost_section(load_cost(run_dir)),
        regions_section(run),
        section("Regions and links", map_figure(map_of_record(run), now=False)),
        machines_section(machines),
        curve_sections(run),
        section("Timeline", timeline(lanes(run.regions), resumptions(run)), _TIMELINE_NOTE),
        members_section(run),
        wan_section(run),
        exchanges_section(run),
        incidents_section(run),
        _config(run_dir),
    ]
    return html_page(started["run"], "".join(parts))


def write_report(
    run_dir: Path,
    out: Path | None = None,
    run: RunRecord | None = None,
    machines: MachinesView | None = None,
) -> Path:
    """Render the page and write it atomically.

    Args:
        run_dir: directory of the run.
        out: output file; None: `report.html` in the run's directory.
        run: result of `load_record`; read if None.
        machines: as for `render_report`.

    Returns:
        Path of the written file.

    Raises:
        RunDirectoryError: as for `render_report`, or the file cannot be written.
    """
    return write_html(render_report(run_dir, run, machines), out or run_dir / REPORT_FILE)


_TIMELINE_NOTE = "Upper row of a region: compute and wait. Lower row: exchanges in flight. \
Dashed line: the run was resumed."


def _header(run: RunRecord, started: Event, summary: Summary | None, ending: Ending) -> str:
    stop = run.totals.stop_cause
    tags = tag(ending, early=stop is not None)
    if started["simulated"]:
        tags += '<span class="tag">simulated: times are virtual</span>'
    regions = list(started["regions"])
    named = ", ".join(regions[:MOST_REGIONS])
    if len(regions) > MOST_REGIONS:
        named += f" and {len(regions) - MOST_REGIONS} more regions"
    digest = f"configuration {_fingerprint(started['digest'])}"
    if summary is not None and summary.digest:
        digest += f", final parameters {_fingerprint(summary.digest)}"
    sub = f"{started['task']}, {started['strategy']}, {named}"
    links = started.fields.get("links")
    sentence = "" if links is None else f"<br>{escape(links)}"
    asked = f'<p class="warn">Requested to stop: {escape(stop)}</p>' if stop is not None else ""
    return (
        f"<header><h1>{escape(started['run'])} {tags}</h1>"
        f'<p class="sub">{escape(sub)}<br>'
        f"{digest}{sentence}</p>{asked}</header>"
    )


def _fingerprint(digest: str) -> str:
    """Return a shortened digest, with the full one under the pointer."""
    return f'<code title="{escape(digest)}">{escape(digest[:_FINGERPRINT])}</code>'


def _facts(run: RunRecord, started: Event, summary: Summary | None) -> str:
    facts = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        for label, value in _values(run, started, summary)
    )
    return f'<dl class="facts">{facts}</dl>'


def _tokens(tokens_per_s: float | None) -> list[tuple[str, str]]:
    if tokens_per_s is None:
        return []
    return [("tokens per second", number_text(round(tokens_per_s, 1)))]


def _values(run: RunRecord, started: Event, summary: Summary | None) -> list[tuple[str, str]]:
    totals = run.totals
    per_s = totals.samples / totals.elapsed_s if totals.elapsed_s > 0 else 0.0
    facts = [
        ("time", duration_text(totals.elapsed_s)),
        ("steps", f"{totals.steps:,}"),
        ("samples", f"{totals.samples:,}"),
        ("samples per second", number_text(round(per_s, 1))),
        *_tokens(totals.throughput.tokens_per_s(per_s)),
        ("WAN", bytes_text(sum(totals.wan.by_class().values()))),
        ("rounds", f"{len(totals.rounds):,}"),
        ("seed", str(started["seed"])),
    ]
    if totals.codec:
        payloads = {"before": totals.payload_before, "after": totals.payload_after}
        facts += [
            ("codec", codec_text(totals.codec)),
            ("between regions", saving_text(payloads)),
        ]
    if totals.newest_eval is not None:
        metrics = totals.newest_eval["metrics"]
        facts += [(f"eval {name}", number_text(value)) for name, value in metrics.items()]
    if totals.best is not None:
        facts.append(("best kept", Best.of(totals.best.fields).text))
    if summary is not None and summary.time_to_target_s is not None:
        facts.append(("time to target", duration_text(summary.time_to_target_s)))
    if summary is not None and summary.early_stop is not None:
        facts.append(("ended early", summary.early_stop.cause))
    noise = newest_noise(totals.noise)
    if noise is not None:
        rows = noise["b_simple"]
        text = "hides the gradient" if rows is None else f"{number_text(round(rows, 1))} rows"
        facts.append(("gradient noise", text))
    if summary is not None and summary.startup_s is not None:
        facts.append(("start-up", duration_text(summary.startup_s)))
    if summary is not None and summary.usd is not None:
        facts.append(("cost", f"{summary.usd:.2f} USD"))
    facts += [(kind.replace("_", " "), f"{n:,}") for kind, n in totals.faults.items() if n]
    return facts


def _config(run_dir: Path) -> str:
    path = run_dir / LOCK_FILE
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return section("Configuration", f'<p class="none">the run has no {LOCK_FILE}</p>')
    except OSError as error:
        raise RunDirectoryError(
            f"cannot read {path}: {error.strerror}", fix="Check the permissions of the file."
        ) from error
    folded = f"<details><summary>{LOCK_FILE}</summary><pre>{escape(text)}</pre></details>"
    made = f'<p class="sub">written by geo_ray {escape(__version__)}</p>'
    return section("Configuration", folded + made)
