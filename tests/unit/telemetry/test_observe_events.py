"""The event log: what is refused, what survives crashes, what readers are given."""

from __future__ import annotations

import json
import math
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from geo_ray.base.errors import InvariantError, RunDirectoryError
from geo_ray.telemetry.event_log import EventLog, EventTail, follow, last_time_s, read_events
from geo_ray.telemetry.events import EVENT_FIELDS, conform
from tests.support.observe_support import small_run, started, step, write
from tests.support.wan_support import open_files


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = small_run()
    path = write(tmp_path / "events.jsonl", rows)
    read = list(read_events(path))
    assert [(event.kind, event.t_s) for event in read] == [(kind, t_s) for kind, t_s, _ in rows]
    assert [dict(event.fields) for event in read] == [fields for _, _, fields in rows]


def test_write_gives_the_event_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, clock_origin_s=100.0) as log:
        written = log.write("stop_requested", 101.5, cause="ctrl-c")
        kind, _, fields = step("east", 1, 102.0)
        shifted = log.write(kind, 102.0, **fields)
    assert list(read_events(path)) == [written, shifted]
    assert written.t_s == 1.5
    assert shifted["start_s"] == 1.5


def test_unknown_kind_is_refused(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e") as log, pytest.raises(InvariantError, match="'stepp'"):
        log.write("stepp", 0.0)


@pytest.mark.parametrize("kind", [kind for kind, fields in EVENT_FIELDS.items() if fields])
def test_every_field_of_a_kind_is_required(kind: str) -> None:
    with pytest.raises(InvariantError, match=", ".join(EVENT_FIELDS[kind])):
        conform(kind, 0.0, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("region", 3),
        ("step", 1.5),
        ("step", True),
        ("samples", "many"),
        ("loss", "low"),
        ("loss", False),
        ("region", None),
    ],
)
def test_wrong_type_names_the_field(name: str, value: object) -> None:
    kind, t_s, fields = step("east", 1, 1.0)
    with pytest.raises(InvariantError, match=f"'step': {name} is"):
        conform(kind, t_s, fields | {name: value})


def test_wrong_containers_are_refused() -> None:
    with pytest.raises(InvariantError, match="regions"):
        conform("run_started", 0.0, started()[2] | {"regions": "east"})
    with pytest.raises(InvariantError, match="bytes_by_class"):
        conform("wan", 0.0, {"src": "a", "dst": "b", "bytes_by_class": [1]})
    with pytest.raises(InvariantError, match="summary"):
        conform("run_finished", 0.0, {"summary": {"x": {1, 2}}})


def test_fields_cannot_overwrite_time_or_kind() -> None:
    with pytest.raises(InvariantError, match="overwrite"):
        conform("stop_requested", 0.0, {"cause": "x", "kind": "step"})


def test_non_finite_floats_become_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    kind, t_s, fields = step("east", 1, 1.0, loss=math.nan, wait_s=math.inf)
    with EventLog(path) as log:
        event = log.write(kind, t_s, **fields)
        log.write("eval", 2.0, step=1, region=None, metrics={"loss": np.float32("nan")}, samples=1)
        log.write("run_finished", 2.0, summary={"eval": {"loss": math.inf}, "n": np.int64(3)})
        with pytest.raises(InvariantError, match="time"):
            log.write("stop_requested", math.nan, cause="x")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["loss"] is None
    assert rows[0]["wait_s"] is None
    assert rows[1]["metrics"] == {"loss": None}
    assert rows[2]["summary"] == {"eval": {"loss": None}, "n": 3}
    assert math.isnan(event.number("loss"))


def test_numpy_numbers_are_numbers() -> None:
    kind, t_s, fields = step("east", 1, 1.0, loss=np.float32(0.5), samples=np.int64(8))
    event = conform(kind, t_s, fields)
    assert type(event["loss"]) is float
    assert type(event["samples"]) is int


def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", small_run())
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t_s":9.0,"kind":"st')
    assert len(list(read_events(path))) == len(small_run())
    with EventLog(path) as log:
        log.write("stop_requested", 10.0, cause="x")
    assert path.read_bytes().startswith(whole)
    assert [event.kind for event in read_events(path)][-1] == "stop_requested"
    assert last_time_s(path) == 10.0


