"""One self-contained HTML page about a run: no script, nothing loaded from elsewhere."""

from __future__ import annotations

from html import escape
from pathlib import Path

from geo_ray import __version__
from geo_ray.errors import RunDirectoryError
from geo_ray.observe.events.columns import RunRecord, record
from geo_ray.observe.events.log import EVENTS_FILE, read_events
from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.cost import load_cost
from geo_ray.observe.metrics.noise import newest_noise
from geo_ray.observe.metrics.summary import Summary, load_summary
from geo_ray.observe.report.cost_section import cost_section
from geo_ray.observe.report.page import html_page, write_html
from geo_ray.observe.report.sections import (
    evals_section,
    exchanges_section,
    incidents_section,
    loss_section,
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

LOCK_FILE = "config.lock.yaml"
REPORT_FILE = "report.html"


def load_record(run_dir: Path) -> RunRecord:
    """Read what a page is made of: all events of a run, once.

    Raises:
        RunDirectoryError: ``run_dir`` is no run, or its events cannot be read.
    """
    path = run_dir / EVENTS_FILE
    if not path.is_file():
        what = "has no events.jsonl" if run_dir.is_dir() else "is no directory"
        raise RunDirectoryError(
            f"{run_dir} is no run: it {what}",
            fix="Name a directory that `geo-ray train` or `geo-ray simulate` has written.",
        )
    run = record(read_events(path))
    if run.totals.started is None:
        raise RunDirectoryError(
            f"{path} has no run_started: the run ended before it began",
            fix="Look at what the command that started it printed.",
        )
    return run


def render_report(run_dir: Path, run: RunRecord | None = None) -> str:
    """Make the page of a run that has finished, was cut off or is still going.

    Args:
        run_dir: directory with `events.jsonl`; `summary.json`, `cost.json` and `config.lock.yaml`
            are used if they are there.
        run: what `load_record` gave; read if None.

    Returns:
        HTML.

    Raises:
        RunDirectoryError: ``run_dir`` is no run, or a file in it cannot be read.
    """
    run = run or load_record(run_dir)
    started = run.totals.started
    assert started is not None, "load_record refuses such runs"  # noqa: S101
    summary = load_summary(run_dir)
    parts = [
        _header(run, started, summary),
        cost_section(load_cost(run_dir)),
        regions_section(run),
        loss_section(run),
        evals_section(run),
        section("Timeline", timeline(lanes(run.regions)), _TIMELINE_NOTE),
        wan_section(run),
        exchanges_section(run),
        incidents_section(run),
        _config(run_dir),
    ]
    return html_page(started["run"], "".join(parts))


def write_report(run_dir: Path, out: Path | None = None, run: RunRecord | None = None) -> Path:
    """Render the page and write it whole or not at all.

    Args:
        run_dir: directory of the run.
        out: file to write; `report.html` in the run's directory if None.
        run: what `load_record` gave; read if None.

    Returns:
        The path written.

    Raises:
        RunDirectoryError: as for `render_report`, or the file cannot be written.
    """
    return write_html(render_report(run_dir, run), out or run_dir / REPORT_FILE)


_TIMELINE_NOTE = "Upper row of a region: compute and wait. Lower row: exchanges in flight."


def _header(run: RunRecord, started: Event, summary: Summary | None) -> str:
    totals = run.totals
    name = escape(started["run"])
    tag = '<span class="tag done">finished</span>'
    warning = ""
    if totals.finished is None:
        tag = '<span class="tag cut">not finished</span>'
        warning = (
            '<p class="warn">The event log has no end: the run is still going, or was cut off '
            f"after {escape(duration_text(totals.elapsed_s))}.</p>"
        )
    if totals.stop_cause is not None:
        tag = '<span class="tag cut">stopped</span>'
        warning += f'<p class="warn">Asked to stop: {escape(totals.stop_cause)}</p>'
    if started["simulated"]:
        tag += '<span class="tag">simulated: times are virtual</span>'
    regions = ", ".join(started["regions"])
    sub = f"{started['task']}, {started['strategy']}, {regions}"
    digest = f"configuration <code>{escape(started['digest'])}</code>"
    if summary is not None and summary.digest:
        digest += f", final parameters <code>{escape(summary.digest)}</code>"
    facts = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        for label, value in _facts(run, started, summary)
    )
    return (
        f'<header><h1>{name} {tag}</h1><p class="sub">{escape(sub)}<br>{digest}</p>{warning}'
        f'<dl class="facts">{facts}</dl></header>'
    )


def _facts(run: RunRecord, started: Event, summary: Summary | None) -> list[tuple[str, str]]:
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
        facts += [("codec", codec_text(totals.codec)), ("payloads", saving_text(payloads))]
    if totals.newest_eval is not None:
        metrics = totals.newest_eval["metrics"]
        facts += [(f"eval {name}", number_text(value)) for name, value in metrics.items()]
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
        raise RunDirectoryError(f"cannot read {path}: {error.strerror}") from error
    folded = f"<details><summary>{LOCK_FILE}</summary><pre>{escape(text)}</pre></details>"
    made = f'<p class="sub">made by geo_ray {escape(__version__)}</p>'
    return section("Configuration", folded + made)
