"""The machines of a run in a table: where they are, what they cost, how old they are."""

from __future__ import annotations

from html import escape
from typing import Final

from geo_ray.observe.picture.view import MachinesView
from geo_ray.observe.report.sections import section, table
from geo_ray.observe.text import age_text, number_text

_MOST_ROWS: Final = 200


def machines_section(view: MachinesView | None) -> str:
    """Give the table; nothing where nothing is known of machines."""
    if view is None or not view.rows:
        return ""
    rows = [
        [
            escape(row.region),
            escape(row.machine),
            escape(row.type),
            escape(row.state),
            "-" if row.usd_per_hour is None else number_text(row.usd_per_hour),
            "-" if row.age_s is None else age_text(row.age_s),
            escape(row.note),
        ]
        for row in view.rows[:_MOST_ROWS]
    ]
    note = machines_note(view)
    if len(view.rows) > _MOST_ROWS:
        note += f" The first {_MOST_ROWS} of {len(view.rows):,}."
    headings = ["region", "machine", "type", "state", "USD/h", "age", "why"]
    return section("Machines", table(headings, rows, left=4), note)


def machines_note(view: MachinesView) -> str:
    """Say whose word it is and what all of them cost."""
    each = f"{number_text(view.usd_per_hour)} USD an hour in all"
    if view.source == "plan":
        return f"As the plan has them: {each}."
    paid = "" if view.paid_usd is None else f", {number_text(view.paid_usd)} USD paid so far"
    return f"As the autoscaler last noted them: {each}{paid}."