def test_a_file_that_is_one_long_torn_line_is_cut_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 200_000)
    with EventLog(path) as log:
        log.write("stop_requested", 1.0, cause="x")
    assert len(list(read_events(path))) == 1


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", '{"kind":"step"}', '{"kind":"step","t_s":1}', '{"t_s":1}']
)
def test_a_damaged_line_costs_its_event_and_a_warning(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "events.jsonl", [started()])
    with path.open("a") as file:
        file.write(line + "\n")
    with EventLog(path) as log:
        log.write("stop_requested", 1.0, cause="x")
    assert [event.kind for event in read_events(path)] == ["run_started", "stop_requested"]
    assert f"line 2 of {path}" in caplog.text
    tail = EventTail(path)
    assert len(list(tail.new())) == 2 and len(tail.problems) == 1


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"t_s": 1, "kind": "other", "text": "\\ud800"}',
        '{"t_s": 1%s, "kind": "other"}' % ("0" * 400),
        '{"t_s": 1, "kind": "checkpoint", "id": 1, "step": 1, "bytes": 1%s}' % ("0" * 400),
        '{"t_s": 1, "kind": "noise", "region": null, "step": 1, "grad_sq": 1%s, "trace": 1, '
        '"rows": 1, "workers": 1, "count": 1}' % ("0" * 400),
        '{"t_s": 1, "kind": "best_kept", "step": 1, "region": null, "metric": "loss", '
        '"mode": "least", "value": 1, "samples": 1, "metrics": {}}',
        '{"t_s": 1, "kind": "best_kept", "step": 1, "region": null, "metric": "loss", '
        '"mode": "min", "value": null, "samples": 1, "metrics": {}}',
    ],
)
def test_whatever_a_line_has_it_costs_no_other_event(line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", small_run())
    with path.open("a") as file:
        file.write(f"{line}\n")
    tail = EventTail(path)
    assert len(list(tail.new())) == len(small_run())
    assert len(tail.problems) == 1


def test_control_characters_of_a_log_do_not_reach_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    cause = "a\x1b]0;pwned\x07\r\x9b2J\x7fb\nc\u00e9"
    with EventLog(path) as log:
        log.write("stop_requested", 1.0, cause=cause)
    for text in (path.read_text(), json.dumps(json.loads(path.read_text())) + "\n"):
        path.write_text(text)
        (event,) = read_events(path)
        assert event["cause"] == r"a\x1b]0;pwned\x07\x0d\x9b2J\x7fb" + "\nc\u00e9"


def test_kinds_of_a_newer_release_are_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"t_s":1.5,"kind":"region_moved","to":"mars"}\n')
    (event,) = read_events(path)
    assert (event.kind, event.t_s, event["to"]) == ("region_moved", 1.5, "mars")


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:

        def work(region: str) -> None:
            for number in range(1, 201):
                kind, t_s, fields = step(region, number, float(number))
                log.write(kind, t_s, **fields)

        threads = [threading.Thread(target=work, args=(f"r{index}",)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    read = list(read_events(path))
    for index in range(4):
        steps = [event["step"] for event in read if event["region"] == f"r{index}"]
        assert steps == list(range(1, 201))


def test_a_killed_process_loses_no_written_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    script = (
        "import os, signal, sys, pathlib\n"
        "from geo_ray.telemetry.event_log import EventLog\n"
        "log = EventLog(pathlib.Path(sys.argv[1]))\n"
        "for n in range(100): log.write('stop_requested', float(n), cause='x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [event.t_s for event in read_events(path)] == [float(n) for n in range(100)]


def test_an_event_that_cannot_be_written_names_the_file_and_is_written_later_as_a_whole(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventLog(path) as log:
        log.write("stop_requested", 1.0, cause="first")
        room_bytes = path.stat().st_size + 20  # the next line fits only in part
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, limits[1]))
        try:
            with pytest.raises(RunDirectoryError, match=rf"cannot write {path}"):
                log.write("stop_requested", 2.0, cause="second")
            assert [event["cause"] for event in read_events(path)] == ["first"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.write("stop_requested", 3.0, cause="third")
    assert [event["cause"] for event in read_events(path)] == ["first", "second", "third"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "events.jsonl"):
        with pytest.raises(RunDirectoryError, match=rf"cannot open {path}"):
            EventLog(path)
    with pytest.raises(RunDirectoryError, match="cannot read"):
        list(read_events(tmp_path / "missing"))


def test_a_closed_log_refuses(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e")
    log.close()
    log.close()
    with pytest.raises(InvariantError, match="closed"):
        log.write("stop_requested", 1.0, cause="x")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = open_files()
    with EventLog(tmp_path / "e") as log:
        log.write("stop_requested", 1.0, cause="x")
    list(read_events(tmp_path / "e"))
    assert not open_files() - before


def test_follow_gives_what_is_written_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    seen: list[str] = []
    first = threading.Event()

    def reader() -> None:
        for event in follow(path, poll_s=0.005):
            seen.append(event.kind)
            first.set()

    thread = threading.Thread(target=reader)
    thread.start()
    with EventLog(path) as log:
        log.write("stop_requested", 1.0, cause="x")
        assert first.wait(30)
        log.write("stop_requested", 2.0, cause="y")
        log.write("run_finished", 3.0, summary={})
    thread.join(30)
    assert not thread.is_alive()
    assert seen == ["stop_requested", "stop_requested", "run_finished"]


def test_follow_ends_when_told_to_but_gives_everything(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", small_run())
    assert len(list(follow(path, stop=lambda: True))) == len(small_run())
    assert list(follow(tmp_path / "none", stop=lambda: True)) == []
    assert last_time_s(tmp_path / "none") == 0.0
