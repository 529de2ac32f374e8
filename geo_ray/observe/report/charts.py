"""Small charts as inline SVG: curves, bars, a histogram. Colours come from the page's style."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from geo_ray.observe.report.axis import LIMIT, Axis, linear_axis, log_axis, time_axis
from geo_ray.observe.report.plot import SPAN, frame, marks, stretched
from geo_ray.observe.report.series import MAX_POINTS, thin
from geo_ray.observe.text import number_text

Floats = NDArray[np.float64]

COLOURS = 7  # of the palette in style.py
ALL = -1  # series of what stands for all the others; strong and in the colour of the text
MANY = 12  # more curves than this are drawn thin
_HEIGHT = 232  # of a drawing of curves, in pixels
_NARROW_PX = 340  # its width beside another one, or on a narrow page
_MOST_POINTS = 24_000  # of all curves of a chart; each has at least 60 and at most 1,000
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: for the legend; none for an empty one.
        x: places in rising order, float64 (N,).
        y: values, float64 (N,); points that are not finite are left out.
        series: number of the colour and dash, or `ALL`.
        faint: drawn thin and pale, and not the reason for the range of the y axis.
        breaks: places on the x axis at which a new line begins, rising.
    """

    label: str
    x: Floats
    y: Floats
    series: int
    faint: bool = False
    breaks: tuple[float, ...] = ()


