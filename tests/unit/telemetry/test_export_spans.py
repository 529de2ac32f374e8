"""Traces of rounds from events, and a collector that is sent them over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from benchmarks.observe.made_run import MadeRun, made_run
from geo_ray.api.live import export_events
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.export.spans import SpanFold, SpanRecord
from tests.support.observe_support import events, exchange, started, step


def spans_of(found: list[Event]) -> list[SpanRecord]:
    fold = SpanFold()
    spans = [span for event in found for span in fold.feed(event)]
    return spans + fold.rest()


def two_rounds() -> list[Event]:
    rows = [started()]
    for number in (1, 2):
        at_s = 2.0 * number
        for region, late_s in (("east", 0.0), ("west", 0.25)):
            rows.append(step(region, number, at_s - 0.5, start_s=at_s - 1.5, compute_s=0.75))
            fields = {"start_s": at_s - 0.5 - late_s, "held_s": 0.1}
            rows.append(exchange(region, number, at_s + late_s, **fields))
    return events(rows)


def test_a_round_is_a_trace_across_regions() -> None:
    spans = [span for span in spans_of(two_rounds()) if span.path[0] == "round 2"]
    assert {"/".join(span.path[1:]) for span in spans} == {
        "",
        *("east", "east/compute", "east/wait", "east/upload", "east/merge", "east/download"),
        *("west", "west/compute", "west/wait", "west/upload", "west/merge", "west/download"),
    }
    by = {"/".join(span.path[1:]): span for span in spans}
    assert (by[""].start_s, by[""].end_s) == (2.5, 4.25)
    assert (by["east/compute"].start_s, by["east/compute"].end_s) == (2.5, 3.25)
    assert (by["west/wait"].start_s, by["west/wait"].end_s) == (3.25, 4.25)
    # 1 s of exchange less 0.1 s at the averager, divided as 1000 bytes there and 1200 back.
    assert by["west/upload"].end_s == pytest.approx(3.25 + 0.9 * 1000 / 2200)
    assert by["west/merge"].end_s - by["west/merge"].start_s == pytest.approx(0.1)
    assert by["west/download"].end_s == 4.25
    assert by[""].attributes["geo_ray.round"] == 2
    assert by["east/compute"].attributes["geo_ray.compute_s"] == 0.75


def test_ids_are_the_same_for_the_same_events_and_others_for_others() -> None:
    one, two = spans_of(two_rounds()), spans_of(two_rounds())
    assert one == two
    assert len({span.trace_id for span in one}) == 2
    assert len({span.span_id for span in one}) == len(one)


def test_a_region_that_is_lost_is_not_waited_for() -> None:
    rows = two_rounds()[:-1]  # the exchange of west in round 2 never comes
    (lost,) = events([("region_lost", 5.0, {"region": "west", "cause": "gone"})])
    fold = SpanFold()
    given_before = [span for event in rows for span in fold.feed(event)]
    assert {span.path[0] for span in given_before} == {"round 1"}
    assert {span.path[0] for span in fold.feed(lost)} == {"round 2"}


def test_exchanges_without_rounds_are_traces_of_their_own() -> None:
    rows = [started(), step("east", 1, 1.0), exchange("east", 7, 2.0, round=None, blocking=False)]
    spans = spans_of(events(rows))
    assert spans[0].path == ("exchange 7",)
    assert "wait" not in {span.path[-1] for span in spans}


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    rows, at_s = [started(regions=["a", "b", "c"])], 0.0
    rounds = dict.fromkeys("abc", 0)
    for _ in range(draw(st.integers(0, 30))):
        at_s += draw(st.floats(0, 3))
        region = draw(st.sampled_from("abc"))
        kind = draw(st.sampled_from(["step", "exchange", "lost", "joined", "resumed"]))
        back_s = draw(st.floats(-0.5, 5))  # clocks of two machines need not agree
        if kind == "step":
            took = {"start_s": at_s - back_s, "compute_s": draw(st.floats(0, 9))}
            rows.append(step(region, 1, at_s, **took))
        elif kind == "exchange":
            rounds[region] += 1
            number = draw(st.sampled_from([None, rounds[region]]))
            more = {
                "held_s": draw(st.none() | st.floats(0, 9)),
                "bytes_sent": draw(st.integers(0, 9)),
            }
            rows.append(
                exchange(
                    region,
                    len(rows),
                    at_s,
                    start_s=at_s - back_s,
                    round=number,
                    bytes_received=0,
                    **more,
                )
            )
        elif kind == "lost":
            rows.append(("region_lost", at_s, {"region": region, "cause": "x"}))
        elif kind == "joined":
            numbers = dict.fromkeys(("view", "round", "step", "bytes"), 1)
            rows.append(("region_joined", at_s, {"region": region, "took_s": 1.0, **numbers}))
        else:
            rows.append(("run_started", at_s + 0.1, started(regions=["a", "b", "c"])[2]))
            rounds = dict.fromkeys("abc", 0)
            at_s += 0.1
    return events(rows)


@settings(max_examples=60)
@given(histories())
def test_whatever_happens_parts_lie_within_their_whole(found: list[Event]) -> None:
    spans = spans_of(found)
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    answered = [each for each in found if each.kind == "exchange"]
    assert sum(span.path[-1] == "merge" for span in spans) == len(answered), "each once"
    for span in spans:
        assert span.start_s <= span.end_s + 1e-9
        if span.parent_id is not None:
            whole = by_id[span.trace_id, span.parent_id]
            assert whole.start_s - 1e-9 <= span.start_s
            assert span.end_s <= whole.end_s + 1e-9


def test_rounds_of_which_not_all_is_heard_are_not_kept_for_ever() -> None:
    rows = [started(), *[exchange("east", n, float(n)) for n in range(1, 101)]]
    fold = SpanFold()
    given_spans = [span for event in events(rows) for span in fold.feed(event)]
    assert len({span.trace for span in given_spans}) >= 80


# ------------------------------------------------------------------ the collector


class Collector:
    """A collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.url = ""


