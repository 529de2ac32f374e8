"""Tables on narrow terminals: numbers are never cut, columns are left out and named."""

from __future__ import annotations

import io

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

from geo_ray.base.clock import VirtualClock
from geo_ray.base.tables import FittedTable
from geo_ray.telemetry.progress import Progress
from tests.support.observe_support import Row, events, started, step, wan

NUMBERS = ["1,234,567", "89.12", "3:07:09"]


def shown(table: FittedTable, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(table)
    return console.export_text().splitlines()


def table(**options: object) -> FittedTable:
    found = FittedTable(box=SIMPLE_HEAD, **options)
    found.add_column("region", no_wrap=True)
    for heading in ("samples", "loss", "time"):
        found.add_column(heading, justify="right")
    found.add_column("")
    found.add_row("eu-central-frankfurt-2", *NUMBERS, "a remark of several words")
    return found


@pytest.mark.parametrize("width", range(20, 100))
def test_a_number_is_whole_or_its_column_is_left_out_and_named(width: int) -> None:
    lines = shown(table(leave_out=("loss",)), width)
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    left_out = text.partition("columns not shown:")[2]
    for heading, number in zip(("samples", "loss", "time"), NUMBERS, strict=True):
        assert (number in text) != (heading in left_out)
    if width >= 95:
        assert "eu-central-frankfurt-2" in text and "a remark of several words" in text
    if "samples" in left_out or "time" in left_out:
        assert "loss" in left_out, "what is named first is left out first"


def test_the_live_table_of_a_large_run_fits_80_columns() -> None:
    regions = ["eu-central-frankfurt", "us-west-oregon-2"]
    console = Console(file=io.StringIO(), width=80, record=True)
    progress = Progress(120_000, regions, console, plain=True, clock=VirtualClock())
    rows: list[Row] = [started(regions=regions)]
    for n in range(1, 40):
        rows += [step(name, 99_000 + n, float(n), samples=123_456, loss=1234.5) for name in regions]
        rows.append(wan(*regions, n + 0.3, update=10**9 * n))
    rows.append(("worker_lost", 39.5, {"region": regions[0], "worker": 1, "cause": "signal 9"}))
    for event in events(rows):
        progress.feed(event)
    console.export_text()
    console.print(progress.render())
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    for number in ("99039/120000", "1,234", "123,456", "computing 1 fault"):
        assert number in lines[1], lines[1]


@pytest.mark.parametrize("width", [40, 200])
def test_no_text_of_a_table_controls_the_terminal(width: int) -> None:
    evil = "\x1b]0;owned\x07\x9b31m"
    found = FittedTable(title=f"t{evil}", caption=f"c{evil}", box=SIMPLE_HEAD)
    found.add_column(f"h{evil}", overflow="fold")
    found.add_column("other", justify="right")
    found.add_row(Text(f"a{evil}", "bold"), "12")
    file = io.StringIO()
    Console(file=file, width=width).print(found)
    text = file.getvalue()
    assert not set("\x1b\x07\x9b") & set(text)
    if width > 40:
        escaped = r"\x1b]0;owned\x07\x9b31m"
        assert all(f"{letter}{escaped}" in text for letter in "tch"), text
        assert r"a\x1b]0;owned\x9b31m" in text, "a Text drops the bell by itself"
    assert found.columns[0].header == f"h{evil}", "the table itself is as it was made"


def test_markup_in_the_texts_of_a_table_means_nothing() -> None:
    odd = "[red]x[/red][/no] :warning:"
    found = FittedTable(f"h{odd}", title=f"t{odd}", caption=f"c{odd}", box=SIMPLE_HEAD)
    found.add_row(f"a{odd}")
    text = "\n".join(shown(found, 200))
    assert all(f"{letter}{odd}" in text for letter in "tcha"), text


def test_a_colored_cell_keeps_its_color() -> None:
    found = FittedTable("state", box=SIMPLE_HEAD)
    found.add_row(Text("bad", "red"))
    file = io.StringIO()
    Console(file=file, width=80, force_terminal=True, color_system="standard").print(found)
    assert "\x1b[31mbad" in file.getvalue()