def curves_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    x_time: bool = False,
    x_text: Callable[[float], str] = number_text,
    y_text: Callable[[float], str] = number_text,
    zero: bool = False,
    log: bool = False,
    at: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw curves over one x axis, at most 1,000 points each.

    Args:
        title: heading.
        curves: drawn in this order.
        x_label: what x is; of a time axis, its unit is added.
        x_time: x is in seconds.
        x_text: what to write at a tick of an x axis that is not time.
        y_text: what to write at a tick of the y axis and behind a curve's name.
        zero: let y begin at zero.
        log: let y be logarithmic if the values are positive and span enough.
        at: (place on the x axis, what is there), drawn as marks.

    Returns:
        HTML of a figure; of a note if there is nothing to draw.
    """
    most = max(60, min(MAX_POINTS, _MOST_POINTS // max(1, len(curves))))
    drawn = [(curve, *thin(curve.x, curve.y, most)) for curve in curves]
    drawn = [(curve, x, np.clip(y, -LIMIT, LIMIT)) for curve, x, y in drawn if len(x)]
    if not drawn:
        return figure(title, "", '<p class="none">nothing was recorded</p>')
    x_low = min(0.0, *(float(x[0]) for _, x, _ in drawn))
    x_high = max(float(x[-1]) for _, x, _ in drawn)
    if x_time:
        x_axis, unit = time_axis(x_low, x_high)
        x_label = f"{x_label} ({unit})"
    else:
        x_axis = linear_axis(x_low, x_high, 6, x_text)
    y_axis = _y_axis([(curve.faint, y) for curve, _, y in drawn], y_text, zero=zero, log=log)
    faint = [_polyline(curve, x, y, x_axis, y_axis) for curve, x, y in drawn if curve.faint]
    bold = [_polyline(curve, x, y, x_axis, y_axis) for curve, x, y in drawn if not curve.faint]
    many = len(bold) > MANY
    dots = [
        _dots(curve, x, y, x_axis, y_axis)
        for curve, x, y in drawn
        if not curve.faint and (len(x) == 1 or not many or curve.series == ALL)
    ]
    lines = stretched("".join(faint), _HEIGHT, cut=True) if faint else ""
    lines += stretched("".join(bold), _HEIGHT, cut=False)
    body = frame(
        title,
        _HEIGHT,
        lines + "".join(dots) + marks(x_axis, _HEIGHT, at),
        x_axis=x_axis,
        x_label=x_label,
        y_texts=[(_y(y_axis, value), escape(text)) for value, text in y_axis.ticks],
        least_px=_NARROW_PX,
    )
    legend = [
        (curve.series, f"{curve.label} {y_text(float(y[-1]))}")
        for curve, _, y in drawn
        if curve.label
    ]
    legend.sort(key=lambda entry: entry[0] != ALL)
    inside = _legend(legend) + body
    return figure(title, "", f'<div class="many">{inside}</div>' if many else inside)


def bars_chart(title: str, values: Mapping[str, float], text: Callable[[float], str]) -> str:
    """Draw one horizontal bar per entry, the series of which is its place.

    Args:
        title: heading.
        values: label -> value; none negative.
        text: what to write behind a bar.
    """
    if not values:
        return figure(title, "", '<p class="none">nothing was recorded</p>')
    most = max(values.values()) or 1.0
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td class="bar"><svg width="100%" height="16">'
        f'<rect class="b{index % COLOURS}" width="{max(0.3, 100 * value / most):.2f}%" height="16"'
        f' rx="2"/></svg></td><td class="n">{escape(text(value))}</td></tr>'
        for index, (label, value) in enumerate(values.items())
    )
    return figure(title, "", f'<table class="bars">{rows}</table>')


def histogram(values_N: Floats, bins: int = 12) -> str:
    """Draw how often small numbers occur as a row of bars, without axes; for a table's cell.

    Args:
        values_N: finite values, float64 (N,).
        bins: most bars; whole numbers get a bar each while they fit.
    """
    if not len(values_N):
        return ""
    low, high = float(values_N.min()), float(values_N.max())
    if low >= 0 and high < bins and np.all(values_N == np.round(values_N)):
        edges = np.arange(0, int(high) + 2) - 0.5
        labels = [str(value) for value in range(int(high) + 1)]
    else:
        edges = np.linspace(low, high if high > low else low + max(1.0, abs(low)), bins + 1)
        pairs = pairwise(map(float, edges))
        labels = [f"{number_text(a)} to {number_text(b)}" for a, b in pairs]
    counts, _ = np.histogram(values_N, edges)
    rects = "".join(
        f'<g><title>{label}: {count:,}</title><rect class="b4" x="{14 * index}" width="12" '
        f'y="{24 - 24 * count / counts.max():.1f}" height="{24 * count / counts.max():.1f}"/></g>'
        for index, (label, count) in enumerate(zip(labels, counts, strict=True))
    )
    width = 14 * len(labels)
    first, last = labels[0].split(" to ")[0], labels[-1].split(" to ")[-1]
    ends = f'<text x="0" y="36">{first}</text>'
    if len(labels) > 1:
        ends += f'<text x="{width}" y="36" text-anchor="end">{last}</text>'
    return f'<svg class="histogram" width="{width}" height="38">{rects}{ends}</svg>'


def _y_axis(
    values: Sequence[tuple[bool, Floats]],
    text: Callable[[float], str],
    *,
    zero: bool,
    log: bool,
) -> Axis:
    """Fit the bold curves whole, the faint ones but for their outermost percent."""
    bold = [y for faint, y in values if not faint]
    faint = [np.percentile(y, [1, 99]) for is_faint, y in values if is_faint]
    every = np.concatenate([*bold, *faint])
    low, high = float(every.min()), float(every.max())
    if log and low > 0 and high > 20 * low:
        return log_axis(low / 1.1, high * 1.1)
    return linear_axis(min(0.0, low) if zero else low, high, 5, text, widen=True)


def _y(axis: Axis, value: float) -> float:
    return _HEIGHT * (1 - axis.part(value))


def _polyline(curve: Curve, x: Floats, y: Floats, x_axis: Axis, y_axis: Axis) -> str:
    kind = f"l{_colour(curve.series)}{' faint' if curve.faint else ''}"
    name = f"<title>{escape(curve.label)}</title>" if curve.label else ""
    first = np.searchsorted(x, curve.breaks)
    lines = ""
    for xs, ys in zip(np.split(x, first), np.split(y, first), strict=True):
        if len(xs) < 2:
            continue
        path = " ".join(
            f"{SPAN * x_axis.part(float(a)):.1f},{_y(y_axis, float(b)):.1f}"
            for a, b in zip(xs, ys, strict=True)
        )
        lines += f'<polyline class="{kind}"{_dash(curve.series)} points="{path}">{name}</polyline>'
    return lines


def _dots(curve: Curve, x: Floats, y: Floats, x_axis: Axis, y_axis: Axis) -> str:
    """Mark the points of a curve that has few."""
    if len(x) > 25:
        return ""
    return "".join(
        f'<circle class="b{_colour(curve.series)}" cx="{100 * x_axis.part(float(a)):.2f}%" '
        f'cy="{_y(y_axis, float(b)):.1f}" r="2.5"/>'
        for a, b in zip(x, y, strict=True)
    )


def _colour(series: int) -> str:
    return "-all" if series == ALL else str(series % COLOURS)


def _dash(series: int) -> str:
    dash = "" if series == ALL else _DASHES[series // COLOURS % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _legend(entries: Sequence[tuple[int, str]]) -> str:
    items = "".join(
        f'<li><svg width="22" height="8"><line class="l{_colour(series)}"{_dash(series)} x1="0" '
        f'x2="22" y1="4" y2="4"/></svg>{escape(text)}</li>'
        for series, text in entries
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def figure(title: str, legend: str, body: str) -> str:
    """Give a figure: its title, then ``legend``, then ``body`` (both HTML)."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{body}</figure>"