@contextmanager
def collector(status: int = 200) -> Iterator[Collector]:
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            for each in request.resource_spans:
                kept.resources.append(
                    {a.key: a.value.string_value for a in each.resource.attributes}
                )
                kept.spans += [span for scope in each.scope_spans for span in scope.spans]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    kept.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeRun]:
    made = made_run(tmp_path, 3)
    made.begin()
    made.go_on(8)
    made.finish()
    yield made
    made.close()


def test_a_collector_is_sent_every_round(made: MadeRun) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp", reason="the extra `export` is not installed")
    with collector() as kept:
        count = export_events(made.path, [{"kind": "otlp", "endpoint": kept.url}])
    lines = (made.path / "events.jsonl").read_text().splitlines()
    assert count == len(lines)
    roots = [span for span in kept.spans if not span.parent_span_id]
    assert [span.name for span in roots] == [f"round {n}" for n in range(1, 9)]
    assert len(kept.spans) == 8 * (1 + 3 * 6)
    by_id = {(span.trace_id, span.span_id): span for span in kept.spans}
    assert len(by_id) == len(kept.spans)
    assert all((s.trace_id, s.parent_span_id) in by_id for s in kept.spans if s.parent_span_id)
    told = {a.key: a.value for a in roots[3].attributes}
    assert told["geo_ray.round"].int_value == 4
    assert told["geo_ray.strategy"].string_value == "sma"
    assert kept.resources[0]["service.name"] == "geo_ray"
    ends_unix_s = (made.path / "events.jsonl").stat().st_mtime
    newest = max(span.end_time_unix_nano for span in kept.spans) / 1e9
    assert newest == pytest.approx(ends_unix_s - 1.0, abs=0.01), "run_finished comes 1 s later"


def test_a_collector_that_refuses_is_told(made: MadeRun) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp", reason="the extra `export` is not installed")
    with collector(status=400) as kept, pytest.raises(ConnectionError, match="did not accept"):
        export_events(made.path, [f"{{kind: otlp, endpoint: '{kept.url}'}}"])
