"""A queue as a Gantt chart: a lane for each job, what it had, has and is to have."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from geo_ray.observe.picture.queue_view import QueueBar, QueueLane, QueueView
from geo_ray.observe.report.axis import Axis, time_axis
from geo_ray.observe.report.charts import figure
from geo_ray.observe.report.plot import SPAN, frame, marks, stretched
from geo_ray.observe.text import duration_text

_LEAST_PX: Final = 560
_ROOMY, _TIGHT = (24, 16), (12, 8)  # pixels of a lane, and of its bar
_ROOMY_LANES: Final = 24
MOST_LANES: Final = 150
_STYLES: Final = {"had": "m-done", "has": "m-member", "planned": "m-left"}
_LEGEND: Final = (("m-member", "runs"), ("m-done", "ran"), ("m-left", "as planned"))
NOTE: Final = (
    "Bars: what a job had, has, and will have if nothing more comes and all goes as reckoned. "
    "A stroke is a deadline, the dashed line is now."
)


def gantt_figure(view: QueueView) -> str:
    """Draw the chart; nothing where there is no job."""
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
        x = SPAN * axis.part(lane.deadline_s)
        text = f"{lane.name}: half of its worth is gone"
        drawn += (
            f'<rect class="m-lost" x="{x:.1f}" y="{top - 2}" width="1.5" height="{height + 4}">'
            f"<title>{escape(text)}</title></rect>"
        )
    return drawn


def _bar(lane: QueueLane, bar: QueueBar, top: int, height: int, axis: Axis) -> str:
    x = SPAN * axis.part(bar.start_s)
    width = max(SPAN * axis.part(bar.end_s) - x, 0.6)
    text = f"{lane.name}: {bar.told}, {duration_text(bar.end_s - bar.start_s)}"
    return (
        f'<rect class="{_STYLES[bar.kind]}" x="{x:.1f}" y="{top}" width="{width:.1f}" '
        f'height="{height}"><title>{escape(text)}</title></rect>'
    )


def _name(lane: QueueLane) -> str:
    short = lane.name if len(lane.name) <= 20 else lane.name[:18] + "…"
    return f"{escape(short)}<title>{escape(lane.name)} of {escape(lane.tenant)}</title>"


def lanes_cells(lanes: Sequence[QueueLane]) -> list[list[str]]:
    """Return the rows of the table of jobs, as HTML."""
    return [
        [escape(text) for text in (lane.name, lane.tenant, lane.state, *lane.cells)]
        for lane in lanes
    ]
