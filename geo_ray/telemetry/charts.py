"""Charts as inline SVG: curves, bars, histograms, and curves over a choice of x axes.

Series are smoothed and thinned for plotting. A viewBox would scale the text with the figure, so a
frame has none: positions along x are percentages of the drawing, positions along y and all text are
in pixels of the page. Only content that must be stretched is in a nested SVG with a viewBox
(`stretched`). Colours come from the style of the page; a choice of axes needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.base.text import bytes_text, count_text, number_text

Floats = NDArray[np.float64]
MAX_POINTS = 1000


def smooth(y_N: Floats, fraction: float = 0.03, breaks: Sequence[int] = ()) -> Floats:
    """Give the centred moving mean over ``fraction`` of the points, values that are NaN left out.

    The window has at least 9 points, fewer at the ends of the curve and next to a break; fewer than
    60 points are not smoothed.

    Args:
        y_N: values, float64 (N,).
        fraction: width of the window as a part of N.
        breaks: indices of the first points after gaps, rising; no window crosses a gap.

    Returns:
        float64 (N,); NaN where the whole window is NaN.
    """
    if len(y_N) < 60:
        return y_N.copy()
    half = max(4, int(len(y_N) * fraction / 2))
    good_N = np.isfinite(y_N)
    finite_N = np.where(good_N, y_N, 0.0)
    unit = max(1.0, float(np.abs(finite_N).max()))  # sums of large values stay finite
    sums = np.concatenate([[0.0], np.cumsum(finite_N / unit)])
    counts = np.concatenate([[0], np.cumsum(good_N)])
    index = np.arange(len(y_N))
    edges = np.array([0, *breaks, len(y_N)])
    next_edge = np.searchsorted(edges, index, side="right")
    first = np.maximum(index - half, edges[next_edge - 1])
    last = np.minimum(index + half + 1, edges[next_edge])
    with np.errstate(invalid="ignore"):
        mean: Floats = unit * ((sums[last] - sums[first]) / (counts[last] - counts[first]))
    return mean


def thin(x_N: Floats, y_N: Floats, max_points: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """Give at most ``max_points`` of the points, including the extremes of each interval.

    Args:
        x_N: places in rising order, float64 (N,).
        y_N: values, float64 (N,); points whose value is not finite are left out.
        max_points: at least 4.

    Returns:
        x and y of the points kept, the first and the last among them, float64 (M,).
    """
    good_N = np.isfinite(x_N) & np.isfinite(y_N)
    x, y = x_N[good_N], y_N[good_N]
    if len(x) <= max_points:
        return x, y
    edges = np.linspace(1, len(x) - 1, (max_points - 2) // 2 + 1).astype(int)
    keep = {0, len(x) - 1}
    for start, end in pairwise(edges):
        keep |= {start + int(np.argmin(y[start:end])), start + int(np.argmax(y[start:end]))}
    chosen = np.array(sorted(keep))
    return x[chosen], y[chosen]


def last_of_each(x_N: Floats, y_N: Floats) -> tuple[Floats, Floats]:
    """Give the last point at each place, float64 (M,) each.

    Args:
        x_N: places in rising order, several points at some, float64 (N,).
        y_N: values, float64 (N,).
    """
    last_N = np.append(np.diff(x_N) > 0, True)[: len(x_N)]
    return x_N[last_N], y_N[last_N]


def bytes_at(wan_s_N: Floats, wan_bytes_N: Floats, t_s_M: Floats) -> Floats:
    """Give the total bytes between regions at given times; float64 (M,).

    All numbers of bytes over time come from here: the counters of `wan` events, which measure
    the traffic that left a region. Between two counts bytes are interpolated linearly.

    Args:
        wan_s_N: times of the counts, rising, float64 (N,); several may be at one time.
        wan_bytes_N: total bytes of all links at those times, float64 (N,).
        t_s_M: the requested times, float64 (M,).
    """
    wan_s, wan_bytes = last_of_each(wan_s_N, wan_bytes_N)
    known_s, known = np.concatenate([[0.0], wan_s]), np.concatenate([[0.0], wan_bytes])
    found: Floats = np.interp(t_s_M, known_s, known)
    return found


def coverage(start_N: Floats, end_N: Floats, edges_B: Floats) -> Floats:
    """Give the part of each bin that intervals cover.

    Args:
        start_N: starts of the intervals in seconds, float64 (N,).
        end_N: their ends, float64 (N,); not before the starts.
        edges_B: rising borders of the bins in seconds, float64 (B+1,).

    Returns:
        float64 (B,), 0 to 1; intervals that overlap count once each, up to 1.
    """
    covered = _ramp(start_N, edges_B) - _ramp(end_N, edges_B)
    return np.clip(np.diff(covered) / np.diff(edges_B), 0.0, 1.0)


def _ramp(begin_N: Floats, at_B: Floats) -> Floats:
    """Sum over all n of max(0, at - begin_n)."""
    ordered = np.sort(begin_N)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    count_B = np.searchsorted(ordered, at_B)
    ramp: Floats = count_B * at_B - sums[count_B]
    return ramp


AXIS_LIMIT = 1e300
"""Differences and ratios of values beyond this limit, or below its inverse, may overflow."""

_LETTER_PX = 7.7  # width of the widest usual digit of the page's font at 12 px


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values on a line of pixels.

    Attributes:
        low: value at the start.
        high: value at the end; above ``low``.
        ticks: (value, text) in rising order.
        log: whether the axis is logarithmic.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def part(self, value: float) -> float:
        """Give the relative position of ``value``: 0 at the start and 1 at the end."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(max(value, 1 / AXIS_LIMIT)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def fitted(self, width_px: float) -> Axis:
        """Give the axis with only as many ticks as fit side by side with their texts.

        Args:
            width_px: length of the axis.
        """
        widest_px = max((text_px(text) for _, text in self.ticks), default=0.0) + 12
        stride = 1
        while len(self.ticks[::stride]) > max(2.0, width_px / widest_px):
            stride += 1
        return replace(self, ticks=self.ticks[::stride])


