"""The live page of a queue: view model, Gantt chart and sections. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Literal

from geo_ray.base.text import duration_text
from geo_ray.telemetry.charts import (
    STRETCHED_WIDTH,
    Axis,
    figure,
    frame,
    marks,
    stretched,
    time_axis,
)
from geo_ray.telemetry.html_page import empty_note, section, table
from geo_ray.telemetry.live.page import SECTIONS

MOST_ROWS: Final = 300
HEADINGS: Final = ("job", "tenant", "state", "why", "value", "done", "speed", "starts")


def queue_sections(view: QueueView) -> dict[str, str]:
    """Render every section as HTML by name, with escaped content."""
    drawn = dict.fromkeys(SECTIONS, "")
    drawn["head"] = _head(view)
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>" for label, text in view.facts
    )
    drawn["facts"] = f'<dl class="facts">{items}</dl>'
    chart = gantt_figure(view)
    drawn["members"] = section("Jobs over time", chart or empty_note("no job has come yet"), NOTE)
    if view.lanes:
        rows = lanes_cells(view.lanes[:MOST_ROWS])
        more = len(view.lanes) - len(rows)
        note = f"The first {len(rows)} of {len(view.lanes):,}." if more else ""
        drawn["regions"] = section("Jobs", table(HEADINGS, rows, left=4), note)
    if view.capacities:
        capacities = [
            [escape(text) for text in (row.region, *row.cells)] for row in view.capacities
        ]
        headings = ["region", "GPUs", "CPUs", "jobs there"]
        drawn["machines"] = section("Regions", table(headings, capacities))
    return drawn


def _head(view: QueueView) -> str:
    served = {True: "served", False: "not served", None: "as last recorded"}[view.is_served]
    tag = " cut" if view.is_served is False else ""
    about = "<br>".join(escape(text) for text in view.about)
    return (
        f'<h1>{escape(view.name)} <span class="tag{tag}">{served}</span></h1>'
        f'<p class="sub">{about}</p>'
    )


_LEAST_PX: Final = 560
_ROOMY, _TIGHT = (24, 16), (12, 8)  # pixels of a lane, and of its bar
_ROOMY_LANES: Final = 24
MOST_LANES: Final = 150
_STYLES: Final = {"had": "m-done", "has": "m-member", "planned": "m-left"}
_LEGEND: Final = (("m-member", "runs"), ("m-done", "ran"), ("m-left", "as planned"))
NOTE: Final = (
    "Bars: past, current and expected allocations, assuming no new jobs. "
    "A tick mark is a deadline; the dashed line is now."
)


def gantt_figure(view: QueueView) -> str:
    """Render the chart; empty without jobs."""
    lanes = view.lanes[:MOST_LANES]
    if not lanes:
        return ""
    ends = [bar.end_s for lane in lanes for bar in lane.bars]
    ends += [lane.deadline_s for lane in lanes if lane.deadline_s and not lane.is_over]
    starts = [min([lane.came_s, *(bar.start_s for bar in lane.bars)]) for lane in lanes]
    first_s, last_s = min(starts), max([view.now_s, *ends])
    axis, unit = time_axis(first_s, max(last_s, first_s + 1.0), 10)
    lane_px, bar_px = _ROOMY if len(lanes) <= _ROOMY_LANES else _TIGHT
    names = [(number * lane_px + 4 + bar_px / 2, _name(lane)) for number, lane in enumerate(lanes)]
    body = "".join(_lane(lane, n * lane_px + 4, bar_px, axis) for n, lane in enumerate(lanes))
    total = lane_px * len(lanes) + 4
    legend = "".join(
        f'<li><svg width="14" height="12"><rect class="{style}" width="14" height="12"/></svg>'
        f"{text}</li>"
        for style, text in _LEGEND
    )
    drawing = frame(
        "jobs over time",
        total,
        stretched(body, total, cut=False) + marks(axis, total, [(view.now_s, "now")]),
        x_axis=axis,
        x_label=f"time ({unit})",
        y_texts=names,
        least_px=_LEAST_PX,
        upright=True,
    )
    rest = (
        f" (the first {len(lanes)} of {len(view.lanes):,})" if len(view.lanes) > len(lanes) else ""
    )
    return figure(f"jobs over time{rest}", f'<ul class="legend">{legend}</ul>', drawing)


def _lane(lane: QueueLane, top: int, height: int, axis: Axis) -> str:
    drawn = "".join(_bar(lane, bar, top, height, axis) for bar in lane.bars)
    if lane.deadline_s is not None and axis.low <= lane.deadline_s <= axis.high:
        x = STRETCHED_WIDTH * axis.part(lane.deadline_s)
        text = f"{lane.name}: half of its value is lost"
        drawn += (
            f'<rect class="m-lost" x="{x:.1f}" y="{top - 2}" width="1.5" height="{height + 4}">'
            f"<title>{escape(text)}</title></rect>"
        )
    return drawn


def _bar(lane: QueueLane, bar: QueueBar, top: int, height: int, axis: Axis) -> str:
    x = STRETCHED_WIDTH * axis.part(bar.start_s)
    width = max(STRETCHED_WIDTH * axis.part(bar.end_s) - x, 0.6)
    text = f"{lane.name}: {bar.message}, {duration_text(bar.end_s - bar.start_s)}"
    return (
        f'<rect class="{_STYLES[bar.kind]}" x="{x:.1f}" y="{top}" width="{width:.1f}" '
        f'height="{height}"><title>{escape(text)}</title></rect>'
    )


def _name(lane: QueueLane) -> str:
    short = lane.name if len(lane.name) <= 20 else lane.name[:18] + "…"
    return f"{escape(short)}<title>{escape(lane.name)} of {escape(lane.tenant)}</title>"


def lanes_cells(lanes: Sequence[QueueLane]) -> list[list[str]]:
    """Return the rows of the job table as HTML."""
    return [
        [escape(text) for text in (lane.name, lane.tenant, lane.state, *lane.cells)]
        for lane in lanes
    ]


BarKind = Literal["had", "has", "planned"]


@dataclass(frozen=True, slots=True)
class QueueBar:
    """A time span with a constant allocation.

    Attributes:
        start_s: start, relative to the start of the queue.
        end_s: end.
        kind: past, current or expected.
        message: the allocation as text.
    """

    start_s: float
    end_s: float
    kind: BarKind
    message: str


@dataclass(frozen=True, slots=True)
class QueueLane:
    """A job in the chart.

    Attributes:
        name: of the job.
        tenant: its tenant.
        state: its state, as one word.
        is_over: whether it has ended.
        bars: its allocations over time.
        came_s: submission time.
        deadline_s: when half of its value is lost; None: never.
        cells: cells of the table: reason of the state, value, done, speed, starts.
    """

    name: str
    tenant: str
    state: str
    is_over: bool
    bars: tuple[QueueBar, ...]
    came_s: float
    deadline_s: float | None
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RegionCapacityRow:
    """A region in the table.

    Attributes:
        region: its name.
        cells: GPUs, CPUs, and number of jobs with an allocation.
    """

    region: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueueView:
    """View model of a queue.

    Attributes:
        name: of the queue.
        is_served: whether the queue is served; None: unknown.
        about: text with policy, slot and location.
        facts: labeled numbers.
        lanes: jobs: running and waiting ones in order, then the others, newest first.
        capacities: rows by region.
        now_s: current time, relative to the start of the queue.
    """

    name: str
    is_served: bool | None
    about: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    lanes: tuple[QueueLane, ...]
    capacities: tuple[RegionCapacityRow, ...]
    now_s: float
