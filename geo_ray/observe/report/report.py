"""One self-contained HTML page about a run: no script, nothing loaded from elsewhere."""

from __future__ import annotations

from html import escape
from pathlib import Path

from geo_ray.errors import RunDirectoryError
from geo_ray.observe.events.columns import RunRecord, record
from geo_ray.observe.events.log import EVENTS_FILE, read_events
from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.best import Best
from geo_ray.observe.metrics.cost import load_cost
from geo_ray.observe.metrics.noise import newest_noise
from geo_ray.observe.metrics.summary import Summary, load_summary
from geo_ray.observe.picture.machines_section import machines_section
from geo_ray.observe.picture.map_section import map_figure
from geo_ray.observe.picture.run_map import map_of_record
from geo_ray.observe.picture.view import MachinesView
from geo_ray.observe.report.cost_section import cost_section
from geo_ray.observe.report.curve_sections import curve_sections, resumptions
from geo_ray.observe.report.ending import Ending, ending_of
from geo_ray.observe.report.ending_section import MOST_REGIONS, ending_box, tag
from geo_ray.observe.report.members_section import members_section
from geo_ray.observe.report.page import html_page, write_html
from geo_ray.observe.report.sections import (
    exchanges_section,
    incidents_section,
    regions_section,
    section,
    wan_section,
)
from geo_ray.observe.report.timeline import lanes, timeline
from geo_ray.observe.text import (
    bytes_text,
    codec_text,
    duration_text,
    number_text,
    saving_text,
)
from geo_ray.version import __version__

LOCK_FILE = "config.lock.yaml"
REPORT_FILE = "report.html"
_FINGERPRINT = 12  # digits


def load_record(run_dir: Path) -> RunRecord:
    """Read what a page is made of: all events of a run, once; of a run that did not begin, none.

    Raises:
        RunDirectoryError: ``run_dir`` is no run, or its events cannot be read.
    """
    path = run_dir / EVENTS_FILE
    if path.is_file():
        return record(read_events(path))
    if not (run_dir / LOCK_FILE).is_file():
        what = "has no events.jsonl" if run_dir.is_dir() else "is no directory"
        raise RunDirectoryError(
            f"{run_dir} is no run: it {what}",
            fix="Name a directory that `geo-ray train` or `geo-ray simulate` has written.",
        )
    return record(())


def render_report(
    run_dir: Path, run: RunRecord | None = None, machines: MachinesView | None = None
) -> str:
    """Make the page of a run that has finished, failed, was cut off or is still going.

    Args:
        run_dir: directory with `events.jsonl`; `summary.json`, `cost.json` and `config.lock.yaml`
            are used if they are there.
        run: what `load_record` gave; read if None.
        machines: of the run; None where nothing is known of them.

    Returns:
        HTML.

    Raises:
        RunDirectoryError: ``run_dir`` is no run, or a file in it cannot be read.
    """
    run = run or load_record(run_dir)
    started = run.totals.started
    ending = ending_of(run_dir, run.totals)
    if started is None:
        name = run_dir.resolve().name
        head = f"<header><h1>{escape(name)} {tag(ending)}</h1></header>"
        return html_page(name, head + ending_box(run_dir, run, ending) + _config(run_dir))
    # Of a run that was resumed and has not ended, there is the summary of the stretch before.
    summary = load_summary(run_dir) if ending is Ending.FINISHED else None
    parts = [
        _header(run, started, summary, ending),
        ending_box(run_dir, run, ending),
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
    """Render the page and write it whole or not at all.

    Args:
        run_dir: directory of the run.
        out: file to write; `report.html` in the run's directory if None.
        run: what `load_record` gave; read if None.
        machines: as for `render_report`.

    Returns:
        The path written.

    Raises:
        RunDirectoryError: as for `render_report`, or the file cannot be written.
    """
    return write_html(render_report(run_dir, run, machines), out or run_dir / REPORT_FILE)


_TIMELINE_NOTE = "Upper row of a region: compute and wait. Lower row: exchanges in flight. \
A dashed line: the run was resumed."


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
    told = "" if links is None else f"<br>{escape(links)}"
    asked = f'<p class="warn">Asked to stop: {escape(stop)}</p>' if stop is not None else ""
    return (
        f"<header><h1>{escape(started['run'])} {tags}</h1>"
        f'<p class="sub">{escape(sub)}<br>'
        f"{digest}{told}</p>{asked}</header>"
    )


def _fingerprint(digest: str) -> str:
    """Enough to tell runs apart at a glance; all of it under the pointer."""
    return f'<code title="{escape(digest)}">{escape(digest[:_FINGERPRINT])}</code>'


def _facts(run: RunRecord, started: Event, summary: Summary | None) -> str:
    facts = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        for label, value in _values(run, started, summary)
    )
    return f'<dl class="facts">{facts}</dl>'


def _values(run: RunRecord, started: Event, summary: Summary | None) -> list[tuple[str, str]]:
    totals = run.totals
    per_s = totals.samples / totals.elapsed_s if totals.elapsed_s > 0 else 0.0
    facts = [
        ("time", duration_text(totals.elapsed_s)),
        ("steps", f"{totals.steps:,}"),
        ("samples", f"{totals.samples:,}"),
        ("samples per second", number_text(round(per_s, 1))),
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
    made = f'<p class="sub">made by geo_ray {escape(__version__)}</p>'
    return section("Configuration", folded + made)
