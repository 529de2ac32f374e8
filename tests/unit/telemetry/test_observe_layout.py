"""The layout of pages: letters of one size, nothing cut off or on top of other things."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from geo_ray.base.text import bytes_text, count_text
from geo_ray.telemetry.charts import ALL, AXES, Curve, curves_chart, linear_axis, log_axis
from geo_ray.telemetry.html_page import STYLE, write_plan_page
from geo_ray.telemetry.report import render_report
from tests.support.observe_support import (
    Row,
    evaluation,
    exchange,
    small_run,
    started,
    step,
    wan,
    write,
)

ABOVE_PX, BELOW_PX = 10, 42  # margins of a plot in the style
LETTER_PX = 7  # about as wide as a digit of 12 px
NARROW_PX = 420  # of a figure on a narrow page; two beside each other have more
WIDTHS = [NARROW_PX, 586, 1200]
REGIONS = [f"region-{number:03d}" for number in range(100)]


def drawings(page: str) -> list[ElementTree.Element]:
    """The figures of a page that have a plot."""
    found = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    figures = [ElementTree.fromstring(figure) for figure in found]
    return [figure for figure in figures if figure.find(".//svg[@class='plot']") is not None]


def place(text: str, inner_px: float) -> float:
    return inner_px * float(text[:-1]) / 100 if text.endswith("%") else float(text)


def check(figure: ElementTree.Element, width_px: float) -> None:
    """That everything lies in the figure and texts do not touch, at this inner width."""
    plot = figure.find(".//svg[@class='plot']")
    assert plot is not None and "viewBox" not in plot.attrib
    match = re.fullmatch(
        r"height:(\d+)px;width:calc\(100% - (\d+)px\);margin-left:(\d+)px", plot.attrib["style"]
    )
    assert match is not None
    height, margins, left = map(int, match.groups())
    inner = width_px - margins
    assert inner > 200
    boxes: list[tuple[float, float, float]] = []
    for text in plot.iter("text"):
        assert not {"font-size", "style", "transform"} & set(text.attrib)
        width = LETTER_PX * len(text.text or "")
        x, y = place(text.attrib["x"], inner), float(text.attrib["y"])
        begin = x - {"end": 1.0, "middle": 0.5}[text.attrib["text-anchor"]] * width
        assert begin >= -left and begin + width <= inner + margins - left, text.text
        assert -ABOVE_PX + 8 <= y <= height + BELOW_PX, text.text
        for other_begin, other_end, other_y in boxes:
            apart = abs(y - other_y) >= 12 or begin >= other_end or begin + width <= other_begin
            assert apart, text.text
        boxes.append((begin, begin + width, y))
    for circle in plot.iter("circle"):
        assert 0 <= place(circle.attrib["cx"], 100) <= 100
        assert 0 <= float(circle.attrib["cy"]) <= height
    for inside in plot.findall("svg"):
        assert inside.attrib["viewBox"] == f"0 0 1000 {height}"
        assert inside.attrib["preserveAspectRatio"] == "none" and not list(inside.iter("text"))
        for line in inside.iter("polyline") if inside.attrib["class"] == "whole" else ():
            points = np.array([p.split(",") for p in line.attrib["points"].split()], dtype=float)
            assert np.isfinite(points).all() and points.min() >= 0
            assert points[:, 0].max() <= 1000 and points[:, 1].max() <= height


def curve(*values: float, x: np.ndarray | None = None) -> Curve:
    y = np.array(values)
    return Curve("a curve", np.arange(1.0, len(y) + 1) if x is None else x, y, 0)


CURVES = {
    "two points": [curve(1.0, 2.0)],
    "one point": [curve(0.5)],
    "one point at 0": [curve(3.0, x=np.zeros(1))],
    "constant": [curve(*[1e6] * 40)],
    "zero": [curve(0.0, 0.0)],
    "with gaps": [curve(np.nan, 1.0, np.inf, 2.0, -np.inf)],
    "as large as can be": [curve(1.7e308, -1.7e308, 1.7e308)],
    "as small as can be": [curve(5e-324, 0.0, 1e-310)],
    "large and small": [curve(1e-305, 1e300, 1e-3)],
    "close together": [curve(*(1e6 + 1e-3 * np.arange(9)))],
    "all regions": [curve(*(np.arange(30) / (n + 1))) for n in range(100)],
}


@pytest.mark.parametrize("width_px", WIDTHS)
@pytest.mark.parametrize("kind", CURVES)
@pytest.mark.parametrize("log", [False, True])
def test_charts_of_odd_values_are_whole(kind: str, width_px: float, log: bool) -> None:
    for x_time in (False, True):
        chart = curves_chart("t", CURVES[kind], x_label="x", x_time=x_time, log=log)
        (drawn,) = drawings(chart)
        check(drawn, width_px)
        assert list(drawn.iter("circle")) or list(drawn.iter("polyline"))


@pytest.mark.parametrize("most", [7, 1_250, 9_999, 48_000, 2_500_000, 3e9])
def test_long_numbers_below_a_chart_do_not_touch(most: float) -> None:
    line = curve(1.0, 2.0, x=np.array([1.0, most]))
    for text in (count_text, bytes_text, str):
        (drawn,) = drawings(curves_chart("t", [line], x_label="x", x_text=text))
        for width_px in WIDTHS:
            check(drawn, width_px)


def test_the_last_point_is_at_the_edge_and_drawn_whole() -> None:
    (drawn,) = drawings(curves_chart("t", [curve(1.0, 2.0, 4.0)], x_label="x"))
    assert [circle.attrib["cx"] for circle in drawn.iter("circle")][-1] == "100.00%"
    assert "svg.plot { display: block; overflow: visible;" in STYLE
    assert "svg.whole { overflow: visible; }" in STYLE


def test_letters_and_lines_have_one_size_however_wide_the_chart() -> None:
    """Nothing scales with a figure but what is stretched, and its lines do not."""
    assert re.search(r"^svg text \{[^}]*font-size: 12px", STYLE, re.MULTILINE)
    assert re.search(r"polyline, [^{]*\{[^}]*vector-effect: non-scaling-stroke", STYLE)
    assert not re.search(r"figure\s*>\s*svg[^{]*\{[^}]*width: 100%", STYLE)


def test_ticks_that_would_read_alike_get_more_digits() -> None:
    for low, high in [(1e6, 1e6 + 0.01), (7.1, 7.1001), (1e12, 1e12 + 5), (0.0, 1.0)]:
        texts = [text for _, text in linear_axis(low, high).ticks]
        assert len(set(texts)) == len(texts) >= 2
    assert log_axis(1e-310, 1.7e308).part(1.0) == pytest.approx(0.5)


def many_regions() -> list[Row]:
    rows = [started(regions=REGIONS)]
    for number in range(1, 12):
        rows += [step(name, number, number + 0.1) for name in REGIONS]
        rows += [exchange(name, number, number + 0.5) for name in REGIONS]
        rows += [wan(name, REGIONS[0], number + 0.5, update=10**6 * number) for name in REGIONS]
        rows += [evaluation(number, number + 0.6, name, accuracy=0.5) for name in REGIONS]
        rows.append(evaluation(number, number + 0.6, accuracy=0.5))
    rows += [wan(a, b, 13.0, update=1 + n) for n, a in enumerate(REGIONS) for b in REGIONS[:9]]
    return rows


def unusual() -> list[Row]:
    nan, big = float("nan"), 1.7e308
    rows = [started(regions=["nan", "huge", "constant", "one step", "a-region-with-a-long-name"])]
    rows.append(step("one step", 1, 1.0))
    for n in range(1, 90):
        rows += [step("nan", n, n / 1, loss=nan), step("huge", n, n / 1, loss=big * (-1) ** n)]
        rows += [step("constant", n, n / 1, loss=7.0)]
        rows += [evaluation(n, n / 1, close=1e6 + n * 1e-4, never=nan, tiny=5e-324 * n)]
    return rows


PAGES = {"small": small_run(40), "long": small_run(900), "many": many_regions(), "odd": unusual()}


@pytest.mark.parametrize("kind", PAGES)
def test_whole_pages_keep_everything_in_its_place(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "events.jsonl", PAGES[kind])
    page = render_report(tmp_path)
    figures = drawings(page)
    assert len(figures) >= 7
    for figure in figures:
        for width_px in WIDTHS[1:]:
            check(figure, width_px)


def test_a_page_of_a_hundred_regions_stays_small(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", many_regions())
    page = render_report(tmp_path)
    assert len(page) < 2e6
    assert "and 88 more regions" in page and "The 200 busiest of" in page
    assert 'class="scroll tall wide"' in page and ".tall { max-height" in STYLE


def test_a_plan_page_is_whole(tmp_path: Path) -> None:
    points = [(10.0, 5.0, "eu: 2 x a", "fast"), (40.0, 2.0, "eu: 1 x a", "cheap")]
    (figure,) = drawings(write_plan_page("x", points, (40.0, 2.0), tmp_path / "p").read_text())
    check(figure, NARROW_PX)


def test_every_table_scrolls_in_its_own_box(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", small_run(40))
    page = render_report(tmp_path)
    tables = page.count("<table>")
    assert tables >= 3 and len(re.findall(r'<div class="scroll[^"]*"><table>', page)) == tables
    rule = re.search(r"^\.scroll \{([^}]*)\}", STYLE, re.MULTILINE)
    assert rule is not None and "overflow-x: auto" in rule[1] and "max-width: 100%" in rule[1]


def test_every_axis_has_one_chart_of_each_metric_and_a_rule_that_shows_it(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", small_run(40))
    page = render_report(tmp_path)
    views = re.findall(r'<div class="view x-(\w+)"><figure><figcaption>([-\w ]+) over', page)
    assert sorted(views) == sorted((axis, metric) for metric in CHARTS.values() for axis in AXES)
    inputs = re.findall(
        r'<input type="radio" name="axis" id="axis-(\w+)" class="x-(\w+)"(.*?)>', page
    )
    assert [name for name, _, _ in inputs] == list(AXES)
    assert [rest for _, _, rest in inputs] == [" checked", "", "", ""]
    assert ".view { display: none; }" in STYLE
    for axis in AXES:
        assert f".x-{axis}:checked ~ section .view.x-{axis}" in STYLE
        assert f'<label for="axis-{axis}">' in page


CHARTS = {
    "loss": "training loss",
    "accuracy": "held-out accuracy",
    "evaluated loss": "held-out loss",
}


def points_of(page: str, axis: str, metric: str) -> list[float]:
    """Where the first curve's points lie, as parts of the axis."""
    view = re.search(
        rf'<div class="view x-{axis}"><figure><figcaption>{CHARTS[metric]} over.*?</figure>', page
    )
    assert view is not None
    line = re.search(r'points="([^"]*)"', view[0])
    assert line is not None
    return [float(point.split(",")[0]) / 1000 for point in line[1].split()]


