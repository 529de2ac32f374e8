"""Tables and lines of `geo-ray queue`."""

from __future__ import annotations

import time
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console

from geo_ray.observe.fitted_table import FittedTable
from geo_ray.observe.text import coarse_text, duration_text, number_text
from geo_ray.queue.border import workers_text
from geo_ray.queue.report import QueueJobRow, QueueReport

_WIDTH: Final = 150
_ENDED: Final = 10


def wide_console() -> Console:
    """Return where tables of jobs are printed."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDTH))


def jobs_table(report: QueueReport, *, with_ended: bool = False) -> FittedTable:
    """A line per job."""
    table = FittedTable(
        leave_out=("speed", "utility", "starts", "worth", "ends"),
        whole=("state",),
        box=SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for heading in ("job", "tenant", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("worth", "deadline", "done", "ends", "speed", "starts", "utility"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    ended = [row for row in report.jobs if row.state == "ended"]
    hidden = set() if with_ended else {row.name for row in ended[:-_ENDED]}
    for row in report.jobs:
        if row.name in hidden:
            continue
        cells = (
            row.name,
            row.tenant,
            _state(report, row),
            f"{row.worth:g}",
            _deadline(row),
            f"{row.done:.0%}",
            "" if report.is_served is False else _ends(row),
            f"{row.factor:.2f}",
            str(row.attempts),
            "" if row.utility is None else number_text(row.utility),
            row.told if row.code is None else f"{row.code}: {row.told}",
        )
        table.add_row(*cells)
    return table


def queue_line(report: QueueReport) -> str:
    """Return a line about the queue."""
    room = "; ".join(
        f"{name} {cpus:g} CPUs" + (f", {gpus:g} GPUs" if gpus else "")
        for name, (gpus, cpus) in report.room.items()
    )
    ago = coarse_text(max(0.0, time.time() - report.written_unix_s))
    slot = "no slot yet" if report.slot is None else f"slot {report.slot}"
    return (
        f"{report.name}: {report.policy}, {slot} of {duration_text(report.slot_s)}; "
        f"{room or 'nothing there'}; written {ago} ago"
        + ("; not served: nothing changes" if report.is_served is False else "")
    )


def worth_line(row: QueueJobRow) -> str:
    """Return what a job is worth."""
    deadline_s = row.deadline_s
    half = "" if deadline_s is None else f", half of it after {duration_text(deadline_s)}"
    return f"worth    {row.worth:g}{half}"


def job_lines(report: QueueReport, row: QueueJobRow) -> list[str]:
    """Return what `geo-ray queue show` says."""
    state = _state(report, row)
    lines = [
        f"job      {row.name} of tenant {row.tenant}: {state}"
        + (f", {row.told}" if row.told else ""),
        f"run      {report.runs}/{row.id}",
        worth_line(row)
        + ("" if row.utility is None else f"; was worth {number_text(row.utility)}"),
        f"done     {row.done:.1%}, {row.factor:.2f} times as fast as said",
        f"starts   {row.attempts}",
    ]
    for each in row.stretches:
        since_s = each.since_unix_s - row.came_unix_s
        until = "now" if each.until_unix_s is None else duration_text(
            each.until_unix_s - row.came_unix_s
        )  # fmt: skip
        lines.append(f"had      {duration_text(since_s)} to {until}: {workers_text(each.workers)}")
    for each in row.planned:
        since_s = each.since_unix_s - row.came_unix_s
        until = "later" if each.until_unix_s is None else duration_text(
            each.until_unix_s - row.came_unix_s
        )  # fmt: skip
        lines.append(f"will     {duration_text(since_s)} to {until}: {workers_text(each.workers)}")
    if report.is_served is False and row.state != "ended":
        lines.append("         the queue is not served: nothing changes until it is")
    return lines


def _state(report: QueueReport, row: QueueJobRow) -> str:
    """How a job stands; where nobody serves the queue, how it stood."""
    state = row.outcome or row.state
    goes = row.state in ("running", "leaving")
    return f"was {state}" if goes and report.is_served is False else state


def _ends(row: QueueJobRow) -> str:
    ends_s = row.ends_unix_s
    return "" if ends_s is None else f"in {coarse_text(max(0.0, ends_s - time.time()))}"


def _deadline(row: QueueJobRow) -> str:
    if row.deadline_s is None:
        return "none"
    if row.ended_unix_s is not None:
        return f"after {duration_text(row.deadline_s)}"
    left_s = row.came_unix_s + row.deadline_s - time.time()
    return f"in {coarse_text(left_s)}" if left_s > 0 else "over"
