"""Axes of charts: where the ticks lie and what is written at them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from geo_ray.observe.text import number_text

LIMIT = 1e300  # beyond it, and below its inverse, differences and ratios are no finite floats
_LETTER_PX = 7.7  # widest usual digit of the page's letters at their size, 12 px


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values on a line of pixels.

    Attributes:
        low: value at its begin.
        high: value at its end; above ``low``.
        ticks: (value, text) in rising order.
        log: whether distances are ratios.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def part(self, value: float) -> float:
        """Give where ``value`` lies, 0 at the begin and 1 at the end."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(max(value, 1 / LIMIT)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def fitted(self, width_px: float) -> Axis:
        """Give the axis with as few ticks as have room for their texts side by side.

        Args:
            width_px: length of the axis.
        """
        widest_px = max((text_px(text) for _, text in self.ticks), default=0.0) + 12
        stride = 1
        while len(self.ticks[::stride]) > max(2.0, width_px / widest_px):
            stride += 1
        return replace(self, ticks=self.ticks[::stride])


def text_px(text: str) -> float:
    """Give about how wide ``text`` is on the page, in pixels; rather too wide."""
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
        text: what to write at a tick.
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
    low, high = max(low, 1 / LIMIT), min(high, LIMIT)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    stride = max(1, (last - first) // 6)
    values = [digit * 10.0**power for power in range(first, last + 1, stride) for digit in digits]
    kept = [value for value in values if low * 0.999 <= value <= high * 1.001]
    return Axis(low, high, tuple((value, number_text(value)) for value in kept), log=True)


def time_axis(low_s: float, high_s: float, count: int = 6) -> tuple[Axis, str]:
    """Make an axis of seconds and give the unit that it is labelled in: ms, s, min or h."""
    units = (("ms", 1e-3, 2.0), ("s", 1.0, 180.0), ("min", 60.0, 10800.0), ("h", 3600.0, math.inf))
    unit, unit_s = next((name, size) for name, size, upto in units if high_s - low_s < upto)
    scaled = linear_axis(low_s / unit_s, high_s / unit_s, count)
    ticks = tuple((value * unit_s, text) for value, text in scaled.ticks)
    return Axis(scaled.low * unit_s, scaled.high * unit_s, ticks), unit


def _drawable(value: float) -> float:
    return 0.0 if abs(value) < 1 / LIMIT else min(max(value, -LIMIT), LIMIT)


def _distinct(values: Sequence[float], text: Callable[[float], str]) -> list[str]:
    """Give the texts of even ticks; with more digits if two would read the same."""
    texts = [text(value) for value in values]
    if len(set(texts)) == len(texts):
        return texts
    largest = max(abs(value) for value in values)
    digits = math.ceil(math.log10(largest / (values[1] - values[0]))) + 2
    return [f"{value:.{min(17, digits)}g}" for value in values]


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in (1, 2, 2.5, 5, 10) if power * digit >= rough * 0.999)
