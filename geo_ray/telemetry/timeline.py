"""When each region computed, waited and transferred: lanes of a Gantt chart as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from geo_ray.base.text import duration_text
from geo_ray.telemetry.charts import (
    STRETCHED_WIDTH,
    Axis,
    coverage,
    figure,
    frame,
    marks,
    stretched,
    time_axis,
)
from geo_ray.telemetry.columns import RegionRecord

Floats = NDArray[np.float64]

MAX_INTERVALS = 2000  # above it, the whole run is drawn as shares of time
ZOOM_INTERVALS, ZOOM_EACH = 240, 12  # drawn one by one above it; at least so many of a region
_BINS_LEAST, _BINS_MOST = 60, 240
_MOST_BINS = 12_000  # of all regions of a drawing
_NARROW_PX = 560
_KINDS = ("compute", "wait", "transfer")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Heights in pixels: of a region, of its row of work, of its row of exchanges."""

    lane: int
    work: int
    wire: int


_ROOMY, _TIGHT = _Rows(46, 20, 11), _Rows(22, 10, 5)
_ROOMY_REGIONS = 16


@dataclass(frozen=True, slots=True)
class Spans:
    """Intervals of one kind in one region, in seconds.

    Attributes:
        start: begins, float64 (N,).
        end: ends, float64 (N,); after the begins.
    """

    start: Floats
    end: Floats

    def before(self, end_s: float) -> Spans:
        """Give those that begin before ``end_s``, cut off there."""
        kept = self.start < end_s
        return Spans(self.start[kept], np.minimum(self.end[kept], end_s))


Lanes = Mapping[str, Mapping[str, Spans]]  # region -> kind -> spans


def lanes(regions: Mapping[str, RegionRecord]) -> dict[str, dict[str, Spans]]:
    """Work out the intervals of every region.

    Compute is ``start_s`` to ``start_s + compute_s`` of a step. Its ``wait_s`` lies between there
    and ``t_s`` as far as it fits, and the rest just before ``start_s``. A transfer is an exchange.
    """
    return {name: _region_lanes(region) for name, region in regions.items()}


def _region_lanes(region: RegionRecord) -> dict[str, Spans]:
    steps, exchanges = region.steps, region.exchanges
    start, t_s = steps["start_s"], steps["t_s"]
    computed = start + np.nan_to_num(steps["compute_s"])
    wait_s = np.nan_to_num(steps["wait_s"])
    after_s = np.clip(t_s - computed, 0.0, wait_s)
    floor = np.concatenate([[0.0], np.maximum(computed, computed + after_s)[:-1]])
    before = np.clip(start - (wait_s - after_s), np.minimum(floor, start), start)
    return {
        "compute": _spans(start, computed),
        "wait": _spans(
            np.concatenate([before, computed]), np.concatenate([start, computed + after_s])
        ),
        "transfer": _spans(exchanges["start_s"], exchanges["t_s"]),
    }


def _spans(start: Floats, end: Floats) -> Spans:
    real = np.isfinite(start) & np.isfinite(end) & (end > start)
    order = np.argsort(start[real], kind="stable")
    return Spans(start[real][order], end[real][order])


def timeline(of: Lanes, at: Sequence[tuple[float, str]] = ()) -> str:
    """Draw the whole run and, if that is crowded, its first seconds as well.

    Args:
        of: what `lanes` gave.
        at: (seconds, what happened then), drawn as marks.

    Returns:
        HTML of one or two figures; of a note if there is nothing to draw.
    """
    every = [spans for kinds in of.values() for spans in kinds.values()]
    starts = np.sort(np.concatenate([spans.start for spans in every] or [np.zeros(0)]))
    if not len(starts):
        return '<figure><p class="none">nothing was recorded</p></figure>'
    end_s = max(float(spans.end.max()) for spans in every if len(spans.end))
    aggregated = len(starts) > MAX_INTERVALS
    caption = "whole run"
    if aggregated:
        caption += ": height is the share of time in each column"
    figures = ""
    shown = max(ZOOM_INTERVALS, ZOOM_EACH * len(of))
    if len(starts) > shown:
        # From the first interval on: start-up would be an empty stretch.
        zoom_s = float(starts[shown])
        zoomed = {
            name: {kind: spans.before(zoom_s) for kind, spans in kinds.items()}
            for name, kinds in of.items()
        }
        if zoom_s < 0.8 * end_s:
            first_s = float(starts[0])
            length = duration_text(zoom_s - first_s)
            figures = _drawn(f"the first {length}", zoomed, first_s, zoom_s, at, shares=False)
    return figures + _drawn(caption, of, 0.0, end_s, at, shares=aggregated)


