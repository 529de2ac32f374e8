"""What the averager knows of how fast and how large each region is, from the updates themselves.

Everything lies in `AveragerState.numbers` under names that go with the region.
"""

from __future__ import annotations

import math
from typing import Final

from geo_ray.strategies.base import AveragerState, Update

_ROUNDING: Final = 1e-9  # of a whole number of steps that just fits


def note(averager: AveragerState, update: Update) -> None:
    """Remember an update's measurements."""
    averager.numbers[f"step_s/{update.region}"] = update.step_s
    if update.num_samples:
        averager.numbers[f"rows/{update.region}"] = float(update.num_samples)


def relative_rows(averager: AveragerState, region: str) -> float:
    """Rows behind an update of ``region`` over the mean of all regions; 1 if not known."""
    rows = [averager.numbers[k] for k in averager.numbers if k.startswith("rows/")]
    own = averager.numbers.get(f"rows/{region}")
    return 1.0 if own is None else own * len(rows) / sum(rows)


def steps_by_speed(averager: AveragerState, region: str, steps: int) -> int:
    """Local steps of ``region`` while the fastest takes ``steps``: in proportion, at least 1."""
    known_s = {k: v for k, v in averager.numbers.items() if k.startswith("step_s/") and v > 0}
    own_s = known_s.get(f"step_s/{region}")
    if own_s is None:
        return steps
    return max(1, math.floor(steps * min(known_s.values()) / own_s + _ROUNDING))
