"""The frame of a drawing as inline SVG: axes, lines across, and letters of one size everywhere.

What scales with its figure scales its letters, too, so a frame has no viewBox: places along x are
percentages of the drawing, places along y and all letters are in pixels of the page. Only what
shall be stretched lies in an SVG of its own that is (`stretched`).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from geo_ray.observe.report.axis import Axis, text_px

SPAN = 1000  # width of what is stretched, in its own unit
_EDGE_PX = 14  # right of the drawing: room for half a mark


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
        title: for those who cannot see it.
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
        at: (value, what is there); those outside of the axis are left out.
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
        body: SVG, `SPAN` wide.
        height: of the frame; pixels.
        cut: leave out what lies outside.
    """
    kind = "cut" if cut else "whole"
    return (
        f'<svg class="{kind}" viewBox="0 0 {SPAN} {height}" preserveAspectRatio="none" '
        f'width="100%" height="{height}">{body}</svg>'
    )


def _line(kind: str, x1: str, x2: str, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1}" x2="{x2}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _plain(text: str) -> str:
    return text.split("<")[0]