def test_curves_lie_where_time_steps_samples_and_bytes_say(tmp_path: Path) -> None:
    rows = [started()]
    for n, t_s in enumerate([1.0, 2.0, 10.0], start=1):
        rows += [step("east", n, t_s, samples=10 * n), step("west", n, t_s, samples=10 * n)]
        rows.append(evaluation(n, t_s, accuracy=n / 10))
        rows += [wan("east", "west", t_s, update=100 * n * n), wan("west", "east", t_s, reply=0)]
    write(tmp_path / "events.jsonl", rows)
    page = render_report(tmp_path)
    ends = {"time": [0.1, 0.2, 1.0], "steps": [1 / 3, 2 / 3, 1.0], "samples": [1 / 6, 0.5, 1.0]}
    ends["wan"] = [1 / 9, 4 / 9, 1.0]
    for axis, parts in ends.items():
        for metric in ("loss", "accuracy"):
            assert points_of(page, axis, metric) == pytest.approx(parts, abs=1e-4), (axis, metric)


def test_work_that_was_done_again_counts_once_over_steps_and_samples(tmp_path: Path) -> None:
    rows = [started(), step("east", 1, 1.0), step("east", 2, 2.0), evaluation(2, 2.0, accuracy=0.1)]
    rows += [started(), step("east", 2, 3.0), evaluation(2, 3.0, accuracy=0.2)]
    rows += [step("east", 3, 4.0), evaluation(3, 4.0, accuracy=0.3)]
    write(tmp_path / "events.jsonl", rows)
    page = render_report(tmp_path)
    assert points_of(page, "time", "accuracy") == pytest.approx([0.5, 0.75, 1.0])
    assert points_of(page, "steps", "loss") == pytest.approx([1 / 3, 2 / 3, 1.0], abs=1e-4)
    for axis in ("steps", "samples"):
        assert points_of(page, axis, "accuracy") == pytest.approx([2 / 3, 1.0], abs=1e-4)


def test_without_bytes_between_regions_there_is_no_such_axis(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", [started(), step("east", 1, 1.0), step("east", 2, 2.0)])
    page = render_report(tmp_path)
    assert 'id="axis-steps"' in page and 'id="axis-wan"' not in page


def test_what_stands_for_all_is_named_first() -> None:
    x = np.arange(3.0)
    chart = curves_chart("t", [Curve("east", x, x, 0), Curve("all", x, x, ALL)], x_label="x")
    assert re.findall(r"</svg>(\w+) 2</li>", chart) == ["all", "east"]
