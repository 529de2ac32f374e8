"""Who takes part in a run, and what became of requests, as its events tell it."""

from __future__ import annotations

from typing import Any

import pytest

from geo_ray.telemetry.events import Event, conform
from geo_ray.telemetry.live.page import _regions
from geo_ray.telemetry.status import (
    MembersFold,
    RunNow,
    RunStatus,
    SpentStatus,
    StatusFold,
    status_lines,
)
from tests.support import observe_support as rows

JOINED = {"view": 2, "round": 1, "step": 3, "bytes": 1, "took_s": 1.0}


def started(*regions: str) -> Event:
    told = {"run": "r", "digest": "d", "strategy": "sma", "task": "t", "seed": 0}
    return conform("run_started", 0.0, {**told, "regions": regions, "simulated": False})


def fold(*events: Any) -> MembersFold:
    made = MembersFold()
    for event in events:
        made.feed(event if isinstance(event, Event) else Event(event[0], 1.0, event[1]))
    return made


def step(number: int) -> tuple[str, dict[str, Any]]:
    return "step", {"region": "eu", "step": number}


def about(kind: str, region: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return kind, {"region": region, **more}


def asked(kind: str, verb: str, region: str, request: str = "7", **more: Any) -> Any:
    return kind, {"verb": verb, "region": region, "request": request, **more}


def states(found: MembersFold, *names: str) -> list[tuple[str, int | None]]:
    return [(found.of(name).state, found.of(name).step) for name in names]


def test_a_region_that_joins_says_so_until_it_is_a_member() -> None:
    joining = [started("eu", "us"), step(5), about("region_joining", "ap"), step(8)]
    assert states(fold(*joining), "eu", "ap", "sa") == [
        ("member", 0),
        ("joining", 5),
        ("absent", None),
    ]
    joined = fold(*joining, about("region_joined", "ap", **JOINED))
    assert states(joined, "ap") == [("member", 8)]
    failed = fold(*joining, about("join_failed", "ap", cause="its port is closed"))
    assert states(failed, "ap") == [("did not join", 8)]


def test_a_lost_region_that_is_brought_back_is_joining() -> None:
    lost = [started("eu", "us"), step(5), about("region_lost", "us", cause="killed")]
    assert states(fold(*lost), "us") == [("lost", 5)]
    assert states(fold(*lost, about("region_joining", "us")), "us") == [("joining", 5)]


@pytest.mark.parametrize("kind", ["run_started", "run_finished", "run_failed"])
def test_nobody_is_on_the_way_once_the_run_ends_or_begins_again(kind: str) -> None:
    under_way = [
        started("eu", "us"),
        about("region_joining", "ap"),
        asked("members_accepted", "drain", "us"),
    ]
    found = fold(*under_way)
    assert [state for state, _ in states(found, "us", "ap")] == ["leaving", "joining"]
    found.feed(started("eu", "us") if kind == "run_started" else Event(kind, 2.0, {}))
    assert [state for state, _ in states(found, "us", "ap")] == ["member", "did not join"]


def test_who_was_let_go_and_stays_after_all_is_a_member() -> None:
    """The averager has moved to a region that was about to leave."""
    found = fold(
        started("eu", "us"),
        asked("members_accepted", "drain", "us"),
        asked("members_refused", "drain", "us", "", cause="the averager is in 'us' now"),
    )
    assert states(found, "us") == [("member", 0)]
    assert found.refused == "drain us: the averager is in 'us' now" == found.of("us").refused


def test_the_newest_refusal_counts_until_another_request_is_accepted() -> None:
    refused = [
        started("eu", "us"),
        asked("members_refused", "drain", "eu", cause="it hosts the averager"),
        asked("members_refused", "add", "us", cause="it takes part already"),
    ]
    found = fold(*refused)
    assert found.refused == "add us: it takes part already"
    assert found.of("eu").refused == "drain eu: it hosts the averager"
    assert states(found, "eu", "us") == [("member", 0)] * 2
    found = fold(*refused, asked("members_accepted", "drain", "us"))
    assert (found.refused, found.of("us").refused) == (None, None)
    assert found.of("eu").refused is not None


def test_a_second_request_does_not_call_the_first_one_off() -> None:
    found = fold(
        started("eu", "us"),
        asked("members_accepted", "drain", "us"),
        asked("members_refused", "drain", "us", "8", cause="it is leaving already"),
    )
    assert states(found, "us") == [("leaving", 0)]


def test_a_process_group_shows_its_ranks_and_restarts() -> None:
    status = StatusFold()
    told = [
        rows.started(ranks={"east": 2}),
        rows.step("east", 4, 1.0),
        rows.step("west", 4, 1.0),
        ("worker_lost", 2.0, {"region": "east", "worker": 1, "cause": "killed"}),
        ("region_lost", 2.0, {"region": "east", "cause": "killed"}),
        ("region_joining", 2.0, {"region": "east"}),
        ("region_started", 3.0, {"region": "east", "took_s": 1.0}),
    ]
    for event in rows.events(told):
        status.feed(event)
    east, west = status.regions(is_going=True)
    assert (east.ranks, east.workers_lost, east.restarts, east.state) == (2, 1, 1, "joining")
    assert (west.ranks, west.restarts) == (None, 0)
    spent = SpentStatus(seconds=1.0, wan_bytes=0, usd=None)
    shown = RunStatus(run="r", phase="training", is_going=True, regions=(east, west), spent=spent)
    text = "\n".join(status_lines(shown))
    assert "east: 2 ranks, step 4, " in text
    assert "1 rank lost, 1 restart, joining" in text
    page = _regions([east, west])
    assert "ranks" in page
    assert "restarts" in page
    assert "ranks" not in _regions([west])


def test_the_server_of_a_run_is_no_region() -> None:
    now = RunNow(("east", "west"))
    traffic = {"src": "geo-ray-server", "dst": "east", "bytes_by_class": {"update": 100}}
    back = {"src": "west", "dst": "geo-ray-server", "bytes_by_class": {"update": 50}}
    for event in rows.events([rows.started(), ("wan", 1.0, traffic), ("wan", 1.0, back)]):
        now.feed(event)
    assert list(now.regions) == ["east", "west"]
    assert now.regions["east"].rates.received.per_s(1.0) > 0
    assert now.regions["west"].rates.sent.per_s(1.0) > 0
