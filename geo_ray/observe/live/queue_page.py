"""The live page of a queue: its sections as HTML, in the places of those of a run. Pure."""

from __future__ import annotations

from html import escape
from typing import Final

from geo_ray.observe.live.page import SECTIONS
from geo_ray.observe.picture.gantt_figure import NOTE, gantt_figure, lanes_cells
from geo_ray.observe.picture.queue_view import QueueView
from geo_ray.observe.report.sections import none, section, table

MOST_ROWS: Final = 300
HEADINGS: Final = ("job", "tenant", "state", "why", "worth", "done", "speed", "starts")


def queue_sections(view: QueueView) -> dict[str, str]:
    """Draw every section; HTML by name, in which all that comes from a queue is escaped."""
    drawn = dict.fromkeys(SECTIONS, "")
    drawn["head"] = _head(view)
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>" for label, text in view.facts
    )
    drawn["facts"] = f'<dl class="facts">{items}</dl>'
    chart = gantt_figure(view)
    drawn["members"] = section("Jobs over time", chart or none("no job has come yet"), NOTE)
    if view.lanes:
        rows = lanes_cells(view.lanes[:MOST_ROWS])
        more = len(view.lanes) - len(rows)
        note = f"The first {len(rows)} of {len(view.lanes):,}." if more else ""
        drawn["regions"] = section("Jobs", table(HEADINGS, rows, left=4), note)
    if view.rooms:
        rooms = [[escape(text) for text in (row.region, *row.cells)] for row in view.rooms]
        headings = ["region", "GPUs", "CPUs", "jobs there"]
        drawn["machines"] = section("Regions", table(headings, rooms))
    return drawn


def _head(view: QueueView) -> str:
    served = {True: "served", False: "not served", None: "as last written down"}[view.is_served]
    tag = " cut" if view.is_served is False else ""
    about = "<br>".join(escape(text) for text in view.about)
    return (
        f'<h1>{escape(view.name)} <span class="tag{tag}">{served}</span></h1>'
        f'<p class="sub">{about}</p>'
    )