def _drawn(
    caption: str,
    of: Lanes,
    low_s: float,
    high_s: float,
    at: Sequence[tuple[float, str]],
    *,
    shares: bool,
) -> str:
    axis, unit = time_axis(low_s, high_s, 10)
    rows = _ROOMY if len(of) <= _ROOMY_REGIONS else _TIGHT
    height = rows.lane * len(of)
    names, parts = [], []
    for index, (name, kinds) in enumerate(of.items()):
        top = index * rows.lane + 4
        names.append((top + rows.work / 2, f"{escape(_short(name))}<title>{escape(name)}</title>"))
        if shares:
            most = min(_BINS_MOST, max(_BINS_LEAST, _MOST_BINS // len(of)))
            parts.append(_shares(kinds, top, rows, axis, most))
        else:
            parts.append(_bars(kinds, top, rows, axis))
    legend = "".join(
        f'<li><svg width="14" height="12"><rect class="t-{kind}" width="14" height="12"/></svg>'
        f"{kind}</li>"
        for kind in _KINDS
    )
    drawing = frame(
        f"timeline, {caption}",
        height,
        stretched("".join(parts), height, cut=False) + marks(axis, height, at),
        x_axis=axis,
        x_label=f"time ({unit})",
        y_texts=names,
        least_px=_NARROW_PX,
        upright=True,
    )
    return figure(caption, f'<ul class="legend">{legend}</ul>', drawing)


def _x(axis: Axis, value_s: Floats) -> Floats:
    return STRETCHED_WIDTH * (value_s - axis.low) / (axis.high - axis.low)


def _bars(kinds: Mapping[str, Spans], top: int, rows: _Rows, axis: Axis) -> str:
    parts = []
    for kind in _KINDS:
        spans = kinds[kind]
        y, height = (top + rows.work + 3, rows.wire) if kind == "transfer" else (top, rows.work)
        start, end = _x(axis, spans.start), _x(axis, spans.end)
        width = np.maximum(end - start - 0.5, 0.6)  # half a pixel or so between neighbours
        lengths = [duration_text(float(length)) for length in spans.end - spans.start]
        parts += [
            f'<rect class="t-{kind}" x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height}">'
            f"<title>{kind} {length}</title></rect>"
            for x, w, length in zip(start, width, lengths, strict=True)
        ]
    return "".join(parts)


def _shares(kinds: Mapping[str, Spans], top: int, rows: _Rows, axis: Axis, most: int) -> str:
    # Several exchanges per column, or the columns show the beat of rounds against columns.
    columns = int(np.clip(len(kinds["transfer"].start) // 4, _BINS_LEAST, most))
    edges = np.linspace(axis.low, axis.high, columns + 1)
    x = _x(axis, edges)
    shares = {kind: coverage(kinds[kind].start, kinds[kind].end, edges) for kind in _KINDS}
    shares["wait"] = np.minimum(shares["wait"], 1.0 - shares["compute"])
    floor = np.full(columns, float(top + rows.work))
    compute, wait = floor - rows.work * shares["compute"], rows.work * shares["wait"]
    wire = floor + 3 + rows.wire
    return (
        f'<rect class="t-none" x="0" y="{top}" width="{STRETCHED_WIDTH}" height="{rows.work}"/>'
        + _steps("compute", x, compute, floor)
        + _steps("wait", x, compute - wait, compute)
        + _steps("transfer", x, wire - rows.wire * shares["transfer"], wire)
    )


def _steps(kind: str, x: Floats, upper: Floats, lower: Floats) -> str:
    """Draw the columns between two rows of heights as one path."""
    columns = [
        f"M{a:.1f},{low:.1f}V{high:.1f}H{b:.1f}V{low:.1f}Z"
        for a, b, high, low in zip(x[:-1], x[1:], upper, lower, strict=True)
        if low - high > 0.05
    ]
    return f'<path class="t-{kind}" d="{"".join(columns)}"/>' if columns else ""


def _short(name: str) -> str:
    return name if len(name) <= 20 else name[:18] + "…"
