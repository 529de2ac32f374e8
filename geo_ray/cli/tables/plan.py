"""Tables of `geo-ray plan`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD

from geo_ray.observe.fitted_table import FittedTable
from geo_ray.observe.text import duration_text
from geo_ray.planning.plan import Plan, differing_machines


def machines_table(plan: Plan) -> FittedTable:
    """What would run where."""
    table = FittedTable(box=SIMPLE_HEAD)
    for heading in ("region", "machines", "market"):
        table.add_column(heading)
    for heading in ("rows per step", "USD/h each", "step"):
        table.add_column(heading, justify="right")
    for region in plan.regions:
        for index, each in enumerate(region.machines):
            table.add_row(
                region.region if index == 0 else "",
                f"{each.count} x {each.type}",
                each.market.replace("_", "-"),
                f"{each.rows}",
                f"{each.usd_per_h:.4g}",
                f"{region.step_s:.3g} s" if index == 0 else "",
            )
    return table


def terms_table(plan: Plan) -> FittedTable:
    """Every second and dollar by what it is for."""
    table = FittedTable("term", box=SIMPLE_HEAD)
    for heading in ("time", "USD", "share"):
        table.add_column(heading, justify="right")
    for name, seconds in plan.seconds.items():
        table.add_row(name, duration_text(seconds), "", f"{seconds / plan.total_s:.1%}")
    table.add_section()
    for name, usd in plan.usd.items():
        table.add_row(name, "", f"{usd:.2f}", f"{usd / plan.total_usd:.1%}")
    table.add_section()
    table.add_row("all", duration_text(plan.total_s), f"{plan.total_usd:.2f}", "")
    return table


def loss_text(plan: Plan) -> str:
    """What interval and codec cost in loss, and who says so."""
    if plan.loss is None:
        return "loss     not known"
    how = "measured for this task" if plan.loss.measured else "assumed: a rough table for any task"
    if plan.loss.expected is None:
        return f"loss     training diverged with this interval and codec ({how})"
    return f"loss     {plan.loss.expected:.2%} more than plain training ({how})"


def totals_text(plan: Plan) -> str:
    """Time and dollars, with the ranges that they are expected in."""
    time_text, usd_text = duration_text(plan.total_s), f"{plan.total_usd:.2f} USD"
    low_s, high_s = plan.seconds_range or (0.0, 0.0)
    if low_s < high_s:
        time_text += f" ({duration_text(low_s)} to {duration_text(high_s)})"
    low, high = plan.usd_range or (0.0, 0.0)
    if low < high:
        usd_text += f" ({low:.2f} to {high:.2f})"
    return f"{time_text}, {usd_text}"


def totals_json(plan: Plan) -> str:
    """The same for programs."""
    totals = {
        "seconds": plan.total_s,
        "seconds_range": plan.seconds_range,
        "usd": plan.total_usd,
        "usd_range": plan.usd_range,
    }
    return json.dumps(totals, indent=2)


def front_table(plans: Sequence[Plan]) -> FittedTable:
    """Plans that nothing beats in both time and money."""
    table = FittedTable(box=SIMPLE_HEAD)
    for heading in ("time", "USD"):
        table.add_column(heading, justify="right")
    for heading in ("averager", "exchange", "why, and the machines that differ"):
        table.add_column(heading)
    for plan, machines in zip(plans, differing_machines(plans), strict=True):
        table.add_row(
            duration_text(plan.total_s),
            f"{plan.total_usd:.2f}",
            plan.averager,
            f"{plan.interval} steps, {plan.codec or 'no codec'}",
            f"{plan.reason}\n{machines}".rstrip(),
        )
    return table
