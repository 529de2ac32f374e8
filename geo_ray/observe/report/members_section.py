"""The members of a run over time: a band for each region, and for each worker that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from geo_ray.observe.events.columns import RunRecord
from geo_ray.observe.report.axis import Axis, time_axis
from geo_ray.observe.report.charts import figure
from geo_ray.observe.report.plot import SPAN, frame, marks, stretched
from geo_ray.observe.report.presence import RUN, Band, presence_of
from geo_ray.observe.report.sections import section
from geo_ray.observe.text import duration_text

_STATES: Final = ("member", "lost", "left", "paused")
_LEAST_PX: Final = 560
_ROOMY, _TIGHT = (24, 16), (12, 8)  # pixels of a lane, and of its band
_ROOMY_LANES: Final = 24
_MOST_LANES: Final = 200
MEMBERS_NOTE: Final = (
    "Regions, and workers that were lost, left or came. A dashed line: the averager moved, a "
    "bridge was replaced, or somebody did not join."
)


def members_section(run: RunRecord) -> str:
    """The section; nothing if the members were the same all the time."""
    found = presence_of(run.changes)
    end_s = run.totals.elapsed_s
    bands = found.until(end_s)
    changed = any(band.state != "member" for each in bands.values() for band in each)
    joined = any(each and each[0].start_s > _first_s(bands) for each in bands.values())
    if not (changed or joined or found.marks) or end_s <= 0:
        return ""
    return section("Members", members_figure(bands, found.marks, end_s), MEMBERS_NOTE)


def members_figure(
    bands: Mapping[str, list[Band]], at: Sequence[tuple[float, str]], end_s: float
) -> str:
    """Draw bands over time.

    Args:
        bands: of the run, its regions and workers, by name.
        at: what happened at a moment: seconds, and words.
        end_s: end of the time; above 0.
    """
    lanes = _in_order(bands)
    return _drawn(lanes[:_MOST_LANES], len(lanes), end_s, at)


def _first_s(bands: Mapping[str, Sequence[Band]]) -> float:
    return min((each[0].start_s for each in bands.values() if each), default=0.0)


def _in_order(bands: Mapping[str, list[Band]]) -> list[tuple[str, list[Band]]]:
    """The run, then each region with its workers behind it."""
    return sorted(bands.items(), key=lambda item: (item[0] != RUN, item[0].split("/")))


def _drawn(
    lanes: Sequence[tuple[str, list[Band]]],
    count: int,
    end_s: float,
    at: Sequence[tuple[float, str]],
) -> str:
    axis, unit = time_axis(0.0, end_s, 10)
    lane, height = _ROOMY if len(lanes) <= _ROOMY_LANES else _TIGHT
    names = [(i * lane + 4 + height / 2, _name(name)) for i, (name, _) in enumerate(lanes)]
    body = "".join(
        _band(band, i * lane + 4, height, axis)
        for i, (_, bands) in enumerate(lanes)
        for band in bands
    )
    total = lane * len(lanes) + 4
    shown = [s for s in _STATES if any(band.state == s for _, bands in lanes for band in bands)]
    legend = "".join(
        f'<li><svg width="14" height="12"><rect class="m-{state}" width="14" height="12"/></svg>'
        f"{state}</li>"
        for state in shown
    )
    drawing = frame(
        "members over time",
        total,
        stretched(body, total, cut=False) + marks(axis, total, at),
        x_axis=axis,
        x_label=f"time ({unit})",
        y_texts=names,
        least_px=_LEAST_PX,
        upright=True,
    )
    rest = f" (the first {len(lanes)} of {count})" if count > len(lanes) else ""
    return figure(f"members over time{rest}", f'<ul class="legend">{legend}</ul>', drawing)


def _band(band: Band, top: int, height: int, axis: Axis) -> str:
    x = SPAN * axis.part(band.start_s)
    width = max(SPAN * axis.part(band.end_s) - x, 0.6)
    text = f"{band.state} for {duration_text(band.end_s - band.start_s)}"
    return (
        f'<rect class="m-{band.state}" x="{x:.1f}" y="{top}" width="{width:.1f}" '
        f'height="{height}"><title>{escape(text)}</title></rect>'
    )


def _name(name: str) -> str:
    short = name if len(name) <= 20 else name[:18] + "…"
    return f"{escape(short)}<title>{escape(name)}</title>"
