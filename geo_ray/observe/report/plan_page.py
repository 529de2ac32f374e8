"""A page that plots plans: time against money, the chosen one marked, a reason for each."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from geo_ray.observe.report.charts import ALL, Curve, curves_chart
from geo_ray.observe.report.page import html_page, write_html
from geo_ray.observe.report.sections import section, table
from geo_ray.observe.text import duration_text


def write_plan_page(
    name: str,
    points: Sequence[tuple[float, float, str, str]],
    chosen: tuple[float, float],
    path: Path,
) -> Path:
    """One self-contained HTML page.

    Args:
        name: of the job.
        points: seconds, dollars, machines and reason of each plan, from fast to cheap.
        chosen: seconds and dollars of the plan that was chosen.
        path: file to write.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    seconds = np.array([point[0] for point in points])
    dollars = np.array([point[1] for point in points])
    front = Curve("plans that nothing beats", seconds, dollars, 0)
    mark = Curve("chosen", np.array([chosen[0]] * 2), np.array([0.0, chosen[1]]), ALL)
    chart = curves_chart("Time and money", [front, mark], x_label="time", x_time=True, zero=True)
    rows = [
        [duration_text(seconds), f"{usd:.2f}", escape(machines), escape(reason)]
        for seconds, usd, machines, reason in points
    ]
    title = f"Plans for {name}"
    body = (
        f"<header><h1>{escape(title)}</h1></header>"
        + section("Time against USD", chart, "Each bend is a plan; the upright line is the chosen.")
        + section("Plans", table(("time", "USD", "machines", "why"), rows, left=0))
    )
    return write_html(html_page(title, body), path)
