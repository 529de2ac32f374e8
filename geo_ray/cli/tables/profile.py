"""Tables of `geo-ray profile`."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD

from geo_ray.observe.fitted_table import FittedTable
from geo_ray.observe.text import bytes_text
from geo_ray.planning.model.step_model import fit_steps
from geo_ray.planning.profile import Profile


def steps_table(profile: Profile) -> FittedTable:
    """Measured steps, and what the line through them says."""
    table = FittedTable(box=SIMPLE_HEAD)
    for heading in ("region", "machine"):
        table.add_column(heading)
    for heading in ("workers", "rows", "step", "spread", "line says"):
        table.add_column(heading, justify="right")
    for region in dict.fromkeys(point.region for point in profile.steps):
        line = fit_steps(region, profile.steps)
        for point in profile.steps:
            if point.region == region:
                table.add_row(
                    region,
                    point.machine,
                    f"{point.workers}",
                    f"{point.rows}",
                    f"{1e3 * point.step_s:.4g} ms",
                    f"{point.spread:.1%}",
                    f"{1e3 * line.step_s(point.machine, point.workers, point.rows):.4g} ms",
                )
    return table


def exchanges_table(profile: Profile) -> FittedTable:
    """Sizes of exchanges, and what they took beside their bytes."""
    table = FittedTable(box=SIMPLE_HEAD)
    table.add_column("codec")
    for heading in ("update", "answer", "beside the wire", "exchanges"):
        table.add_column(heading, justify="right")
    for point in profile.exchanges:
        table.add_row(
            point.codec or "none",
            bytes_text(point.up_bytes),
            bytes_text(point.down_bytes),
            f"{1e3 * point.overhead_s:.4g} ms",
            f"{point.count}",
        )
    return table
