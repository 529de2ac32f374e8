"""The committed plots hold the numbers of the records; pages show them with their conditions."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import plots

SVG = "{http://www.w3.org/2000/svg}"
CHARTS = {chart.name: chart for chart in plots.charts()}
TOPICS = (
    *("training", "strategies", "codecs", "transport"),
    *("planning", "recovery", "autoscaling", "scheduling"),
)


def lengths(path: Path) -> dict[str, float]:
    """Length of each bar in points, by id."""
    found = {}
    for group in ElementTree.parse(path).iter(f"{SVG}g"):
        name = group.get("id", "")
        if re.fullmatch(r"bar-\d+-\d+", name):
            (shape,) = group.iter(f"{SVG}path")
            numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", shape.get("d", ""))]
            found[name] = max(numbers[::2]) - min(numbers[::2])
    return found


def labels(path: Path) -> dict[str, str]:
    """Text of each bar's label, by id."""
    return {
        group.get("id", ""): "".join(group.itertext()).strip()
        for group in ElementTree.parse(path).iter(f"{SVG}g")
        if re.fullmatch(r"label-\d+-\d+", group.get("id", ""))
    }


def recorded(bar: plots.Bar) -> float:
    """The number of a bar, read from the record without the code under test."""
    content = json.loads((plots.ARCHIVE / f"{bar.record}.json").read_text("utf-8"))
    (figure,) = [figure for figure in content["figures"] if figure["name"] == bar.figure]
    return float(figure["value"] if bar.run is None else figure["runs"][bar.run])


def test_all_charts_are_committed_and_no_other_file() -> None:
    assert {path.name for path in plots.PLOTS.iterdir()} == {f"{name}.svg" for name in CHARTS}
    assert {name.split("-")[0] for name in CHARTS} == set(TOPICS)


@pytest.mark.parametrize("name", CHARTS)
def test_committed_bars_are_those_of_the_record(name: str) -> None:
    chart, path = CHARTS[name], plots.PLOTS / f"{name}.svg"
    numbers = {f"{row}-{series}": recorded(bar) * chart.scale for row, series, bar in chart.bars()}
    assert labels(path) == {
        f"label-{key}": f"{number:.{chart.digits}f}" for key, number in numbers.items()
    }
    drawn = lengths(path)
    assert drawn.keys() == {f"bar-{key}" for key in numbers}
    unit = statistics.median(drawn[f"bar-{key}"] / number for key, number in numbers.items())
    for key, number in numbers.items():
        assert drawn[f"bar-{key}"] == pytest.approx(number * unit, abs=0.01)


@pytest.mark.parametrize("name", CHARTS)
def test_committed_plot_is_the_one_that_the_code_draws(name: str, tmp_path: Path) -> None:
    drawn, committed = plots.draw(CHARTS[name], tmp_path), plots.PLOTS / f"{name}.svg"
    assert labels(drawn) == labels(committed)
    assert lengths(drawn) == pytest.approx(lengths(committed), abs=0.5)
    text = committed.read_text("utf-8")
    assert len(text) < 60_000
    assert "<dc:date>" not in text
    assert drawn.read_text("utf-8") == plots.draw(CHARTS[name], tmp_path).read_text("utf-8")


def test_a_chart_shows_no_number_that_a_record_lacks() -> None:
    with pytest.raises(KeyError):
        plots.Bar("2026-11-21-2-core-xeon/peers", "torchft_over_nothing").value()


@pytest.mark.parametrize("name", CHARTS)
def test_page_shows_the_plot_with_its_conditions(name: str) -> None:
    page = plots.PLOTS.parent / f"{name.split('-')[0]}.md"
    text = page.read_text("utf-8")
    (shown,) = re.finditer(rf"!\[([^\]]+)\]\(plots/{name}\.svg\)\n\n(\*.+?\*)\n\n", text, re.DOTALL)
    alt, caption = (" ".join(part.split()) for part in shown.groups())
    assert len(alt) > 40
    records = {bar.record for _, _, bar in CHARTS[name].bars()}
    for record in records:
        content = json.loads((plots.ARCHIVE / f"{record}.json").read_text("utf-8"))
        assert f"(archive/{record}.json)" in caption
        assert re.search(rf"python -m benchmarks\.\w+\.{content['benchmark']}\b", caption)
        assert ("EPYC" if "EPYC" in content["hardware"]["cpu"] else "Xeon") in caption
    for day in {int(record[8:10]) for record in records}:
        assert re.search(rf"\b{day}\b[^.]*November 2026", caption)


def test_archive_index_lists_every_dated_page_newest_first() -> None:
    text = (plots.ARCHIVE / "index.md").read_text("utf-8")
    listed = re.findall(
        r"^\| (\d+) November 2026 \| \[[^\]]+\]\(([\w-]+\.md)\)", text, re.MULTILINE
    )
    pages = {path.name for path in plots.ARCHIVE.glob("*.md")} - {"index.md"}
    assert sorted(name for _, name in listed) == sorted(pages)
    assert all(name.startswith(f"2026-11-{day}") for day, name in listed)
    days = [int(day) for day, _ in listed]
    assert days == sorted(days, reverse=True)
