"""What is shown of a run, as values: curves of bounded size, loads of links, notes, maps."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.observe.made_run import made_run
from geo_ray.telemetry.columns import record
from geo_ray.telemetry.event_log import read_events
from geo_ray.telemetry.run_map import map_figure, map_of_record, places_of
from geo_ray.telemetry.status import RunStatus, SpentStatus, StatusFold
from geo_ray.telemetry.totals import RunTotals
from geo_ray.telemetry.view import (
    BoundedCurve,
    HistoryFold,
    MapLink,
    MapRegion,
    MapView,
    map_of,
    note_text,
)
from tests.support.observe_support import (
    evaluation,
    events,
    exchange,
    small_run,
    started,
    step,
    wan,
)


def folded(rows: list, fold: HistoryFold | None = None) -> tuple[HistoryFold, RunTotals]:
    fold, totals = fold or HistoryFold(), RunTotals()
    for event in events(rows):
        totals.feed(event)
        fold.feed(event, totals)
    return fold, totals


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), max_size=300),
    st.sampled_from([4, 6, 10]),
)
def test_a_curve_has_means_of_so_many_points_each(points: list, most: int) -> None:
    curve = BoundedCurve(most)
    for x, y in points:
        curve.add(x, y)
    xs, ys = curve.points()
    each = 1  # a second program: how many points a mean is of, from their number alone
    while len(points) // each >= most:
        each *= 2
    wanted = [points[i : i + each] for i in range(0, len(points), each)]
    assert len(xs) == len(wanted) == len(curve) <= most
    for part, x, y in zip(wanted, xs, ys, strict=True):
        assert x == pytest.approx(math.fsum(p[0] for p in part) / len(part), abs=1e-6)
        assert y == pytest.approx(math.fsum(p[1] for p in part) / len(part), abs=1e-6)


def test_a_curve_leaves_out_what_is_not_finite_and_takes_the_largest_floats() -> None:
    curve = BoundedCurve(4)
    for y in (math.nan, math.inf, 1e308, 1e308):
        curve.add(1.0, y)
    for _ in range(9):
        curve.add(2.0, 1e308)
    assert np.isfinite(curve.points()[1]).all()


def test_load_of_a_link_is_that_of_the_newest_seconds() -> None:
    rows = [started()]
    rows += [wan("west", "east", float(t), update=1_000_000 * t) for t in range(1, 101)]
    fold, _ = folded(rows)
    (link,) = fold.links({("west", "east"): 10.0}, 10)
    assert link.bytes == 100_000_000
    assert link.mbps == pytest.approx(8.0)
    assert link.fraction == pytest.approx(0.8)


def test_a_link_that_carries_no_more_has_no_load() -> None:
    rows = [started(), wan("west", "east", 1.0, update=10**6), step("east", 1, 100.0)]
    (link,) = folded(rows)[0].links({}, 10)
    assert (link.mbps, link.bytes, link.fraction) == (0.0, 10**6, None)


def test_the_busiest_links_come_first_and_no_more_than_asked_for() -> None:
    rows = [started()]
    rows += [wan("east", f"r{i}", 1.0, update=1000 * (i + 1)) for i in range(9)]
    found = folded(rows)[0].links({}, 3)
    assert [each.dst for each in found] == ["r8", "r7", "r6"]


def test_everything_over_time_stays_bounded() -> None:
    regions = [f"r{i}" for i in range(100)]
    rows = [started(regions=regions)]
    for number in range(1, 301):
        rows += [step(name, number, float(number)) for name in regions]
        rows.append(exchange("r1", number, float(number)))
        rows.append(evaluation(number, float(number), accuracy=0.5))
        rows.append(("worker_lost", float(number), {"region": "r1", "worker": 0, "cause": "x"}))
        rows.append(
            ("worker_replaced", number + 0.5, {"region": "r1", "worker": 0, "attempt": number})
        )
    fold, totals = folded(rows, HistoryFold(lambda totals: totals.elapsed_s))
    totals.forget(50)
    history = fold.history()
    assert sum(len(each.t_s) for each in history.losses[1:]) <= 4000
    assert len(history.losses[0].t_s) <= 600
    assert history.usd is not None and len(history.usd.t_s) <= 201
    assert len(history.notes) == 50
    assert max(map(len, history.members.ranges.values())) <= 202
    assert all(len(each.steps.rows) <= 50 for each in totals.regions.values())
    assert totals.samples == 100 * 300 * 32, "sums stay"
    assert len(totals.rounds) == 50


def test_dollars_are_of_what_was_done_by_then() -> None:
    rows = [started(), *[step("east", n, float(n)) for n in range(1, 1000)]]
    fold, _ = folded(rows, HistoryFold(lambda totals: 2 * totals.elapsed_s))
    usd = fold.history().usd
    assert usd is not None
    assert np.allclose(usd.value, 2 * usd.t_s)
    assert usd.t_s[-1] > 900


def test_without_prices_there_are_no_dollars() -> None:
    assert folded(small_run())[0].history().usd is None


def test_a_note_is_a_line_with_what_one_must_know() -> None:
    (event,) = events(
        [("worker_lost", 1.0, {"region": "eu", "worker": 3, "cause": "out of\nmemory"})]
    )
    assert note_text(event) == "worker lost: eu, worker 3, out of memory"
    (event,) = events([("run_resumed", 1.0, {})])
    assert note_text(event) == "run resumed"


# ------------------------------------------------------------------ the map


def view_of(count: int, links: list[tuple[int, int]], leader: int = 0) -> MapView:
    names = [f"r{i}" for i in range(count)]
    regions = tuple(MapRegion(name, "computing", i == leader) for i, name in enumerate(names))
    return MapView(regions, tuple(MapLink(names[a], names[b], 1.0, 10) for a, b in links))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 40, 41, 100])
def test_regions_have_places_of_their_own_inside_the_map(count: int) -> None:
    star = [(0, i) for i in range(1, count)] + [(i, 0) for i in range(1, count)]
    for links in ([], star):
        places = places_of(view_of(count, links))
        assert len(set(places.values())) == count
        height = 300 if count <= 2 else 460 if count <= 40 else 620
        assert all(0 < x < 1000 and 0 < y < height for x, y in places.values())


def test_who_is_linked_with_all_others_is_in_the_middle() -> None:
    star = [(2, i) for i in (0, 1, 3, 4)]
    assert places_of(view_of(5, star))["r2"] == (500, 230)
    mesh = [(a, b) for a in range(5) for b in range(5) if a != b]
    assert (500, 230) not in places_of(view_of(5, mesh)).values()


def test_names_from_outside_are_text_on_the_map() -> None:
    evil = '"><script>alert(1)</script>'
    regions = (MapRegion(evil, "lost", True, evil), MapRegion("b", "computing"))
    html = map_figure(MapView(regions, (MapLink(evil, "b", 3.0, 5, 3.0),)), now=True)
    assert "<script" not in html and "&lt;script" in html
    assert "k-full" in html and "nearly full link" in html


def test_the_map_of_a_report_has_what_the_log_says(tmp_path) -> None:
    made = made_run(tmp_path, 3)
    made.begin()
    made.go_on(10)
    made.write(("region_lost", 20.5, {"region": "ap-south", "cause": "gone"}))
    made.write(("averager_moved", 20.6, {"region": "eu-west", "term": 2}))
    made.go_on(1, without=("ap-south",))
    made.close()
    view = map_of_record(record(read_events(made.path / "events.jsonl")))
    assert {r.name: (r.state, r.is_leader) for r in view.regions} == {
        "us-east": ("member", False),
        "eu-west": ("member", True),
        "ap-south": ("lost", False),
    }
    sent: dict[tuple[str, str], int] = defaultdict(int)
    for event in read_events(made.path / "events.jsonl"):
        if event.kind == "wan":
            sent[event["src"], event["dst"]] = sum(event["bytes_by_class"].values())
    assert {(link.src, link.dst): link.bytes for link in view.links} == sent
    assert view.links[0].mbps == pytest.approx(view.links[0].bytes * 8e-6 / 22.0)


def test_the_map_of_a_status_says_how_regions_stand() -> None:
    fold = StatusFold()
    for event in events([*small_run(), ("region_lost", 9.0, {"region": "west", "cause": "gone"})]):
        fold.feed(event)
    status = RunStatus(
        run="r",
        phase="training",
        is_going=True,
        averager="east",
        regions=fold.regions(is_going=True),
        spent=SpentStatus(seconds=1.0, wan_bytes=0, usd=None),
    )
    view = map_of(status, ())
    assert [(r.name, r.state, r.is_leader) for r in view.regions] == [
        ("east", "computing", True),
        ("west", "lost", False),
    ]


def test_the_live_curve_of_a_region_has_a_gap_where_it_was_absent() -> None:
    joined = {"region": "west", "view": 2, "round": 4, "step": 4, "bytes": 9, "took_s": 1.0}
    rows = [started(), *(step("west", n, float(n)) for n in (1, 2, 3))]
    rows += [("region_lost", 3.5, {"region": "west", "cause": "signal 9"})]
    rows += [("region_joined", 10.0, joined), *(step("west", n, 7.0 + n) for n in (4, 5, 6))]
    fold, _ = folded(rows)
    _, _, west = fold.history().losses
    assert west.label == "west" and west.breaks_s == (10.0,)
    assert west.t_s.tolist() == [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]
    for number in range(7, 3000):  # means of several points: none of them lies in the absence
        fold.feed(events([step("west", number, 7.0 + number)])[0], RunTotals())
    t_s = fold.history().losses[2].t_s
    assert not ((t_s > 3.5) & (t_s < 10.0)).any()
