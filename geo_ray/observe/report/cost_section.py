"""The section of the report page that holds a plan against its run."""

from __future__ import annotations

from html import escape

from geo_ray.observe.metrics.cost import TOTAL, Cost, CostRow, error_text, value_text
from geo_ray.observe.report.sections import section, table


def cost_section(cost: Cost | None) -> str:
    """Give a row per term of time and money; nothing for a run that followed no plan."""
    if cost is None:
        return ""
    headings = ["term", "estimated", "actual", "difference"]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in cost.notes)
    return section("Plan and run", table(headings, [_cells(row) for row in cost.rows]) + notes)


def _cells(row: CostRow) -> list[str]:
    what = "time" if row.unit == "s" else "money"
    return [
        escape(f"{what} in total" if row.term == TOTAL else f"{what}: {row.term}"),
        escape(value_text(row.estimated, row.unit)),
        escape("not known" if row.actual is None else value_text(row.actual, row.unit)),
        escape(error_text(row)),
    ]
