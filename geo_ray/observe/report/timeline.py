"""When each region computed, waited and transferred: lanes of a Gantt chart as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from geo_ray.observe.events.columns import RegionRecord
from geo_ray.observe.report.axis import Axis, time_axis
from geo_ray.observe.report.series import coverage
from geo_ray.observe.text import duration_text

Floats = NDArray[np.float64]

MAX_INTERVALS = 2000  # above it, the whole run is drawn as shares of time
ZOOM_INTERVALS = 240
_BINS_LEAST, _BINS_MOST = 60, 240
_WIDTH, _LEFT, _RIGHT = 1140, 150, 14
_LANE, _WORK, _WIRE = 46, 20, 11  # heights in pixels: of a region, of its two rows
_KINDS = ("compute", "wait", "transfer")


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


def timeline(of: Lanes) -> str:
    """Draw the whole run and, if that is crowded, its first seconds as well.

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
    if len(starts) > ZOOM_INTERVALS:
        # From the first interval on: start-up would be an empty stretch.
        zoom_s = float(starts[ZOOM_INTERVALS])
        zoomed = {
            name: {kind: spans.before(zoom_s) for kind, spans in kinds.items()}
            for name, kinds in of.items()
        }
        if zoom_s < 0.8 * end_s:
            first_s = float(starts[0])
            length = duration_text(zoom_s - first_s)
            figures = _drawn(f"the first {length}", zoomed, first_s, zoom_s, shares=False)
    return figures + _drawn(caption, of, 0.0, end_s, shares=aggregated)


def _drawn(caption: str, of: Lanes, low_s: float, high_s: float, *, shares: bool) -> str:
    axis, unit = time_axis(low_s, high_s, 10)
    height = _LANE * len(of) + 44
    parts = [_grid(axis, unit, len(of))]
    for index, (name, kinds) in enumerate(of.items()):
        top = index * _LANE + 8
        parts.append(
            f'<text x="{_LEFT - 10}" y="{top + 19}" text-anchor="end" class="label">'
            f"{escape(_short(name))}<title>{escape(name)}</title></text>"
        )
        parts.append(_shares(kinds, top, axis) if shares else _bars(kinds, top, axis))
    legend = "".join(
        f'<li><svg width="14" height="12"><rect class="t-{kind}" width="14" height="12"/></svg>'
        f"{kind}</li>"
        for kind in _KINDS
    )
    return (
        f'<figure class="wide"><figcaption>{escape(caption)}</figcaption>'
        f'<ul class="legend">{legend}</ul><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="timeline, {escape(caption)}">{"".join(parts)}</svg></figure>'
    )


def _x(axis: Axis, value_s: Floats) -> Floats:
    inner = _WIDTH - _LEFT - _RIGHT
    return _LEFT + inner * (value_s - axis.low) / (axis.high - axis.low)


def _bars(kinds: Mapping[str, Spans], top: int, axis: Axis) -> str:
    parts = []
    for kind in _KINDS:
        spans = kinds[kind]
        y, height = (top + _WORK + 3, _WIRE) if kind == "transfer" else (top, _WORK)
        start, end = _x(axis, spans.start), _x(axis, spans.end)
        width = np.maximum(end - start - 0.5, 0.6)  # half a pixel between neighbours
        lengths = [duration_text(float(length)) for length in spans.end - spans.start]
        parts += [
            f'<rect class="t-{kind}" x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height}">'
            f"<title>{kind} {length}</title></rect>"
            for x, w, length in zip(start, width, lengths, strict=True)
        ]
    return "".join(parts)


def _shares(kinds: Mapping[str, Spans], top: int, axis: Axis) -> str:
    # Several exchanges per column, or the columns show the beat of rounds against columns.
    columns = int(np.clip(len(kinds["transfer"].start) // 4, _BINS_LEAST, _BINS_MOST))
    edges = np.linspace(axis.low, axis.high, columns + 1)
    x = _x(axis, edges)
    shares = {kind: coverage(kinds[kind].start, kinds[kind].end, edges) for kind in _KINDS}
    shares["wait"] = np.minimum(shares["wait"], 1.0 - shares["compute"])
    base = top + _WORK
    floor = np.full(columns, float(base))
    compute, wait = floor - _WORK * shares["compute"], _WORK * shares["wait"]
    wire = np.full(columns, float(base + 3 + _WIRE))
    return (
        f'<rect class="t-none" x="{_LEFT}" y="{top}" width="{x[-1] - x[0]:.1f}" height="{_WORK}"/>'
        + _steps("compute", x, compute, floor)
        + _steps("wait", x, compute - wait, compute)
        + _steps("transfer", x, wire - _WIRE * shares["transfer"], wire)
    )


def _steps(kind: str, x: Floats, upper: Floats, lower: Floats) -> str:
    """Draw the columns between two rows of heights as one path."""
    columns = [
        f"M{a:.1f},{low:.1f}V{high:.1f}H{b:.1f}V{low:.1f}Z"
        for a, b, high, low in zip(x[:-1], x[1:], upper, lower, strict=True)
        if low - high > 0.05
    ]
    return f'<path class="t-{kind}" d="{"".join(columns)}"/>' if columns else ""


def _grid(axis: Axis, unit: str, count: int) -> str:
    bottom = _LANE * count + 6
    ticks: Sequence[tuple[float, str]] = axis.ticks
    parts = []
    for value_s, text in ticks:
        x = float(_x(axis, np.array(value_s)))
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{text}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 32}" text-anchor="middle" class="label">')
    parts.append(f"time ({unit})</text>")
    return "".join(parts)


def _short(name: str) -> str:
    return name if len(name) <= 20 else name[:18] + "…"
