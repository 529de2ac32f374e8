"""Bands of members on the page: what the events say, whoever comes and goes."""

from __future__ import annotations

from typing import Any

from geo_ray.telemetry.columns import record
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.participation import RUN, TimeRange, members_section, participation_of
from tests.support.observe_support import started


def event(kind: str, t_s: float, **fields: Any) -> Event:
    return Event(kind, t_s, fields)


def begun(*regions: str, t_s: float = 0.0) -> Event:
    kind, _, fields = started(regions=list(regions))
    return Event(kind, t_s, fields)


def history() -> list[Event]:
    return [
        begun("a", "b"),
        event("region_lost", 10.0, region="b", cause="gone"),
        event("run_paused", 11.0, cause="b is missing"),
        event("worker_lost", 12.0, region="a", worker=1, cause="gone"),
        event("worker_replaced", 15.0, region="a", worker=1, attempt=2),
        event("run_resumed", 20.0),
        event("region_joined", 20.0, region="b", view=3, round=2, step=4, bytes=8, took_s=1.0),
        event("region_joined", 25.0, region="c", view=4, round=2, step=4, bytes=8, took_s=1.0),
        event("averager_moved", 26.0, region="b", term=2),
        event("region_drained", 30.0, region="c"),
        event("run_failed", 40.0, code="X", message="m", fix="f"),
        begun("a", "b", t_s=50.0),
    ]


def test_bands_are_what_the_events_say() -> None:
    found = participation_of(history()).until(60.0)
    assert found == {
        "a": [TimeRange("member", 0.0, 40.0), TimeRange("member", 50.0, 60.0)],
        "b": [
            TimeRange("member", 0.0, 10.0),
            TimeRange("lost", 10.0, 20.0),
            TimeRange("member", 20.0, 40.0),
            TimeRange("member", 50.0, 60.0),
        ],
        RUN: [TimeRange("paused", 11.0, 20.0)],
        "a/1": [
            TimeRange("member", 0.0, 12.0),
            TimeRange("lost", 12.0, 15.0),
            TimeRange("member", 15.0, 40.0),
        ],
        "c": [TimeRange("member", 25.0, 30.0), TimeRange("left", 30.0, 40.0)],
    }


def test_a_resumption_ends_what_a_killed_driver_left_open() -> None:
    found = participation_of(
        [
            begun("a", "b", "c"),
            event("worker_lost", 5.0, region="b", worker=1, cause="gone"),
            event("region_lost", 6.0, region="c", cause="gone"),
            event("run_paused", 10.0, cause="c is missing"),
            begun("a", "b", t_s=20.0),
        ]
    )
    assert found.until(100.0) == {
        "a": [TimeRange("member", 0.0, 100.0)],
        "b": [TimeRange("member", 0.0, 100.0)],
        "c": [TimeRange("member", 0.0, 6.0), TimeRange("lost", 6.0, 20.0)],
        "b/1": [TimeRange("member", 0.0, 5.0), TimeRange("lost", 5.0, 20.0)],
        RUN: [TimeRange("paused", 10.0, 20.0)],
    }


def test_what_happens_at_a_moment_is_marked() -> None:
    found = participation_of(
        [
            begun("a", "b"),
            event("averager_moved", 1.0, region="b", term=2),
            event("bridge_replaced", 2.0, region="a", cause="gone", took_s=3.0),
            event("join_failed", 3.0, region="c", cause="no node"),
            event("run_actor_attached", 4.0, token=2, downtime_s=5.5),
        ]
    )
    assert [t_s for t_s, _ in found.marks] == [1.0, 2.0, 3.0, 4.0]
    assert found.marks[3][1] == "run actor restarted after 5.5 s"
    assert "c does not join: no node" in found.marks[2][1]


def test_the_section_is_there_only_if_somebody_came_or_went() -> None:
    step = {"step": 1, "samples": 8, "loss": 1.0, "start_s": 0.0, "compute_s": 1.0, "wait_s": 0.0}
    steps = [event("step", 60.0, region="a", **step)]
    assert members_section(record([begun("a", "b"), *steps])) == ""
    page = members_section(record([*history(), *steps]))
    assert page.count('class="m-lost"') == 2 + 1  # with that of the legend
    assert page.count('class="m-paused"') == 1 + 1
    assert "a/1" in page and "the averager moves to b" in page


def test_hundreds_of_workers_fit() -> None:
    lost = [
        event("worker_lost", float(i), region=f"region-{i % 20:02d}", worker=i, cause="<gone>")
        for i in range(1, 301)
    ]
    step = {"step": 1, "samples": 8, "loss": 1.0, "start_s": 0.0, "compute_s": 1.0, "wait_s": 0.0}
    regions = [f"region-{i:02d}" for i in range(20)]
    page = members_section(
        record([begun(*regions), *lost, event("step", 400.0, region="region-00", **step)])
    )
    assert "the first 200 of 320" in page and "<gone>" not in page
    assert len(page) < 200_000
