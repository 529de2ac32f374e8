"""Table of `geo-ray train --dry-run`."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD

from geo_ray.api.run_check import RunCheck
from geo_ray.observe.fitted_table import FittedTable


def needs_table(found: RunCheck) -> FittedTable:
    """What the run would ask of each region."""
    table = FittedTable("region", box=SIMPLE_HEAD)
    for heading in ("training rows", "processes", "CPUs", "GPUs"):
        table.add_column(heading, justify="right")
    for row in found.table().to_pylist():
        numbers = (row["rows"], row["processes"], row["cpus"], row["gpus"])
        name = f"{row['region']} (absent at first)" if row["absent"] else row["region"]
        table.add_row(name, *(f"{number:,g}" for number in numbers))
    return table
