"""The report page: well-formed, self-contained, escaped, and true to the events."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.base.errors import RunDirectoryError
from geo_ray.cli.report import report
from geo_ray.telemetry.columns import record
from geo_ray.telemetry.event_log import read_events
from geo_ray.telemetry.report import render_report, write_report
from geo_ray.telemetry.status import RunNow
from geo_ray.telemetry.summary import save_summary, summarise
from tests.support.observe_support import (
    Row,
    evaluation,
    events,
    exchange,
    noise,
    small_run,
    started,
    step,
    wan,
    write,
)

VOID = {"meta", "br", "input", "wbr"}


class Page(HTMLParser):
    """Checks nesting and collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.values: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def page_of(tmp_path: Path, rows: list[Row]) -> Page:
    write(tmp_path / "events.jsonl", rows)
    return Page(render_report(tmp_path))


def test_a_whole_run(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", small_run(40))
    summary = summarise(read_events(path), startup_s=2.0, digest="d1ge57", usd=1.25)
    save_summary(summary, tmp_path)
    with path.open("a") as file:
        file.write('{"t_s":41,"kind":"run_finished","summary":{}}\n')
    (tmp_path / "config.lock.yaml").write_text("task: <digits> & more\n")
    page = Page(render_report(tmp_path))
    for text in ("finished", "trial", "diloco", "d1ge57", "1.25 USD", "task: <digits> & more"):
        assert text in page.text
    assert "cut off" not in page.text
    for heading in ("Training loss", "Evaluation", "Timeline", "Exchanges", "Faults and repairs"):
        assert heading in page.text
    assert {"polyline", "rect", "details"} <= set(page.tags)


def test_nothing_is_loaded_or_run(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", small_run())
    text = render_report(tmp_path)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "image", "use", "a"} & set(page.tags)
    assert not re.search(r"https?:|url\(|@import|\son\w+=", text)
    assert "default-src 'none'; style-src 'unsafe-inline'" in page.values


def test_everything_from_the_run_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"&"
    rows: list[Row] = [
        started(run=evil, strategy=evil, task=evil, digest=evil, regions=[evil]),
        *(step(evil, number, float(number)) for number in range(1, 90)),
        exchange(evil, 1, 2.0),
        wan(evil, "west", 2.0, **{evil: 5}),
        evaluation(1, 2.0, **{evil: 0.5}),
        evaluation(1, 2.0, evil, **{evil: 0.5}),
        ("worker_lost", 2.0, {"region": evil, "worker": evil, "cause": evil}),
        ("checkpoint", 2.0, {"id": evil, "step": 1, "bytes": 1}),
        ("stop_requested", 2.0, {"cause": evil}),
    ]
    (tmp_path / "config.lock.yaml").write_text(evil)
    page = page_of(tmp_path, rows)
    assert "script" not in page.tags
    assert page.text.count(evil) >= 10


def test_a_run_that_was_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", small_run())
    path.write_bytes(path.read_bytes() + b'{"t_s":9,"ki')
    page = render_report(tmp_path)
    assert '<span class="tag cut">cut off</span>' in page and ">finished<" not in page


@pytest.mark.parametrize("count", range(1, 8))
def test_every_beginning_of_a_run_can_be_drawn(tmp_path: Path, count: int) -> None:
    assert "trial" in page_of(tmp_path, small_run()[:count]).text


def test_a_simulated_resumed_stopped_run_says_so(tmp_path: Path) -> None:
    rows = [started(simulated=True), step("east", 1, 1.0), started(simulated=True)]
    page = page_of(tmp_path, [*rows, ("stop_requested", 3.0, {"cause": "ctrl-c"})])
    for text in ("simulated: times are virtual", "resumed", "Requested to stop: ctrl-c"):
        assert text in page.text


def test_a_stop_that_was_asked_for_is_no_failure_in_the_list_of_faults(tmp_path: Path) -> None:
    told = {"code": "INTERRUPTED", "message": "Ctrl-C", "fix": "Resume with it."}
    page = page_of(tmp_path, [started(), step("east", 1, 1.0), ("run_failed", 2.0, told)])
    assert "stopped on request" in page.text and "run failed" not in page.text


def test_training_and_held_out_loss_have_charts_of_different_titles(tmp_path: Path) -> None:
    page = page_of(tmp_path, [started(), step("east", 1, 1.0), evaluation(1, 1.5, loss=0.5)])
    assert "training loss over steps" in page.text and "held-out loss over steps" in page.text


def test_a_resumption_is_a_mark_in_the_timeline_and_over_time(tmp_path: Path) -> None:
    before = [started(), step("east", 1, 1.0), step("east", 2, 2.0)]
    after = [step("east", 3, 6.0), step("east", 4, 6.2), evaluation(3, 6.5, accuracy=0.5)]
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    write(resumed / "events.jsonl", [*before, ("run_started", 4.0, started()[2]), *after])
    page = render_report(resumed)
    line = r'<line class="mark" x1="([\d.]+)%" x2="\1%" y1="0" y2="\d+"><title>resumed at 4.0 s'
    places = re.findall(line, page)
    assert len(places) == 3  # timeline, loss and accuracy over time: not over steps
    assert all(50 < float(place) < 75 for place in places)
    lines = re.findall(r'<polyline class="l0" points="([^"]*)"', page)
    points = [line.count(",") for line in lines]
    assert points == [2, 2, 4, 4], "over time, steps and samples: a line crosses the resumption"
    write(tmp_path / "events.jsonl", [*before, *after])
    assert 'class="mark"' not in render_report(tmp_path)


def test_a_long_run_stays_small_and_is_shown_as_shares(tmp_path: Path) -> None:
    page = page_of(tmp_path, small_run(3000))
    assert "whole run: height is the fraction of time in each column" in page.text
    assert "the first " in page.text
    lines = [value for value in page.values if value.count(",") > 500]
    assert lines
    assert all(value.count(",") <= 1000 for value in lines)
    assert (tmp_path / "events.jsonl").stat().st_size > 1e6
    assert len(render_report(tmp_path)) < 5e5


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    nan = float("nan")
    rows = [started()] + [
        step("east", n, float(n), loss=nan, start_s=nan, compute_s=nan) for n in range(1, 5)
    ]
    text = page_of(tmp_path, [*rows, evaluation(1, 2.0, loss=nan)]).text
    assert "no data recorded" in text
    assert "nan" not in text.replace("NaN", "nan").split("Regions")[1]


def test_command_writes_and_names_the_page(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", small_run())
    done = CliRunner().invoke(report, [str(tmp_path)])
    assert done.exit_code == 0
    assert done.output.strip() == str(tmp_path / "report.html")
    out = tmp_path / "other.html"
    done = CliRunner().invoke(report, [str(tmp_path), "--out", str(out)])
    assert done.output.strip() == str(out)
    assert out.read_text() == (tmp_path / "report.html").read_text()
    assert not list(tmp_path.glob("*.part"))


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(report, [str(tmp_path)])
    assert isinstance(done.exception, RunDirectoryError)
    assert f"{tmp_path} is not a run: it has no events.jsonl" in str(done.exception)
    with pytest.raises(RunDirectoryError, match="is not a directory"):
        render_report(tmp_path / "missing")


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", small_run())
    with pytest.raises(RunDirectoryError, match=r"missing/report\.html"):
        write_report(tmp_path, tmp_path / "missing" / "report.html")


@pytest.mark.parametrize(("grad_sq", "told"), [(4.0, "10 rows"), (-1.0, "hides the gradient")])
def test_gradient_noise_is_a_fact(grad_sq: float, told: str, tmp_path: Path) -> None:
    rows = [*small_run(), noise("east", 16, 1.0, 1.0, 64), noise(None, 16, grad_sq, 40.0, 128)]
    page = page_of(tmp_path, rows)
    assert "gradient noise" in page.text and told in page.text
    (other := tmp_path / "other").mkdir()
    assert "gradient noise" not in page_of(other, small_run()).text


def absent_rows() -> list[Row]:
    """Two regions; west is lost after step 3 and joins again before step 4."""
    joined = {"region": "west", "view": 2, "round": 4, "step": 4, "bytes": 9, "took_s": 1.0}
    rows = [started(), *(step(name, n, float(n)) for n in (1, 2, 3) for name in ("east", "west"))]
    rows += [("region_lost", 3.5, {"region": "west", "cause": "signal 9"})]
    rows += [step("east", n, float(n)) for n in range(4, 10)]
    rows += [("region_joined", 10.0, joined)]
    return rows + [step(name, n, 7.0 + n) for n in (4, 5, 6) for name in ("west",)]


def test_a_curve_has_a_gap_where_its_region_was_absent(tmp_path: Path) -> None:
    page = render_report(write(tmp_path / "events.jsonl", absent_rows()).parent)
    lines = re.findall(r'<polyline class="l1" points="([^"]*)"', page)
    assert [len(points.split()) for points in lines] == [3, 3] * 3, "over time, steps and samples"
    assert [
        len(points.split()) for points in re.findall(r'<polyline class="l0" points="([^"]*)"', page)
    ] == [9] * 3


def test_a_worker_that_is_killed_and_replaced_is_one_fault(tmp_path: Path) -> None:
    lost = ("worker_lost", 1.5, {"region": "east", "worker": 1, "cause": "signal 9"})
    replaced = ("worker_replaced", 2.5, {"region": "east", "worker": 1, "attempt": 1})
    run = record(events([started(), step("east", 1, 1.0), lost, replaced]))
    assert run.totals.region("east").fault_count == 1
    now = RunNow(("east", "west"))
    for event in events([started(), lost, replaced]):
        now.feed(event)
    assert now.regions["east"].faults == 1