def text_px(text: str) -> float:
    """Return an upper estimate of the width of ``text`` on the page in pixels."""
    return _LETTER_PX * len(text)


def linear_axis(
    low: float,
    high: float,
    count: int = 5,
    text: Callable[[float], str] = number_text,
    *,
    widen: bool = False,
) -> Axis:
    """Make an axis with about ``count`` ticks at 1, 2, 2.5 or 5 times a power of ten.

    Args:
        low: least value.
        high: greatest value.
        count: how many ticks are wanted.
        text: formats the text of a tick.
        widen: move both ends out to the next tick.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = 0.0, 1.0
    low, high = _drawable(low), _drawable(high)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(low) / 2 or 1.0
        low, high = (0.0 if low == 0 else low - pad), high + pad
    step = _nice_step((high - low) / count)
    if widen:
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [index * step for index in range(first, last + 1)]
    return Axis(low, high, tuple(zip(values, _distinct(values, text), strict=True)))


def log_axis(low: float, high: float) -> Axis:
    """Make an axis for positive values that span powers of ten; ticks at 1 (2 5) times those."""
    low, high = max(low, 1 / AXIS_LIMIT), min(high, AXIS_LIMIT)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    stride = max(1, (last - first) // 6)
    values = [digit * 10.0**power for power in range(first, last + 1, stride) for digit in digits]
    shown = [value for value in values if low * 0.999 <= value <= high * 1.001]
    return Axis(low, high, tuple((value, number_text(value)) for value in shown), log=True)


def time_axis(low_s: float, high_s: float, count: int = 6) -> tuple[Axis, str]:
    """Make an axis of seconds and give the unit that it is labelled in: ms, s, min or h."""
    units = (("ms", 1e-3, 2.0), ("s", 1.0, 180.0), ("min", 60.0, 10800.0), ("h", 3600.0, math.inf))
    unit, unit_s = next((name, size) for name, size, upto in units if high_s - low_s < upto)
    scaled = linear_axis(low_s / unit_s, high_s / unit_s, count)
    ticks = tuple((value * unit_s, text) for value, text in scaled.ticks)
    return Axis(scaled.low * unit_s, scaled.high * unit_s, ticks), unit


def _drawable(value: float) -> float:
    return 0.0 if abs(value) < 1 / AXIS_LIMIT else min(max(value, -AXIS_LIMIT), AXIS_LIMIT)


def _distinct(values: Sequence[float], text: Callable[[float], str]) -> list[str]:
    """Give the texts of even ticks; with more digits if two texts would be equal."""
    texts = [text(value) for value in values]
    if len(set(texts)) == len(texts):
        return texts
    largest = max(abs(value) for value in values)
    digits = math.ceil(math.log10(largest / (values[1] - values[0]))) + 2
    return [f"{value:.{min(17, digits)}g}" for value in values]


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in (1, 2, 2.5, 5, 10) if power * digit >= rough * 0.999)


STRETCHED_WIDTH = 1000  # width of stretched content, in its own unit
_EDGE_PX = 14  # right of the drawing: space for half a mark


def frame(
    title: str,
    height: int,
    body: str,
    *,
    x_axis: Axis,
    x_label: str,
    y_texts: Sequence[tuple[float, str]],
    least_px: int,
    upright: bool = False,
) -> str:
    """Draw axes around ``body``.

    Args:
        title: accessible description.
        height: of the drawing between its axes, pixels.
        body: SVG.
        x_axis: the axis below.
        x_label: written below that.
        y_texts: (place in pixels from above, text) on the left; the text may have markup of SVG.
        least_px: how wide the drawing is on a narrow page; the axis gets as many texts as fit.
        upright: draw lines at the ticks of x, not at those of y.
    """
    axis = x_axis.fitted(least_px)
    left = round(max((text_px(_plain(text)) for _, text in y_texts), default=0.0)) + 10
    right = _EDGE_PX
    parts = []
    for place_px, text in y_texts:
        if not upright:
            parts.append(_line("grid", "0", "100%", place_px, place_px))
        parts.append(f'<text x="-8" y="{place_px + 4:.1f}" text-anchor="end">{text}</text>')
    for number, (value, text) in enumerate(axis.ticks):
        part = axis.part(value)
        x = f"{100 * part:.2f}%"
        right = max(right, round(text_px(text) / 2 - (1 - part) * least_px) + 2)
        top, bottom, kind = (0, height, "grid") if upright else (height, height + 4, "axis")
        parts.append(_line(kind, x, x, top, bottom))
        kind = ' class="odd"' if number % 2 else ""
        parts.append(f'<text{kind} x="{x}" y="{height + 17}" text-anchor="middle">')
        parts.append(f"{escape(text)}</text>")
    if not upright:
        parts.append(_line("axis", "0", "100%", height, height))
    parts.append(f'<text class="label" x="50%" y="{height + 34}" text-anchor="middle">')
    parts.append(f"{escape(x_label)}</text>")
    style = f"height:{height}px;width:calc(100% - {left + right}px);margin-left:{left}px"
    return (
        f'<svg class="plot" style="{style}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}{body}</svg>"
    )


def marks(axis: Axis, height: int, at: Sequence[tuple[float, str]]) -> str:
    """Draw lines from top to bottom at values of the x axis, for a frame's ``body``.

    Args:
        axis: the axis below.
        height: of the frame; pixels.
        at: (value, description); values outside the axis are skipped.
    """
    return "".join(
        f'<line class="mark" x1="{100 * axis.part(value):.2f}%" x2="{100 * axis.part(value):.2f}%" '
        f'y1="0" y2="{height}"><title>{escape(text)}</title></line>'
        for value, text in at
        if axis.low <= value <= axis.high
    )


def stretched(body: str, height: int, *, cut: bool) -> str:
    """Stretch ``body`` over the width of a frame.

    Args:
        body: SVG content, `STRETCHED_WIDTH` units wide.
        height: of the frame; pixels.
        cut: clip content outside.
    """
    kind = "cut" if cut else "whole"
    return (
        f'<svg class="{kind}" viewBox="0 0 {STRETCHED_WIDTH} {height}" preserveAspectRatio="none" '
        f'width="100%" height="{height}">{body}</svg>'
    )


def _line(kind: str, x1: str, x2: str, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1}" x2="{x2}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _plain(text: str) -> str:
    return text.split("<")[0]


COLOURS = 7  # number of colours of the palette in style.py
ALL = -1  # series of an aggregate; strong and in the colour of the text
MANY = 12  # more curves than this are drawn thin
_HEIGHT = 232  # height of a chart in pixels
_NARROW_PX = 340  # width of a chart next to another one, or on a narrow page
_MOST_POINTS = 24_000  # limit over all curves of a chart; each keeps 60 to 1,000 points
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: entry in the legend; empty: no entry.
        x: places in rising order, float64 (N,).
        y: values, float64 (N,); points that are not finite are left out.
        series: number of the colour and dash, or `ALL`.
        faint: drawn thin and pale, and ignored for the range of the y axis.
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
        x_label: label of x; the unit is added to a time axis.
        x_time: x is in seconds.
        x_text: formats the ticks of an x axis that is not time.
        y_text: formats the ticks of the y axis and the value after a curve's name.
        zero: let y begin at zero.
        log: let y be logarithmic if the values are positive and span enough.
        at: (place on the x axis, description), drawn as marks.

    Returns:
        HTML of a figure; of a note if there is nothing to draw.
    """
    most = max(60, min(MAX_POINTS, _MOST_POINTS // max(1, len(curves))))
    drawn = [(curve, *thin(curve.x, curve.y, most)) for curve in curves]
    drawn = [(curve, x, np.clip(y, -AXIS_LIMIT, AXIS_LIMIT)) for curve, x, y in drawn if len(x)]
    if not drawn:
        return figure(title, "", '<p class="none">no data recorded</p>')
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
    """Draw one horizontal bar per entry; its index is the series.

    Args:
        title: heading.
        values: label -> value; none negative.
        text: formats the text after a bar.
    """
    if not values:
        return figure(title, "", '<p class="none">no data recorded</p>')
    most = max(values.values()) or 1.0
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td class="bar"><svg width="100%" height="16">'
        f'<rect class="b{index % COLOURS}" width="{max(0.3, 100 * value / most):.2f}%" height="16"'
        f' rx="2"/></svg></td><td class="n">{escape(text(value))}</td></tr>'
        for index, (label, value) in enumerate(values.items())
    )
    return figure(title, "", f'<table class="bars">{rows}</table>')


def histogram(values_N: Floats, bins: int = 12) -> str:
    """Draw a histogram of small numbers without axes, for a table cell.

    Args:
        values_N: finite values, float64 (N,).
        bins: largest number of bars; whole numbers from 0 to ``bins - 1`` get a bar each.
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
    """Fit the bold curves completely, and the faint ones without their outermost percent."""
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
            f"{STRETCHED_WIDTH * x_axis.part(float(a)):.1f},{_y(y_axis, float(b)):.1f}"
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


TIME_AXIS: Final = "time"
STEPS_AXIS: Final = "steps"
SAMPLES_AXIS: Final = "samples"
WAN_AXIS: Final = "wan"
AXES: Final = (TIME_AXIS, STEPS_AXIS, SAMPLES_AXIS, WAN_AXIS)
"""Available x axes; style.py has a rule for each."""

_LABELS = {
    TIME_AXIS: "time",
    STEPS_AXIS: "steps",
    SAMPLES_AXIS: "samples",
    WAN_AXIS: "bytes between regions",
}
_TEXTS = {
    TIME_AXIS: number_text,
    STEPS_AXIS: count_text,
    SAMPLES_AXIS: count_text,
    WAN_AXIS: bytes_text,
}


def switched(axes: Sequence[str], body: str) -> str:
    """Put a switch above sections, which selects the views over one axis.

    Args:
        axes: choices in this order; the first is the initial one.
        body: HTML of sections that contain every chart once for each of ``axes`` (`chart_view`).
    """
    choices = "".join(
        f'<input type="radio" name="axis" id="axis-{axis}" class="x-{axis}"'
        f"{' checked' if axis == axes[0] else ''}>"
        f'<label for="axis-{axis}">{_LABELS[axis]}</label>'
        for axis in axes
    )
    return f'<div class="views"><span class="over">Curves over</span>{choices}{body}</div>'


def chart_view(
    axis: str,
    title: str,
    curves: Sequence[Curve],
    *,
    whose: str = "",
    log: bool = False,
    at: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw curves over one of the axes of `switched`.

    Args:
        axis: one of `AXES`, the axis of the curves' x values.
        title: what y is.
        curves: as for `curves_chart`.
        whose: appended to the axis's name in the title, such as `` of the region``.
        log: as for `curves_chart`.
        at: as for `curves_chart`.
    """
    name = _LABELS[axis]
    chart = curves_chart(
        f"{title} over {name}",
        curves,
        x_label=name + whose,
        x_time=axis == TIME_AXIS,
        x_text=_TEXTS[axis],
        log=log,
        at=at,
    )
    return f'<div class="view x-{axis}">{chart}</div>'
