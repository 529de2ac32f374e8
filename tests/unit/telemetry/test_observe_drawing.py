"""Axes, thinning, shares of time and the lanes of the timeline."""

from __future__ import annotations

import numpy as np
import pytest

from geo_ray.base.text import bytes_text
from geo_ray.telemetry.charts import (
    ALL,
    Curve,
    bars_chart,
    coverage,
    curves_chart,
    histogram,
    linear_axis,
    log_axis,
    smooth,
    thin,
    time_axis,
)
from geo_ray.telemetry.columns import RegionRecord
from geo_ray.telemetry.participation import lanes, timeline


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0.18, 2.41), (-5, 5), (1e-9, 2e-9), (0, 1e12), (3, 3), (0, 0), (7.1, 7.1001)],
)
def test_ticks_are_few_even_and_inside(low: float, high: float) -> None:
    axis = linear_axis(low, high)
    values = [value for value, _ in axis.ticks]
    assert 2 <= len(values) <= 8
    assert np.allclose(np.diff(values), values[1] - values[0])
    assert all(-1e-6 <= axis.part(value) <= 1 + 1e-6 for value in values)


def test_widened_axis_ends_at_ticks() -> None:
    axis = linear_axis(0.18, 2.41, widen=True)
    assert (axis.low, axis.high) == (axis.ticks[0][0], axis.ticks[-1][0]) == (0.0, 2.5)
    assert linear_axis(float("nan"), 1.0).high == 1.0


def test_log_axis_has_even_ratios() -> None:
    axis = log_axis(0.01, 100.0)
    assert axis.part(1.0) == pytest.approx(0.5)
    assert [text for _, text in axis.ticks] == ["0.01", "0.1", "1", "10", "100"]
    assert len(log_axis(1e-12, 1e12).ticks) <= 8
    assert 2 <= len(log_axis(0.2, 5.0).ticks) <= 8


@pytest.mark.parametrize(("high_s", "unit"), [(0.5, "ms"), (90, "s"), (900, "min"), (90_000, "h")])
def test_time_is_labelled_in_a_fitting_unit(high_s: float, unit: str) -> None:
    axis, found = time_axis(0.0, high_s)
    assert found == unit
    assert axis.high == pytest.approx(high_s)
    assert axis.ticks[-1][0] <= high_s * 1.001


def test_thin_keeps_ends_and_extremes() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 900)
    y[5_000], y[50_001], y[77] = 40.0, -30.0, np.nan
    x_thin, y_thin = thin(x, y)
    assert len(x_thin) <= 1000
    assert (x_thin[0], x_thin[-1]) == (0.0, 99_999.0)
    assert np.all(np.diff(x_thin) > 0)
    assert (y_thin.max(), y_thin.min()) == (40.0, -30.0)
    assert np.array_equal(y_thin, y[x_thin.astype(int)])


def test_smooth_is_the_mean_of_what_is_finite() -> None:
    y = np.ones(200)
    y[50] = np.nan
    assert np.array_equal(smooth(y), np.ones(200))
    ramp = np.arange(200.0)
    assert np.allclose(smooth(ramp)[10:-10], ramp[10:-10])
    few = np.arange(10.0)
    assert np.array_equal(smooth(few), few)
    assert np.isnan(smooth(np.full(100, np.nan))).all()


def test_smooth_takes_no_points_from_across_a_break() -> None:
    y = np.concatenate([np.full(100, 2.0), np.full(100, 7.0)])
    assert np.allclose(smooth(y, breaks=[100]), y)
    assert not np.allclose(smooth(y), y)
    ramp = np.arange(200.0)
    halves = smooth(ramp, breaks=[100])
    assert halves[99] == pytest.approx(ramp[95:100].mean())
    assert halves[100] == pytest.approx(ramp[100:105].mean())
    assert np.array_equal(smooth(ramp, breaks=[100, 100]), halves)  # two returns before one step


def test_coverage_is_the_part_of_each_bin() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    start, end = np.array([0.5, 2.0]), np.array([1.25, 3.0])
    assert np.allclose(coverage(start, end, edges), [0.5, 0.25, 1.0])
    twice = coverage(np.repeat(start, 2), np.repeat(end, 2), edges)
    assert np.allclose(twice, [1.0, 0.5, 1.0])
    assert np.allclose(coverage(np.zeros(0), np.zeros(0), edges), 0.0)


def region(*steps: tuple[float, float, float, float]) -> RegionRecord:
    made = RegionRecord()
    for number, (t_s, start_s, compute_s, wait_s) in enumerate(steps, start=1):
        made.steps.add(t_s, number, 32, 1.0, start_s, compute_s, wait_s)
    return made


def test_wait_lies_after_compute_or_else_before_it() -> None:
    # The first waits before it is applied; the second has waited before it began.
    kinds = lanes({"east": region((3.0, 1.0, 1.0, 1.0), (6.0, 5.0, 1.0, 2.0))})["east"]
    assert kinds["compute"].start.tolist() == [1.0, 5.0]
    assert kinds["compute"].end.tolist() == [2.0, 6.0]
    assert kinds["wait"].start.tolist() == [2.0, 3.0]
    assert kinds["wait"].end.tolist() == [3.0, 5.0]


def test_wait_never_covers_the_compute_before_it() -> None:
    kinds = lanes({"east": region((2.0, 1.0, 1.0, 0.0), (4.0, 3.0, 1.0, 9.0))})["east"]
    assert (kinds["wait"].start.tolist(), kinds["wait"].end.tolist()) == ([2.0], [3.0])


def test_timeline_of_nothing_and_of_one_step() -> None:
    assert "no data recorded" in timeline({})
    assert "no data recorded" in timeline(lanes({"east": RegionRecord()}))
    drawn = timeline(lanes({"east": region((2.0, 1.0, 1.0, 0.0)), "west": RegionRecord()}))
    assert drawn.count("<figure") == 1
    assert "compute 1.0 s" in drawn


def test_standing_steps_are_those_not_done_again() -> None:
    made = RegionRecord()
    for number in (1, 2, 3, 4, 3, 4, 5):
        made.steps.add(0.0, number, 32, 1.0, 0.0, 1.0, 0.0)
    assert made.standing().tolist() == [0, 1, 4, 5, 6]
    assert RegionRecord().standing().tolist() == []


def test_faint_outliers_do_not_squeeze_the_bold_curve() -> None:
    x = np.arange(1000.0)
    raw = np.ones(1000)
    raw[3] = 1e6
    chart = curves_chart(
        "loss",
        [Curve("", x, raw, 0, faint=True), Curve("east", x, np.linspace(1, 2, 1000), 0)],
        x_label="step",
    )
    assert ">2<" in chart
    assert "1,000,000" not in chart


def test_charts_of_odd_values() -> None:
    none = np.zeros(0)
    assert "no data recorded" in curves_chart("t", [Curve("a", none, none, 0)], x_label="x")
    one = np.array([5.0])
    assert "<circle" in curves_chart("t", [Curve("a", one, one, ALL)], x_label="x")
    span = np.array([1e-3, 10.0])
    assert ">0.01<" in curves_chart("t", [Curve("a", span, span, 9)], x_label="x", log=True)
    assert "no data recorded" in bars_chart("t", {}, bytes_text)
    assert "0 B" in bars_chart("t", {"x": 0.0}, bytes_text)
    assert histogram(none) == ""
    assert histogram(np.array([0.0, 0.0, 2.0])).count("<rect") == 3
    assert histogram(np.array([0.5, 70.0])).count("<rect") == 12
