"""What the live page shows, in lines for a terminal."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from geo_ray.errors import GeoRayError
from geo_ray.observe.picture.machines_section import machines_note
from geo_ray.observe.picture.view import MapLink, RunView
from geo_ray.observe.status.text import status_lines
from geo_ray.observe.text import age_text, bytes_text, duration_text, number_text, printable

_MOST: Final = 8  # links, machines and notes


def view_lines(view: RunView | GeoRayError) -> list[str]:
    """Give the lines; of a run that is not there yet, the error that says so."""
    if isinstance(view, GeoRayError):
        return [printable(f"awaited: {view.code}: {' '.join(view.message.split())}")]
    lines = status_lines(view.status)
    lines += [f"  {text}" for text in view.problems]
    lines += _named("links", [_link(each) for each in view.map.links])
    if view.planned is not None and view.status.spent.usd is not None:
        spent, planned = view.status.spent.usd, view.planned.usd
        lines += _named("money", [f"{spent:.4g} USD spent of {planned:.4g} planned"])
    machines = view.machines
    if machines is not None:
        rows = [
            f"{row.region}: {row.machine} {row.type}, {row.state}"
            + ("" if row.usd_per_hour is None else f", {number_text(row.usd_per_hour)} USD/h")
            + ("" if row.age_s is None else f", {age_text(row.age_s)}")
            for row in machines.rows
        ]
        lines += _named("machines", rows)
        lines.append(f"    {machines_note(machines)}")
    lines += _named(
        "newest", [f"{duration_text(t)} {text}" for t, text in view.history.notes][::-1]
    )
    return [printable(line) for line in lines]


def view_text(view: RunView | GeoRayError) -> Text:
    """Give the same as one text."""
    return Text("\n".join(view_lines(view)))


def _link(link: MapLink) -> str:
    limit = "" if link.limit_mbps is None else f" of {number_text(link.limit_mbps)}"
    load = f"{number_text(round(link.mbps, 2))}{limit} Mb/s"
    return f"{link.src} to {link.dst}: {load}, {bytes_text(link.bytes)} so far"


def _named(name: str, rows: list[str]) -> list[str]:
    shown = rows[:_MOST] + ([f"and {len(rows) - _MOST} more"] if len(rows) > _MOST else [])
    return [f"  {name if not i else '':<9} {row}" for i, row in enumerate(shown)]
