"""How a run ended is what its page says: finished, failed, stopped, killed, going on, not begun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.base.errors import (
    GeoRayError,
    InterruptedRunError,
    RegionLostError,
    TaskLoadError,
    WorkerLostError,
)
from geo_ray.cli.report import report
from geo_ray.telemetry.event_log import (
    EventLog,
    being_written,
    failure_noted,
    follow,
    note_failure,
    read_events,
)
from geo_ray.telemetry.report import load_record, render_report
from geo_ray.telemetry.summary import save_summary, summarise
from tests.support.observe_support import Row, small_run, started, step, write

CHECKPOINT: Row = ("checkpoint", 2.0, {"id": 7, "step": 2, "bytes": 9})
LOST: Row = ("worker_lost", 3.0, {"region": "east", "worker": 1, "cause": "signal 9"})
REPLACED: Row = ("worker_replaced", 3.5, {"region": "east", "worker": 1, "attempt": 2})
WRITER = """
import sys, time
from pathlib import Path
from geo_ray.telemetry.event_log import EventLog
with EventLog(Path(sys.argv[1])) as log:
    log.write("stop_requested", 5.0, cause="x")
    print("written", flush=True)
    time.sleep(60)
"""


def run_of(tmp_path: Path, *more: Row) -> Path:
    rows = [started(steps={"east": 100, "west": 90}), *small_run()[1:], *more]
    return write(tmp_path / "events.jsonl", rows)


def told(tmp_path: Path) -> tuple[str, str]:
    """The label and the box of the page, without markup."""
    page = render_report(tmp_path)
    tag = re.search(r'<span class="tag[^"]*">([^<]*)<', page)
    box = re.search(r'<div class="ended[^"]*">(.*?)</div>', page, re.DOTALL)
    assert tag is not None
    return tag[1], re.sub(r"<[^>]*>", " ", box[1]) if box else ""


def test_an_error_is_shown_with_its_code_place_reach_and_way_on(tmp_path: Path) -> None:
    path = run_of(tmp_path, CHECKPOINT, LOST, REPLACED)
    os.utime(path, (0, 0))
    note_failure(tmp_path, WorkerLostError("worker east/1 died (signal 9); [too] <often>"))
    tag, box = told(tmp_path)
    assert tag == "failed"
    for text in (
        "WORKER_LOST",
        "worker east/1 died (signal 9); [too] &lt;often&gt;",
        "Read the worker&#x27;s log",
        "east worker 1",
        "4.5 s after the run began",
        "east: step 4 of 100 at 4.0 s",
        "west: step 4 of 90 at 4.0 s",
        "worker lost: east worker 1, at 3.0 s: signal 9",
        "no: the numbers below cover the run up to this end",
        f"geo-ray train --resume {tmp_path}",
        "from checkpoint 7 of step 2 at 2.0 s",
    ):
        assert text in box, text


def test_an_interruption_is_a_stop_and_says_how_to_go_on(tmp_path: Path) -> None:
    run_of(tmp_path, CHECKPOINT)
    note_failure(tmp_path, InterruptedRunError("the run was interrupted; its state is saved"))
    tag, box = told(tmp_path)
    assert tag == "stopped" and "its state is saved" in box
    assert f"Resume with `geo-ray train --resume {tmp_path}`" in box
    note_failure(tmp_path, KeyboardInterrupt())
    assert "ended immediately" in told(tmp_path)[1]


def test_what_is_no_error_of_ours_is_called_a_bug(tmp_path: Path) -> None:
    run_of(tmp_path)
    with pytest.raises(ZeroDivisionError), failure_noted(tmp_path):
        raise ZeroDivisionError("division by zero")
    tag, box = told(tmp_path)
    assert tag == "failed" and "INVARIANT" in box and "ZeroDivisionError: division by zero" in box
    assert "no checkpoint was written: start the run again" in box


def test_a_process_that_lives_is_told_from_one_that_was_killed(tmp_path: Path) -> None:
    path = run_of(tmp_path, CHECKPOINT)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"written\n"
        assert being_written(path) is True
        assert told(tmp_path)[0] == "still going"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(30)
        writer.stdout.close()
    assert being_written(path) is False
    tag, box = told(tmp_path)
    assert tag == "cut off"
    for text in ("was killed", "5.0 s after the run began", "east: step 4 of 100", "--resume"):
        assert text in box, text


def test_several_writers_and_readers_do_not_keep_each_other_waiting(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert being_written(path) is None
    with EventLog(path), EventLog(path):
        assert being_written(path) is True
    assert being_written(path) is False is being_written(path)


def test_a_finished_run_has_no_box_and_a_stop_on_purpose_is_told(tmp_path: Path) -> None:
    end: Row = ("run_finished", 9.0, {"summary": {}})
    run_of(tmp_path, end)
    assert told(tmp_path) == ("finished", "")
    (early := tmp_path / "early").mkdir()
    run_of(early, ("stop_requested", 4.0, {"cause": "accuracy reached 0.9"}), end)
    assert told(early) == ("stopped early", "")
    assert "Requested to stop: accuracy reached 0.9" in render_report(early)


def test_a_resumed_run_is_not_what_its_first_stretch_was(tmp_path: Path) -> None:
    path = run_of(tmp_path)
    save_summary(summarise(read_events(path), startup_s=2.0, digest="d1ge57"), tmp_path)
    note_failure(tmp_path, RegionLostError("the parameter server of region 'west' is lost"))
    assert told(tmp_path)[0] == "failed"
    with EventLog(path) as log:
        log.write(started()[0], 6.0, **started()[2])
        assert told(tmp_path)[0] == "still going"
    assert told(tmp_path)[0] == "cut off" and "d1ge57" not in render_report(tmp_path)
    with EventLog(path) as log:
        log.write("run_finished", 7.0, summary={})
    assert told(tmp_path) == ("finished", "") and "d1ge57" in render_report(tmp_path)
    assert "the parameter server of region" in render_report(tmp_path)  # among the faults


def test_a_failure_lies_as_long_after_the_last_event_as_it_took(tmp_path: Path) -> None:
    path = run_of(tmp_path)
    newest_s = path.stat().st_mtime - 100
    for began_unix_s, t_s in [(newest_s - 5, 104.5), (newest_s + 5, 4.5)]:
        os.utime(path, (newest_s, newest_s))
        note_failure(tmp_path, RegionLostError("x"), began_unix_s)
        (failed,) = [event for event in read_events(path) if event.kind == "run_failed"]
        assert failed.t_s == pytest.approx(t_s, abs=30)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize("count", range(len(small_run()) + 1))
def test_a_run_that_fails_after_any_event_has_a_page(tmp_path: Path, count: int) -> None:
    path = write(tmp_path / "events.jsonl", small_run()[:count])
    path.write_bytes(path.read_bytes() + b'{"t_s":9,"ki')
    (tmp_path / "config.lock.yaml").write_text("name: trial\n")
    tag, box = told(tmp_path)
    assert tag == ("cut off" if count else "not begun") and "start the run again" in box
    note_failure(tmp_path, RegionLostError("region 'west' is lost"))
    tag, box = told(tmp_path)
    assert tag == "failed" and "REGION_LOST" in box
    assert ("before training began" in box) == (count == 0)


def test_a_run_that_did_not_begin_has_a_page_with_its_logs(tmp_path: Path) -> None:
    (tmp_path / "config.lock.yaml").write_text("name: trial\n")
    assert told(tmp_path)[0] == "not begun"
    note_failure(tmp_path, TaskLoadError("no module named 'x'"))
    assert not (tmp_path / "events.jsonl").exists()  # its directory will be removed
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-1.err").write_text("Traceback")
    note_failure(tmp_path, TaskLoadError("no module named 'x'"))
    done = CliRunner().invoke(report, [str(tmp_path)])
    assert done.exit_code == 0, done.output
    tag, box = told(tmp_path)
    assert tag == "failed"
    for text in (
        "TASK_LOAD",
        "no module named",
        f"{tmp_path / 'logs'} (1 file)",
        "what the message names",
    ):
        assert text in box
    assert load_record(tmp_path).totals.started is None


def test_a_simulated_run_is_simulated_again(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", [started(simulated=True), step("east", 1, 1.0), CHECKPOINT])
    note_failure(tmp_path, GeoRayError("x"))
    box = told(tmp_path)[1]
    assert "simulate it again" in box and "in simulated time" in box and "--resume" not in box


def test_of_many_regions_the_silent_ones_are_named(tmp_path: Path) -> None:
    names = [f"r{number:02d}" for number in range(40)]
    rows = [started(regions=names), *(step(n, 3, 50.0 - i) for i, n in enumerate(names))]
    write(tmp_path / "events.jsonl", rows)
    box = told(tmp_path)[1]
    assert "r39: step 3 at 11.0 s" in box and "35 others after these" in box
    assert "r30" not in box


def test_a_follower_ends_with_a_failure(tmp_path: Path) -> None:
    path = run_of(tmp_path)
    note_failure(tmp_path, RegionLostError("x"))
    assert [event.kind for event in follow(path)][-1] == "run_failed"
    with EventLog(path) as log:
        log.write(started()[0], 9.0, **started()[2])
        log.write("run_finished", 9.0, summary={})
    assert [event.kind for event in follow(path)][-1] == "run_finished"
