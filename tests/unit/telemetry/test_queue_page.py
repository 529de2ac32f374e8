"""The live page of a queue: jobs over time, and what is said of them."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import geo_ray
from geo_ray.api.queue import names_queue
from geo_ray.scheduler.queue.page import (
    MOST_LANES,
    MOST_ROWS,
    QueueBar,
    QueueLane,
    QueueView,
    queue_sections,
)
from geo_ray.scheduler.queue.page_reader import QueueLiveReader, view_of
from geo_ray.scheduler.queue.report import report_of
from geo_ray.scheduler.queue.state import QueueLocation
from geo_ray.telemetry.live.page import SECTIONS
from tests.support.queue_support import job, sim_queue

NASTY = '<script>alert("x")</script>'


def lane(number: int) -> QueueLane:
    bars = (
        QueueBar(0.0, 5.0, "had", NASTY),
        QueueBar(5.0, 8.0, "has", "1 in us"),
        QueueBar(9.0, 12.0, "planned", "1 in us"),
    )
    cells = ("1", "50%", "1.00", "1", NASTY)
    return QueueLane(f"j{number}", NASTY, "running", False, bars, 0.0, 20.0, cells)


def view(lanes: int) -> QueueView:
    every = tuple(lane(number) for number in range(lanes))
    return QueueView(NASTY, True, (NASTY,), (("run", "1"),), every, (), 8.0)


def test_everything_of_a_queue_is_escaped() -> None:
    drawn = queue_sections(view(3))
    assert set(drawn) == set(SECTIONS)
    assert not any("<script" in html for html in drawn.values())
    assert "&lt;script&gt;" in drawn["regions"]


def test_a_thousand_jobs_are_drawn_in_a_page_of_bounded_size() -> None:
    drawn = queue_sections(view(1000))
    assert f"the first {MOST_LANES} of 1,000" in drawn["members"]
    assert len(re.findall("<rect", drawn["members"])) < MOST_LANES * 5
    assert f"The first {MOST_ROWS} of 1,000" in drawn["regions"]
    assert sum(map(len, drawn.values())) < 400_000


def test_bars_are_what_jobs_had_have_and_will_have(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=2.0)
    queue.submit("red", job("a", seconds=12.0, deadline_s=100.0))
    queue.submit("red", job("b", seconds=30.0))
    queue.run(25.0)
    reader = QueueLiveReader(QueueLocation.at(tmp_path), lambda: 25.0)
    assert reader.read(1) == 1.0
    found = {each.name: each for each in reader.view().lanes}
    assert [bar.kind for bar in found["a"].bars] == ["had"]
    assert [bar.kind for bar in found["b"].bars] == ["has", "planned"]
    queue.run(80.0)
    end = queue.state.jobs["b"].end
    assert end is not None
    assert abs(found["b"].bars[-1].end_s - end.unix_s) <= 3.0  # as it was planned
    assert reader.view().is_served is False


def test_an_empty_queue_has_a_page(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.tick()
    drawn = queue_sections(view_of(report_of(queue.state), 10.0))
    assert "no job has come yet" in drawn["members"]


def test_the_page_of_a_queue_is_served(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=2.0)
    queue.submit("red", job("only-one", seconds=12.0))
    queue.run(5.0)
    assert names_queue(tmp_path)
    with geo_ray.watch(tmp_path, every_s=0.2) as page:
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(page.url, timeout=20) as answer:
            assert answer.status == 200
        with opener.open(page.url.partition("?")[0] + "events", timeout=20) as stream:
            first = stream.readline()
            while not first.startswith(b"data:") or b"only-one" not in first:
                first = stream.readline()
    assert b"Jobs over time" in first
