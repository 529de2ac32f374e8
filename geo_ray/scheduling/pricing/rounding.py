"""The factor before randomized rounding, and what it guarantees.

A solution of the relaxed programme is multiplied by G and each number rounded up with the chance of
its fraction. Below 1 the factor favours what must not be exceeded, above 1 what must be covered.
With ``W`` the least ratio of a right-hand side to an entry of its row, and rows ``m`` and ``r``:

    packing:  G = 1 + 3 ln(3 r / d) / (2 W) - sqrt((3 ln(3 r / d) / (2 W))^2 + 3 ln(3 r / d) / W)
    cover:    G = 1 + ln(3 m / d) / W + sqrt((ln(3 m / d) / W)^2 + 2 ln(3 m / d) / W)

Then each row of that kind is broken with a chance of at most ``d`` over three times their number,
and the cost is at most ``3 G / d`` times the relaxed one, with a chance above ``1 - d``. In small
clusters the factors are far from 1; tries around 1, and a repair, do better (docs/scheduling.md).

Source: derived anew from Chernoff bounds; the form of the first is that read in SMD.
"""

from __future__ import annotations

import math

import numpy as np

from geo_ray.scheduling.model.cluster import Floats


def packing_factor(rows: int, width: float, delta: float = 0.5) -> float:
    """Return the factor that keeps packing rows, in (0, 1]."""
    part = 3 * math.log(3 * rows / delta) / (2 * width)
    return 1 + part - math.sqrt(part * part + 2 * part)


def cover_factor(rows: int, width: float, delta: float = 0.5) -> float:
    """Return the factor that keeps cover rows, above 1."""
    part = math.log(3 * rows / delta) / width
    return 1 + part + math.sqrt(part * part + 2 * part)


def rounded(relaxed: Floats, factor: float, rng: np.random.Generator) -> np.ndarray:
    """Return whole numbers, each scaled value rounded up with the chance of its fraction."""
    scaled = relaxed * factor
    down = np.floor(scaled + 1e-9)
    return np.asarray((down + (rng.random(len(scaled)) < scaled - down)).astype(np.int64))
