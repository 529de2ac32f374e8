"""What a run was estimated to take and what it took, in seconds and dollars: `cost.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from geo_ray.config.base import StrictModel
from geo_ray.config.json_file import load_run_json
from geo_ray.observe.text import duration_text, number_text
from geo_ray.util.atomic_file import save_text

COST_FILE: Final = "cost.json"
TOTAL: Final = "total"

Unit = Literal["s", "USD"]


class CostRow(StrictModel):
    """One term."""

    term: str = Field(description="its name; 'total' is that of all terms of a unit")
    unit: Unit = Field(description="seconds or US dollars")
    estimated: float = Field(description="by the plan")
    actual: float | None = Field(description="of the run; null: not known")

    @property
    def error(self) -> float | None:
        """By which share of the estimate the actual value is above it; None where none is."""
        if self.actual is None or self.estimated == 0:
            return None
        return self.actual / self.estimated - 1


class Cost(StrictModel):
    """The content of `cost.json`."""

    rows: tuple[CostRow, ...] = Field(min_length=1, description="terms, each unit's total last")
    notes: tuple[str, ...] = Field((), description="what to know before believing it")

    def total(self, unit: Unit) -> CostRow | None:
        """The row of all terms of a unit; None if there is none."""
        found = [row for row in self.rows if (row.term, row.unit) == (TOTAL, unit)]
        return found[0] if found else None


def save_cost(cost: Cost, run_dir: Path) -> Path:
    """Write `cost.json` whole or not at all; give its path.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    return save_text(run_dir / COST_FILE, cost.model_dump_json(indent=2) + "\n")


def load_cost(run_dir: Path) -> Cost | None:
    """Read `cost.json` of a run; None if the run has none.

    Raises:
        RunDirectoryError: the file cannot be read or is of another kind.
    """
    return load_run_json(run_dir / COST_FILE, Cost)


def value_text(value: float | None, unit: Unit) -> str:
    """A value of a row for people: ``3:07``, ``0.1234 USD``, ``-`` where it is not known."""
    if unit == "s":
        return duration_text(value)
    return "-" if value is None else f"{number_text(value)} USD"


def error_text(row: CostRow) -> str:
    """By how much a row is off: ``+12%``, ``-`` where that has no meaning."""
    return "-" if row.error is None else f"{row.error:+.0%}"


def cost_line(cost: Cost) -> str:
    """The totals in one line: ``estimated 3:07 and 1.2 USD, actual 3:20 (+7%) and ...``."""
    totals = [row for unit in ("s", "USD") if (row := cost.total(unit)) is not None]
    estimated = " and ".join(value_text(row.estimated, row.unit) for row in totals)
    actual = " and ".join(
        "USD not known"
        if row.actual is None
        else f"{value_text(row.actual, row.unit)} ({error_text(row)})"
        for row in totals
    )
    return f"estimated {estimated}, actual {actual}"
