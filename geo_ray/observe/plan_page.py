"""A page that plots plans: time against money, the chosen one marked, a reason for each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from geo_ray.errors import RunDirectoryError
from geo_ray.observe.charts import ALL, Curve, curves_chart
from geo_ray.observe.sections import section, table
from geo_ray.observe.style import STYLE
from geo_ray.observe.text import duration_text

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_plan_page(
    name: str,
    points: Sequence[tuple[float, float, str]],
    chosen: tuple[float, float],
    path: Path,
) -> Path:
    """One self-contained HTML page.

    Args:
        name: of the job.
        points: seconds, dollars and reason of each plan, from fast to cheap.
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
    rows = [[duration_text(s), f"{usd:.2f}", escape(reason)] for s, usd, reason in points]
    title = f"Plans for {escape(name)}"
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} - geo_ray</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{title}</h1></header>"
        + section("Time against USD", chart, "Each bend is a plan; the upright line is the chosen.")
        + section("Plans", table(("time", "USD", "why"), rows, left=0))
        + "</body></html>\n"
    )
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}") from error
    return path
