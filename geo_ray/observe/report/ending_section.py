"""The head of the report page: how the run ended, and what to do if that was not its end."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from geo_ray.observe.events.columns import RunRecord
from geo_ray.observe.events.log import EVENTS_FILE
from geo_ray.observe.events.schema import FAULT_KINDS
from geo_ray.observe.report.ending import LOGS, Ending
from geo_ray.observe.text import duration_text

MOST_REGIONS = 12  # that are listed
SILENT_REGIONS = 5  # of more regions, those that were silent longest
_TAGS = {Ending.FINISHED: "tag done", Ending.GOING: "tag"}
_CAUSES = {
    Ending.CUT_OFF: "The events just end: no error was noted, and no process writes them any more. "
    "The process of the run was killed (by hand, by a scheduler, or by the system for want of "
    "memory), or its machine went down.",
    Ending.UNKNOWN: "The events have no end: the run is still going, or was cut off. This file "
    "system does not tell whether a process still writes them.",
    Ending.NOT_BEGUN: "There are no events: the run is still starting, or it ended before training "
    "began and no error was noted.",
}


def tag(ending: Ending, *, early: bool = False) -> str:
    """Give the label behind the run's name.

    Args:
        ending: how it stands.
        early: whether it ended well, but before all its steps, as it was asked to.
    """
    text = "stopped early" if early and ending is Ending.FINISHED else ending.value
    return f'<span class="{_TAGS.get(ending, "tag cut")}">{escape(text)}</span>'


def ending_box(run_dir: Path, run: RunRecord, ending: Ending) -> str:
    """Give a box that says how and where the run ended and how to go on; nothing if it is whole."""
    if ending is Ending.FINISHED:
        return ""
    if ending is Ending.GOING:
        told = "This page was made while the run was going on: its numbers are those until then."
        return f'<div class="ended going"><p>{told}</p></div>'
    run_dir = run_dir.absolute()  # the page may be read from elsewhere
    totals = run.totals
    rows: list[tuple[str, str]] = []
    head = _CAUSES.get(ending, "")
    if totals.failed is not None:
        failed = totals.failed
        head = f"<code>{escape(failed['code'])}</code> {_lines(failed['message'])}"
        rows.append(("what to do", _lines(_named(failed["fix"], run_dir))))
        where = _where(failed["message"], list(run.regions))
        if where:
            rows.append(("where", escape(where)))
    if totals.started is None:
        rows.append(("when", "before training began"))
    else:
        rows += [("when", _when(run_dir, run)), ("reached", _reached(run))]
        rows += _last_fault(run)
        rows.append(("complete", "no: all numbers below are those until then"))
    logs = sorted((run_dir / LOGS).glob("*"))
    if logs:
        count = "1 file" if len(logs) == 1 else f"{len(logs)} files"
        text = f"what the actors printed is in {run_dir / LOGS} ({count})"
        rows.append(("logs", escape(text)))
    rows.append(("going on", _going_on(run_dir, run)))
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
    """Where each region stood, the one that was silent longest first."""
    planned = run.totals.started.fields.get("steps") if run.totals.started else None
    stood: list[tuple[float, str]] = []
    for name, region in run.regions.items():
        step = run.totals.region(name).steps.step
        t_s = float(np.max(region.steps["t_s"])) if len(region.steps) else 0.0
        whole = f" of {planned[name]:,}" if planned and name in planned else ""
        when = f" at {duration_text(t_s)}" if step else ""
        stood.append((t_s, f"{name}: step {step:,}{whole}{when}"))
    stood.sort(key=lambda entry: entry[0])
    texts = [text for _, text in stood]
    if len(stood) > MOST_REGIONS:
        texts = [*texts[:SILENT_REGIONS], f"{len(stood) - SILENT_REGIONS} others later than these"]
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
    """The regions and workers that a message names, as ``eu-west worker 1``."""
    found = []
    for name in regions:
        match = re.search(rf"(?<![\w.-]){re.escape(name)}(?:/(\d+))?(?![\w-])", message)
        if match is not None:
            found.append(name + (f" worker {match[1]}" if match[1] else ""))
    return ", ".join(found)


def _going_on(run_dir: Path, run: RunRecord) -> str:
    started = run.totals.started
    if started is not None and started["simulated"]:
        return "a simulated run is not resumed: simulate it again"
    if not run.checkpoints:
        return "no checkpoint was written, so it has to be started again"
    newest = run.checkpoints[-1]
    command = escape(f"geo-ray train --resume {shlex.quote(str(run_dir))}")
    whence = f"from checkpoint {newest['id']} of step {newest['step']:,}"
    return f"<code>{command}</code> {escape(whence)} at {escape(duration_text(newest.t_s))}"


def _named(fix: str, run_dir: Path) -> str:
    return fix.replace("--resume RUN", f"--resume {shlex.quote(str(run_dir))}")


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
