"""Curves made fit for drawing: smoothed, thinned; pure functions on float64 arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAX_POINTS = 1000


def smooth(y_N: Floats, share: float = 0.03, breaks: Sequence[int] = ()) -> Floats:
    """Give the centred moving mean over ``share`` of the points, values that are NaN left out.

    The window has at least 9 points, fewer at the ends of the curve and beside a break; fewer than
    60 points are left as they are.

    Args:
        y_N: values, float64 (N,).
        share: width of the window as a part of N.
        breaks: the first points after gaps, rising; no window has points of both sides.

    Returns:
        float64 (N,); NaN where the whole window is.
    """
    if len(y_N) < 60:
        return y_N.copy()
    half = max(4, int(len(y_N) * share / 2))
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
    """Give at most ``max_points`` of the points, keeping the extremes of each stretch.

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
    """Give of all points at one place the last, float64 (M,) each.

    Args:
        x_N: places in rising order, several points at some, float64 (N,).
        y_N: values, float64 (N,).
    """
    last_N = np.append(np.diff(x_N) > 0, True)[: len(x_N)]
    return x_N[last_N], y_N[last_N]


def bytes_at(wan_s_N: Floats, wan_bytes_N: Floats, t_s_M: Floats) -> Floats:
    """Give the bytes that have crossed between regions by some times; float64 (M,).

    The one source of every number of bytes over time: the counts of `wan` events, which are of what
    really left a region. Between two counts bytes are taken to have been sent evenly.

    Args:
        wan_s_N: when they were counted, rising, float64 (N,); several may be at one time.
        wan_bytes_N: those of all links by then, float64 (N,).
        t_s_M: the times, float64 (M,).
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
