"""Remaining work of a run, read from its directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import RegionLostError, RunDirectoryError
from geo_ray.cloud.autoscaler.run_work import NamedRun, RunWork
from geo_ray.planner.plan import Machines, Plan, RegionPlan
from geo_ray.runs import directory
from geo_ray.runs.lease import LEASE_KEY, driving, seeker_of
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, note_failure
from tests.support.job_support import experiment

MACHINES = (Machines(type="m", market="spot", count=1, rows=8, rows_per_s=8, usd_per_h=1.0),)
PLAN = Plan(
    policy="optimal",
    regions=(RegionPlan(region="eu", machines=MACHINES, step_s=10.0),),
    averager="eu",
    interval=1,
    codec=None,
    steps=10,
    seconds={"start": 60.0, "compute": 100.0},
    usd={},
)


def begin(log: EventLog, *, simulated: bool = False) -> None:
    log.write(
        "run_started", 0.0, run="trial", digest="d", strategy="sma", regions=["eu", "us"],
        task="digits", seed=0, simulated=simulated, averager="eu", steps={"eu": 10, "us": 10},
    )  # fmt: skip


def write_steps(log: EventLog, first: int, last: int) -> None:
    for number in range(first, last + 1):
        for region in ("eu", "us"):
            log.write(
                "step", float(number), region=region, step=number, samples=16, loss=1.0,
                compute_s=0.5, wait_s=0.0, start_s=number - 1.0,
            )  # fmt: skip


def test_all_is_left_before_it_begins_then_what_the_steps_say_and_nothing_when_it_is_done(
    tmp_path: Path,
) -> None:
    clock = VirtualClock()
    work = RunWork(NamedRun(tmp_path / "runs" / "trial", PLAN), 300.0, clock.now_s)
    assert work.left_s() == 160.0
    run = directory.create(experiment(f"run.dir={tmp_path / 'runs'}"), tmp_path)
    assert work.left_s() == 160.0
    with driving(seeker_of(run.path, print)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, 1, 2)
        assert work.left_s() == pytest.approx(8 * 10.0)
        write_steps(log, 3, 6)
        clock.advance_to_s(100.0)
        assert work.left_s() == pytest.approx(4 * 100.0 / 4), "as planned until it is measured"
        write_steps(log, 7, 9)
        clock.advance_to_s(140.0)
        assert work.left_s() == pytest.approx(1 * 40.0 / 3)
        write_steps(log, 10, 10)
        assert work.left_s(), "it still writes its model"
        log.write("run_finished", 10.0, summary={})
    assert work.left_s() == 0.0


def test_a_run_that_failed_is_over_until_it_is_resumed(tmp_path: Path) -> None:
    run = directory.create(experiment(f"run.dir={tmp_path / 'runs'}"), tmp_path)
    work = RunWork(NamedRun(run.path, PLAN), 300.0, VirtualClock().now_s)
    with driving(seeker_of(run.path, print)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, 1, 5)
    note_failure(run.path, RegionLostError("us is lost"))
    assert work.left_s() == 0.0
    with driving(seeker_of(run.path, print)):
        assert work.left_s() == pytest.approx(50.0)


def test_a_run_that_was_cut_off_and_is_not_resumed_is_over_after_a_while(tmp_path: Path) -> None:
    run, clock = new_run(tmp_path), VirtualClock()
    work = RunWork(NamedRun(run, PLAN), 300.0, clock.now_s)
    with driven(run, 5):
        clock.advance_to_s(200.0)
        assert work.left_s()
    for second, is_over in ((250.0, False), (549.0, False), (551.0, True)):
        clock.advance_to_s(second)
        assert (work.left_s() == 0.0) == is_over
    with driving(seeker_of(run, print)):
        assert work.left_s(), "it is resumed"
    assert work.left_s(), "the time begins again"


# ------------------------------------------------------------------ one name, several directories


def new_run(tmp_path: Path, name: str = "trial") -> Path:
    return directory.create(
        experiment(f"run.dir={tmp_path / 'runs'}", f"name={name}"), tmp_path
    ).path


def follows(tmp_path: Path, since_unix_s: float = 0.0) -> RunWork:
    run = NamedRun(tmp_path / "runs" / "trial", PLAN, since_unix_s)
    return RunWork(run, 300.0, VirtualClock().now_s)


@contextmanager
def driven(run: Path, steps: int, *, simulated: bool = False) -> Iterator[EventLog]:
    with driving(seeker_of(run, print)), EventLog(run / EVENTS_FILE) as log:
        begin(log, simulated=simulated)
        write_steps(log, 1, steps)
        yield log


def finish(run: Path, *, simulated: bool = False) -> None:
    with driven(run, 10, simulated=simulated) as log:
        log.write("run_finished", 10.0, summary={})


def age(run: Path, by_s: float) -> None:
    for path in run.iterdir():
        about = path.stat()
        os.utime(path, (about.st_atime, about.st_mtime - by_s))


def test_a_run_that_was_started_again_is_followed_to_its_other_directory(tmp_path: Path) -> None:
    first = new_run(tmp_path)
    work = follows(tmp_path)
    finish(first)
    assert work.left_s() == 0.0
    second = new_run(tmp_path)
    assert second.name == "trial-2"
    assert work.left_s() == 160.0, "it has all before it"
    with driven(second, 4) as log:
        assert work.left_s() == pytest.approx(60.0)
        log.write("run_finished", 10.0, summary={})
    assert work.left_s() == 0.0


def test_the_run_that_lives_counts_and_not_one_that_was_cut_off(tmp_path: Path) -> None:
    first, work = new_run(tmp_path), follows(tmp_path)
    with driven(first, 3):
        killed = new_run(tmp_path)
        with EventLog(killed / EVENTS_FILE) as log:
            begin(log)
            write_steps(log, 1, 8)
        assert work.left_s() == pytest.approx(70.0)
        finish(killed)
        assert work.left_s() == pytest.approx(70.0), "the older one goes on"
    note_failure(first, RegionLostError("us is lost"))
    assert work.left_s() == 0.0, "the newest is over"


def test_what_ended_before_the_cluster_was_made_is_not_its_work(tmp_path: Path) -> None:
    old = new_run(tmp_path)
    finish(old)
    made_unix_s = old.stat().st_mtime - 500.0
    age(old, 1000.0)
    work = follows(tmp_path, made_unix_s)
    assert work.left_s() == 160.0
    with driven(old, 2):  # it is gone on with
        assert work.left_s() == pytest.approx(80.0)


def test_neither_a_simulation_nor_another_run_that_is_called_so_is_followed(tmp_path: Path) -> None:
    finish(new_run(tmp_path), simulated=True)
    work = follows(tmp_path)
    assert work.left_s() == 160.0
    other = new_run(tmp_path, "trial-2")
    finish(other)
    assert work.left_s() == 160.0
    mine = new_run(tmp_path)
    assert mine.name == "trial-3"
    with driven(mine, 5):
        assert work.left_s() == pytest.approx(50.0)


def test_a_recreated_directory_is_read_again(tmp_path: Path) -> None:
    first = new_run(tmp_path)
    work = follows(tmp_path)
    finish(first)
    assert work.left_s() == 0.0
    directory.discard(directory.reopen(first)[0])
    assert work.left_s() == 160.0
    with driven(new_run(tmp_path), 1):
        assert work.left_s() == pytest.approx(90.0)


# ------------------------------------------------------------------ runs that cannot be read


def test_an_unreadable_run_does_not_hide_the_others(tmp_path: Path) -> None:
    first, dead = new_run(tmp_path), new_run(tmp_path)
    (dead / LEASE_KEY).write_bytes(b"")
    work = follows(tmp_path)
    with driven(first, 3):
        assert work.left_s() == pytest.approx(70.0)
        (note,) = work.notes
        assert str(dead) in note and LEASE_KEY in note
        (dead / LEASE_KEY).unlink()
        assert work.left_s() == pytest.approx(70.0)
        assert not work.notes


def test_alone_it_is_as_if_it_had_not_begun(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (run / LEASE_KEY).write_bytes(b"")
    work = follows(tmp_path)
    assert work.left_s() == 160.0
    assert work.notes


def test_for_a_while_nothing_is_over_as_it_may_be_the_one_that_lives(tmp_path: Path) -> None:
    finish(new_run(tmp_path))
    (new_run(tmp_path) / LEASE_KEY).write_bytes(b"")
    clock = VirtualClock()
    work = RunWork(NamedRun(tmp_path / "runs" / "trial", PLAN), 300.0, clock.now_s)
    with pytest.raises(RunDirectoryError, match="trial-2"):
        work.left_s()
    clock.advance_to_s(299.0)
    with pytest.raises(RunDirectoryError, match="trial-2"):
        work.left_s()
    clock.advance_to_s(301.0)
    assert work.left_s() == 0.0
    assert work.notes


def test_one_that_could_be_read_before_counts_for_a_while_as_it_was(tmp_path: Path) -> None:
    finish(new_run(tmp_path))
    second = new_run(tmp_path)
    clock = VirtualClock()
    work = RunWork(NamedRun(tmp_path / "runs" / "trial", PLAN), 300.0, clock.now_s)
    with driven(second, 4):
        assert work.left_s() == pytest.approx(60.0)
        lease = (second / LEASE_KEY).read_bytes()
        (second / LEASE_KEY).write_bytes(b"")
        clock.advance_to_s(299.0)
        assert work.left_s() == pytest.approx(60.0)
        (second / LEASE_KEY).write_bytes(lease)
        assert work.left_s() is not None and not work.notes
        (second / LEASE_KEY).write_bytes(b"")
        clock.advance_to_s(598.0)
        assert work.left_s() != 0.0, "the time runs anew"
        (second / LEASE_KEY).write_bytes(lease)
