"""Tables and pages of comparisons and searches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD

from geo_ray.base.files import save_text
from geo_ray.base.tables import FittedTable
from geo_ray.telemetry.charts import Curve
from geo_ray.telemetry.events import finite
from geo_ray.telemetry.html_page import html_page, section, table, write_html


def terminal_table(caption: str, **options: Any) -> FittedTable:
    """Return an empty table for the terminal.

    Args:
        caption: text below it; "" for none.
        options: as for `FittedTable`.
    """
    return FittedTable(
        caption=caption or None,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        **options,
    )


def save_results(content: dict[str, Any], path: Path) -> Path:
    """Write JSON atomically; non-finite numbers become null.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    return save_text(path, json.dumps(finite(content), indent=1) + "\n")


def write_page(title: str, summary: str, body: str, path: Path) -> Path:
    """Write a self-contained HTML page.

    Args:
        title: heading of the page.
        summary: text below it; "" for none.
        body: the sections.
        path: of the file.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    summary_html = f'<p class="sub">{lines(summary)}</p>' if summary else ""
    head = f"<header><h1>{escape(title)}</h1>{summary_html}</header>"
    return write_html(html_page(title, head + body), path)


def lines(text: str) -> str:
    """Return escaped text with its line breaks."""
    return escape(text).replace("\n", "<br>")


def failures(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], left: int, note: str = ""
) -> str:
    """Return a section with the failed runs; "" if there are none."""
    return section(title, table(headings, rows, left=left), note) if rows else ""


def curve(
    label: str, points: Sequence[tuple[float, float]], color: int, *, faint: bool = False
) -> Curve:
    """Return a line through points."""
    x = np.asarray([x for x, _ in points], dtype=np.float64)
    y = np.asarray([y for _, y in points], dtype=np.float64)
    return Curve(label, x, y, color, faint=faint)
