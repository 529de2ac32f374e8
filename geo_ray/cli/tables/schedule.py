"""The table of `geo-ray schedule`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD

from geo_ray.observe.fitted_table import FittedTable
from geo_ray.scheduling.history.outcome import ScheduleOutcome
from geo_ray.scheduling.page import HEADINGS, cells


def outcome_table(outcomes: Mapping[str, ScheduleOutcome]) -> FittedTable:
    """A line per policy."""
    table = FittedTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for name, outcome in outcomes.items():
        table.add_row(*cells(name, outcome))
    return table
