"""Curves over one of several x axes, switched on the page without a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from geo_ray.observe.report.charts import Curve, curves_chart
from geo_ray.observe.text import bytes_text, count_text, number_text

TIME: Final = "time"
STEPS: Final = "steps"
SAMPLES: Final = "samples"
WAN: Final = "wan"
AXES: Final = (TIME, STEPS, SAMPLES, WAN)
"""What curves may be drawn over; style.py has a rule for each."""

_LABELS = {TIME: "time", STEPS: "steps", SAMPLES: "samples", WAN: "bytes between regions"}
_TEXTS = {TIME: number_text, STEPS: count_text, SAMPLES: count_text, WAN: bytes_text}


def switched(axes: Sequence[str], body: str) -> str:
    """Put a switch above sections, which shows of their views those over the chosen axis.

    Args:
        axes: what can be chosen, in this order; the first is chosen at first.
        body: HTML of sections with every `view` once for each of ``axes``.
    """
    choices = "".join(
        f'<input type="radio" name="axis" id="axis-{axis}" class="x-{axis}"'
        f"{' checked' if axis == axes[0] else ''}>"
        f'<label for="axis-{axis}">{_LABELS[axis]}</label>'
        for axis in axes
    )
    return f'<div class="views"><span class="over">Curves over</span>{choices}{body}</div>'


def view(
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
        axis: one of `AXES`, which the curves' x is of.
        title: what y is.
        curves: as for `curves_chart`.
        whose: behind the axis's name, such as `` of the region``.
        log: as for `curves_chart`.
        at: as for `curves_chart`.
    """
    name = _LABELS[axis]
    chart = curves_chart(
        f"{title} over {name}",
        curves,
        x_label=name + whose,
        x_time=axis == TIME,
        x_text=_TEXTS[axis],
        log=log,
        at=at,
    )
    return f'<div class="view x-{axis}">{chart}</div>'
